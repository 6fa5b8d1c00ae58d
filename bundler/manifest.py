"""bundle.json: what is in a bundle, where it came from and how it was made. No clock: equal inputs, equal bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from bundler.findings import Finding

SCHEMA = 1
NAME = "bundle.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of the bundle. `role`: body, drafter, card, licence, recipe, measurement, evidence or asset."""

    path: str
    size_bytes: int
    sha256: str
    role: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFileEntry:
    """One file of a source at its commit."""

    path: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceEntry:
    """A checkpoint that went into the bundle: Hub repo and commit, or a folder as the recipe names it."""

    model: str
    revision: str | None
    commit: str | None
    """None for a local folder, which is known by its files' hashes alone."""
    card: Mapping[str, object]
    """The front matter of the source's own README.md; empty where there is none."""
    files: tuple[SourceFileEntry, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationEntry:
    """The calibration as it was run."""

    dataset: str
    config: str | None
    split: str
    commit: str | None
    """The dataset's commit on the Hub; None for a local file."""
    sha256: str | None
    """Of a local dataset file; None for a Hub dataset."""
    num_samples: int
    max_seq_length: int
    seed: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizationEntry:
    """What was quantized and how."""

    scheme: str
    format: str
    ignore: tuple[str, ...]
    weight_observer: str
    input_observer: str
    calibration: CalibrationEntry
    compute: Mapping[str, object]
    """device, dtype, attention, batch_size of the calibration forward."""
    quantized_modules: int
    quantized_parameters: int
    kept_parameters: int
    dropped_tensors: tuple[str, ...]
    """Source tensors that the model class does not build (K/V of KV-shared layers), so they are not carried."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The whole of bundle.json."""

    name: str
    tool: Mapping[str, str]
    """Package name → version, bundler's own first."""
    recipe_sha256: str
    body: SourceEntry
    drafter: SourceEntry
    quantization: QuantizationEntry
    findings: tuple[Finding, ...]
    """Warnings and notes that were known when the bundle was built."""
    files: tuple[FileEntry, ...]
    """Every file but bundle.json itself, sorted by path."""
