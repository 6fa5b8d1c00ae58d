"""What was hashed already, so that 21 GB are not read again: a file's state on disk → its SHA-256.

A file whose size, times and inode are those that it had when it was hashed holds what was hashed then. The memory is
one file in the user's cache; without it everything is hashed again, and nothing else changes.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from bundler import manifest
from bundler.errors import VerificationError
from bundler.findings import Finding
from bundler.manifest import FileEntry

WORTH_BYTES = 10_000_000
"""Smaller files are hashed faster than they are worth remembering."""
_UNSETTLED_NS = 100_000_000  # a clock tick of the file system is up to 10 ms; within one, a change shows in no time
_MAX_CACHE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class FileState:
    """What a file system says of a file. No program can set the time of its last change (`ctime_ns`)."""

    size_bytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


def read_state(path: Path) -> FileState | None:
    """A file's state now; None where there is no such file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return FileState(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)


def read_states(root: Path, entries: Iterable[FileEntry]) -> dict[str, FileState | None]:
    """The state of each file of a bundle, to be taken before it is hashed."""
    return {entry.path: read_state(root / entry.path) for entry in entries}


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """A bundle's files as they lay on disk at some moment."""

    root: Path
    entries: tuple[FileEntry, ...]
    states: Mapping[str, FileState | None]


def look(root: Path) -> Look:
    """How a bundle lies there now; nothing where its manifest cannot be read."""
    try:
        entries = manifest.load(root).files
    except VerificationError:
        entries = ()
    return Look(root=root, entries=entries, states=read_states(root, entries))


def remember_unless(faults: Iterable[Finding], before: Look) -> None:
    """Remember the manifest's hashes if a verification that began at `before` found no fault."""
    if not list(faults):
        remember(before.entries, before.states, before.root)


def load() -> dict[FileState, str]:
    """The SHA-256 of every state that is remembered; empty where nothing can be read."""
    known: dict[FileState, str] = {}
    if not _cache_file().is_file():
        return known
    with suppress(OSError, ValueError, TypeError):
        for line in _cache_file().read_text(encoding="ascii").splitlines():
            *state, sha256 = json.loads(line)
            known[FileState(*state)] = str(sha256)
    return known


def remember(entries: Iterable[FileEntry], states: Mapping[str, FileState | None], root: Path) -> None:
    """Keep the hashes of large files that were just found right and have not changed since `states` were read.

    A cache that cannot be written is no error: the files are hashed again next time.
    """
    lines = []
    for entry in entries:
        state = states.get(entry.path)
        if state is None or entry.size_bytes < WORTH_BYTES or state != read_state(root / entry.path):
            continue
        if time.time_ns() - state.ctime_ns > _UNSETTLED_NS and state.ctime_ns % 1_000_000_000:
            lines.append(json.dumps([*astuple(state), entry.sha256]) + "\n")
    cache = _cache_file()
    with suppress(OSError):
        if lines:
            cache.parent.mkdir(parents=True, exist_ok=True)
            full = cache.exists() and cache.stat().st_size > _MAX_CACHE_BYTES
            with cache.open("w" if full else "a", encoding="ascii") as file:
                file.write("".join(lines))


def cache_folder() -> Path:
    """Where this tool keeps what it can do without: $XDG_CACHE_HOME/bundler, ~/.cache/bundler by default."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "bundler"


def _cache_file() -> Path:
    return cache_folder() / "hashes.jsonl"
