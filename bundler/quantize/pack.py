"""NVFP4 weights: observed and packed in two passes over memory, the same bytes as compressed-tensors.

A weight w [rows, columns] in bf16 becomes, in groups of 16 along a row,
    global scale  g = 448 * 6 / amax over all weights of the fused group, rounded to bf16, kept as float32
    group scale   s = fp8_e4m3(g * bf16(amax16 / 6)), 0 becomes 0.125
    value         q = e2m1(w / (s / g)), ties to the even mantissa; the low nibble is the even column;
                  the sign of what rounds to zero is kept, that of an exact -0 is not
Source: compressed-tensors 0.19, quantization/utils/helpers.py (generate_gparam, calculate_qparams) and
compressors/nvfp4. tests/test_pack.py holds the two against each other. On a CPU compiled loops do it, on a GPU torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from bundler.errors import QuantizationError
from bundler.gemma4 import GROUP_SIZE, fused_groups
from bundler.quantize.nvfp4 import E2M1, round_magnitude
from bundler.scales import RANGE

if TYPE_CHECKING:
    from torch import Tensor

_INFINITY_BITS = 0x7F80
_GPU_ROWS = 4096
"""Rows packed at a time on a GPU, so that temporaries stay small."""


def pack(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Pack a layer's bf16 weights [rows, columns], fused groups sharing a global scale: name.part → tensor.

    weight_packed uint8 [rows, columns/2], weight_scale float8_e4m3fn [rows, columns/16], weight_global_scale
    float32 [1], on the weights' device. QuantizationError names every weight that is not finite or is all zero.
    """
    amax = {name: observe(weight) for name, weight in weights.items()}
    largest = {name: int(groups.max()) for name, groups in amax.items()}
    refuse([f"{name}: its weight is {fault}" for name, bits in largest.items() if (fault := _fault_of_bits(bits))])
    fused = fused_groups(weights)
    alone = [(name,) for name in weights if not any(name in group for group in fused)]
    for group in (*fused, *alone):
        global_scale = global_scale_of(_from_bits(max(largest[name] for name in group)))
        where = weights[group[0]].device
        for name in group:
            packed, scale = _pack_one(weights[name], amax[name], float(global_scale))
            yield f"{name}.weight_packed", packed
            yield f"{name}.weight_scale", scale
            yield f"{name}.weight_global_scale", global_scale.to(where)


def observe(weight: Tensor) -> Tensor:
    """The largest magnitude of every group of 16 of a bf16 weight, as bf16 bits: int16 [rows, columns/16].

    Magnitudes of bf16 order as their bits do, with infinity and NaN last.
    """
    import torch

    rows, columns = weight.shape
    if weight.is_cuda:
        bits = weight.view(torch.int16) & 0x7FFF
        return bits.view(rows, -1, GROUP_SIZE).amax(-1)
    from bundler.quantize import kernels

    amax = torch.empty(rows, columns // GROUP_SIZE, dtype=torch.int16)
    kernels.group_amax(weight.view(torch.int16).numpy(), amax.numpy())
    return amax


def global_scale_of(amax: Tensor) -> Tensor:
    """The global scale, float32 [1], for a largest magnitude, computed in the magnitude's own dtype."""
    import torch

    amax = amax.reshape(1).clamp(min=torch.finfo(amax.dtype).tiny)
    return torch.nan_to_num(RANGE / amax, nan=1.0, posinf=1.0, neginf=1.0).float()


def fault_of_range(amax: Mapping[str, Tensor | None]) -> None:
    """QuantizationError that names every module which calibration did not reach, or whose inputs are unusable."""
    import torch

    faults = []
    for name, value in amax.items():
        if value is None:
            faults.append(f"{name}: no calibration token reached it")
        elif not torch.isfinite(value):
            faults.append(f"{name}: its inputs are not finite")
        elif not value:
            faults.append(f"{name}: its inputs are all zero")
    refuse(faults)


def refuse(faults: list[str]) -> None:
    """QuantizationError for what cannot be quantized, if there is anything."""
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise QuantizationError(
            "cannot quantize " + "; ".join(faults[:8]) + more,
            hint="look at the source checkpoint and at the calibration data",
        )


def _fault_of_bits(bits: int) -> str | None:
    if bits >= _INFINITY_BITS:
        return "not finite"
    return None if bits else "all zero"


def _from_bits(bits: int) -> Tensor:
    import torch

    return torch.tensor([bits], dtype=torch.int16).view(torch.bfloat16)


def _pack_one(weight: Tensor, amax: Tensor, global_scale: float) -> tuple[Tensor, Tensor]:
    import torch

    rows, columns = weight.shape
    packed = torch.empty(rows, columns // 2, dtype=torch.uint8, device=weight.device)
    scale = torch.empty(amax.shape, dtype=torch.uint8, device=weight.device)
    if weight.is_cuda:
        for row in range(0, rows, _GPU_ROWS):
            part = slice(row, row + _GPU_ROWS)
            packed[part], scale[part] = _pack_rows(weight[part], amax[part], global_scale)
    else:
        import numpy as np

        from bundler.quantize import kernels

        kernels.pack(
            weight.view(torch.int16).numpy(), amax.numpy(), np.float32(global_scale), scale.numpy(), packed.numpy()
        )
    return packed, scale.view(torch.float8_e4m3fn)


def _pack_rows(weight: Tensor, amax: Tensor, global_scale: float) -> tuple[Tensor, Tensor]:
    import torch

    six, whole = (  # by a number a GPU does not divide: it multiplies by the reciprocal, and misses ties
        torch.tensor(6, dtype=torch.bfloat16, device=weight.device),
        torch.tensor(global_scale, dtype=torch.float32, device=weight.device),
    )
    group = (amax.view(torch.bfloat16) / six).float() * whole
    codes = group.clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(codes == 0, torch.tensor(0x20, dtype=torch.uint8, device=codes.device), codes)
    step = codes.view(torch.float8_e4m3fn).float() / whole
    ratio = weight.float().abs().view(*step.shape, GROUP_SIZE) / step[..., None]
    negative = (weight.view(torch.int16).view_as(ratio) < 0) & (ratio > 0)
    levels = torch.tensor(E2M1, device=weight.device)
    magnitude = torch.bucketize(round_magnitude(ratio), levels, out_int32=True).to(torch.uint8)
    nibble = (magnitude | (negative.to(torch.uint8) << 3)).view(weight.shape)
    return nibble[:, ::2] | (nibble[:, 1::2] << 4), codes
