"""Calibration at the speed of the matrix units: batches, fused attention, the dtype that is faster here.

`compute = "fast"`: the weights are byte for byte those of exact mode, which need no forward; the input scales come
from the same formula over activations that differ from llm-compressor's by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bundler.quantize import parallel
from bundler.quantize.attention import choose_attention as choose_attention
from bundler.quantize.attention import quick_rotation
from bundler.quantize.pack import fault_of_range, global_scale_of
from bundler.recipe import Quantization

if TYPE_CHECKING:
    from torch import Tensor


def batch_tokens(device: Any) -> int:
    """Tokens that pass a layer together; more makes matrix products no faster."""
    return 8192 if device.type == "cuda" else 2048


@contextmanager
def forward_conditions(model: Any) -> Iterator[None]:
    """No gradients; the cache is switched off at every call."""
    import torch

    with torch.no_grad(), quick_rotation(model):
        yield


def prepare(layer: Any) -> None:
    """Replace a layer's 3-D expert parameters by Linears that are views of them, and its norms by one fused step."""
    if hasattr(layer, "experts"):
        layer.experts = _make_experts(layer.experts)
    norms = [name for name, module in layer.named_modules() if type(module).__name__.endswith("RMSNorm")]
    for name in norms:
        layer.set_submodule(name, _make_norm(layer.get_submodule(name)))


def observe_inputs(
    layer: Any,
    index: int,
    modules: Mapping[str, Any],
    quantization: Quantization,
    ignore: Iterable[str],
    advance: Callable[[], None],
) -> dict[str, Tensor]:
    """Send the calibration samples through a layer: module → input_global_scale, float32 [1]."""
    import torch

    ranges: dict[str, Tensor] = {}
    last: list[Tensor] = []  # q, k, v and gate, up read one tensor: its range is taken once

    def watch(name: str) -> Callable[[Any, tuple[Tensor, ...]], None]:
        def observe(_: Any, args: tuple[Tensor, ...]) -> None:
            if not last or last[0] is not args[0]:
                low, high = torch.aminmax(args[0].detach())
                last[:] = [args[0], torch.maximum(-low, high)]
            ranges[name] = torch.maximum(ranges[name], last[1]) if name in ranges else last[1]

        return observe

    hooks = [module.register_forward_pre_hook(watch(name)) for name, module in modules.items()]
    advance()
    for hook in hooks:
        hook.remove()
    last.clear()
    amax: dict[str, Tensor | None] = {name: ranges.get(name) for name in modules}
    parallel.widest_of(amax)
    fault_of_range(amax)
    return {name: global_scale_of(ranges[name].float()) for name in modules}


def choose_dtype(device: Any) -> tuple[Any, float]:
    """The dtype that this machine multiplies faster, and that rate in operations a second, measured for a second."""
    import time

    import torch

    if device.type == "cuda":
        return torch.bfloat16, _rate(torch.bfloat16, device, 8192, time.perf_counter)
    rates = {dtype: _rate(dtype, device, 2048, time.perf_counter) for dtype in (torch.float32, torch.bfloat16)}
    fastest = max(rates, key=lambda dtype: rates[dtype])
    return fastest, rates[fastest]


def _rate(dtype: Any, device: Any, size: int, clock: Callable[[], float]) -> float:
    import torch

    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    synchronize: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    left @ right
    synchronize()
    began, count = clock(), 0
    while clock() - began < 0.4:
        left @ right
        synchronize()
        count += 1
    return 2 * size**3 * count / (clock() - began)


def _make_norm(norm: Any) -> Any:
    from torch import nn
    from torch.nn.functional import rms_norm

    class Norm(nn.Module):
        """The source's own norm, which takes six passes over memory, in one: statistics in float32, as there."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = norm.weight if norm.with_scale else None
            self.eps = norm.eps

        def forward(self, hidden: Tensor) -> Tensor:
            return rms_norm(hidden, hidden.shape[-1:], self.weight, self.eps)

    return Norm()


def _make_experts(fused: Any) -> Any:
    import torch
    from torch import nn

    def view(weight: Tensor) -> Any:
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        return linear

    class Experts(nn.ModuleList):
        """Every expert sees every token, so that each is calibrated; the router's weights then choose."""

        def forward(self, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            routing = hidden.new_zeros(hidden.shape[0], len(self))
            routing.scatter_(1, top_k_index, top_k_weights.to(hidden.dtype))
            result = torch.zeros_like(hidden)
            for number in range(len(self)):
                expert: Any = self[number]
                value = fused.act_fn(expert.gate_proj(hidden)) * expert.up_proj(hidden)
                result += expert.down_proj(value) * routing[:, number : number + 1]
            return result

    half = fused.gate_up_proj.shape[1] // 2
    experts = Experts()
    for gate_up, down in zip(fused.gate_up_proj.detach(), fused.down_proj.detach(), strict=True):
        expert = nn.Module()
        expert.gate_proj, expert.up_proj = view(gate_up[:half]), view(gate_up[half:])
        expert.down_proj = view(down)
        experts.append(expert)
    return experts
