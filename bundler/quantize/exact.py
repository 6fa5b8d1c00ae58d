"""Calibration as llm-compressor does it: its modifier, observers and MoE handling, one sample at a time.

`compute = "exact"`: every byte is what llm-compressor's own `oneshot` writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bundler.gemma4 import LAYERS
from bundler.quantize import parallel
from bundler.quantize.pack import fault_of_range
from bundler.recipe import Quantization

if TYPE_CHECKING:
    from torch import Tensor

_ROWS = 1024
"""Rows packed at a time: compressed-tensors' packing needs about 20 times a weight's memory."""


def choose_attention(device: Any) -> str:
    """Eager, which is what llm-compressor sets."""
    return "eager"


def batch_tokens(device: Any) -> int:
    """One sample at a time."""
    return 1


@contextmanager
def forward_conditions(model: Any) -> Iterator[None]:
    """What llm-compressor sets for calibration: no gradients, no cache, eager attention, no head."""
    from llmcompressor.utils.helpers import calibration_forward_context

    with calibration_forward_context(model):
        yield


def prepare(layer: Any) -> None:
    """Replace a layer's 3-D expert parameters by one Linear per projection, as llm-compressor does."""
    from llmcompressor.modeling.moe.linear_experts import LinearExperts2D
    from llmcompressor.modeling.moe.linearize import get_non_linearized_moes

    for name, experts in get_non_linearized_moes(layer):
        linear_class = LinearExperts2D.get_linear_experts_cls(type(experts))
        layer.set_submodule(name, linear_class.from_experts_module(experts, layer.config))


def observe_inputs(
    layer: Any,
    index: int,
    modules: Mapping[str, Any],
    quantization: Quantization,
    ignore: Iterable[str],
    advance: Callable[[], None],
) -> dict[str, Tensor]:
    """Send the calibration samples through a layer: module → input_global_scale, float32 [1].

    The layer is hung into an empty tree under its own name, so that llm-compressor matches `ignore` as it would in the
    whole model; `modules` is what the plan quantizes and must be what llm-compressor attaches its scheme to.
    """
    from compressed_tensors.quantization import disable_quantization
    from compressed_tensors.quantization.lifecycle import apply
    from compressed_tensors.utils import patch_attr
    from llmcompressor.modeling.moe.context import moe_calibration_context
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.quantization.calibration import update_qparams
    from llmcompressor.observers import ACTIVATION_OBS

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
    _require_planned(tree, modules, index)
    with moe_calibration_context():
        advance()
    modifier.remove_hooks()
    for module in modules.values():
        module.weight_observer.detach(module)  # some weigh a weight by what it multiplies; held-out data is none of it
    observers = {name: module.input_observer for name, module in modules.items()}
    for observer in observers.values():
        if observer.has_statistics:
            parallel.widest(observer.min_vals, observer.max_vals)
    fault_of_range({name: _amax(observer) for name, observer in observers.items()})
    update_qparams(modules.values(), ACTIVATION_OBS)
    return {name: module.input_global_scale.detach() for name, module in modules.items()}


def pack_observed(modules: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Weights through llm-compressor's own observer and compressed-tensors' packer, where ours is not asked for."""
    from llmcompressor.modifiers.quantization.calibration import observe, update_qparams

    observe(modules.values(), "weight")
    update_qparams(modules.values(), "weight")
    for name, module in modules.items():
        for part, tensor in _pack_module(module).items():
            yield f"{name}.{part}", tensor


def _amax(observer: Any) -> Tensor | None:
    import torch

    return torch.maximum(-observer.min_vals.min(), observer.max_vals.max()) if observer.has_statistics else None


def _tree(layer: Any, index: int) -> Any:
    from torch import nn

    root = nn.Module()
    parent = root
    for part in LAYERS.split("."):
        child = nn.Module()
        parent.add_module(part, child)
        parent = child
    parent.add_module(str(index), layer)
    return root


def _require_planned(tree: Any, modules: Mapping[str, Any], index: int) -> None:
    from bundler.errors import QuantizationError

    attached = {name for name, module in tree.named_modules() if getattr(module, "quantization_scheme", None)}
    if attached != modules.keys():
        difference = ", ".join(sorted(attached ^ modules.keys())[:8])
        raise QuantizationError(
            f"layer {index}: llm-compressor quantizes other modules than the plan: {difference}",
            hint="this is a bug of bundler or a change in llm-compressor; please report it with the recipe",
        )


def _pack_module(module: Any) -> dict[str, Tensor]:
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
