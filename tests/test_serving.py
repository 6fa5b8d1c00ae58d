"""Serving arithmetic at real size: weights on a card, the price of a token, and the context that is left room for."""

from __future__ import annotations

from functools import cache

import pytest
from published import QAT, config_of, shapes_of

from bundler.engines import Box, load_cards, parse_box, usual_cards
from bundler.gemma4 import find_kind, make_ignore
from bundler.layout import make_layout
from bundler.serving import Model, make_kv_cache, make_model, make_weights

SIZES = ("31B", "26B-A4B", "12B", "E4B", "E2B")


@cache
def model(size: str, kv: str = "auto", tokens: int = 4, versions: tuple[str, ...] = ("0.21.0",)) -> Model:
    """A QAT body of this size with its drafter, as the serve line would start them."""
    body = f"google/gemma-4-{size}-it{QAT}"
    config = config_of(body)
    layout = make_layout(shapes_of(body), config, make_ignore(find_kind(config)))
    return make_model(
        {name: tensor.shape for shard in layout.shards for name, tensor in shard.tensors.items()},
        config,
        shapes_of(f"{body}-assistant"),
        num_speculative_tokens=tokens,
        kv_cache_dtype=kv,
        max_num_batched_tokens=4096,
        versions=versions,
    )


def card(name: str) -> Box:
    return parse_box(name)


@pytest.mark.parametrize(
    ("size", "sliding", "full", "shared", "window"),
    [
        ("31B", 819_200, 81_920, 0, 1024),
        ("26B-A4B", 204_800, 20_480, 0, 1024),
        ("12B", 327_680, 16_384, 0, 1024),
        ("E4B", 40_960, 16_384, 18, 512),
        ("E2B", 12_288, 6_144, 20, 512),
    ],
)
def test_kv_bytes_per_token(size: str, sliding: int, full: int, shared: int, window: int) -> None:
    """Sliding and full layers apart, layers that share another's cache free, half of it in FP8."""
    kv = model(size).kv
    assert (kv.sliding.token_bytes(), kv.full.token_bytes()) == (sliding, full)
    assert (kv.shared_layers, kv.window) == (shared, window)
    assert model(size, kv="fp8").kv.token_bytes() == (sliding + full) // 2


def test_the_seed_has_no_room_on_two_cards() -> None:
    """31B body and drafter on 2 x 16 GB leave no KV cache; without the drafter a little is left, as was measured."""
    two = card("2x16GB")
    assert model("31B").fit(two).kv_bytes < 0
    assert model("31B").fit(two).context_tokens == 0
    assert 0 < model("31B").fit(two, drafter=False).kv_tokens < 5_000


def test_the_seed_has_17_thousand_tokens_on_four_cards() -> None:
    """31B body and drafter on 4 x 16 GB have room for the 17,385 tokens that were measured there."""
    fit = model("31B").fit(card("4x16GB"))
    assert fit.kv_tokens == 17_385
    assert fit.context_tokens > 17_385
    assert 8 * fit.context_tokens_of_8 == pytest.approx(17_385, abs=8)


def test_fp8_doubles_what_fits() -> None:
    """An FP8 cache holds twice the tokens in the same memory."""
    pair = [model("31B", kv=kv).fit(card("4x16GB")) for kv in ("bfloat16", "fp8")]
    assert pair[0].kv_bytes == pair[1].kv_bytes
    assert pair[1].kv_tokens == pytest.approx(2 * pair[0].kv_tokens, abs=1)


