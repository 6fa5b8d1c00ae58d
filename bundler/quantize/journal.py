"""What a killed build has finished: one line per layer, each with the hash of the bytes it left in the stage."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from bundler.errors import QuantizationError


@dataclass(frozen=True, kw_only=True, slots=True)
class Journal:
    """Finished units (a decoder layer, or what lies outside the layers) → sha256 of their tensors."""

    path: Path
    done: dict[str, str] = field(default_factory=dict)
    choices: dict[str, str] = field(default_factory=dict)
    """What the first run decided for all that carry on, such as the dtype that this machine multiplies faster."""

    def record(self, unit: str, sha256: str) -> None:
        """Note a unit as finished; on return the line is on disk."""
        _append(self.path, {"unit": unit, "sha256": sha256})
        self.done[unit] = sha256

    def choose(self, what: str, value: str) -> None:
        """Note a decision for every run that carries on, unless the first run has made it."""
        if what not in self.choices:
            _append(self.path, {"choice": what, "value": value})
            self.choices[what] = value


def open_journal(path: Path, fingerprint: str) -> Journal:
    """A stage's journal, new or as a killed build left it; QuantizationError if it belongs to another build.

    `fingerprint` identifies recipe, sources and tool versions. A last line that was cut by a crash is dropped.
    """
    if not path.exists():
        _append(path, {"fingerprint": fingerprint})
        return Journal(path=path)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        path.write_text("".join(whole), encoding="utf-8")
    entries = [json.loads(line) for line in whole]
    if not entries:
        path.unlink()
        return open_journal(path, fingerprint)
    if entries[0].get("fingerprint") != fingerprint:
        raise QuantizationError(
            f"{path.parent} holds an unfinished build of another recipe, source commit or tool version",
            hint=f"remove {path.parent} to start anew, or run the build that it belongs to",
        )
    return Journal(
        path=path,
        done={entry["unit"]: entry["sha256"] for entry in entries if "unit" in entry},
        choices={entry["choice"]: entry["value"] for entry in entries if "choice" in entry},
    )


def _append(path: Path, entry: dict[str, str]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
        file.flush()
        os.fsync(file.fileno())
