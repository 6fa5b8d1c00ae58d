"""The scales of a quantized body, read through mmap: impossible values, and those that had to be equal and are not.

Format nvfp4-pack-quantized: compressed-tensors 0.19, compressors/nvfp4. A body of any size takes little memory, as
scales are one byte for 16 weights, and of the packed weights only the first that is not zero is looked for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from bundler.checkpoint import Tensor
from bundler.findings import Finding, error
from bundler.gemma4 import EXPERT, fused_groups, group_name
from bundler.layout import QUANTIZED_PARTS

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

_NAN, _NEGATIVE = 0x7F, 0x80  # FP8 E4M3: NaN is all ones below the sign, there is no infinity
_CHUNK = 1 << 20
RANGE = 448 * 6
"""What a global scale of 1 spans: the largest FP8 scale times the largest e2m1 magnitude."""
_REBUILD = "build the bundle again"


def check_scales(folder: Path, tensors: Mapping[str, Tensor]) -> list[Finding]:
    """What the scales of every quantized module say: impossible values, and those that had to be equal and are not."""
    import numpy as np

    maps: dict[str, Bytes] = {}
    findings: list[Finding] = []
    scales: dict[str, dict[str, float]] = {"weight_global_scale": {}, "input_global_scale": {}}
    for module in sorted(name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")):
        for part in QUANTIZED_PARTS:
            tensor = tensors.get(f"{module}.{part}")
            if tensor is None:
                continue
            if tensor.file not in maps:
                maps[tensor.file] = np.memmap(folder / tensor.file, dtype=np.uint8, mode="r")
            data, where = maps[tensor.file][tensor.start : tensor.end], f"{tensor.file}: {module}.{part}"
            if part == "weight_packed":
                findings += _check_packed(data, where)
            elif part == "weight_scale" and tensor.shape.dtype == "F8_E4M3":
                findings += _check_blocks(data, where)
            elif part in scales and tensor.shape.dtype == "F32" and tensor.shape.numel == 1:
                value = float(data.view("<f4")[0])
                faults = _check_global(value, part, where)
                findings += faults
                if not faults:
                    scales[part][module] = value
    return findings + _check_equal(scales)


def _check_packed(data: Bytes, where: str) -> list[Finding]:
    """Whether any weight is not ±0, the two codes of 4 bits whose lower three are 0."""
    if any((data[start : start + _CHUNK] & 0x77).any() for start in range(0, len(data), _CHUNK)):
        return []
    return [error("weight-zero", where, "holds nothing but zeros", _REBUILD, "compressed-tensors #781")]


def _check_blocks(data: Bytes, where: str) -> list[Finding]:
    if not len(data) or (data.min() > 0 and data.max() < _NAN):
        return []
    low = data & _NAN
    nan, zero = low == _NAN, low == 0
    negative = (data >= _NEGATIVE) & ~nan & ~zero
    findings = []
    if nan.any():
        findings.append(error("scale-nan", where, f"{nan.sum()} of {len(data)} block scales are NaN", _REBUILD))
    if zero.any():
        findings.append(error("scale-zero", where, f"{zero.sum()} of {len(data)} block scales are 0", _REBUILD))
    if negative.any():
        message = f"{negative.sum()} of {len(data)} block scales are negative"
        findings.append(error("scale-negative", where, message, _REBUILD))
    return findings


def _check_global(value: float, part: str, where: str) -> list[Finding]:
    if math.isnan(value):
        return [error("scale-nan", where, "is NaN", _REBUILD)]
    if math.isinf(value):
        return [error("scale-infinite", where, "is infinite", _REBUILD, "compressed-tensors #595")]
    if value == 0:
        return [error("scale-zero", where, "is 0", _REBUILD)]
    if value < 0:
        return [error("scale-negative", where, f"is {value}", _REBUILD)]
    if value == 1.0:
        message = "is exactly 1.0, which compressed-tensors writes where nothing was calibrated"
        return [error("scale-one", where, message, _REBUILD, "compressed-tensors #637")]
    if part == "weight_global_scale" and value < 1.0:
        message = f"is {value:.3g}, which means weights up to {RANGE / value:.3g}: is it the reciprocal?"
        return [error("scale-reciprocal", where, message, _REBUILD, "vllm-neuralmagic #59")]
    return []


def _check_equal(scales: Mapping[str, Mapping[str, float]]) -> list[Finding]:
    """q/k/v and gate/up are fused, and engines take one of their scales; a layer's experts all see the same input."""
    findings: list[Finding] = []
    unequal: set[str] = set()
    for part, values in scales.items():
        for group in fused_groups(values):
            if len(found := {values[module] for module in group}) > 1:
                unequal.update(group)
                where, message = (
                    group_name(group),
                    f"{part} differs between matrices that engines fuse: {_some(found)}",
                )
                if part == "weight_global_scale":
                    findings.append(error("fused-weight-scale", where, message, _REBUILD))
                else:
                    findings.append(error("fused-input-scale", where, message, _REBUILD))
    inputs: dict[str, set[float]] = defaultdict(set)
    for module, value in scales["input_global_scale"].items():
        match = EXPERT.fullmatch(module)
        if match is not None and match[2] != "down" and module not in unequal:
            inputs[match[1]].add(value)
    for experts, found in sorted(inputs.items()):
        if len(found) > 1:
            message = (
                f"gate/up input_global_scale differs between experts ({_some(found)}): some saw only routed tokens"
            )
            findings.append(error("experts-input-scale", experts, message, _REBUILD, "llm-compressor #2827"))
    return findings


def _some(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.6g}" for value in sorted(values)[:4])
