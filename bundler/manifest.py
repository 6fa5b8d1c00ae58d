"""bundle.json: what is in a bundle, where it came from and how it was made. No clock: equal inputs, equal bytes."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bundler import drafter
from bundler.errors import VerificationError
from bundler.findings import Finding, error
from bundler.names import check_name, check_path

SCHEMA = 1
NAME = "bundle.json"
ROLES = ("body", "drafter", "card", "licence", "recipe", "measurement", "evidence", "asset", "signature")

_FOLDER_ROLES = {drafter.FOLDER: "drafter", "measurements": "measurement", "evidence": "evidence", "assets": "asset"}
_FILE_ROLES = {"README.md": "card", "recipe.toml": "recipe", "model.sig": "signature"}
_LICENCE = re.compile(r"(LICEN[CS]E|NOTICE)\b", re.IGNORECASE)
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of the bundle. `role`: one of `ROLES`."""

    path: str
    size_bytes: int
    sha256: str
    role: str


Known = Callable[[FileEntry, Path], bool]
"""Whether a file at hand is known to have its entry's hash, so that it need not be read."""


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
class LayerFidelity:
    """A layer's signal-to-quantization-noise ratio: that of its worst module, on the source's own activations."""

    layer: int
    sqnr_db: float | None
    """None where nothing in the layer is quantized."""
    module: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class FidelityEntry:
    """The quantized body against its source, on text that it was not calibrated on."""

    num_samples: int
    num_tokens: int
    kl_divergence: float
    """Mean over tokens of KL(source ‖ quantized), in nats."""
    top1_agreement: float
    """Share of tokens for which both put the same token first."""
    perplexity: float
    """The source's."""
    perplexity_ratio: float
    """The quantized body's divided by the source's."""
    input_range: float
    """Largest input of a module on this text over the largest that calibration saw there; above 1 it is clipped."""
    input_range_module: str | None
    """The module where that is largest; None where nothing is quantized."""
    layers: tuple[LayerFidelity, ...]

    def worst(self, count: int = 5) -> list[LayerFidelity]:
        """The layers with the lowest signal-to-quantization-noise ratio, the worst first."""
        quantized = [(layer.sqnr_db, layer.layer, layer) for layer in self.layers if layer.sqnr_db is not None]
        return [layer for _, _, layer in sorted(quantized, key=lambda item: item[:2])[:count]]


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
    q4_0_blocks: float
    """Share of the source's blocks of 32 weights that lie on a q4_0 grid, in a sample of every quantized module."""
    fidelity: FidelityEntry


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


def render(manifest: Manifest) -> str:
    """bundle.json's text: ASCII JSON with sorted keys, so that equal manifests are equal bytes."""
    document = {"schema": SCHEMA, **_encode(manifest)}
    return json.dumps(document, sort_keys=True, indent=2) + "\n"


def write(root: Path, manifest: Manifest) -> None:
    """Write bundle.json into a bundle, whole or not at all."""
    part = root / f"{NAME}.part"
    part.write_text(render(manifest), encoding="ascii", newline="\n")
    part.replace(root / NAME)


def load(root: Path) -> Manifest:
    """Read a bundle's bundle.json; VerificationError with a finding for every key that is not as it must be."""
    path = root / NAME
    if not path.is_file():
        raise _refused([error("manifest-missing", NAME, "is not here", "is this the folder of a bundle?")])
    try:
        document = json.loads(path.read_bytes())
    except OSError as exc:
        raise _refused([error("manifest-unreadable", NAME, f"cannot be read: {exc.strerror}")]) from exc
    except (ValueError, RecursionError) as exc:
        raise _refused([error("manifest-unreadable", NAME, f"is no JSON: {exc}")]) from exc
    if not isinstance(document, dict):
        raise _refused([error("manifest-unreadable", NAME, "is no JSON object")])
    if document.get("schema") != SCHEMA:
        message = f"has schema {document.get('schema')!r}, this version reads {SCHEMA}"
        raise _refused([error("manifest-schema", NAME, message, "use the bundler that wrote it, or a newer one")])
    problems: list[Finding] = []
    del document["schema"]
    manifest = _decode(Manifest, document, "", problems)
    if not problems:
        problems = _check_entries(manifest)
    if problems:
        raise _refused(problems)
    loaded: Manifest = manifest
    return loaded


