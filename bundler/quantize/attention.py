"""What a decoder layer does between its matrix products, in fewer passes over memory than transformers takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SDPA = "sdpa"
WINDOWED = "sdpa_with_windows"
_FLASH_HEAD_DIM = 256
_FLASH_CAPABILITY = (8, 0)


def choose_attention(device: Any) -> str:
    """The name of an implementation that transformers knows afterwards, the fastest that `device` has."""
    import torch
    from transformers import AttentionInterface, AttentionMaskInterface

    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FLASH_CAPABILITY or not _has_windows():
        return SDPA
    AttentionInterface.register(WINDOWED, attend)
    AttentionMaskInterface.register(WINDOWED, make_mask)
    return WINDOWED


def make_mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> Tensor | None:
    """transformers' mask for SDPA; None as well for text without padding, whose window `attend` keeps by itself."""
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(*args, local_size=None, **kwargs)
    return mask


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention of query [samples, heads, tokens, head_dim] → [samples, tokens, heads, head_dim].

    SDPA has no sliding window but a mask of tokens x tokens, most of which it computes for nothing.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    window = kwargs.get("sliding_window")
    if attention_mask is None and window and window < query.shape[2] and query.shape[-1] <= _FLASH_HEAD_DIM:
        return attend_window(query, key, value, window, kwargs["scaling"]), None
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return out, None


def attend_window(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Tensor:
    """Causal attention in which every token sees itself and the `window` - 1 before it."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    samples, _, tokens, _ = query.shape
    grouped: dict[str, Any] = {"enable_gqa": True}
    if "enable_gqa" not in signature(varlen_attn).parameters:
        grouped = {}
        key, value = (part.repeat_interleave(query.shape[1] // key.shape[1], 1) for part in (key, value))
    ends = torch.arange(samples + 1, device=query.device, dtype=torch.int32) * tokens
    q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    out: Any = varlen_attn(q, k, v, ends, ends, tokens, tokens, scale=scale, window_size=(window - 1, 0), **grouped)
    result: Tensor = out.unflatten(0, (samples, tokens))
    return result


def rotate(value: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    """Rotary positions: value [samples, tokens, heads, head_dim], cos and sin [1 or samples, tokens, head_dim]."""
    import torch

    half = value.shape[-1] // 2
    low, high = slice(None, half), slice(half, None)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    out = torch.empty_like(value)
    torch.mul(value[..., low], cos[..., low], out=out[..., low]).addcmul_(value[..., high], sin[..., low], value=-1)
    torch.mul(value[..., high], cos[..., high], out=out[..., high]).addcmul_(value[..., low], sin[..., high])
    return out


@contextmanager
def quick_rotation(model: Any) -> Iterator[None]:
    """Have the model's layers call `rotate` for a while."""
    source: Any = sys.modules[type(model.model.language_model).__module__]
    original = source.apply_rotary_pos_emb
    source.apply_rotary_pos_emb = rotate
    try:
        yield
    finally:
        source.apply_rotary_pos_emb = original


def _has_windows() -> bool:
    """Whether this torch has flash attention in windows, which came with 2.11."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in signature(varlen_attn).parameters
