"""Graphics cards and boxes of them: `4x16GB`, `1xH200`."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources

_SMALLEST_SHARE = 15.47 / 16  # of a size that no row has: what a 16 GB card shows of its GiB; larger ones show more


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """A card, or any card of a size."""

    name: str
    gb: int
    """As printed on the box."""
    gib: float
    """As PyTorch counts it."""
    sm: int | None = None
    """Compute capability, 120 for SM120; None where only a size is known."""
    tflops: int | None = None
    """Dense bf16."""
    usual: bool = False
    most: int = 8
    """As many as are put together."""

    @property
    def nbytes(self) -> int:
        """What an engine takes its share of."""
        return int(self.gib * 2**30)


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Cards of one kind in one machine."""

    count: int
    card: Card

    def __str__(self) -> str:
        return f"{self.count} x {self.card.name}"


@cache
def load_cards() -> tuple[Card, ...]:
    """Every card that is known, smallest size first."""
    text = (resources.files("bundler.engines") / "cards.toml").read_text(encoding="utf-8")
    return tuple(Card(**row) for row in tomllib.loads(text)["card"])


def usual_cards() -> tuple[Card, ...]:
    """The sizes that a plan is shown for."""
    return tuple(card for card in load_cards() if card.usual)


def parse_box(text: str) -> Box:
    """`4x16GB`, `2 x RTX 5090` or `H200` → a box; ValueError says what can be written."""
    match = re.fullmatch(r"\s*(?:(\d{1,3})\s*[x×*]\s*)?(.+?)\s*", text, re.IGNORECASE)  # noqa: RUF001
    if match is None or match[1] == "0" * len(match[1] or "1"):
        raise ValueError(f"{text!r} is no box; write it as 4x16GB or 1xH200")
    return Box(count=int(match[1] or 1), card=_find(match[2], text))


def _find(name: str, text: str) -> Card:
    def plain(word: str) -> str:
        return re.sub(r"[\s_-]", "", word).casefold()

    for card in load_cards():
        if plain(card.name) == plain(name):
            return card
    if (size := re.fullmatch(r"(\d{1,4})g(i?b)?", plain(name))) and int(size[1]):
        gb = int(size[1])
        return Card(name=f"{gb} GB", gb=gb, gib=round(gb * _SMALLEST_SHARE, 2))
    known = ", ".join(card.name for card in load_cards() if card.sm)
    raise ValueError(f"{text!r}: no card is called {name!r}; give its memory, as in 4x16GB, or one of {known}")