def hash_file(path: Path) -> tuple[int, str]:
    """Size in bytes and SHA-256 of a file, read once and never held whole."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return file.tell(), digest.hexdigest()


def list_files(root: Path) -> list[Path]:
    """Every file of a bundle but bundle.json, relative to `root`, sorted.

    A link to a file counts as the file (the Hub's cache is made of such links); a link to a folder is never followed.
    What the Hub and its client add is not the bundle's: .gitattributes at the top, and .cache/huggingface.
    """
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        relative = Path(folder).relative_to(root)
        if relative == Path(".cache"):
            folders[:] = [name for name in folders if name != "huggingface"]
        found += [relative / name for name in names if (Path(folder) / name).is_file()]
    own = {Path(NAME), Path(".gitattributes")}
    return sorted((path for path in found if path not in own), key=Path.as_posix)


def role_of(path: str) -> str:
    """What a file of a bundle is for, told from its path: one of `ROLES`."""
    folder, _, rest = path.partition("/")
    if rest:
        return _FOLDER_ROLES.get(folder, "body")
    return "licence" if _LICENCE.match(path) else _FILE_ROLES.get(path, "body")


def make_entries(root: Path) -> tuple[FileEntry, ...]:
    """The `files` of a manifest for what lies in `root`, each file hashed once."""
    names = [path.as_posix() for path in list_files(root)]
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(hash_file, [root / name for name in names])
        return tuple(
            FileEntry(path=name, size_bytes=size, sha256=sha256, role=role_of(name))
            for name, (size, sha256) in zip(names, hashes, strict=True)
        )


def compare(manifest: Manifest, root: Path, *, is_known: Known | None = None) -> list[Finding]:
    """Every difference between a manifest and the files beside it, sorted by path; each file is hashed once.

    Files of which `is_known` says that they still have the manifest's hash are not read.
    """
    expected = {entry.path: entry for entry in manifest.files}
    present = {path.as_posix(): root / path for path in list_files(root)}
    with ThreadPoolExecutor() as pool:
        both = sorted(expected.keys() & present.keys())
        findings = list(pool.map(lambda path: _compare_file(expected[path], present[path], is_known), both))
    for path in expected.keys() - present.keys():
        findings.append(error("file-missing", path, f"is listed in {NAME} but not here", "download the bundle again"))
    for path in present.keys() - expected.keys():
        findings.append(error("file-extra", path, f"is here but not listed in {NAME}", "move it out of the bundle"))
    return sorted((finding for finding in findings if finding), key=lambda finding: finding.where)


def _compare_file(entry: FileEntry, path: Path, is_known: Known | None) -> Finding | None:
    try:
        size = path.stat().st_size
        if size != entry.size_bytes:
            message = f"has {size} bytes, {NAME} says {entry.size_bytes}"
            return error("file-size", entry.path, message, "download it again")
        if is_known is not None and is_known(entry, path):
            return None
        sha256 = hash_file(path)[1]
    except OSError as exc:
        return error("file-unreadable", entry.path, f"cannot be read: {exc.strerror}")
    if sha256 == entry.sha256:
        return None
    message = f"has SHA-256 {sha256}, {NAME} says {entry.sha256}"
    return error("file-hash", entry.path, message, "download it again")


def _check_entries(manifest: Manifest) -> list[Finding]:
    findings = check_name(manifest.name, f"{NAME}: name")
    seen: dict[str, str] = {}
    for index, entry in enumerate(manifest.files):
        at = f"{NAME}: files[{index}]"
        if not _SHA256.fullmatch(entry.sha256) or entry.size_bytes < 0 or entry.role != role_of(entry.path):
            findings.append(error("manifest-value", at, f"{entry.path!r} has an impossible size, hash or role"))
        if (other := seen.setdefault(entry.path.casefold(), entry.path)) is not entry.path:
            findings.append(error("path-name", at, f"{entry.path!r} and {other!r} are one file where case is ignored"))
        findings += check_path(entry.path)
    return findings


def _refused(findings: list[Finding]) -> VerificationError:
    first, more = findings[0], len(findings) - 1
    also = f" (and {more} more)" if more else ""
    return VerificationError(f"{first.where} {first.message}{also}", hint=first.hint, findings=findings)


def _encode(value: object) -> Any:
    if is_dataclass(value):
        return {field.name: _encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)  # front matter is YAML: it may hold dates and non-finite numbers


def _decode(kind: Any, value: Any, at: str, problems: list[Finding]) -> Any:
    """`value` as a `kind`, or None beside a finding that names the key path `at`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return None if value is None else _decode(arguments[0], value, at, problems)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        for key in sorted(hints.keys() ^ value.keys()):
            word = "is missing" if key in hints else "is no key of this schema"
            problems.append(error("manifest-key", f"{NAME}: {at}{key}", word))
        known = {key: _decode(hints[key], value[key], f"{at}{key}.", problems) for key in hints if key in value}
        return kind(**known) if known.keys() == hints.keys() else None
    if origin is tuple and isinstance(value, list):
        base = at.rstrip(".")
        return tuple(_decode(arguments[0], item, f"{base}[{index}].", problems) for index, item in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        if arguments[1] is object:
            return value
        return {key: _decode(arguments[1], item, f"{at}{key}.", problems) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, StrEnum) and value in [str(member) for member in kind]:
        return kind(value)
    if kind in (str, int) and type(value) is kind:
        return value
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    name = "a list" if origin is tuple else "an object" if origin is Mapping else getattr(kind, "__name__", kind)
    problems.append(error("manifest-type", f"{NAME}: {at.rstrip('.')}", f"is {value!r:.60}, must be {name}"))
    return None
