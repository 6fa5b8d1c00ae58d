"""What the fast mode computes between matrix products, against what transformers computes there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

from bundler.quantize.attention import (
    SDPA,
    WINDOWED,
    attend,
    attend_window,
    choose_attention,
    make_mask,
    rotate,
)

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOKENS, WINDOW, SCALE = 24, 7, 0.25


def make_heads(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Query [2, 4, 24, 32], key and value [2, 2, 24, 32]."""
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(2, heads, TOKENS, 32, generator=generator).to(device, dtype) for heads in (4, 2, 2))


def make_window() -> torch.Tensor:
    """What may be seen [24, 24]: itself and the six before it."""
    back = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)
    return (back >= 0) & (back < WINDOW)


def make_masks(name: str, **patterns: Any) -> torch.Tensor | None:
    """The mask that transformers passes to a sliding layer under an implementation's name."""
    config = SimpleNamespace(_attn_implementation=name, sliding_window=WINDOW, is_causal=True)
    mask: torch.Tensor | None = create_sliding_window_causal_mask(
        config=config, inputs_embeds=torch.zeros(2, TOKENS, 8), past_key_values=None, **patterns
    )
    return mask


@pytest.mark.parametrize("samples", [1, 3])
def test_rotation_is_that_of_transformers(samples: int) -> None:
    """In float32, for positions that samples share or have of their own."""
    value = torch.randn(3, TOKENS, 4, 32)
    cos, sin = torch.randn(samples, TOKENS, 32), torch.randn(samples, TOKENS, 32)
    torch.testing.assert_close(rotate(value, cos, sin, 2), apply_rotary_pos_emb(value, cos, sin, 2))


def test_only_plain_text_goes_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding and images need theirs, and it has the window in it."""
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "here", make_mask)
    monkeypatch.setitem(AttentionInterface._global_mapping, "here", attend)
    full = torch.ones(2, TOKENS, dtype=torch.long)
    assert make_masks("here", attention_mask=full) is None
    padded = full.clone()
    padded[0, :3] = 0
    for patterns in (
        {"attention_mask": padded},
        {"attention_mask": full, "or_mask_function": lambda batch, head, query, key: query == 9},
    ):
        mask, expected = make_masks("here", **patterns), make_masks(SDPA, **patterns)
        assert mask is not None
        assert expected is not None
        assert torch.equal(mask, expected)


def test_a_mask_or_a_short_text_goes_to_sdpa() -> None:
    """Where nothing is to be gained, the result is SDPA's own."""
    query, key, value = make_heads()
    module = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    masked, _ = attend(module, query, key, value, make_window()[None, None], scaling=SCALE, sliding_window=WINDOW)
    expected = sdpa(query, key, value, make_window())
    torch.testing.assert_close(masked, expected)
    short, _ = attend(module, query, key, value, None, scaling=SCALE, sliding_window=TOKENS)
    torch.testing.assert_close(short, sdpa(query, key, value, torch.ones(TOKENS, TOKENS).tril().bool()))


def test_a_cpu_has_sdpa() -> None:
    """Flash attention in windows is a GPU's."""
    assert choose_attention(torch.device("cpu")) == SDPA


@gpu
def test_windows_on_a_gpu_see_what_a_mask_shows() -> None:
    """bf16, heads sharing keys and values."""
    query, key, value = make_heads("cuda", torch.bfloat16)
    assert choose_attention(query.device) == WINDOWED
    windowed = attend_window(query, key, value, WINDOW, SCALE)
    expected = sdpa(*(part.float() for part in (query, key, value)), make_window().cuda())
    torch.testing.assert_close(windowed.float(), expected, atol=0.02, rtol=0.02)


def sdpa(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """torch's own attention with a mask of tokens x tokens, [samples, tokens, heads, head_dim]."""
    key, value = (part.repeat_interleave(2, 1) for part in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=SCALE)
    return out.transpose(1, 2)
