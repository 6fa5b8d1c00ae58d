"""Figures as people read them: three digits and a decimal prefix, as the Hub shows sizes and parameters."""

from __future__ import annotations


def short_bytes(size: float) -> str:
    """20.4 GB."""
    return f"{size:.0f} bytes" if size < 1000 else f"{_short(size)}B"


def exact_bytes(size: int) -> str:
    """20.4 GB (20,446,823,120 bytes)."""
    return f"{short_bytes(size)} ({size:,} bytes)"


def short_count(number: float) -> str:
    """31.3 B, 4.20 K."""
    return _short(number).replace("G", "B").replace("k", "K") if number >= 1000 else f"{number:.0f}"


def clock(seconds: float) -> str:
    """1:02:03, or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def duration(seconds: float) -> str:
    """About how long: 40 s, 12 min, 7 h, 3 days; two digits, for an estimate is not known better."""
    for unit, length, most in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 48)):
        if seconds < most * length:
            return f"{max(1, round(seconds / length))} {unit}"
    return f"{seconds / 86400:.{1 if seconds < 10 * 86400 else 0}f} days"


def count(number: int, noun: str) -> str:
    """1 file, 2 files."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _short(value: float) -> str:
    prefixes = iter(("", "k", "M", "G", "T", "P"))
    prefix = next(prefixes)
    while value >= 999.5:
        value, prefix = value / 1000, next(prefixes)
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {prefix}"
