"""The Gemma 4 family: its kinds, what of each stays in bf16, what NVFP4 makes of the rest, and its two config schemas.

Read in transformers 5.17 (models/gemma4, models/gemma4_unified) and checked on the published checkpoints' headers.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any

from bundler.checkpoint import Shape, Tensor
from bundler.errors import CompatibilityError

BODY_MODEL_TYPES = ("gemma4", "gemma4_unified")
DRAFTER_MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
GROUP_SIZE = 16
"""Weights that share one FP8 scale in NVFP4."""

LAYERS = "model.language_model.layers"
"""Where the decoder layers are, in checkpoint names and in module names alike."""
LAYER = re.compile(r"model\.language_model\.layers\.(\d+)\.")
_LINEAR = re.compile(r"model\.language_model\.layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj)")
_EXPERTS = re.compile(r"(model\.language_model\.layers\.\d+\.experts)\.(gate_up_proj|down_proj)")
EXPERT = re.compile(r"(model\.language_model\.layers\.\d+\.experts)\.\d+\.(gate|up|down)_proj")
_SHARED_KV = re.compile(r"model\.language_model\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.weight")
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Kind(StrEnum):
    """What a body is built like; the value is what people call it."""

    DENSE = "31B dense"
    MOE = "26B-A4B mixture of experts"
    PER_LAYER = "E2B/E4B with per-layer embeddings"
    UNIFIED = "12B unified"


def find_kind(config: Mapping[str, Any]) -> Kind:
    """The kind of a body's config.json; CompatibilityError if it is no Gemma 4 body."""
    model_type = config.get("model_type")
    if model_type == "gemma4_unified":
        return Kind.UNIFIED
    if model_type != "gemma4" or not isinstance(config.get("text_config"), dict):
        hint = "a drafter is not a body" if model_type in DRAFTER_MODEL_TYPES else None
        raise CompatibilityError(
            f"model_type {model_type!r} is no Gemma 4 body (expected {' or '.join(BODY_MODEL_TYPES)})", hint=hint
        )
    if config["text_config"].get("enable_moe_block"):
        return Kind.MOE
    return Kind.PER_LAYER if config["text_config"].get("hidden_size_per_layer_input") else Kind.DENSE


_KEPT_ALWAYS = (
    "lm_head",
    "re:.*vision_tower.*",
    "re:.*audio_tower.*",
    "re:.*embed_vision.*",
    "re:.*embed_audio.*",
    "re:.*vision_embedder.*",
)
_KEPT_BY_KIND = {
    Kind.MOE: ("re:.*router.*",),
    Kind.PER_LAYER: (
        "re:.*per_layer_input_gate$",
        "re:.*per_layer_projection$",
        "re:.*per_layer_model_projection$",
    ),
}


def make_ignore(kind: Kind, extra: Iterable[str] = ()) -> tuple[str, ...]:
    """The `ignore` list of quantization_config: what always stays bf16 for this kind, then the recipe's own."""
    fixed = _KEPT_ALWAYS + _KEPT_BY_KIND.get(kind, ())
    return fixed + tuple(pattern for pattern in extra if pattern not in fixed)


def is_ignored(module: str, ignore: Iterable[str]) -> bool:
    """Whether a module is on an ignore list, matched as compressed-tensors does: exact, or `re:` from the start."""
    return any(
        re.match(pattern[3:], module) is not None if pattern.startswith("re:") else module == pattern
        for pattern in ignore
    )


def dropped_tensors(names: Iterable[str], config: Mapping[str, Any]) -> list[str]:
    """Source tensors that the model class does not build: K and V of the layers that share another layer's.

    Google's E2B/E4B -it files hold them, the QAT files do not; a quantized body loads everywhere without them.
    """
    text = config["text_config"]
    first_shared = text["num_hidden_layers"] - (text.get("num_kv_shared_layers") or 0)
    return sorted(
        name for name in names if (match := _SHARED_KV.fullmatch(name)) is not None and int(match[1]) >= first_shared
    )


