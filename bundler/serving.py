"""Serving: what the weights take of each card, what is left for the KV cache, and how much context that is.

An estimate, made before anything is baked; the line "GPU KV cache size" in vLLM's own log is the truth. The arithmetic
is vLLM's (0.21 to 0.32: config/cache.py, v1/worker/gpu_worker.py, v1/kv_cache_interface.py, models/gemma4*.py): it
takes a share of the card, subtracts the weights and what a trial run needs, and gives the rest to the KV cache.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from bundler.checkpoint import Shape
from bundler.engines import Box, Card, usual_cards
from bundler.gemma4 import kv_geometry, layer_of, own_layer_types

UTILIZATION = 0.92
DEFAULT_BATCHED_TOKENS = 2048
_WORK_BYTES = 1_200_000_000
_JOINT_WORK_BYTES = 2_453_500_000
_LOGIT_COPIES = 2
_LARGE_CARD_GIB = 70
_ASYNC_FROM = Version("0.26")
_TOWER = re.compile(r"(vision_tower|audio_tower|embed_vision|embed_audio|vision_embedder)\.")
_SPLIT = re.compile(
    r"\.(q_proj|o_proj|gate_proj|up_proj|down_proj)\.|\.experts\.|(^|\.)(embed_tokens|embed_tokens_per_layer|lm_head|"
    r"per_layer_model_projection|pre_projection|post_projection)\."
)
_QUERY, _KEY_VALUE = re.compile(r"\.self_attn\.q_proj\."), re.compile(r"\.self_attn\.[kv]_proj\.")

ASSUMPTIONS = (
    ("vLLM takes 92 % of a card's memory", "vLLM 0.21 to 0.32, config/cache.py, gpu_memory_utilization"),
    (
        "Linears, experts and embeddings are split over the cards; towers, norms, router and per-layer gates are "
        "copied; K and V heads repeat where there are fewer than cards",
        "vLLM, models/gemma4.py, gemma4_mm.py, gemma4_mtp.py",
    ),
    (
        "a K and a V matrix is kept for every layer, also where K is V or another layer's",
        "vLLM, models/gemma4.py, QKVParallelLinear",
    ),
    (
        "two float32 copies of the logits of every token that is sampled or verified: 256 streams, 1024 on cards of "
        "70 GiB and more, times what is drafted and one, times the vocabulary",
        "vLLM, v1/sample/rejection_sampler.py; engine/arg_utils.py, max_num_seqs",
    ),
    (
        "2.5 GB a card for activations, CUDA graphs and communication where cards share a model: what is left to "
        "explain when the 17,385 tokens that were measured with the 31B on 4 x 16 GB are counted at full cost",
        "card of the published 31B MTP bundle",
    ),
    ("1.2 GB on a single card", "logs of 26B-A4B bodies on an A100 80 GB (in bf16), an RTX 5090 and an RTX 4090"),
    (
        "a sliding layer keeps window - 1 + tokens in flight: one batch, from 0.26 on two",
        "vLLM, v1/kv_cache_interface.py, SlidingWindowSpec; vLLM #43308, #49878",
    ),
    ("the drafter has no KV cache of its own", "vLLM #41745"),
)
"""What the estimate rests on, and where that is from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """A model's bytes by what tensor parallelism does with them."""

    split_bytes: int
    copied_bytes: int
    kv_bytes: Mapping[int, int]
    """K and V projections by the number of their heads: with more cards than heads, heads repeat."""

    def on_card(self, cards: int) -> int:
        """Bytes on each of so many cards."""
        kv = sum(nbytes * max(1, heads // cards) // heads for heads, nbytes in self.kv_bytes.items())
        return -(-self.split_bytes // cards) + self.copied_bytes + kv


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLayers:
    """The layers of one attention type that keep a KV cache."""

    layers: int
    heads: int
    head_dim: int
    element_bytes: int

    def token_bytes(self, cards: int = 1) -> int:
        """K and V of one token in all these layers, on each of so many cards."""
        return self.layers * 2 * max(1, self.heads // cards) * self.head_dim * self.element_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCache:
    """What a token costs. Sliding layers forget what their window has passed; full layers keep everything."""

    sliding: CacheLayers
    full: CacheLayers
    shared_layers: int
    """Layers that read another layer's cache and cost nothing."""
    window: int
    max_tokens: int
    """The model's own longest context."""
    kept_tokens: int
    """The most that a sliding layer holds of one request: the window and what is in flight."""

    def token_bytes(self, cards: int = 1) -> int:
        """Of a token that every layer holds."""
        return self.sliding.token_bytes(cards) + self.full.token_bytes(cards)

    def request_bytes(self, tokens: int, cards: int = 1) -> int:
        """Of one request of so many tokens."""
        return tokens * self.full.token_bytes(cards) + min(tokens, self.kept_tokens) * self.sliding.token_bytes(cards)

    def context_tokens(self, pool_bytes: int, streams: int, cards: int = 1) -> int:
        """The longest context that so many streams can have at once in `pool_bytes` a card."""
        share = max(0, pool_bytes) // streams
        if share > self.request_bytes(self.kept_tokens, cards) and not self.full.layers:
            return self.max_tokens
        if share <= self.request_bytes(self.kept_tokens, cards):
            tokens = share // self.token_bytes(cards)
        else:
            beyond = share - self.kept_tokens * self.sliding.token_bytes(cards)
            tokens = beyond // self.full.token_bytes(cards)
        return min(tokens, self.max_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """One model on one box."""

    box: Box
    drafter: bool
    weights_bytes: int
    """On each card, the drafter's included."""
    work_bytes: int
    """On each card, beside weights and KV cache."""
    kv_bytes: int
    """What is left on each card; below 0 the engine does not start."""
    kv_tokens: int
    """That many tokens at full cost: what fits however the streams are cut."""
    context_tokens: int
    """The longest context of one stream."""
    context_tokens_of_8: int
    """The longest context that 8 streams can have at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Model:
    """A bundle as an engine sees it."""

    body: Weights
    drafter: Weights
    kv: KvCache
    vocab_size: int
    num_speculative_tokens: int

    def fit(self, box: Box, *, drafter: bool = True) -> Fit:
        """How this bundle sits on a box, all its cards sharing it."""
        cards, card = box.count, box.card
        weights = self.body.on_card(cards) + (self.drafter.on_card(cards) if drafter else 0)
        work = (_WORK_BYTES if cards == 1 else _JOINT_WORK_BYTES) + self._logit_bytes(card, drafter)
        pool = int(card.nbytes * UTILIZATION) - weights - work
        return Fit(
            box=box,
            drafter=drafter,
            weights_bytes=weights,
            work_bytes=work,
            kv_bytes=pool,
            kv_tokens=max(0, pool) // self.kv.token_bytes(cards),
            context_tokens=self.kv.context_tokens(pool, 1, cards),
            context_tokens_of_8=self.kv.context_tokens(pool, 8, cards),
        )

    def smallest(self, sizes: Iterable[int], tokens: int) -> Fit | None:
        """The least memory, then the fewest cards, on which one stream has so much context with the drafter."""
        fits = [self.fit(Box(count=size, card=card)) for size in sizes for card in usual_cards() if size <= card.most]
        enough = [fit for fit in fits if fit.context_tokens >= tokens]
        return min(enough, key=lambda fit: (fit.box.count * fit.box.card.gb, fit.box.count), default=None)

    def _logit_bytes(self, card: Card, drafter: bool) -> int:
        streams = 1024 if card.gib >= _LARGE_CARD_GIB and card.name != "A100" else 256
        return _LOGIT_COPIES * streams * (self.num_speculative_tokens * drafter + 1) * self.vocab_size * 4


def make_model(
    body: Mapping[str, Shape],
    body_config: Mapping[str, Any],
    drafter: Mapping[str, Shape],
    *,
    num_speculative_tokens: int,
    kv_cache_dtype: str,
    max_num_batched_tokens: int,
    versions: Iterable[str],
) -> Model:
    """A finished body's and a drafter's tensors, and how they are to be served, by any of the engine's `versions`."""
    text = body_config["text_config"]
    batches = 2 if any(Version(version) >= _ASYNC_FROM for version in versions) else 1
    return Model(
        body=make_weights(body, text),
        drafter=make_weights(drafter),
        kv=make_kv_cache(text, kv_cache_dtype, max_num_batched_tokens * batches),
        vocab_size=text["vocab_size"],
        num_speculative_tokens=num_speculative_tokens,
    )


def make_weights(shapes: Mapping[str, Shape], text_config: Mapping[str, Any] | None = None) -> Weights:
    """Tensors as vLLM spreads them over cards. `text_config` is a body's; a drafter has no K and V projections."""
    split, copied, kv = 0, 0, dict[int, int]()
    for name, shape in shapes.items():
        if _TOWER.search(name):
            copied += shape.nbytes
        elif _SPLIT.search(name):
            split += shape.nbytes
        elif not (text_config and _KEY_VALUE.search(name)):
            copied += shape.nbytes
        if text_config and _QUERY.search(name) and (layer := layer_of(name)) is not None:
            heads, _ = kv_geometry(text_config, text_config["layer_types"][layer])
            kv[heads] = kv.get(heads, 0) + 2 * shape.nbytes * heads // text_config["num_attention_heads"]
    return Weights(split_bytes=split, copied_bytes=copied, kv_bytes=kv)


def make_kv_cache(text_config: Mapping[str, Any], kv_cache_dtype: str, in_flight_tokens: int) -> KvCache:
    """What a body's tokens cost in a cache of this dtype (`auto` is bf16, as the body)."""
    own = own_layer_types(text_config)

    def layers(layer_type: str) -> CacheLayers:
        heads, head_dim = kv_geometry(text_config, layer_type)
        element = 1 if kv_cache_dtype.startswith("fp8") else 2
        return CacheLayers(layers=own.count(layer_type), heads=heads, head_dim=head_dim, element_bytes=element)

    return KvCache(
        sliding=layers("sliding_attention"),
        full=layers("full_attention"),
        shared_layers=text_config["num_hidden_layers"] - len(own),
        window=text_config["sliding_window"],
        max_tokens=text_config.get("max_position_embeddings") or 131_072,
        kept_tokens=text_config["sliding_window"] - 1 + in_flight_tokens,
    )
