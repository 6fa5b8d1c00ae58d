"""Every tensor that a Gemma 4 config.json promises, by name, dtype and shape, before any weight is read.

Read in transformers 5.17 (models/gemma4, gemma4_unified, gemma4_assistant, gemma4_unified_assistant) and equal, name
by name, to what Google's twenty gemma-4 repositories publish (tests/data/README.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bundler.checkpoint import Shape
from bundler.findings import Finding, error
from bundler.gemma4 import kv_geometry

Dims = tuple[int, ...]
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""A config's own word for a dtype → safetensors'."""

_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_MOE_NORMS = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
_LAYER_TYPES = ("sliding_attention", "full_attention")
_MOST = 10_000_000  # a larger number is no dimension, and would make the inventory itself too large to list
_MOST_OF = {"num_hidden_layers": 1000, "num_experts": 4096}

_TEXT = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window",
)  # fmt: skip
_TEXT_OPTIONAL = ("num_kv_shared_layers", "num_global_key_value_heads", "hidden_size_per_layer_input")
_VISION = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "patch_size", "position_embedding_size",
)  # fmt: skip
_AUDIO = ("hidden_size", "num_hidden_layers", "num_attention_heads", "conv_kernel_size", "output_proj_dims")
_UNIFIED_VISION = ("mm_embed_dim", "mm_posemb_size", "output_proj_dims", "patch_size", "pooling_kernel_size")
_UNIFIED_AUDIO = ("audio_embed_dim",)


def check_geometry(config: Mapping[str, Any], where: str) -> list[Finding]:
    """Whether a body's or drafter's config.json has every number that its tensors' shapes follow from."""
    text = _section(config, "text_config")
    unified = str(config.get("model_type")).startswith("gemma4_unified")
    wrong = _wrong(text, "text_config.", _TEXT) + _wrong(text, "text_config.", _TEXT_OPTIONAL, optional=True)
    if text.get("hidden_size_per_layer_input"):
        wrong += _wrong(text, "text_config.", ("vocab_size_per_layer_input",))
    if text.get("enable_moe_block"):
        wrong += _wrong(text, "text_config.", ("num_experts", "moe_intermediate_size"))
    types, layers = text.get("layer_types"), text.get("num_hidden_layers")
    if not isinstance(types, list) or len(types) != layers or any(kind not in _LAYER_TYPES for kind in types):
        wrong.append(("text_config.layer_types", types))
    if "assistant" in str(config.get("model_type")):
        ordered = bool(config.get("use_ordered_embeddings"))
        wrong += _wrong(
            config, "", ("backbone_hidden_size", "num_centroids") if ordered else ("backbone_hidden_size",)
        )
    elif not wrong and (text.get("num_kv_shared_layers") or 0) >= text["num_hidden_layers"]:
        wrong.append(("text_config.num_kv_shared_layers", text["num_kv_shared_layers"]))
    if config.get("vision_config") is not None:
        keys = _UNIFIED_VISION if unified else _VISION
        wrong += _wrong(_section(config, "vision_config"), "vision_config.", keys)
    if config.get("audio_config") is not None:
        audio = _section(config, "audio_config")
        wrong += _wrong(audio, "audio_config.", _UNIFIED_AUDIO if unified else _AUDIO)
        channels = audio.get("subsampling_conv_channels")
        if not unified and not (isinstance(channels, list) and [type(item) for item in channels] == [int, int]):
            wrong.append(("audio_config.subsampling_conv_channels", channels))
    return [
        error("config-geometry", f"{where}: {key}", f"is {value!r:.60}, so the shapes of the tensors cannot be known")
        for key, value in wrong
    ]


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = config.get(key)
    return section if isinstance(section, Mapping) else {}


def _wrong(
    section: Mapping[str, Any], at: str, keys: Iterable[str], *, optional: bool = False
) -> list[tuple[str, object]]:
    """Those keys whose value is no dimension; an optional one may be null or 0."""
    return [
        (f"{at}{key}", value)
        for key in keys
        if not (optional and (value := section.get(key)) in (None, 0))
        and (type(value := section.get(key)) is not int or not 0 < value <= _MOST_OF.get(key, _MOST))
    ]


