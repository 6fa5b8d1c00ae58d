"""What an engine did with a bundle, as recorded in evidence/*.json, and what a card may say of it."""

from __future__ import annotations

import hashlib
import json
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from bundler.errors import VerificationError
from bundler.findings import Finding, error, errors, warning
from bundler.manifest import Manifest

SCHEMA = 1
FOLDER = "evidence"


class Outcome(StrEnum):
    """How it ended. Only the first says that the bundle serves; the third says nothing about it."""

    PROVEN = "proven"
    ENGINE_FAULT = "engine-fault"
    """A fault of this release, or of the packages beside it, that a GPU user should meet too."""
    NOT_PROVABLE = "not-provable"
    """This device cannot run it; others may."""
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One prompt and what came back, greedy."""

    prompt: str
    """Name of the prompt: one of prove.PROMPTS."""
    asked: str
    image: bool
    prompt_ids: tuple[int, ...]
    text: str
    token_ids: tuple[int, ...]
    tops: tuple[Mapping[str, float], ...]
    """Log-probabilities of the engine's first choices at each token: token id → value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One start of the server."""

    drafter: bool
    card_line: str
    """The serve line as the card prints it for the recipe."""
    command: str
    """What was started: that line, and what this release and this device need. `{folder}` is the bundle."""
    env: Mapping[str, str]
    ready_s: float
    answers: tuple[Answer, ...]
    counters: Mapping[str, Any]
    """Of /metrics after all prompts; empty where nothing was drafted."""
    runner: str
    kernels: Mapping[str, int]
    """Class name → layers, as found in the loaded model."""
    attention: Mapping[str, int]
    head_groups: tuple[tuple[int, ...], ...]
    """Query heads found in each attention group."""
    head_check: str
    """What this version's own check of the groups says: passes, fails, absent."""
    unfilled: Mapping[str, Any]
    """Parameters that no tensor of the checkpoint filled: [elements or rows, of how many]."""
    shims: Mapping[str, str]
    """What of the engine was replaced for this device, and why."""
    log: tuple[str, ...]
    """The log's last lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """How far one answer is what the bundle's dequantized weights mean; see reference.Agreement."""

    prompt: str
    tokens: int
    equal: int
    worst_gap: float
    mean_gap: float
    noise: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """The whole of one file."""

    date: str
    engine: str
    version: str
    device: str
    device_name: str
    python: str
    packages: Mapping[str, str]
    fixes: tuple[str, ...]
    """Fixes of the environment, by their id in engines/environments.toml."""
    bundle_sha256: str
    """Digest of the body's and drafter's files, as `make_digest` computes it."""
    subject: str
    """`bundle`, or `twin`: a small copy of its structure."""
    outcome: Outcome
    findings: tuple[Finding, ...]
    runs: tuple[Run, ...]
    reference: tuple[Reference, ...]

    @property
    def file(self) -> str:
        """evidence/<engine>-<version>-<device>.json; a twin's has `-twin`."""
        twin = "-twin" if self.subject == "twin" else ""
        return f"{FOLDER}/{self.engine}-{self.version}-{self.device}{twin}.json"