@pytest.mark.parametrize("size", SIZES)
def test_weights_are_split_and_some_are_copied(size: str) -> None:
    """On one card a bundle takes its own bytes and what vLLM adds; on more the towers stay whole."""
    body = f"google/gemma-4-{size}-it{QAT}"
    config = config_of(body)
    layout = make_layout(shapes_of(body), config, make_ignore(find_kind(config)))
    tensors = sum(tensor.shape.nbytes for shard in layout.shards for tensor in shard.tensors.values())
    made = model(size).body
    assert 0 <= made.on_card(1) - tensors < 0.02 * tensors
    tower = sum(shape.nbytes for name, shape in layout.kept.items() if "vision" in name or "audio" in name)
    assert made.copied_bytes >= tower
    for cards in (2, 4):
        assert made.on_card(cards) > (made.on_card(1) - made.copied_bytes) / cards + tower
        assert made.on_card(cards) < made.on_card(cards // 2)


def test_k_and_v_are_kept_for_every_layer() -> None:
    """The 31B's full layers store no V, and vLLM keeps one for each: 4 heads of 512, in 4 bits and scales."""
    tensors = {name: shape for name, shape in shapes_of(f"google/gemma-4-31B-it{QAT}").items() if "_proj.w" in name}
    text = config_of(f"google/gemma-4-31B-it{QAT}")["text_config"]
    weights = make_weights(tensors, text)
    stored = sum(s.nbytes for n, s in tensors.items() if "k_proj" in n or "v_proj" in n if "language_model" in n)
    assert sum(weights.kv_bytes.values()) - stored == 10 * 4 * 512 * 5376 * 2


def test_heads_repeat_where_cards_are_more() -> None:
    """With one global K/V head, as the 12B has, every card keeps the whole of it."""
    kv = model("12B").kv
    assert kv.full.token_bytes(8) == kv.full.token_bytes()
    assert kv.sliding.token_bytes(8) * 8 == kv.sliding.token_bytes()


def test_a_long_context_costs_only_full_layers() -> None:
    """Beyond the window and what is in flight, a token costs what the full layers keep."""
    kv = make_kv_cache(config_of("google/gemma-4-31B-it")["text_config"], "auto", 4096)
    assert kv.kept_tokens == 1023 + 4096
    assert kv.request_bytes(100_000) - kv.request_bytes(99_999) == 81_920
    assert kv.request_bytes(100) == 100 * 901_120


@pytest.mark.parametrize("streams", [1, 8])
@pytest.mark.parametrize("pool", [0, 10**9, 4 * 10**9, 5 * 10**10, 10**12])
def test_the_context_is_the_longest_that_fits(pool: int, streams: int) -> None:
    """So much context for every stream fits, and one token more does not."""
    kv = make_kv_cache(config_of("google/gemma-4-31B-it")["text_config"], "auto", 4096)
    tokens = kv.context_tokens(pool, streams)
    assert streams * kv.request_bytes(tokens) <= pool
    assert tokens == kv.max_tokens or streams * kv.request_bytes(tokens + 1) > pool


def test_a_body_of_sliding_layers_alone() -> None:
    """Where every layer forgets, a stream costs no more beyond the window, however long it is."""
    text = config_of("google/gemma-4-31B-it")["text_config"]
    text["layer_types"] = ["sliding_attention"] * 60
    kv = make_kv_cache(text, "auto", 4096)
    assert kv.context_tokens(kv.request_bytes(10**6) - 1, 1) == kv.kept_tokens - 1
    assert kv.context_tokens(kv.request_bytes(10**6) + 1, 1) == kv.max_tokens


def test_newer_releases_hold_two_batches() -> None:
    """From vLLM 0.26 on a sliding layer keeps two batches in flight, so a long context costs more."""
    old, new = (model("31B", versions=(version,)) for version in ("0.25.1", "0.26.0"))
    assert new.kv.kept_tokens - old.kv.kept_tokens == 4096
    assert new.fit(card("4x16GB")).context_tokens < old.fit(card("4x16GB")).context_tokens


def test_drafting_needs_memory_beside_the_drafter() -> None:
    """The logits of every drafted token are held for every stream: more drafting, more work; more on large cards."""
    four, eight = (model("31B", tokens=tokens).fit(card("1x48GB")).work_bytes for tokens in (4, 8))
    assert eight - four == 2 * 256 * 4 * 262_144 * 4
    alone = model("31B").fit(card("1x48GB"), drafter=False)
    assert four - alone.work_bytes == 2 * 256 * 4 * 262_144 * 4
    assert model("31B").fit(card("1xH100")).work_bytes > 2 * four


@pytest.mark.parametrize(
    ("size", "tokens", "box"),
    [
        ("31B", 16_384, "1 x 32 GB"),
        ("31B", 32_768, "1 x 48 GB"),
        ("26B-A4B", 32_768, "1 x 24 GB"),
        ("12B", 32_768, "1 x 16 GB"),
        ("E4B", 32_768, "1 x 16 GB"),
        ("E2B", 131_072, "1 x 16 GB"),
    ],
)
def test_the_smallest_box(size: str, tokens: int, box: str) -> None:
    """The least memory that has room for one stream with the drafter."""
    fit = model(size).smallest((1, 2, 4), tokens)
    assert fit is not None
    assert str(fit.box) == box
    assert fit.context_tokens >= tokens


def test_there_may_be_no_such_box() -> None:
    """A context that no number of cards has room for has no smallest box."""
    assert model("E4B").smallest((1, 2), 10**9) is None


# Boxes and cards.


@pytest.mark.parametrize(
    ("text", "count", "name", "gb"),
    [
        ("4x16GB", 4, "16 GB", 16),
        ("1xH200", 1, "H200", 141),
        ("h200", 1, "H200", 141),
        ("2 x RTX 5090", 2, "RTX 5090", 32),
        ("2xrtx-5090", 2, "RTX 5090", 32),
        ("GB10", 1, "GB10", 128),
        ("1x12GB", 1, "12 GB", 12),
        ("8 x 40GiB", 8, "40 GB", 40),
    ],
)
def test_a_box_is_read(text: str, count: int, name: str, gb: int) -> None:
    """A number of cards, and a card by its name or its memory."""
    box = parse_box(text)
    assert (box.count, box.card.name, box.card.gb) == (count, name, gb)
    assert 0.9 * gb < box.card.gib < gb


@pytest.mark.parametrize("text", ["", "0x16GB", "4x", "x", "4xTPU", "16", "4x0GB", "-1x16GB"])
def test_what_is_no_box(text: str) -> None:
    """Anything else says how a box is written."""
    with pytest.raises(ValueError, match="4x16GB"):
        parse_box(text)


def test_cards_are_sound() -> None:
    """Names are unique, an engine sees a little less than what is printed, and the usual sizes grow."""
    names = [card.name for card in load_cards()]
    assert len(names) == len(set(names))
    assert all(0.9 < card.gib / card.gb < 1 for card in load_cards())
    sizes = [card.gb for card in usual_cards()]
    assert sizes == sorted(sizes) == [16, 24, 32, 48, 80, 96, 128, 141, 180]