def body_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Every tensor of an unquantized body whose config.json passes `check_geometry`."""
    text, vision, audio = config["text_config"], config.get("vision_config"), config.get("audio_config")
    unified = config["model_type"] == "gemma4_unified"
    dims = {f"model.language_model.{name}": size for name, size in _text_model(text)}
    if vision is not None:
        tower = _vision_embedder(vision) if unified else _vision_tower(vision)
        dims |= {f"model.{name}": size for name, size in tower}
        width = vision["output_proj_dims"] if unified else vision["hidden_size"]
        dims["model.embed_vision.embedding_projection.weight"] = (text["hidden_size"], width)
    if audio is not None:
        if not unified:
            dims |= {f"model.audio_tower.{name}": size for name, size in _audio_tower(audio)}
        width = audio["audio_embed_dim"] if unified else audio["output_proj_dims"]
        dims["model.embed_audio.embedding_projection.weight"] = (text["hidden_size"], width)
    if not is_tied(config):
        dims["lm_head.weight"] = (text["vocab_size"], text["hidden_size"])
    dtype = dtype_of(config)
    return {name: Shape(dtype=dtype, dims=size) for name, size in dims.items()}


def drafter_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Every tensor of a drafter. All its layers read the body's K and V, so none has k_proj, v_proj or k_norm."""
    text = {**config["text_config"], "num_kv_shared_layers": config["text_config"]["num_hidden_layers"]}
    hidden, backbone = text["hidden_size"], config["backbone_hidden_size"]
    dims = {f"model.{name}": size for name, size in _text_model(text)}
    dims["pre_projection.weight"] = (hidden, 2 * backbone)
    dims["post_projection.weight"] = (backbone, hidden)
    dtype = dtype_of(config)
    shapes = {name: Shape(dtype=dtype, dims=size) for name, size in dims.items()}
    if config.get("use_ordered_embeddings"):
        shapes["masked_embedding.centroids.weight"] = Shape(dtype=dtype, dims=(config["num_centroids"], hidden))
        shapes["masked_embedding.token_ordering"] = Shape(dtype="I64", dims=(text["vocab_size"],))
    return shapes


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the head is the embeddings' own tensor, as in every published Gemma 4, so that none is stored for it."""
    return bool(config.get("tie_word_embeddings", config["text_config"].get("tie_word_embeddings", True)))


def dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype that config.json names for its weights, in safetensors' words; BF16 where it names none."""
    text = config.get("text_config") or {}
    name = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    return DTYPES.get(str(name), "BF16")


def _text_model(text: Mapping[str, Any]) -> Iterator[tuple[str, Dims]]:
    hidden, layers = text["hidden_size"], text["num_hidden_layers"]
    first_shared = layers - (text.get("num_kv_shared_layers") or 0)
    yield "embed_tokens.weight", (text["vocab_size"], hidden)
    yield "norm.weight", (hidden,)
    if per_layer := text.get("hidden_size_per_layer_input"):
        yield "embed_tokens_per_layer.weight", (text["vocab_size_per_layer_input"], layers * per_layer)
        yield "per_layer_model_projection.weight", (layers * per_layer, hidden)
        yield "per_layer_projection_norm.weight", (per_layer,)
    for index, layer_type in enumerate(text["layer_types"]):
        wide = bool(text.get("use_double_wide_mlp")) and index >= first_shared > 0
        layer = {
            **_attention(text, layer_type, shared=index >= first_shared),
            **_feed_forward(text, text["intermediate_size"] * (2 if wide else 1)),
        }
        yield from ((f"layers.{index}.{name}", dims) for name, dims in layer.items())


def _attention(text: Mapping[str, Any], layer_type: str, *, shared: bool) -> dict[str, Dims]:
    hidden = text["hidden_size"]
    kv_heads, head_dim = kv_geometry(text, layer_type)
    query, key = text["num_attention_heads"] * head_dim, kv_heads * head_dim
    dims: dict[str, Dims] = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_norm.weight": (head_dim,),
    }
    if not shared:
        dims["self_attn.k_proj.weight"] = (key, hidden)
        dims["self_attn.k_norm.weight"] = (head_dim,)
        if layer_type == "sliding_attention" or not text.get("attention_k_eq_v"):
            dims["self_attn.v_proj.weight"] = (key, hidden)
    return dims


def _feed_forward(text: Mapping[str, Any], inner: int) -> dict[str, Dims]:
    hidden = text["hidden_size"]
    dims: dict[str, Dims] = {f"{name}.weight": (hidden,) for name in _NORMS}
    dims["layer_scalar"] = (1,)
    dims |= {"mlp.gate_proj.weight": (inner, hidden), "mlp.up_proj.weight": (inner, hidden)}
    dims["mlp.down_proj.weight"] = (hidden, inner)
    if per_layer := text.get("hidden_size_per_layer_input"):
        dims["per_layer_input_gate.weight"] = (per_layer, hidden)
        dims["per_layer_projection.weight"] = (hidden, per_layer)
        dims["post_per_layer_input_norm.weight"] = (hidden,)
    if text.get("enable_moe_block"):
        experts, width = text["num_experts"], text["moe_intermediate_size"]
        dims |= {f"{name}.weight": (hidden,) for name in _MOE_NORMS}
        dims |= {"router.proj.weight": (experts, hidden), "router.scale": (hidden,)}
        dims["router.per_expert_scale"] = (experts,)
        dims["experts.gate_up_proj"] = (experts, 2 * width, hidden)
        dims["experts.down_proj"] = (experts, hidden, width)
    return dims


