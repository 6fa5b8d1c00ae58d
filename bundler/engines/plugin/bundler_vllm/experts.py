"""NVFP4 experts on a processor: vLLM's own parameters and weight loaders, our own dequantized arithmetic.

No release has a CPU kernel for them. The checkpoint's names, shapes and loading are proven by this; the arithmetic of
the GPU's kernels, and the rounding of the experts' inputs, are not.
"""

from __future__ import annotations

import importlib
from typing import Any

from . import report

_MODULES = (
    "compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4",
    "compressed_tensors_moe",
)
_AT = "vllm.model_executor.layers.quantization.compressed_tensors"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def install() -> None:
    """Replace the method's kernel choice and its forward."""
    for name in _MODULES:
        try:
            module = importlib.import_module(f"{_AT}.{name}")
        except (ImportError, RuntimeError):
            continue
        if method := getattr(module, "CompressedTensorsW4A4Nvfp4MoEMethod", None):
            break
    else:
        return
    for choice, answer in (
        ("select_nvfp4_moe_backend", (None, None)),
        ("is_global_sf_supported_for_nvfp4_backend", False),
    ):
        if hasattr(module, choice):
            setattr(module, choice, lambda *args, answer=answer, **kwargs: answer)
    method.process_weights_after_loading = _dequantize
    method.apply = _apply
    method.maybe_make_prepare_finalize = lambda self, *args, **kwargs: None
    method.get_fused_moe_quant_config = lambda self, layer: None
    method.is_monolithic = property(lambda self: False)
    method.topk_indices_dtype = property(lambda self: None)


def _dequantize(self: Any, layer: Any) -> None:
    import torch

    report.shim("nvfp4-experts", "no release has a kernel for NVFP4 experts on a processor")
    count, rows = layer.w13_weight_packed.shape[0], layer.w13_weight_packed.shape[1] // 2
    fused = layer.w13_weight_global_scale.data.reshape(count, -1)[:, :, None].expand(count, -1, rows)
    fused = fused if fused.shape[1] == 2 else fused.expand(count, 2, rows)
    down = layer.w2_weight_global_scale.data.reshape(count, 1, 1)
    self.bundler_w13 = _unpack(layer.w13_weight_packed, layer.w13_weight_scale, fused.reshape(count, -1, 1))
    self.bundler_w2 = _unpack(layer.w2_weight_packed, layer.w2_weight_scale, down)
    for scale in (layer.w13_input_global_scale, layer.w2_input_global_scale):
        if not (torch.isfinite(scale).all() and (scale > 0).all()):
            raise ValueError("an expert's input_global_scale was not initialized from the checkpoint")
    self.moe_quant_config = None


def _unpack(packed: Any, scale: Any, global_scale: Any) -> Any:
    """bf16 [experts, rows, columns] from [experts, rows, columns/2] nibbles, low nibble first."""
    import torch

    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])
    nibbles = torch.stack([packed.data & 15, packed.data >> 4], dim=-1).flatten(-2)
    weight = values[nibbles.long()].reshape(*nibbles.shape[:-1], -1, 16)
    return (weight * (scale.data.float() / global_scale)[..., None]).flatten(-2).to(torch.bfloat16)


def _apply(self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any) -> Any:
    import torch

    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in topk_ids.unique().tolist():
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = (x[token] @ self.bundler_w13[expert].T).chunk(2, dim=-1)
        hidden = torch.nn.functional.gelu(gate, approximate="tanh") * up
        weighted = (hidden @ self.bundler_w2[expert].T).float() * topk_weights[token, slot, None].float()
        out.index_add_(0, token, weighted)
    return out.to(x.dtype)
