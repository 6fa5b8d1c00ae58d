"""Templates and texts that ship with the package: bundler/templates in a wheel, templates/ in a checkout."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).resolve().parent
TEMPLATES = next(path for path in (_HERE / "templates", _HERE.parent / "templates") if path.is_dir())


def load_resource(name: str) -> str:
    """The text of a shipped file, by name."""
    return (TEMPLATES / name).read_text(encoding="utf-8")
