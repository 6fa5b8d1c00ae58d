"""The licence of a bundle: what the sources say of themselves, never a constant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bundler.findings import Finding, error, note, warning
from bundler.resources import load_resource
from bundler.source import Source

LICENCE_NAMES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE")
_TEXTS = {"apache-2.0": "apache-2.0.txt"}


def check_licences(body: Source, drafter: Source) -> list[Finding]:
    """Whether both sources name a licence, and the same one."""
    findings = []
    for role, source in (("body", body), ("drafter", drafter)):
        if not source.card.get("license"):
            findings.append(
                error(
                    "licence-unknown",
                    role,
                    f"the card of {source.model} names no licence",
                    hint="ask its publisher, or use a source whose card has `license:`; a bundle redistributes it",
                )
            )
    names = (body.card.get("license"), drafter.card.get("license"))
    if all(names) and names[0] != names[1]:
        message = f"{body.model} is {names[0]}, {drafter.model} is {names[1]}"
        hint = "the bundle's card names the body's licence; assistant/README.md keeps the drafter's"
        findings.append(warning("licence-mixed", "sources", message, hint=hint))
    if body.card.get("license") and _file(body) is None and str(body.card["license"]) not in _TEXTS:
        message = f"{body.model} carries no LICENSE file; the bundle's states the card's name and link for it"
        findings.append(note("licence-no-text", "body", message))
    return findings


def make_licence(body: Source) -> bytes:
    """The bundle's LICENSE: the source's own file, else the text of the licence that its card names, else its name."""
    path = _file(body)
    if path is not None:
        return path.read_bytes()
    name = str(body.card.get("license"))
    return load_resource(_TEXTS[name]).encode() if name in _TEXTS else _statement(body.model, body.card).encode()


def _file(source: Source) -> Path | None:
    present = {file.path for file in source.files}
    return next((source.folder / name for name in LICENCE_NAMES if name in present), None)


def _statement(model: str, card: Mapping[str, Any]) -> str:
    lines = [f"{model} is published under: {card.get('license_name') or card.get('license')}"]
    if card.get("license_link"):
        lines.append(f"Terms: {card['license_link']}")
    return "\n".join(lines) + "\n"
