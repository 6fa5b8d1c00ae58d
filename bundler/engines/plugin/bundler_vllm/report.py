"""The file that the plugin writes to; `bundler.prove` reads it."""

from __future__ import annotations

import json
import os
from typing import Any


def write(event: str, **values: Any) -> None:
    """Append one event; a line at a time, so that several processes may write."""
    line = json.dumps({"event": event, **values}, sort_keys=True, default=str) + "\n"
    descriptor = os.open(os.environ["BUNDLER_REPORT"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


_shims: set[str] = set()


def shim(name: str, why: str) -> None:
    """Record, once a process, that something of the engine was replaced."""
    if name not in _shims:
        _shims.add(name)
        write("shim", name=name, why=why)
