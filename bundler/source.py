"""A source: one checkpoint at one commit, as the Hub or a folder describes it. Pure data; `hub` fills it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundler.checkpoint import Tensor

_MAX_FRONT_MATTER = 1_000_000  # characters


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file. `sha256` is known for LFS files on the Hub; None where it still has to be computed."""

    path: str
    size_bytes: int
    sha256: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A checkpoint's metadata: enough to plan with, nothing that needs its weights."""

    model: str
    """As the recipe names it: a Hub id, or a folder relative to the recipe."""
    revision: str | None
    commit: str | None
    """The Hub commit that `revision` meant when it was resolved; None for a local folder."""
    folder: Path
    """A local folder that holds at least config.json, the card and the other small files."""
    files: tuple[SourceFile, ...]
    """Every file that belongs to the checkpoint (shards, configs, tokenizer, templates, card, licence; never code or
    pickles), sorted by path, whether it is in `folder` yet or not."""
    config: Mapping[str, Any]
    card: Mapping[str, Any]
    """Front matter of README.md; empty where there is none."""
    tensors: Mapping[str, Tensor]
    """Every tensor of every safetensors shard, read from the headers alone."""
    date: str | None = None
    """The day of that commit, as 2026-11-30; None for a local folder."""
    gated: str | None = None
    """`no`, `auto` (granted at once) or `manual`; None for a local folder."""


def parse_front_matter(text: str) -> dict[str, Any]:
    """A card's YAML block as plain values; ValueError if it is no mapping, or not what a card would hold.

    Aliases are refused: nine lines of them stand for gigabytes once they are written out.
    """
    import yaml

    class Plain(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise yaml.YAMLError("it has aliases")
            return super().compose_node(parent, index)

    if len(text) > _MAX_FRONT_MATTER:
        raise ValueError(f"has {len(text)} characters")
    try:
        matter = yaml.load(text, Plain)
    except Exception as exc:  # of a day like 2026-99-99 and the like, the parser raises whatever Python says
        raise ValueError(f"is no YAML: {exc or type(exc).__name__}") from exc
    if not isinstance(matter, dict | None):
        raise ValueError("is no mapping")
    return matter or {}
