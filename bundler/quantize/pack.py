"""NVFP4 weights: observed and packed in two passes over memory, the same bytes as compressed-tensors.

A weight w [rows, columns] in bf16 becomes, in groups of 16 along a row,
    global scale  g = 448 * 6 / amax over all weights of the fused group, rounded to bf16, kept as float32
    group scale   s = fp8_e4m3(g * bf16(amax16 / 6)), 0 becomes 0.125
    value         q = e2m1(w / (s / g)), ties to the even mantissa; the low nibble is the even column;
                  the sign of what rounds to zero is kept, that of an exact -0 is not
Source: compressed-tensors 0.19, quantization/utils/helpers.py (generate_gparam, calculate_qparams) and
compressors/nvfp4. tests/test_pack.py holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from bundler.gemma4 import GROUP_SIZE

if TYPE_CHECKING:
    from numpy import uint16
    from numpy.typing import NDArray
    from torch import Tensor

    Magnitudes = NDArray[uint16]

_BF16_INFINITY = 0x7F80


def observe(weight: Tensor) -> Magnitudes:
    """The largest magnitude of every group of 16 of a bf16 weight, as bf16 bits: uint16 [rows, columns/16]."""
    import numpy as np
    import torch

    from bundler.quantize import kernels

    bits = weight.view(torch.uint16).numpy()
    amax = np.empty((bits.shape[0], bits.shape[1] // GROUP_SIZE), np.uint16)
    kernels.group_amax(bits, amax)
    return amax


def check_weight(amax: Magnitudes) -> str | None:
    """What makes a weight impossible to quantize, or None."""
    largest = int(amax.max())
    if largest >= _BF16_INFINITY:
        return "not finite"
    return None if largest else "all zero"


def pack_fused(weights: Mapping[str, Tensor], amax: Mapping[str, Magnitudes]) -> Iterator[tuple[str, Tensor]]:
    """Pack bf16 weights that share a global scale (q/k/v, gate/up, or one alone): the three tensors of each, by name.

    weight_packed uint8 [rows, columns/2], weight_scale float8_e4m3fn [rows, columns/16], weight_global_scale
    float32 [1]. The weights are on the CPU and pass `check_weight`.
    """
    import numpy as np
    import torch

    from bundler.quantize import kernels

    global_scale = make_global_scale(max(int(amax[name].max()) for name in weights))
    for name, weight in weights.items():
        rows, columns = weight.shape
        scale, packed = np.empty(amax[name].shape, np.uint8), np.empty((rows, columns // 2), np.uint8)
        kernels.pack(weight.view(torch.uint16).numpy(), amax[name], global_scale.numpy()[0], scale, packed)
        yield f"{name}.weight_packed", torch.from_numpy(packed)
        yield f"{name}.weight_scale", torch.from_numpy(scale).view(torch.float8_e4m3fn)
        yield f"{name}.weight_global_scale", global_scale


def make_global_scale(amax_bits: int) -> Tensor:
    """The global scale, float32 [1], for the largest magnitude's bf16 bits: compressed-tensors' own formula."""
    import torch
    from compressed_tensors.quantization.utils import generate_gparam

    amax = torch.tensor([amax_bits], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    scale: Tensor = generate_gparam(-amax, amax)
    return scale