def linear_shapes(shapes: Mapping[str, Shape]) -> dict[str, tuple[int, int]]:
    """Every Linear of the decoder layers as the bundle names it → (out_features, in_features).

    The experts' 3-D parameters count as one gate, up and down projection per expert: that is how llm-compressor
    writes them and what vLLM maps.
    """
    linears: dict[str, tuple[int, int]] = {}
    for name, shape in shapes.items():
        if (match := _EXPERTS.fullmatch(name)) is not None:
            count, rows, columns = shape.dims
            projections = ("down_proj",) if match[2] == "down_proj" else ("gate_proj", "up_proj")
            for expert in range(count):
                for projection in projections:
                    linears[f"{match[1]}.{expert}.{projection}"] = (rows // len(projections), columns)
        elif _LINEAR.fullmatch(module := name.removesuffix(".weight")) and name != module:
            linears[module] = (shape.dims[0], shape.dims[1])
    return linears


def make_output_shapes(
    shapes: Mapping[str, Shape], config: Mapping[str, Any], ignore: Iterable[str]
) -> tuple[dict[str, Shape], dict[str, tuple[int, int]]]:
    """Every tensor of the quantized body, and the modules that are quantized → (out_features, in_features).

    Format nvfp4-pack-quantized (compressed-tensors): weight_packed U8 [out, in/2], weight_scale F8_E4M3
    [out, in/16], weight_global_scale and input_global_scale F32 [1].
    """
    ignore = tuple(ignore)
    dropped = set(dropped_tensors(shapes, config))
    kept = {name: shape for name, shape in shapes.items() if name not in dropped}
    quantized: dict[str, tuple[int, int]] = {}
    output = {name: shape for name, shape in kept.items() if _EXPERTS.fullmatch(name) is None}
    for module, (rows, columns) in linear_shapes(kept).items():
        if is_ignored(module, ignore):
            output[f"{module}.weight"] = Shape(dtype="BF16", dims=(rows, columns))
            continue
        quantized[module] = (rows, columns)
        output.pop(f"{module}.weight", None)
        output[f"{module}.weight_packed"] = Shape(dtype="U8", dims=(rows, columns // 2))
        output[f"{module}.weight_scale"] = Shape(dtype="F8_E4M3", dims=(rows, columns // GROUP_SIZE))
        output[f"{module}.weight_global_scale"] = Shape(dtype="F32", dims=(1,))
        output[f"{module}.input_global_scale"] = Shape(dtype="F32", dims=(1,))
    return output, quantized


def layer_of(name: str) -> int | None:
    """The decoder layer that a tensor belongs to, or None for everything outside the layers."""
    match = LAYER.match(name)
    return int(match[1]) if match else None


def fused_groups(modules: Iterable[str]) -> list[tuple[str, ...]]:
    """Modules that engines fuse into one matrix, so that their global scales must be equal: q/k/v and gate/up."""
    present = set(modules)
    groups = []
    for first in sorted(present):
        parent, _, leaf = first.rpartition(".")
        for members in _FUSED:
            if leaf == members[0]:
                group = tuple(name for m in members if (name := f"{parent}.{m}") in present)
                groups.append(group)
    return [group for group in groups if len(group) > 1]


def group_name(modules: Sequence[str]) -> str:
    """One name for modules that belong together: `…self_attn.{q,k,v}_proj`, or the experts of a layer."""
    parents = {module.rpartition(".")[0] for module in modules}
    if len(parents) > 1 and (match := EXPERT.fullmatch(modules[0])) is not None:
        return match[1]
    leaves = ",".join(module.rpartition(".")[2].removesuffix("_proj") for module in modules)
    return f"{parents.pop()}.{{{leaves}}}_proj"


def to_published_schema(config: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """config.json in the schema that Google publishes, and whether it had to be converted back to it.

    transformers >= 5.15 re-saves `global_head_dim` and `num_global_key_value_heads` as `per_layer_config`, which
    transformers <= 5.14 and vLLM before 0.29 cannot read, not even beside the old keys (vLLM #51744, #52768); and it
    writes the vision tower's rope_type "default" as "axial", which transformers <= 5.16.1 refuses.
    CompatibilityError if the layers differ in a way that the published schema has no words for.
    """
    result = copy.deepcopy(dict(config))
    converted = False
    for section in (result, result.get("text_config")):
        per_layer = section.pop("per_layer_config", None) if isinstance(section, dict) else None
        if not isinstance(section, dict) or per_layer is None:
            continue
        types = enumerate(section.get("layer_types", ()))
        full = {str(index) for index, layer_type in types if layer_type == "full_attention"}
        values: Mapping[str, Any] = next(iter(per_layer.values()), {})
        if per_layer and (per_layer.keys() != full or any(other != values for other in per_layer.values())):
            raise CompatibilityError("per_layer_config does not say one thing about all full_attention layers")
        section["global_head_dim"] = values.get("head_dim", section.get("head_dim"))
        section["num_global_key_value_heads"] = values.get("num_key_value_heads")
        converted = True
    vision = result.get("vision_config")
    rope = vision.get("rope_parameters") if isinstance(vision, dict) else None
    if isinstance(rope, dict) and rope.get("rope_type") == "axial":
        rope["rope_type"] = "default"
        converted = True
    return result, converted


def own_layer_types(text_config: Mapping[str, Any]) -> list[str]:
    """layer_types of the layers that keep a KV cache of their own, in order."""
    layers: list[str] = list(text_config["layer_types"])
    return layers[: len(layers) - (text_config.get("num_kv_shared_layers") or 0)]


def kv_geometry(text_config: Mapping[str, Any], layer_type: str) -> tuple[int, int]:
    """(key/value heads, head dim) of a layer type. Full layers have their own where the config gives one."""
    heads, head_dim = int(text_config["num_key_value_heads"]), int(text_config["head_dim"])
    if layer_type == "full_attention":
        head_dim = int(text_config.get("global_head_dim") or head_dim)
        if text_config.get("attention_k_eq_v"):
            heads = int(text_config.get("num_global_key_value_heads") or heads)
    return heads, head_dim


def source_offset(name: str, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """(source file, byte offset) of an output tensor that is copied: a source tensor, or one expert's part of one."""
    if name in tensors:
        return tensors[name].file, tensors[name].start
    parent, expert, projection = name.removesuffix(".weight").rsplit(".", 2)
    fused = tensors[f"{parent}.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"]
    expert_bytes = fused.shape.nbytes // fused.shape.dims[0]
    half = expert_bytes // 2 if projection == "up_proj" else 0
    return fused.file, fused.start + int(expert) * expert_bytes + half
