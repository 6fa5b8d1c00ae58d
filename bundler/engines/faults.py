"""What an engine's log says when it fails, and whose fault that is: faults.toml."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib import resources

OF = ("engine", "release", "packages", "bundle", "device")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One kind of failure. `of`: engine, release, packages, bundle or device, as faults.toml explains."""

    id: str
    pattern: str
    of: str
    title: str
    link: tuple[str, ...]


def load_faults() -> tuple[Fault, ...]:
    """Every row, in the order in which they are tried; ValueError for an unknown `of`."""
    text = (resources.files("bundler.engines") / "faults.toml").read_text(encoding="utf-8")
    rows = tuple(Fault(**{**raw, "link": tuple(raw["link"])}) for raw in tomllib.loads(text)["fault"])
    if wrong := [row.id for row in rows if row.of not in OF]:
        raise ValueError(f"faults.toml: `of` must be one of {', '.join(OF)}: {', '.join(wrong)}")
    return rows


def find_fault(log: str) -> Fault | None:
    """The first known fault that a log shows."""
    return next((fault for fault in load_faults() if re.search(fault.pattern, log)), None)


_PREFIX = re.compile(r"^\(\w+ pid=\d+\)\s*((ERROR|WARNING|INFO) [\d: .-]+\[[^\]]+\])?")
_NAMED = re.compile(r"(\w+\.)*\w*(Error|Exception|Exit|Interrupt)\b")
_HOLLOW = ("initialization failed", "See root cause")


def last_error(log: str) -> str:
    """The last line of a log that names an exception of its own, else its last line."""
    lines = [line for raw in log.splitlines() if (line := _PREFIX.sub("", raw).strip())]
    named = [line for line in lines if _NAMED.match(line)]
    telling = [line for line in named if not any(words in line for words in _HOLLOW)]
    return (telling or named or lines or ["no output"])[-1][:400]
