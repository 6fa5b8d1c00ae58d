"""The body as it comes: whether its metadata promises a bundle that loads, can be split and stops talking."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from bundler import sidefiles
from bundler.checkpoint import INDEX, Shape, load_json
from bundler.drafter import make_vocabulary
from bundler.errors import CompatibilityError, SourceError
from bundler.findings import Finding, error, errors, note, warning
from bundler.gemma4 import (
    GROUP_SIZE,
    dropped_tensors,
    fused_groups,
    group_name,
    is_ignored,
    kv_geometry,
    linear_shapes,
    to_published_schema,
)
from bundler.inventory import body_shapes
from bundler.layout import Layout
from bundler.source import Source

_FLOATS = {"BF16", "F16", "F32"}
TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)


def check_source(body: Source) -> list[Finding]:
    """Whether config.json and tensors are one whole, unquantized body; with an error here nothing can be laid out."""
    packed = sorted(name for name, tensor in body.tensors.items() if tensor.shape.dtype not in _FLOATS)
    if "quantization_config" in body.config or packed:
        what = "config.json has a quantization_config" if "quantization_config" in body.config else _some(packed)
        message = f"{body.model} is quantized already: {what}"
        return [error("already-quantized", "body", message, "start from the bf16 checkpoint")]
    try:
        config, converted = to_published_schema(body.config)
    except CompatibilityError as exc:
        return [error("config-schema", "config.json", str(exc), "take the original's config.json")]
    findings = sidefiles.check_config(config)
    if converted:
        message = "was saved again by transformers >= 5.15 (per_layer_config); the bundle gets Google's own keys back"
        findings.append(note("config-schema-converted", "config.json", message, source="vLLM #51744, #52768"))
    if errors(findings):
        return findings
    return findings + list(_check_tensors(body, config)) + list(_check_head(body, config))


def _check_tensors(body: Source, config: Mapping[str, Any]) -> Iterator[Finding]:
    shapes = {name: tensor.shape for name, tensor in body.tensors.items()}
    expected = body_shapes(config)
    dropped = dropped_tensors(shapes, config)
    if missing := sorted(expected.keys() - shapes.keys()):
        message = f"config.json describes {len(expected)} tensors; absent: {_some(missing)}"
        yield error(
            "body-tensor-missing", "body", message, "is the checkpoint whole, and in the names Google publishes?"
        )
    if unknown := sorted(shapes.keys() - expected.keys() - {"lm_head.weight", *dropped}):
        message = f"no module that config.json describes has these: {_some(unknown)}"
        yield error("body-tensor-unexpected", "body", message, "remove them, or correct config.json")
    both = sorted(expected.keys() & shapes.keys())
    if odd := [name for name in both if shapes[name].dims != expected[name].dims]:
        have, want = list(shapes[odd[0]].dims), list(expected[odd[0]].dims)
        message = f"{_some(odd)}: the first is {have}, config.json means {want}"
        yield error("body-tensor-shape", "body", message)
    elif odd := [f"{name}.weight" for name in linear_shapes(shapes) if _dtype(shapes, name) != "BF16"]:
        message = f"quantized is what is stored in BF16, and this is not: {_some(odd)}"
        yield error("body-dtype", "body", message, "save the body in bfloat16 first", "compressed-tensors #781")
    if dropped:
        message = (
            f"{len(dropped)} K/V tensors of layers that read another layer's are left out, as no engine needs them"
        )
        yield note("tensors-dropped", "body", message, source="vLLM #44788, #54917")


def _dtype(shapes: Mapping[str, Shape], module: str) -> str:
    expert = re.sub(r"\.experts\.\d+\.(down_proj|gate_proj|up_proj)$", _fused_expert, module)
    return shapes[expert if expert in shapes else f"{module}.weight"].dtype


def _fused_expert(match: re.Match[str]) -> str:
    return ".experts.down_proj" if match[1] == "down_proj" else ".experts.gate_up_proj"


def _check_head(body: Source, config: Mapping[str, Any]) -> Iterator[Finding]:
    tied = config.get("tie_word_embeddings", config["text_config"].get("tie_word_embeddings", True))
    if tied and "lm_head.weight" in body.tensors:
        size = body.tensors["lm_head.weight"].shape.nbytes
        message = f"the head is tied to the embeddings, and lm_head.weight repeats them in {size:,} bytes"
        hint = "remove it from the checkpoint, or set tie_word_embeddings to false if it really differs"
        yield error("tied-head-stored", "body: lm_head.weight", message, hint, "llm-compressor #2798, #2835")
    if not tied and "lm_head.weight" not in body.tensors:
        yield error(
            "head-missing", "body: lm_head.weight", "tie_word_embeddings is false, and there is no lm_head.weight"
        )


def check_layout(layout: Layout, shapes: Mapping[str, Shape], extra_ignore: Sequence[str]) -> list[Finding]:
    """Whether what the recipe keeps in bf16 leaves a body that engines take."""
    where = "quantization.ignore"
    if not layout.quantized:
        return [error("nothing-quantized", where, "keeps every Linear in bf16", "ignore less")]
    findings = []
    carried = {name: shape for name, shape in shapes.items() if name not in layout.dropped}
    linears = linear_shapes(carried)
    modules = linears.keys() | {name.removesuffix(".weight") for name in carried}
    for number, pattern in enumerate(extra_ignore):
        if not any(is_ignored(module, [pattern]) for module in modules):
            message = f"{pattern!r} matches no module of the body"
            hint = "names begin with `model.language_model.layers.`; a pattern is matched from the start, so `re:.*`"
            findings.append(warning("dead-ignore", f"{where}[{number}]", message, hint, "vLLM #51910"))
    groups = [*fused_groups(linears), *_expert_groups(linears)]
    if split := [group_name(group) for group in groups if len({module in layout.quantized for module in group}) > 1]:
        message = f"keeps a part of what engines fuse into one matrix: {_some(split)}"
        findings.append(error("fused-group-split", where, message, "keep or quantize all of it"))
    if odd := [module for module, (_, columns) in layout.quantized.items() if columns % GROUP_SIZE]:
        message = f"NVFP4 needs inputs in groups of {GROUP_SIZE}: {_some(odd)}"
        findings.append(error("group-size", "body", message, "keep them in bf16 with quantization.ignore"))
    return findings


def _expert_groups(linears: Iterable[str]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for module in linears:
        if (layer := module.partition(".experts.")[0]) != module:
            groups.setdefault(layer, []).append(module)
    return list(groups.values())


def check_side_files(body: Source) -> list[Finding]:
    """Whether the small files that a bundle copies are there and sound; one that is not fetched yet is believed."""
    names = {file.path for file in body.files}
    needed = ["generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    if "preprocessor_config.json" not in names:
        needed.append("processor_config.json")
    findings = [
        error(
            "side-file-missing", name, f"{body.model} does not have it", "take the original's", "llm-compressor #1305"
        )
        for name in needed
        if name not in names
    ]
    parsed: dict[str, dict[str, Any]] = {}
    for name in sorted(names):
        if name.endswith(".json") and name != INDEX and (body.folder / name).is_file():
            try:
                parsed[name] = load_json(body.folder / name)
            except SourceError as exc:
                findings.append(error("json-unreadable", name, str(exc), exc.hint))
    tokenizer, settings = parsed.get("tokenizer.json", {}), parsed.get("tokenizer_config.json", {})
    vocabulary: dict[str, int] = {}
    try:
        vocabulary = make_vocabulary(tokenizer) if tokenizer else {}
    except SourceError as exc:
        findings.append(error("json-unreadable", "tokenizer.json", str(exc), exc.hint))
    findings += sidefiles.check_tokenizer(tokenizer, settings, vocabulary, body.config)
    if processor := parsed.get("processor_config.json") or parsed.get("preprocessor_config.json"):
        completed = sidefiles.complete_vision(body.config, processor)
        findings += sidefiles.check_completed(body.config, completed) + sidefiles.check_processor(processor, completed)
    if "tokenizer_config.json" in parsed:
        findings += sidefiles.check_chat_template(names, settings)
    if "generation_config.json" in parsed:
        findings += sidefiles.check_generation(parsed["generation_config.json"], body.config, vocabulary)
    return findings


def is_attention_quantized(layout: Layout) -> bool:
    """Whether any attention projection becomes 4-bit: what bodies without QAT do not bear."""
    return any(".self_attn." in module for module in layout.quantized)


def check_origin(body: Source) -> list[Finding]:
    """Whether names say that the body was trained for 4 bit (QAT); a folder without a card says nothing."""
    parents = body.card.get("base_model") or []
    names = [str(name) for name in (parents if isinstance(parents, list) else [parents])]
    if body.commit is not None:
        names.append(body.model)
    if not names or any(re.search(r"(^|[-_./])qat([-_.]|$)", name, re.IGNORECASE) for name in names):
        return []
    message = f"{body.model} does not say it is a QAT checkpoint; W4A4 on attention breaks Gemma 4 bodies that are not"
    hint = (
        "use a -qat-q4_0-unquantized body, or keep attention bf16: ignore = ['re:.*self_attn.*']; measure the quality"
    )
    return [warning("body-not-qat", "body.model", message, hint, "discussions of nvidia/Gemma-4-31B-IT-NVFP4, #5")]


def check_tensor_parallel(
    size: int, body_config: Mapping[str, Any], drafter_config: Mapping[str, Any]
) -> list[Finding]:
    """Whether body and drafter can be split over `size` cards: into whole heads and whole NVFP4 groups."""
    body, drafter = body_config["text_config"], drafter_config["text_config"]
    faults = [
        *_split_faults(size, body, GROUP_SIZE),
        *(f"drafter: {fault}" for fault in _split_faults(size, drafter, 1)),
    ]
    if not faults:
        return []
    legal = [
        str(other)
        for other in TENSOR_PARALLEL_SIZES
        if not [*_split_faults(other, body, GROUP_SIZE), *_split_faults(other, drafter, 1)]
    ]
    hint = f"possible: {', '.join(legal)}" if legal else None
    return [error("tensor-parallel", "serve.tensor_parallel_size", f"{size} cards: {'; '.join(faults)}", hint)]


def _split_faults(size: int, text: Mapping[str, Any], group: int) -> list[str]:
    faults = []
    heads = text["num_attention_heads"]
    if heads % size:
        faults.append(f"{heads} attention heads do not divide")
    for layer_type in sorted(set(text["layer_types"])):
        kv_heads, head_dim = kv_geometry(text, layer_type)
        if kv_heads % size and size % kv_heads:
            faults.append(f"{kv_heads} key/value heads ({layer_type}) neither divide nor repeat evenly")
        if heads * head_dim % (size * group):
            faults.append(f"o_proj's {heads * head_dim} inputs ({layer_type}) give no whole groups of {group}")
    widths = {"mlp": text["intermediate_size"]}
    if text.get("enable_moe_block"):
        widths["expert"] = text["moe_intermediate_size"]
    faults += [
        f"{name} width {width} gives no whole groups of {group}"
        for name, width in widths.items()
        if width % (size * group)
    ]
    return faults


def _some(names: Sequence[str]) -> str:
    """The first of many names, and how many there are."""
    shown = ", ".join(names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"
