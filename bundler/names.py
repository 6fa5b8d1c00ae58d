"""Names that work everywhere: in a path inside a bundle, in a repo id, in a bundle's own name."""

from __future__ import annotations

import re
import unicodedata

from bundler.findings import Finding, error

_WINDOWS_DEVICE = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\.|$)", re.IGNORECASE)
_WINDOWS_RESERVED = frozenset('<>:"|?*\\')
_DRAFTER_MARK = re.compile(r"eagle-|eagle3|dflash|dspark", re.IGNORECASE)


def check_path(path: str) -> list[Finding]:
    """Whether a path inside a bundle works on every system and stays inside it."""
    parts = path.split("/")
    problems = []
    if any(part in ("", ".", "..") for part in parts):
        problems.append("is no plain relative path")
    if any(ord(char) < 32 or ord(char) == 127 or char in _WINDOWS_RESERVED for char in path):
        problems.append("has a character that some file systems refuse")
    if any("\ud800" <= char <= "\udfff" for char in path) or unicodedata.normalize("NFC", path) != path:
        problems.append("is no normalized Unicode")
    if any((part.endswith((" ", ".")) and part not in (".", "..")) or _WINDOWS_DEVICE.match(part) for part in parts):
        problems.append("has a name that Windows refuses")
    if any(len(part.encode("utf-8", "replace")) > 255 for part in parts):
        problems.append("has a name longer than 255 bytes")
    findings = [error("path-name", path, problem, "rename it") for problem in problems]
    return findings + check_name(path, path)


def check_name(name: str, where: str) -> list[Finding]:
    """Whether a name would make vLLM take the drafter for another kind of draft model than it is."""
    match = _DRAFTER_MARK.search(name)
    if match is None:
        return []
    message = f'contains {match[0]!r}: vLLM then overrides "method": "mtp" and does not load the drafter'
    return [error("forbidden-name", where, message, "rename it", "vLLM config/speculative.py")]
