"""The weights of a finished checkpoint, from their headers: what its shards hold and what config.json promises."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundler.checkpoint import INDEX, MAX_SHARD_BYTES, SINGLE, Tensor, is_lfs_pointer, load_header, load_json
from bundler.errors import SourceError
from bundler.findings import Finding, error, warning
from bundler.gemma4 import EXPERT, fused_groups, group_name, layer_of
from bundler.inventory import DTYPES, body_shapes
from bundler.layout import QUANTIZED_PARTS, Layout, make_layout

_REBUILD = "build the bundle again"
_AGAIN = "download it again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shards:
    """What the safetensors files of one folder hold."""

    tensors: Mapping[str, Tensor]
    lost: frozenset[str]
    """Tensors that the index places in files which are absent or cannot be read."""
    whole: bool
    """False where a file cannot be read and no index says what is in it: then nothing is known to be missing."""


def check_shards(folder: Path, at: str = "", *, index_required: bool = True) -> tuple[Shards, list[Finding]]:
    """Every tensor that engines read from a folder, and each disagreement between its files and its index.

    `at` is put before file names. What only an orphan shard holds is not counted: no engine opens it.
    """
    headers, findings = _load_headers(folder, at)
    index, faults = _load_index(folder, at, required=index_required)
    findings += faults
    present = {path.name for path in folder.glob("*.safetensors")}
    placed: dict[str, str] = index["weight_map"] if index else {}
    named = set(placed.values()) if index else present
    for name in sorted(named - present):
        findings.append(error("shard-missing", f"{at}{name}", f"is named in {INDEX} but not here", _AGAIN))
    for name in sorted(present - named):
        message = f"is named nowhere in {INDEX}: no engine reads it"
        findings.append(error("shard-orphan", f"{at}{name}", message, _REBUILD))
    if not index and not present and not index_required:
        findings.append(error("shard-missing", f"{at}{SINGLE}", "is not here, and there is no index either", _AGAIN))
    tensors: dict[str, Tensor] = {}
    for name in sorted(headers.keys() & named):
        for tensor in sorted(headers[name].keys() & tensors.keys()):
            message = f"is in {tensors[tensor].file} too"
            findings.append(error("tensor-twice", f"{at}{name}: {tensor}", message, _REBUILD))
        tensors |= headers[name]
    lost = frozenset(tensor for tensor, name in placed.items() if name not in headers)
    if index:
        findings += _check_index(index, tensors, lost, at)
    return Shards(tensors=tensors, lost=lost, whole=bool(index) or headers.keys() == present), findings


def _load_index(folder: Path, at: str, *, required: bool) -> tuple[dict[str, Any], list[Finding]]:
    """The index, or nothing and why; it may name only files beside it."""
    if not (folder / INDEX).is_file():
        message = "is not here: without it engines also read the drafter's weights as the body's"
        return {}, [error("index-missing", f"{at}{INDEX}", message, _REBUILD)] if required else []
    try:
        index = load_json(folder / INDEX)
    except SourceError as exc:
        return {}, [error("index-unreadable", f"{at}{INDEX}", str(exc), exc.hint or _AGAIN)]
    placed = index.get("weight_map")
    if not isinstance(placed, dict) or not placed or not all(_is_shard_name(name) for name in placed.values()):
        return {}, [error("index-unreadable", f"{at}{INDEX}", "has no weight_map of tensor → file name", _AGAIN)]
    return index, []


def _is_shard_name(name: object) -> bool:
    return isinstance(name, str) and name == Path(name).name and name.endswith(".safetensors")


def _load_headers(folder: Path, at: str) -> tuple[dict[str, Mapping[str, Tensor]], list[Finding]]:
    headers: dict[str, Mapping[str, Tensor]] = {}
    findings = []
    for path in sorted(folder.glob("*.safetensors")):
        try:
            header, _ = load_header(path)
        except SourceError as exc:
            code = "lfs-pointer" if is_lfs_pointer(path) else "shard-unreadable"
            findings.append(error(code, f"{at}{path.name}", str(exc), exc.hint or _AGAIN))
            continue
        headers[path.name] = header
        size = sum(tensor.shape.nbytes for tensor in header.values())
        if size > MAX_SHARD_BYTES and len(header) > 1:
            message = f"holds {size} bytes of tensors, more than {MAX_SHARD_BYTES}"
            findings.append(error("shard-too-large", f"{at}{path.name}", message, _REBUILD))
    return headers, findings


def _check_index(
    index: Mapping[str, Any], tensors: Mapping[str, Tensor], lost: frozenset[str], at: str
) -> list[Finding]:
    placed: Mapping[str, str] = index["weight_map"]
    where, findings = f"{at}{INDEX}", []
    for name in sorted(tensors.keys() - placed.keys()):
        message = f"(in {tensors[name].file}) is not in the index: no engine reads it"
        findings.append(error("index-unmapped", f"{where}: {name}", message, _REBUILD))
    for name in sorted(placed.keys() - tensors.keys() - lost):
        message = f"is not in {placed[name]}, where the index places it"
        findings.append(error("index-stale", f"{where}: {name}", message, _REBUILD))
    for name in sorted(placed.keys() & tensors.keys()):
        if placed[name] != tensors[name].file and name not in lost:
            message = f"is in {tensors[name].file}, the index says {placed[name]}"
            findings.append(error("index-wrong-shard", f"{where}: {name}", message, _REBUILD))
    metadata = index.get("metadata")
    said = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    total = sum(tensor.shape.nbytes for tensor in tensors.values())
    if said != total and not lost and not findings:
        message = f"is {said}, the tensors have {total} bytes"
        findings.append(error("index-total-size", f"{where}: metadata.total_size", message, _REBUILD))
    return findings


def check_inventory(config: Mapping[str, Any], ignore: Iterable[str], shards: Shards) -> list[Finding]:
    """Whether a body holds exactly the tensors that its config.json and its ignore list promise.

    One finding for one fault: what a missing layer or a wrongly treated module explains is not said again a tensor
    at a time. `config` must pass `check_geometry`.
    """
    layout = make_layout(body_shapes(config), config, ignore)
    expected = {name: tensor.shape for shard in layout.shards for name, tensor in shard.tensors.items()}
    tensors = shards.tensors
    missing = expected.keys() - tensors.keys() - shards.lost if shards.whole else set()
    extra = set(tensors.keys() - expected.keys())
    findings = _check_layers(expected, missing) + _check_modules(layout, tensors, missing, extra)
    for name in sorted(missing):
        code = "head-missing" if name == "lm_head.weight" else "tensor-missing"
        findings.append(error(code, name, "is not in any shard", _REBUILD))
    findings += [_unexpected(name, tensors[name]) for name in sorted(extra)]
    for name in sorted(expected.keys() & tensors.keys()):
        have, want, where = tensors[name].shape, expected[name], f"{tensors[name].file}: {name}"
        if have.dims != want.dims:
            message = f"has shape {list(have.dims)}, config.json means {list(want.dims)}"
            findings.append(error("tensor-shape", where, message, _REBUILD))
        if have.dtype != want.dtype:
            message = f"is {have.dtype}, must be {want.dtype}"
            kept = name in layout.kept and have.dtype in DTYPES.values()
            findings.append((warning if kept else error)("tensor-dtype", where, message))
    return findings


def _check_layers(expected: Iterable[str], missing: set[str]) -> list[Finding]:
    """Layers of which nothing is there; their tensors leave `missing`."""
    names: dict[int, set[str]] = defaultdict(set)
    for name in expected:
        if (layer := layer_of(name)) is not None:
            names[layer].add(name)
    findings = []
    for layer, members in sorted(names.items()):
        if members <= missing:
            missing -= members
            message = f"is missing whole: none of its {len(members)} tensors is here"
            findings.append(error("layer-missing", f"model.language_model.layers.{layer}", message, _REBUILD))
    return findings


def _check_modules(layout: Layout, tensors: Mapping[str, Tensor], missing: set[str], extra: set[str]) -> list[Finding]:
    """Modules that are not as the ignore list says; what that explains leaves `missing` and `extra`."""
    parts: dict[str, set[str]] = defaultdict(set)
    for name in tensors:
        module, _, part = name.rpartition(".")
        if part in QUANTIZED_PARTS:
            parts[module].add(part)
    findings = []
    mixed, stays_bf16 = _check_fused(layout, parts, tensors)
    findings += mixed
    for module in sorted(layout.quantized.keys() | parts.keys()):
        plain, have = f"{module}.weight", parts.get(module, set())
        absent = {f"{module}.{part}" for part in QUANTIZED_PARTS} & missing
        if module not in layout.quantized:
            if plain in layout.kept or plain in tensors:
                message = "is packed as NVFP4, but config.json's ignore list says that it stays as the source has it"
                findings.append(error("kept-quantized", module, message, _REBUILD))
                missing.discard(plain)
                extra -= {f"{module}.{part}" for part in have}
        elif have and plain in tensors:
            message = f"is stored twice: as weight, and as {', '.join(sorted(have))}"
            findings.append(error("half-quantized", module, message, _REBUILD))
            extra.discard(plain)
            missing -= absent
        elif plain in tensors:
            if module not in stays_bf16:
                message = (
                    "is not quantized, and config.json's ignore list does not name it: engines look for its scales"
                )
                findings.append(error("not-quantized", module, message, _REBUILD))
            extra.discard(plain)
            missing -= absent
        elif len(absent) == len(QUANTIZED_PARTS):
            message = "is missing: engines leave it at nothing and still answer"
            findings.append(error("module-missing", module, message, _REBUILD))
            missing -= absent
        else:
            for name in sorted(absent):
                message = "is missing: engines answer with nothing and still report drafts as accepted"
                code = "weight-missing" if name.endswith("packed") else "scale-missing"
                findings.append(error(code, name, message, _REBUILD))
            missing -= absent
    return findings


def _check_fused(
    layout: Layout, parts: Mapping[str, set[str]], tensors: Mapping[str, Tensor]
) -> tuple[list[Finding], set[str]]:
    """Matrices that engines fuse but of which only some are packed, and the members that are not."""
    modules = layout.quantized.keys() | {name.removesuffix(".weight") for name in layout.kept}
    experts: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        if (match := EXPERT.fullmatch(module)) is not None:
            experts[match[1]].append(module)
    groups = [group for group in fused_groups(modules) if EXPERT.fullmatch(group[0]) is None]
    groups += [tuple(sorted(group)) for group in experts.values()]
    findings, unpacked = [], set()
    for group in groups:
        plain = {module for module in group if f"{module}.weight" in tensors and module not in parts}
        if plain and any("weight_packed" in parts.get(module, ()) for module in group):
            unpacked |= plain
            names = ", ".join(sorted(module.rpartition(".")[2] for module in plain)[:4])
            message = f"are one matrix to an engine, but {names} stay bf16 while the others are packed"
            findings.append(error("fused-group-split", group_name(group), message, "ignore all of them, or none"))
    return findings, unpacked


def _unexpected(name: str, tensor: Tensor) -> Finding:
    where = f"{tensor.file}: {name}"
    if name == "lm_head.weight":
        message = "is stored although the head is tied to the embeddings: the same gigabytes twice"
        return error("tied-head-stored", where, message, "leave it out", "llm-compressor #2798")
    if re.fullmatch(r".*\.experts\.(gate_up|down)_proj", name):
        message = "is the source's fused experts, which were neither split nor quantized"
        return error("experts-fused", where, message, _REBUILD, "llm-compressor #2833")
    return error("tensor-unexpected", where, "belongs to no module that config.json describes", _REBUILD)