def make_digest(manifest: Manifest) -> str:
    """One hash for what an engine reads: every file of the body and the drafter, but their cards and licences."""
    lines = [
        f"{entry.sha256}  {entry.path}\n"
        for entry in sorted(manifest.files, key=lambda entry: entry.path)
        if entry.role in ("body", "drafter") and not entry.path.endswith((".md", "LICENSE", "NOTICE"))
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def render(evidence: Evidence) -> str:
    """The file's text."""
    return json.dumps(to_dict(evidence), indent=2, ensure_ascii=False, sort_keys=True) + "\n"


def to_dict(evidence: Evidence) -> dict[str, Any]:
    """The file's document."""
    return {"schema": SCHEMA, **asdict(evidence)}


def write(bundle: Path, evidence: Evidence) -> Path:
    """Write it into the bundle, whole or not at all."""
    path = bundle / evidence.file
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text(render(evidence), encoding="utf-8", newline="\n")
    part.replace(path)
    return path


def load(path: Path) -> Evidence:
    """Read one file; VerificationError if it is not evidence of this schema."""
    try:
        document = json.loads(path.read_bytes())
        if document.pop("schema") != SCHEMA:
            raise ValueError("its schema is another")
        evidence: Evidence = _decode(Evidence, document)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        message = f"{FOLDER}/{path.name} is no evidence that this version reads: {exc!r:.200}"
        raise VerificationError(message, hint="run bundle prove again") from exc
    return evidence


def load_all(bundle: Path) -> list[Evidence]:
    """Every evidence file of a bundle, newest engine release first."""
    from packaging.version import Version

    found = [load(path) for path in sorted((bundle / FOLDER).glob("*.json"))]
    return sorted(found, key=lambda item: (item.engine, Version(item.version), item.subject), reverse=True)


def check_evidence(bundle: Path, manifest: Manifest) -> list[Finding]:
    """Whether each evidence file can be read, is named after what it says, and is about these very weights."""
    findings = []
    for path in sorted((bundle / FOLDER).glob("*")):
        where = f"{FOLDER}/{path.name}"
        try:
            evidence = load(path)
        except VerificationError as exc:
            findings.append(error("evidence-unreadable", where, str(exc), exc.hint))
            continue
        if evidence.file != where:
            findings.append(error("evidence-name", where, f"says that it is {evidence.file}", "rename it"))
        if evidence.bundle_sha256 != make_digest(manifest):
            message = "was recorded with other weights than this bundle has"
            findings.append(error("evidence-stale", where, message, "run bundle prove again, or remove it"))
        if evidence.outcome is Outcome.PROVEN and errors(evidence.findings):
            findings.append(
                error("evidence-contradicts", where, "says proven beside errors", "run bundle prove again")
            )
        if evidence.outcome is Outcome.FAILED:
            message = f"{evidence.engine} {evidence.version} did not serve this bundle"
            findings.append(warning("evidence-failed", where, message))
    return findings


def _decode(kind: Any, value: Any) -> Any:
    """JSON as a `kind`; ValueError, TypeError or KeyError where it is not one."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return None if value is None else _decode(arguments[0], value)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        names = {field.name for field in fields(kind)}
        if set(value) != names:
            raise ValueError(f"keys {sorted(set(value) ^ names)}")
        return kind(**{name: _decode(hints[name], value[name]) for name in names})  # type: ignore[operator]
    if origin is tuple:
        return tuple(_decode(arguments[0], item) for item in value)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return kind(value)
    if kind in (str, int, bool, float) and type(value) not in ((int, float) if kind is float else (kind,)):
        raise TypeError(f"{value!r:.60} is no {kind.__name__}")
    return value


# ---- what a card shows ----------------------------------------------------------------------------------------------

_KERNEL_WORDS = (
    (re.compile(r"emulat", re.IGNORECASE), "emulation"),
    (re.compile(r"marlin|w4a16|a16", re.IGNORECASE), "weight-only (W4A16)"),
    (re.compile(r"nvfp4.*kernel|_(cutlass|trtllm|cutedsl)", re.IGNORECASE), "native W4A4"),
)
_NOTES = {
    "emulation": (
        "**Emulation** is the reference arithmetic that vLLM ships for hardware without FP4, run on a processor. It "
        "proves the configuration, every tensor's name and shape, that all of them are loaded, and that the numbers "
        "mean what they should. It does not prove the FP4 kernels of a GPU, CUDA graphs, `torch.compile`, tensor "
        "parallelism, or the V2 model runner that newer releases use on a GPU."
    ),
    "twin": (
        "A **twin** has this bundle's own configuration, names, kept modules and head ratios with fewer and narrower "
        "layers, and weights whose right answer is known. What it proves is the structure, never these weights."
    ),
    "engine-fault": (
        "**Fault of the engine**: this release fails on such a bundle by itself; the link says where that is known."
    ),
    "not-provable": "**Not provable here**: the device that was tried cannot run it. That says nothing about others.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tested:
    """One row of the card's table, in plain words."""

    file: str
    engine: str
    device: str
    subject: str
    kernels: str
    body: str
    drafter: str
    outcome: str


def kernel_words(run: Run) -> str:
    """native W4A4, weight-only (W4A16) or emulation, from the classes that were found in the model."""
    names = " ".join(run.kernels)
    return next((words for pattern, words in _KERNEL_WORDS if pattern.search(names)), "unknown")


def make_tested(evidence: Iterable[Evidence]) -> tuple[list[Tested], list[str]]:
    """The rows of a card's "Tested with" table and the sentences that belong under it."""
    evidence = list(evidence)
    rows = [_row(item) for item in evidence]
    keys = {row.kernels for row in rows} | {item.subject for item in evidence} | {item.outcome for item in evidence}
    return rows, [text for key, text in _NOTES.items() if key in keys]


def _row(item: Evidence) -> Tested:
    beside = f" with transformers {item.packages['transformers']}" if "transformers" in item.packages else ""
    return Tested(
        file=item.file,
        engine=f"{item.engine.replace('vllm', 'vLLM')} {item.version}{beside}",
        device=f"{item.device_name} ({item.runs[0].runner or 'not started'})" if item.runs else item.device_name,
        subject="a small twin: structure" if item.subject == "twin" else "these weights",
        kernels=", ".join(dict.fromkeys(kernel_words(run) for run in item.runs if run.kernels)) or "none ran",
        body=_body(item),
        drafter=_drafter(item.runs),
        outcome=_outcome(item),
    )


def _body(item: Evidence) -> str:
    answers = [answer for run in item.runs if not run.drafter for answer in run.answers]
    if not answers:
        return "no answer"
    words = f"{len(answers)} prompts answered" + (", one with an image" if any(a.image for a in answers) else "")
    if item.reference:
        equal, tokens = (sum(getattr(entry, key) for entry in item.reference) for key in ("equal", "tokens"))
        worst, noise = (max(getattr(entry, key) for entry in item.reference) for key in ("worst_gap", "noise"))
        words += f"; {equal} of {tokens} first tokens are those of our own dequantized reference"
        if equal < tokens:
            words += f", the others at most {worst:g} nats below its choice (rounding alone moves it by {noise:g})"
    return words


def _drafter(runs: Sequence[Run]) -> str:
    run = next((run for run in runs if run.drafter), None)
    if run is None or not run.answers:
        return "not run" if run is None else "no answer"
    drafted, accepted = run.counters.get("draft_tokens", 0), run.counters.get("accepted_tokens", 0)
    return f"same answers; {accepted} of {drafted} drafted tokens accepted"


def _outcome(item: Evidence) -> str:
    if item.outcome is Outcome.PROVEN:
        return "proven"
    found = errors(item.findings)
    why = f": {found[0].message}" if found else ""
    source = f" ({found[0].source})" if found and found[0].source else ""
    return {
        Outcome.ENGINE_FAULT: "fault of the engine",
        Outcome.NOT_PROVABLE: "not provable here",
        Outcome.FAILED: "failed",
    }[item.outcome] + f"{why}{source}"