def _clippable(name: str, rows: int, columns: int, config: Mapping[str, Any]) -> Iterator[tuple[str, Dims]]:
    """A tower's Linear; with `use_clipped_linears` its four clipping bounds are saved beside it."""
    yield f"{name}.linear.weight", (rows, columns)
    if config.get("use_clipped_linears"):
        yield from ((f"{name}.{bound}", ()) for bound in ("input_min", "input_max", "output_min", "output_max"))


def _vision_tower(vision: Mapping[str, Any]) -> Iterator[tuple[str, Dims]]:
    hidden, inner, head_dim = vision["hidden_size"], vision["intermediate_size"], vision["head_dim"]
    query, key = vision["num_attention_heads"] * head_dim, vision["num_key_value_heads"] * head_dim
    yield "vision_tower.patch_embedder.input_proj.weight", (hidden, 3 * vision["patch_size"] ** 2)
    yield "vision_tower.patch_embedder.position_embedding_table", (2, vision["position_embedding_size"], hidden)
    if vision.get("standardize"):
        yield "vision_tower.std_bias", (hidden,)
        yield "vision_tower.std_scale", (hidden,)
    for index in range(vision["num_hidden_layers"]):
        at = f"vision_tower.encoder.layers.{index}"
        yield from ((f"{at}.{name}.weight", (hidden,)) for name in _NORMS)
        yield f"{at}.self_attn.q_norm.weight", (head_dim,)
        yield f"{at}.self_attn.k_norm.weight", (head_dim,)
        for name, rows, columns in (
            ("self_attn.q_proj", query, hidden),
            ("self_attn.k_proj", key, hidden),
            ("self_attn.v_proj", key, hidden),
            ("self_attn.o_proj", hidden, query),
            ("mlp.gate_proj", inner, hidden),
            ("mlp.up_proj", inner, hidden),
            ("mlp.down_proj", hidden, inner),
        ):
            yield from _clippable(f"{at}.{name}", rows, columns, vision)


def _vision_embedder(vision: Mapping[str, Any]) -> Iterator[tuple[str, Dims]]:
    """The encoder-free 12B: one projection of raw patches between two LayerNorms, and a table of positions."""
    width = vision["mm_embed_dim"]
    patch = 3 * (vision["patch_size"] * vision["pooling_kernel_size"]) ** 2
    yield "vision_embedder.patch_dense.weight", (width, patch)
    yield "vision_embedder.pos_embedding", (vision["mm_posemb_size"], 2, width)
    yield "vision_embedder.patch_ln1.weight", (patch,)
    yield "vision_embedder.patch_ln1.bias", (patch,)
    yield "vision_embedder.patch_dense.bias", (width,)
    for name in ("patch_ln2", "pos_norm"):
        yield f"vision_embedder.{name}.weight", (width,)
        yield f"vision_embedder.{name}.bias", (width,)


def _audio_tower(audio: Mapping[str, Any]) -> Iterator[tuple[str, Dims]]:
    hidden, (first, second) = audio["hidden_size"], audio["subsampling_conv_channels"]
    yield "subsample_conv_projection.layer0.conv.weight", (first, 1, 3, 3)
    yield "subsample_conv_projection.layer0.norm.weight", (first,)
    yield "subsample_conv_projection.layer1.conv.weight", (second, first, 3, 3)
    yield "subsample_conv_projection.layer1.norm.weight", (second,)
    yield "subsample_conv_projection.input_proj_linear.weight", (hidden, first // 4 * second)
    yield "output_proj.weight", (audio["output_proj_dims"], hidden)
    yield "output_proj.bias", (audio["output_proj_dims"],)
    for index in range(audio["num_hidden_layers"]):
        at = f"layers.{index}"
        for name in ("norm_pre_attn", "norm_post_attn", "norm_out", "lconv1d.pre_layer_norm", "lconv1d.conv_norm"):
            yield f"{at}.{name}.weight", (hidden,)
        yield f"{at}.self_attn.per_dim_scale", (hidden // audio["num_attention_heads"],)
        yield f"{at}.self_attn.relative_k_proj.weight", (hidden, hidden)
        yield f"{at}.lconv1d.depthwise_conv1d.weight", (hidden, 1, audio["conv_kernel_size"])
        yield from _clippable(f"{at}.lconv1d.linear_start", 2 * hidden, hidden, audio)
        yield from _clippable(f"{at}.lconv1d.linear_end", hidden, hidden, audio)
        for name in ("q_proj", "k_proj", "v_proj", "post"):
            yield from _clippable(f"{at}.self_attn.{name}", hidden, hidden, audio)
        for part in ("feed_forward1", "feed_forward2"):
            yield f"{at}.{part}.pre_layer_norm.weight", (hidden,)
            yield f"{at}.{part}.post_layer_norm.weight", (hidden,)
            yield from _clippable(f"{at}.{part}.ffw_layer_1", 4 * hidden, hidden, audio)
            yield from _clippable(f"{at}.{part}.ffw_layer_2", hidden, 4 * hidden, audio)
