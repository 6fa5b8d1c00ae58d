"""Faults to plant in a good bundle, one each, with the finding that `bundle verify` must have for it.

They are written for the structure, not for one checkpoint: the same function breaks a bundle of any of its kinds.
What vLLM does with each is measured by benchmarks/planted_engine.py and kept in data/planted.toml; PLANTED.md is both
together, as `render` writes it.
"""

from __future__ import annotations

import struct
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from breaks import (
    ATTENTION,
    LAYERS,
    MLP,
    POINTER,
    Break,
    Tensors,
    both,
    drop,
    edit_json,
    parts,
    poke,
    put,
    remove,
    repack,
    scale,
    write,
)

from bundler.checkpoint import INDEX, Shape, load_tensors

KINDS = ("dense", "moe", "per-layer", "unified")
TOWERS = ("dense", "moe", "per-layer")
STAGES = ("config", "load", "start", "answer", "crash", "silent")
DATA = Path(__file__).with_name("data") / "planted.toml"
CONFIG, OWN = "config.json", "assistant/config.json"
DOWN, GATE, UP = (f"{MLP}.{name}_proj" for name in ("down", "gate", "up"))
QUERY, KEY = f"{ATTENTION}.q_proj", f"{ATTENTION}.k_proj"
EXPERTS = f"{LAYERS}.0.experts"
QUANTIZATION = (CONFIG, "quantization_config")
GROUP = (*QUANTIZATION, "config_groups", "group_0")
TEXT = (OWN, "text_config")
SOFT_TOKENS = ("default_output_length", "num_soft_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One way in which a bundle is wrong."""

    name: str
    plant: Break
    finding: str
    """The code that verify must have among its errors."""
    kinds: tuple[str, ...] = KINDS


def _fault(name: str, finding: str, plant: Break, kinds: tuple[str, ...] = KINDS) -> Fault:
    return Fault(name=name, plant=plant, finding=finding, kinds=kinds)


# ---- what a fault does ----------------------------------------------------------------------------------------------


def take(choose: Callable[[str], bool], folder: str = "") -> Break:
    """Remove every tensor that `choose` picks, index and all; there must be one."""

    def change(tensors: Tensors) -> None:
        chosen = [name for name in tensors if choose(name)]
        assert chosen
        for name in chosen:
            del tensors[name]

    return repack(change, folder)


def take_named(*names: str, folder: str = "") -> Break:
    return take(names.__contains__, folder)


def take_first(text: str, folder: str = "") -> Break:
    """Remove the first tensor whose name has this text in it."""

    def change(tensors: Tensors) -> None:
        del tensors[next(name for name in sorted(tensors) if text in name)]

    return repack(change, folder)


def alter(name: str, how: Callable[[Shape, bytes], tuple[Shape, bytes]], folder: str = "") -> Break:
    def change(tensors: Tensors) -> None:
        tensors[name] = how(*tensors[name])

    return repack(change, folder)


def narrower(shape: Shape, data: bytes) -> tuple[Shape, bytes]:
    """Half of the last dimension."""
    small = Shape(dtype=shape.dtype, dims=(*shape.dims[:-1], shape.dims[-1] // 2))
    return small, data[: small.nbytes]


def as_bytes(shape: Shape, data: bytes) -> tuple[Shape, bytes]:
    return Shape(dtype="U8", dims=shape.dims), data


def as_integers(shape: Shape, data: bytes) -> tuple[Shape, bytes]:
    return Shape(dtype="I16", dims=shape.dims), data


def add(name: str, like: str, folder: str = "") -> Break:
    """A further tensor: a copy of `like`."""

    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[like]

    return repack(change, folder)


def unpack(module: str, keep: bool = False) -> Break:
    """A quantized matrix as bf16; beside its packed parts with `keep`."""

    def change(tensors: Tensors) -> None:
        rows, half = tensors[f"{module}.weight_packed"][0].dims
        shape = Shape(dtype="BF16", dims=(rows, 2 * half))
        tensors[f"{module}.weight"] = (shape, b"\x10\x3c" * shape.numel)
        for name in () if keep else parts(module):
            del tensors[name]

    return repack(change)


def fuse_experts(root: Path) -> None:
    """Layer 0's experts as transformers has them: one bf16 matrix for all."""

    def change(tensors: Tensors) -> None:
        names = [name for name in tensors if name.startswith(f"{EXPERTS}.")]
        count = 1 + max(int(name[len(EXPERTS) + 1 :].partition(".")[0]) for name in names)
        rows, half = tensors[f"{EXPERTS}.0.gate_proj.weight_packed"][0].dims
        for name in names:
            del tensors[name]
        for name, dims in (("gate_up_proj", (count, 2 * rows, 2 * half)), ("down_proj", (count, 2 * half, rows))):
            shape = Shape(dtype="BF16", dims=dims)
            tensors[f"{EXPERTS}.{name}"] = (shape, b"\x10\x3c" * shape.numel)

    repack(change)(root)


def times(name: str, factor: float) -> Break:
    """A global scale, multiplied."""
    return poke(name, lambda old: struct.pack("<f", struct.unpack("<f", old)[0] * factor))


def of_all(suffix: str, value: float) -> Break:
    """The same value for every scale of this name."""

    def change(root: Path) -> None:
        for name in load_tensors(root):
            if name.endswith(suffix):
                poke(name, struct.pack("<f", value))(root)

    return change


def multiply(name: str, *path: str, by: int) -> Break:
    """A number of a JSON file, multiplied."""

    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] *= by

    return edit_json(name, change)


def swap_ids(document: Any) -> None:
    """Two tokens of a vocabulary change places."""
    vocabulary = document["model"]["vocab"]
    first, second = sorted(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def only_ignore(keep: Callable[[str], bool]) -> Break:
    def change(config: Any) -> None:
        section = config["quantization_config"]
        section["ignore"] = [pattern for pattern in section["ignore"] if keep(pattern)]

    return edit_json(CONFIG, change)


def one_shard_less(root: Path) -> None:
    repack(lambda tensors: None, shards=2)(root)
    (root / "model-00002-of-00002.safetensors").unlink()


def cut(name: str, keep: float) -> Break:
    def change(root: Path) -> None:
        content = (root / name).read_bytes()
        (root / name).write_bytes(content[: int(len(content) * keep)])

    return change


def last_layer_gone(document: Any) -> None:
    text = document["text_config"]
    text["num_hidden_layers"] -= 1
    text["layer_types"] = [*text["layer_types"][:-2], text["layer_types"][-1]]


def repeat_first_token(data: bytes) -> bytes:
    return data[:8] * (len(data) // 8)


SHARD = "model-00001-of-00001.safetensors"

BODY = [
    _fault("an input scale is missing", "scale-missing", take_named(f"{DOWN}.input_global_scale")),
    _fault("every input scale is missing", "scale-missing", take(lambda name: name.endswith(".input_global_scale"))),
    _fault("a weight's global scale is missing", "scale-missing", take_named(f"{DOWN}.weight_global_scale")),
    _fault("a weight's block scales are missing", "scale-missing", take_named(f"{DOWN}.weight_scale")),
    _fault("q_proj's input scale is missing", "scale-missing", take_named(f"{QUERY}.input_global_scale")),
    _fault("a packed weight is missing", "weight-missing", take_named(f"{DOWN}.weight_packed")),
    _fault("gate_proj is missing whole", "module-missing", take_named(*parts(GATE))),
    _fault("o_proj is missing whole", "module-missing", take_named(*parts(f"{ATTENTION}.o_proj"))),
    _fault("a layer is missing", "layer-missing", take(lambda name: name.startswith(f"{LAYERS}.1."))),
    _fault("a norm is missing", "tensor-missing", take_named(f"{LAYERS}.0.input_layernorm.weight")),
    _fault("the last norm is missing", "tensor-missing", take_named("model.language_model.norm.weight")),
    _fault("a layer's scalar is missing", "tensor-missing", take_named(f"{LAYERS}.0.layer_scalar")),
    _fault("the embeddings are missing", "tensor-missing", take_named("model.language_model.embed_tokens.weight")),
    _fault("a tensor of the vision tower is missing", "tensor-missing", take_first("vision_tower.encoder"), TOWERS),
    _fault("the vision embedder's projection is missing", "tensor-missing",
           take_named("model.vision_embedder.patch_dense.weight"), ("unified",)),
    _fault("the images' projection is missing", "tensor-missing", take_first("embed_vision.embedding_projection")),
    _fault("a norm has half its width", "tensor-shape", alter("model.language_model.norm.weight", narrower)),
    _fault("block scales for groups of 32", "tensor-shape", alter(f"{DOWN}.weight_scale", narrower)),
    _fault("block scales stored as bytes", "tensor-dtype", alter(f"{DOWN}.weight_scale", as_bytes)),
    _fault("a norm stored as integers", "tensor-dtype", alter("model.language_model.norm.weight", as_integers)),
    _fault("a tensor too many", "tensor-unexpected",
           add(f"{LAYERS}.0.mlp.extra.weight", "model.language_model.norm.weight")),
    _fault("the tied head is stored", "tied-head-stored",
           add("lm_head.weight", "model.language_model.embed_tokens.weight")),
    _fault("a module is packed and plain", "half-quantized", unpack(DOWN, keep=True)),
    _fault("a module was not quantized", "not-quantized", unpack(DOWN)),
    _fault("up_proj was not quantized, gate_proj was", "fused-group-split", unpack(UP)),
    _fault("packed weights are all zero", "weight-zero", poke(f"{DOWN}.weight_packed", lambda old: bytes(len(old)))),
    _fault("a block scale is NaN", "scale-nan", poke(f"{DOWN}.weight_scale", lambda old: old[:-1] + b"\x7f")),
    _fault("block scales are zero", "scale-zero", poke(f"{DOWN}.weight_scale", lambda old: bytes(len(old)))),
    _fault("an input scale is zero", "scale-zero", scale(0.0, f"{DOWN}.input_global_scale")),
    _fault("an input scale is infinite", "scale-infinite", scale(float("inf"), f"{DOWN}.input_global_scale")),
    _fault("an input scale is negative", "scale-negative", times(f"{DOWN}.input_global_scale", -1)),
    _fault("an input scale was never calibrated", "scale-one", scale(1.0, f"{DOWN}.input_global_scale")),
    _fault("no input scale was calibrated", "scale-one", of_all(".input_global_scale", 1.0)),
    _fault("a weight's scale is the wrong way up", "scale-reciprocal", scale(1e-4, f"{DOWN}.weight_global_scale")),
    _fault("gate_proj and up_proj have other weight scales", "fused-weight-scale",
           times(f"{UP}.weight_global_scale", 4)),
    _fault("q_proj and k_proj have other weight scales", "fused-weight-scale", times(f"{KEY}.weight_global_scale", 4)),
    _fault("q_proj and k_proj have other input scales", "fused-input-scale", times(f"{KEY}.input_global_scale", 4)),
    _fault("an expert's gate_proj is missing", "module-missing",
           take_named(*parts(f"{EXPERTS}.1.gate_proj")), ("moe",)),
    _fault("an expert's input scale is missing", "scale-missing",
           take_named(f"{EXPERTS}.1.down_proj.input_global_scale"), ("moe",)),
    _fault("experts are fused and not quantized", "experts-fused", fuse_experts, ("moe",)),
    _fault("an expert saw only its own tokens", "experts-input-scale",
           both(*(times(f"{EXPERTS}.1.{name}_proj.input_global_scale", 4) for name in ("gate", "up"))), ("moe",)),
    _fault("the router is missing", "tensor-missing", take_named(f"{LAYERS}.0.router.proj.weight"), ("moe",)),
    _fault("the per-layer embeddings are missing", "tensor-missing",
           take_named("model.language_model.embed_tokens_per_layer.weight"), ("per-layer",)),
    _fault("a per-layer gate is missing", "tensor-missing",
           take_named(f"{LAYERS}.0.per_layer_input_gate.weight"), ("per-layer",)),
    _fault("there is no index", "index-missing", remove(INDEX)),
    _fault("the index lacks a tensor", "index-unmapped", drop(INDEX, "weight_map", f"{DOWN}.weight_packed")),
    _fault("the index names a file that is not here", "shard-missing",
           put(INDEX, "weight_map", f"{DOWN}.weight_packed", value="model-2.safetensors")),
    _fault("a shard is missing", "shard-missing", one_shard_less),
    _fault("a shard is cut off", "shard-unreadable", cut(SHARD, 0.9)),
    _fault("a shard is a Git LFS pointer", "lfs-pointer", write(SHARD, POINTER)),
]  # fmt: skip

FILES = [
    _fault("no quantization_config", "quantization-config", drop(*QUANTIZATION)),
    _fault("another format", "quantization-config",
           both(put(*QUANTIZATION, "format", value="pack-quantized"), put(*GROUP, "format", value="pack-quantized"))),
    _fault("groups of 32 by config", "quantization-config", put(*GROUP, "weights", "group_size", value=32)),
    _fault("eight bits by config", "quantization-config", put(*GROUP, "weights", "num_bits", value=8)),
    _fault("weights only by config", "quantization-config", put(*GROUP, "input_activations", value=None)),
    _fault("the head is not ignored", "ignore-incomplete", only_ignore(lambda pattern: pattern != "lm_head")),
    _fault("the vision tower is not ignored", "ignore-incomplete",
           only_ignore(lambda pattern: "vision_tower" not in pattern), TOWERS),
    _fault("the vision embedder is not ignored", "ignore-incomplete",
           only_ignore(lambda pattern: "vision_embedder" not in pattern), ("unified",)),
    _fault("the images' projection is not ignored", "ignore-incomplete",
           only_ignore(lambda pattern: "embed_vision" not in pattern)),
    _fault("the router is not ignored", "ignore-incomplete",
           only_ignore(lambda pattern: "router" not in pattern), ("moe",)),
    _fault("the per-layer gates are not ignored", "ignore-incomplete",
           only_ignore(lambda pattern: "per_layer" not in pattern), ("per-layer",)),
    _fault("a packed module is ignored", "kept-quantized",
           edit_json(CONFIG, lambda c: c["quantization_config"]["ignore"].append(DOWN))),
    _fault("a pattern without re:", "ignore-pattern",
           edit_json(CONFIG, lambda c: c["quantization_config"]["ignore"].append(".*down_proj"))),
    _fault("the newer schema's keys beside the old", "config-schema",
           put(CONFIG, "text_config", "per_layer_config", value={})),
    _fault("no architectures", "config-architectures", drop(CONFIG, "architectures")),
    _fault("another model_type", "config-kind", put(CONFIG, "model_type", value="gemma3")),
    _fault("no global_head_dim", "config-geometry", drop(CONFIG, "text_config", "global_head_dim")),
    _fault("a layer less by config", "tensor-unexpected",
           edit_json(CONFIG, last_layer_gone), ("dense", "moe", "unified")),
    _fault("untied by config, without a head", "head-missing", put(CONFIG, "tie_word_embeddings", value=False)),
    _fault("no number of an image's tokens", "vision-tokens-missing",
           edit_json(CONFIG, lambda c: [c["vision_config"].pop(key, None) for key in SOFT_TOKENS])),
    _fault("another number of an image's tokens", "vision-tokens-differ",
           edit_json(CONFIG, lambda c: c["vision_config"].update(
               {key: 4 * c["vision_config"][key] for key in SOFT_TOKENS if key in c["vision_config"]}))),
    _fault("one stop token", "stop-tokens", put("generation_config.json", "eos_token_id", value=1)),
    _fault("no generation config", "side-file-missing", remove("generation_config.json")),
    _fault("no tokenizer", "side-file-missing", remove("tokenizer.json")),
    _fault("a token beyond the embeddings", "tokenizer-vocab",
           edit_json("tokenizer.json", lambda t: t["added_tokens"].append(
               {**t["added_tokens"][-1], "id": 300_000, "content": "<new>"}))),
    _fault("no processor", "side-file-missing", remove("processor_config.json")),
]  # fmt: skip

PRE, POST = "pre_projection.weight", "post_projection.weight"
DRAFTER = [
    _fault("drafter of a wider body", "drafter-backbone", multiply(OWN, "backbone_hidden_size", by=2)),
    _fault("drafter of a body with another window", "drafter-sliding-window", multiply(*TEXT, "sliding_window", by=2)),
    _fault("drafter with another rope", "drafter-rope",
           put(*TEXT, "rope_parameters", "sliding_attention", "rope_theta", value=5000.0)),
    _fault("drafter with another full rope", "drafter-rope",
           put(*TEXT, "rope_parameters", "full_attention", "partial_rotary_factor", value=0.5)),
    _fault("drafter with other heads", "drafter-head-dim", multiply(*TEXT, "head_dim", by=2)),
    _fault("drafter with more K and V heads", "drafter-kv-heads", multiply(*TEXT, "num_key_value_heads", by=2)),
    _fault("drafter with layers of an unknown type", "config-geometry",
           put(*TEXT, "layer_types", value=["chunked_attention"] * 4)),
    _fault("drafter of a larger vocabulary by config", "drafter-vocab", multiply(*TEXT, "vocab_size", by=2)),
    _fault("drafter with another tokenizer", "drafter-tokenizer", edit_json("assistant/tokenizer.json", swap_ids)),
    _fault("drafter that shares some K and V", "drafter-kv-shared", put(*TEXT, "num_kv_shared_layers", value=2)),
    _fault("drafter with per-layer inputs", "drafter-per-layer",
           edit_json(OWN, lambda c: c["text_config"].update(
               hidden_size_per_layer_input=32, vocab_size_per_layer_input=c["text_config"]["vocab_size"]))),
    _fault("drafter with experts", "drafter-moe",
           edit_json(OWN, lambda c: c["text_config"].update(
               enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=64))),
    _fault("drafter with a double-wide mlp", "drafter-double-wide", put(*TEXT, "use_double_wide_mlp", value=True)),
    _fault("drafter untied without a head", "drafter-untied", put(OWN, "tie_word_embeddings", value=False)),
    _fault("drafter quantized by config", "drafter-quantized",
           edit_json(OWN, lambda c: c.update(quantization_config={"quant_method": "compressed-tensors"}))),
    _fault("drafter without architectures", "drafter-architectures", drop(OWN, "architectures")),
    _fault("drafter of another model_type", "drafter-model-type", put(OWN, "model_type", value="gemma4_text")),
    _fault("drafter without its first projection", "drafter-tensor-missing", take_named(PRE, folder="assistant")),
    _fault("drafter without its last projection", "drafter-tensor-missing", take_named(POST, folder="assistant")),
    _fault("drafter without a norm", "drafter-tensor-missing", take_first("q_norm", folder="assistant")),
    _fault("drafter without embeddings", "drafter-tensor-missing", take_first("embed_tokens", folder="assistant")),
    _fault("drafter with a K of its own", "drafter-tensor-unexpected",
           add("model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight", "assistant")),
    _fault("drafter with a narrower projection", "drafter-tensor-shape", alter(PRE, narrower, "assistant")),
    _fault("drafter stored as integers", "drafter-tensor-dtype", alter("model.norm.weight", as_integers, "assistant")),
    _fault("drafter cut off", "shard-unreadable", cut("assistant/model.safetensors", 0.9)),
    _fault("drafter without weights", "shard-missing", remove("assistant/model.safetensors")),
    _fault("drafter without a config", "side-file-missing", remove(OWN)),
    _fault("drafter with one token everywhere", "drafter-token-ordering",
           poke("masked_embedding.token_ordering", repeat_first_token, "assistant"), ("per-layer",)),
    _fault("drafter without centroids", "drafter-tensor-missing",
           take_named("masked_embedding.centroids.weight", folder="assistant"), ("per-layer",)),
]  # fmt: skip

TABLES = {"weights": BODY, "config and side files": FILES, "drafter": DRAFTER}
FAULTS = {fault.name: fault for faults in TABLES.values() for fault in faults}


def faults_of(kind: str) -> list[Fault]:
    """What can be planted in a bundle of this kind."""
    return [fault for fault in FAULTS.values() if kind in fault.kinds]


# ---- the table ------------------------------------------------------------------------------------------------------


def load_measured() -> tuple[str, Mapping[str, Mapping[str, str]]]:
    """The release that was measured, and fault → kind → what it did."""
    document = tomllib.loads(DATA.read_text(encoding="utf-8"))
    return document["release"], document["fault"]


def render() -> str:
    """PLANTED.md."""
    release, measured = load_measured()
    lines = [
        "# Planted faults",
        "",
        "One fault each, planted in a good bundle of each kind: what `bundle verify` says, and what vLLM",
        f"{release} does by itself (on a CPU, in process, with the drafter; benchmarks/planted_engine.py).",
        "test_planted.py holds every line to verify, and this file to the data: `python tests/planted.py` writes it.",
        "",
        "- config, load, start: vLLM refuses while it reads the configuration, loads the weights, or warms up.",
        "- answer: it crashes at the first prompt. crash: its process dies.",
        "- **silent**: it starts and answers. *wrong*: with a token that this bundle does not repeat, as it must;",
        "  *no drafts*: nothing is accepted; *same*: nothing shows in these answers.",
        "- A dash: this kind cannot have the fault. A question mark: not run.",
    ]
    for table, faults in TABLES.items():
        lines += ["", f"## {table[0].upper()}{table[1:]}", "", f"| fault | verify | {' | '.join(KINDS)} |"]
        lines.append("|---" * (2 + len(KINDS)) + "|")
        for fault in faults:
            seen = [_cell(fault, kind, measured.get(fault.name, {})) for kind in KINDS]
            lines.append(f"| {fault.name} | `{fault.finding}` | {' | '.join(seen)} |")
    return "\n".join([*lines, "", *summary(measured)]) + "\n"


def _cell(fault: Fault, kind: str, measured: Mapping[str, str]) -> str:
    if kind not in fault.kinds:
        return "-"
    words = measured.get(kind, "?")
    return f"**silent**: {words.partition(' ')[2]}" if words.startswith("silent") else words


def summary(measured: Mapping[str, Mapping[str, str]]) -> Iterable[str]:
    """How many vLLM catches, and where."""
    yield "## In sum"
    yield ""
    for kind in KINDS:
        words = [measured[fault.name][kind] for fault in faults_of(kind) if kind in measured.get(fault.name, {})]
        counts = {stage: sum(word.startswith(stage) for word in words) for stage in STAGES}
        told = ", ".join(f"{count} {stage}" for stage, count in counts.items() if count)
        yield f"- {kind}: of {len(words)} faults {told}." if words else f"- {kind}: not run."


if __name__ == "__main__":
    Path(__file__).with_name("PLANTED.md").write_text(render(), encoding="utf-8")
