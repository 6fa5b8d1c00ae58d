"""One decoder layer, quantized as llm-compressor defines it: by its modifier, observers and MoE handling."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bundler.errors import QuantizationError
from bundler.gemma4 import fused_groups
from bundler.quantize.pack import check_weight, observe, pack_fused
from bundler.recipe import Quantization

_SAMPLED_ROWS = 64
_ROWS = 1024
"""Rows packed at a time: compressed-tensors' packing needs about 20 times a weight's memory."""


@contextmanager
def calibrating(layer: Any, index: int, quantization: Quantization, ignore: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Observe a decoder layer while the block feeds it; yields its quantized modules by full name.

    The layer is hung into an empty tree under its own name, so that llm-compressor matches `ignore` as it would
    in the whole model. Forwards inside the block run with the source's weights (quantization disabled).
    """
    from compressed_tensors.quantization import disable_quantization
    from compressed_tensors.quantization.lifecycle import apply
    from compressed_tensors.utils import patch_attr
    from llmcompressor.modeling.moe.context import moe_calibration_context
    from llmcompressor.modifiers.quantization import QuantizationModifier

    tree = _tree(layer, index)
    modifier = QuantizationModifier(
        targets="Linear",
        scheme=quantization.scheme,
        ignore=list(ignore),
        weight_observer=quantization.weight_observer,
        input_observer=quantization.input_observer,
    )
    with patch_attr(apply, "tqdm", lambda modules, **_: modules):  # it would draw a bar for every layer
        modifier.initialize_quantization(tree)
    modifier.start_calibration(tree)
    tree.apply(disable_quantization)
    modules = {
        name: module
        for name, module in tree.named_modules()
        if getattr(module, "quantization_scheme", None) is not None
    }
    with moe_calibration_context():
        yield modules
    modifier.remove_hooks()


def linearize_experts(layer: Any) -> None:
    """Replace a layer's 3-D expert parameters by one Linear per projection, as llm-compressor does."""
    from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
    from llmcompressor.modeling.moe.linearize import get_non_linearized_moes

    for name, experts in get_non_linearized_moes(layer):
        linear_class = LinearExperts2D.get_linear_experts_cls(type(experts))
        layer.set_submodule(name, linear_class.from_experts_module(experts, layer.config))


def pack(modules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The four tensors of every observed module, by full name, in the format nvfp4-pack-quantized.

    QuantizationError names the modules that calibration never reached or whose values are not finite.
    """
    from llmcompressor.modifiers.quantization.calibration import update_qparams
    from llmcompressor.observers import ACTIVATION_OBS

    amax = {name: observe(module.weight.detach()) for name, module in modules.items()}
    _require_usable(modules, amax)
    update_qparams(modules.values(), ACTIVATION_OBS)
    for name, module in modules.items():
        yield f"{name}.input_global_scale", module.input_global_scale.detach()
    if not all(module.quantization_scheme.weights.observer == "memoryless_minmax" for module in modules.values()):
        yield from _pack_observed(modules)
        return
    fused = fused_groups(modules)
    alone = [(name,) for name in modules if not any(name in group for group in fused)]
    for group in (*fused, *alone):
        yield from pack_fused({name: modules[name].weight.detach() for name in group}, amax)


def _pack_observed(modules: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The way through llm-compressor's observer and compressed-tensors' packer, for observers that are not ours."""
    from llmcompressor.modifiers.quantization import calibration

    calibration.observe(modules.values(), "weight")
    calibration.update_qparams(modules.values(), "weight")
    for name, module in modules.items():
        for suffix, tensor in _pack_module(module).items():
            yield f"{name}.{suffix}", tensor


def on_q4_0_grid(modules: Iterable[Any]) -> tuple[int, int]:
    """(blocks of 32 weights that lie on a q4_0 grid, blocks looked at) in the first rows of each module."""
    import torch

    from bundler.quantize.kernels import count_on_grid

    found = looked = 0
    for module in modules:
        weight = module.weight.detach()[:_SAMPLED_ROWS]
        if weight.dtype is torch.bfloat16:
            blocks = weight.shape[1] // 32
            found += int(count_on_grid(weight[:, : blocks * 32].contiguous().view(torch.uint16).numpy()))
            looked += weight.shape[0] * blocks
    return found, looked


def _tree(layer: Any, index: int) -> Any:
    from torch import nn

    root = nn.Module()
    parent = root
    for part in ("model", "language_model", "layers"):
        child = nn.Module()
        parent.add_module(part, child)
        parent = child
    parent.add_module(str(index), layer)
    return root


def _require_usable(modules: Mapping[str, Any], amax: Mapping[str, Any]) -> None:
    import torch

    faults = []
    for name, module in modules.items():
        observer = module.input_observer
        if not observer.has_statistics:
            faults.append(f"{name}: no calibration token reached it")
        elif not torch.isfinite(observer.max_vals).all() or not torch.isfinite(observer.min_vals).all():
            faults.append(f"{name}: its inputs are not finite")
        elif not observer.max_vals.any() and not observer.min_vals.any():
            faults.append(f"{name}: its inputs are all zero")
        if fault := check_weight(amax[name]):
            faults.append(f"{name}: its weight is {fault}")
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        raise QuantizationError(
            "cannot quantize " + "; ".join(faults[:8]) + more,
            hint="look at the source checkpoint and at the calibration data",
        )


def _pack_module(module: Any) -> dict[str, Any]:
    import torch
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor

    weight, scale = module.weight.detach(), module.weight_scale.detach()
    packed, scales = [], []
    for row in range(0, weight.shape[0], _ROWS):
        part = NVFP4PackedCompressor.compress(
            {
                "weight": weight[row : row + _ROWS],
                "weight_scale": scale[row : row + _ROWS],
                "weight_global_scale": module.weight_global_scale.detach(),
            },
            module.quantization_scheme,
        )
        packed.append(part["weight_packed"])
        scales.append(part["weight_scale"].view(torch.uint8))
    return {
        "weight_packed": torch.cat(packed),
        "weight_scale": torch.cat(scales).view(torch.float8_e4m3fn),
        "weight_global_scale": module.weight_global_scale.detach(),
    }
