"""Twins of what Google publishes: real configs and head ratios, shrunk, with the tiny tokenizer and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from published import config_of

from bundler import twin

REPOS = {
    "dense": "google/gemma-4-31B-it",
    "moe": "google/gemma-4-26B-A4B-it",
    "per-layer": "google/gemma-4-E4B-it",
    "unified": "google/gemma-4-12B-it",
}


def published_pair(kind: str, tiny: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Body and drafter config.json of a kind as published, speaking the vocabulary of the tiny checkpoint beside."""
    repo = REPOS[kind]
    body, drafter = config_of(repo), config_of(f"{repo}-assistant")
    own = json.loads((tiny / "body" / "config.json").read_text(encoding="utf-8"))
    for document in (body, drafter):
        text = document["text_config"]
        text["vocab_size"] = own["text_config"]["vocab_size"]
        if text.get("vocab_size_per_layer_input"):
            text["vocab_size_per_layer_input"] = text["vocab_size"]
        for key in [key for key in document if key.endswith(("_token_id", "_token_index")) and key in own]:
            document[key] = own[key]
    body["eos_token_id"] = json.loads((tiny / "body" / "generation_config.json").read_text("utf-8"))["eos_token_id"]
    body["vision_config"] |= {
        key: own["vision_config"][key]
        for key in ("default_output_length", "num_soft_tokens")
        if key in own["vision_config"]
    }
    if "vision_soft_tokens_per_image" in own:
        body["vision_soft_tokens_per_image"] = own["vision_soft_tokens_per_image"]
    if drafter.get("use_ordered_embeddings"):
        drafter |= {"num_centroids": 32, "centroid_intermediate_top_k": 4}
    return body, drafter


def bake_published(kind: str, tiny: Path, out: Path) -> Path:
    """The finished twin of a published kind."""
    small, small_drafter = twin.shrink(*published_pair(kind, tiny))
    return twin.bake(small, small_drafter, (tiny / "body", tiny / "drafter"), out, version=">=0.23")
