"""NVFP4 as an engine computes with it: packed weights dequantized, inputs rounded at run time."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundler.checkpoint import Tensor as Address
from bundler.gemma4 import GROUP_SIZE

if TYPE_CHECKING:
    from torch import Tensor

PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
_GPU_ROWS = 4096
"""Rows dequantized at a time on a GPU, so that temporaries stay small."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of codes 0 to 7; the code's fourth bit is the sign."""


def load_tensors(bundle: Path, addresses: Mapping[str, Address], name: str) -> dict[str, Tensor]:
    """The four tensors of a quantized module, as they lie in the bundle's shards, by name.part."""
    import torch

    dtypes = (torch.uint8, torch.float8_e4m3fn, torch.float32, torch.float32)
    keys = [f"{name}.{part}" for part in PARTS]
    return {key: _load(bundle, addresses[key], dtype) for key, dtype in zip(keys, dtypes, strict=True)}


def dequantize(tensors: Mapping[str, Tensor], name: str, dtype: Any, out: Tensor | None = None) -> Tensor:
    """A module's weight [rows, columns], in float32 or bf16, from its packed tensors; in `out` if that is given."""
    import torch

    packed = tensors[f"{name}.weight_packed"]
    step = tensors[f"{name}.weight_scale"].float() / tensors[f"{name}.weight_global_scale"]
    shape = (packed.shape[0], 2 * packed.shape[1])
    weight = torch.empty(shape, dtype=dtype, device=packed.device) if out is None else out.view(shape)
    if packed.is_cuda:
        for row in range(0, len(weight), _GPU_ROWS):
            part = slice(row, row + _GPU_ROWS)
            pairs = _pairs(packed.device)[packed[part].int()]
            weight[part] = (pairs.view(-1, step.shape[1], GROUP_SIZE) * step[part, :, None]).flatten(1)
        return weight
    from bundler.quantize import kernels

    if dtype == torch.bfloat16:
        kernels.dequantize_bf16(packed.numpy(), step.numpy(), weight.view(torch.uint16).numpy())
    else:
        kernels.dequantize(packed.numpy(), step.numpy(), weight.numpy())
    return weight


def round_input(value: Tensor, global_scale: Tensor) -> Tensor:
    """Activations [..., features] as NVFP4 rounds them at run time: FP8 scales of 16 from their own magnitudes.

    Arithmetic: compressed-tensors 0.19, calculate_qparams and fake_quantize with `dynamic: local`.
    """
    import torch

    groups = value.reshape(*value.shape[:-1], value.shape[-1] // GROUP_SIZE, GROUP_SIZE)
    amax = groups.abs().amax(-1, keepdim=True)
    scale = (global_scale * (amax / 6)).clamp(max=448).to(torch.float8_e4m3fn).float()
    step = torch.where(scale == 0, 0.125, scale) / global_scale
    ratio = groups.float() / step
    rounded = round_magnitude(ratio.abs()).copysign_(ratio).mul_(step)
    return rounded.to(value.dtype).flatten(-2)


def round_magnitude(ratio: Tensor) -> Tensor:
    """The nearest e2m1 magnitude, float32, of magnitudes in float32; ties go to the even mantissa (0, 1, 2, 4)."""
    import torch

    step = torch.where(ratio < 2, 0.5, torch.where(ratio < 4, 1.0, 2.0))
    return (ratio / step).round_().mul_(step).clamp_(max=6)


@cache
def _pairs(device: Any) -> Tensor:
    """The two values, float32 [256, 2], that each byte of packed weights stands for."""
    import torch

    values = [*E2M1, *(-value for value in E2M1)]
    return torch.tensor([[low, high] for high in values for low in values], device=device)


def _load(bundle: Path, address: Address, dtype: Any) -> Tensor:
    import torch

    with (bundle / address.file).open("rb") as file:
        file.seek(address.start)
        data = bytearray(file.read(address.end - address.start))
    return torch.frombuffer(data, dtype=dtype).reshape(address.shape.dims)
