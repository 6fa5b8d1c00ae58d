"""What is looked at, on every device: unfilled weights, kernels, attention groups, the runner."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from . import report

_SENTINEL = 0xFF  # as bytes: NaN in float32, bfloat16 and float8_e4m3, and no row of packed FP4 is all -6
_DEFAULTED = re.compile(r"\.attn\.[qkv]_(scale|zero_point)$|\.attn\.prob_scale$")
"""Parameters that a checkpoint need not have: scales of a KV cache that is not quantized."""
_RESTORED = 1 << 20
"""Parameters up to this many elements may have a default, and get it back where no tensor filled them."""


def install() -> None:
    """Put the look-outs in place; an engine version without one of these places just reports less."""
    _wrap("vllm.model_executor.model_loader.default_loader", "DefaultModelLoader", "load_weights", _track)
    for module in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner"):
        _wrap(module, "GPUModelRunner", "initialize_kv_cache", _after_start)


def _wrap(module: str, name: str, method: str, around: Callable[..., Any]) -> None:
    try:
        owner = getattr(importlib.import_module(module), name)
        original = getattr(owner, method)
    except (ImportError, AttributeError, RuntimeError):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(functools.partial(original, self), self, *args, **kwargs)

    setattr(owner, method, wrapped)


def _track(original: Callable[..., Any], _: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Mark every parameter before the load, and report where the mark is still there after it.

    vLLM's own tracking knows fused parameters only as a whole: a missing gate_proj is hidden by its up_proj.
    """
    import torch

    kept = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel() <= _RESTORED:
                kept[name] = parameter.data.clone()
            _bytes(parameter).fill_(_SENTINEL)
    result = original(model, *args, **kwargs)
    unfilled = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            marked = _marked(parameter)
            if not marked.any():
                continue
            if not _DEFAULTED.search(name):
                unfilled[name] = [int(marked.sum()), marked.numel()]
            parameter.data[marked] = kept[name][marked] if name in kept else 0
    report.write("weights", model=type(model).__name__, unfilled=unfilled)
    return result


def _bytes(parameter: Any) -> Any:
    import torch

    return parameter.data.view(torch.uint8) if parameter.dim() else parameter.data.reshape(1).view(torch.uint8)


def _marked(parameter: Any) -> Any:
    """Which elements (of small parameters), else which rows, still hold the sentinel: bool."""
    import torch

    data = parameter.data
    if data.dim() == 0:
        return (data.reshape(1).view(torch.uint8) == _SENTINEL).all().reshape(())
    same = (data.contiguous().view(torch.uint8) == _SENTINEL).unflatten(-1, (data.shape[-1], data.element_size()))
    same = same.all(-1)
    return same if data.dim() == 1 or data.shape[-1] == 1 or data.numel() <= 4096 else same.all(-1)


def _after_start(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    model = getattr(runner, "model", None)
    drafter = getattr(getattr(runner, "drafter", None) or getattr(runner, "speculator", None), "model", None)
    report.write(
        "engine",
        runner=f"{type(runner).__module__}.{type(runner).__name__}",
        kernels=_kernels(model),
        drafter_kernels=_kernels(drafter),
        attention=dict(Counter(_attention(model))),
    )
    groups = [group for of_cache in getattr(runner, "attn_groups", []) for group in of_cache]
    if groups:
        report.write("attention-groups", **_check_heads(runner.vllm_config, groups))
    return result


def _kernels(model: Any) -> dict[str, int]:
    found: Counter[str] = Counter()
    for module in model.modules() if model is not None else ():
        found.update(_kernel_names(module))
    return dict(found)


def _kernel_names(module: Any) -> Iterator[str]:
    """Names of the classes that compute a quantized layer: its scheme, and the kernel or experts behind it."""
    method = getattr(module, "quant_method", None)
    for owner in (method, getattr(module, "scheme", None)):
        if owner is None:
            continue
        name = type(owner).__name__
        if "nvfp4" in name.lower() or "W4A" in name:
            yield name
        for value in vars(owner).values():
            kind = type(value).__name__
            if "Kernel" in kind or kind.endswith("Backend"):
                yield str(value) if kind.endswith("Backend") else kind


def _attention(model: Any) -> Iterator[str]:
    for module in model.modules() if model is not None else ():
        if (impl := getattr(module, "impl", None)) is not None:
            yield type(impl).__name__


def _check_heads(vllm_config: Any, groups: list[Any]) -> dict[str, Any]:
    """This version's own check of head counts, which its GPU backends call and its CPU backend may not."""
    heads = []
    layers = vllm_config.compilation_config.static_forward_context
    for group in groups:
        named = [layers[name] for name in group.layer_names if name in layers]
        heads.append(sorted({int(layer.num_heads) for layer in named if hasattr(layer, "num_heads")}))
    check = "get_num_attention_heads_from_layers"
    try:
        backend = importlib.import_module("vllm.v1.attention.backends.triton_attn")
        utils = importlib.import_module("vllm.v1.attention.backends.utils")
        if check not in inspect.getsource(backend):
            return {"heads": heads, "check": "absent"}
    except (ImportError, OSError) as exc:
        return {"heads": heads, "check": f"unreadable: {exc}"}
    try:
        for group in groups:
            getattr(utils, check)(vllm_config, list(group.layer_names))
    except AssertionError as exc:
        return {"heads": heads, "check": "fails", "error": str(exc)}
    return {"heads": heads, "check": "passes"}
