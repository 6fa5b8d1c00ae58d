"""NVFP4 as an engine computes with it: weights read back from a bundle and dequantized, inputs rounded at run time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundler.checkpoint import Tensor as Address
from bundler.gemma4 import GROUP_SIZE

if TYPE_CHECKING:
    from torch import Tensor

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_UPPER = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)
"""Midpoints whose even neighbour is the upper one."""


def load_module(bundle: Path, addresses: Mapping[str, Address], name: str, dtype: Any) -> tuple[Tensor, Tensor]:
    """A quantized module as the bundle has it: its weight [rows, columns] dequantized, its input_global_scale [1]."""
    import torch

    packed = _load(bundle, addresses[f"{name}.weight_packed"], torch.uint8)
    scale = _load(bundle, addresses[f"{name}.weight_scale"], torch.float8_e4m3fn).float()
    step = scale / _load(bundle, addresses[f"{name}.weight_global_scale"], torch.float32)
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    weight = values[torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()]
    weight = weight * step.repeat_interleave(GROUP_SIZE, dim=1)
    return weight.to(dtype), _load(bundle, addresses[f"{name}.input_global_scale"], torch.float32)


def round_input(value: Tensor, global_scale: Tensor) -> Tensor:
    """Activations [..., features] as NVFP4 rounds them at run time: FP8 scales of 16 from their own magnitudes.

    Arithmetic: compressed-tensors 0.19, calculate_qparams and fake_quantize with `dynamic: local`.
    """
    import torch

    groups = value.reshape(*value.shape[:-1], -1, GROUP_SIZE)
    amax = groups.abs().amax(-1, keepdim=True)
    scale = (global_scale * (amax / 6)).clamp(max=448).to(torch.float8_e4m3fn).float()
    step = torch.where(scale == 0, 0.125, scale) / global_scale
    ratio = groups.float() / step
    bounds = torch.tensor(_UPPER)
    bounds = torch.where(torch.isin(bounds, torch.tensor(_TIES_UP)), bounds.nextafter(torch.zeros(())), bounds)
    rounded = torch.tensor(_E2M1)[torch.bucketize(ratio.abs(), bounds)].copysign(ratio)
    return (rounded * step).to(value.dtype).flatten(-2)


def _load(bundle: Path, address: Address, dtype: Any) -> Tensor:
    import torch

    with (bundle / address.file).open("rb") as file:
        file.seek(address.start)
        data = bytearray(file.read(address.end - address.start))
    return torch.frombuffer(data, dtype=dtype).reshape(address.shape.dims)
