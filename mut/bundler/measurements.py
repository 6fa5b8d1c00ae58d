"""Measurement files: what was run, what came out, and who says so. Every figure of a card comes from one.

A measurement file is JSON with `"schema": 1`; its keys are the fields of Measurement, Run and Observation below. A key
of Setup may stand at the top, for every run, or in one run. A run gives its `figures`, or names the `raw` result files
of `vllm bench serve` beside it, which are read as they are.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from bundler.bench import Result, check_drafting, is_pytorch_file, is_result, load_results, make_benches
from bundler.errors import RecipeError
from bundler.findings import Finding, error, errors

SCHEMA = 1
ASSISTANT = "assistant"
"""The `drafter` of a run that used the one in the bundle."""
FIGURES = {
    "output_throughput": "tok/s, over all streams",
    "acceptance_rate": "percent",
    "acceptance_length": "tokens a step",
    "median_ttft_ms": "ms",
    "median_tpot_ms": "ms",
    "mean_ttft_ms": "ms",
    "mean_tpot_ms": "ms",
}
TOPICS = ("size", "memory", "parallelism", "drafters", "siblings", "quality", "speed")
"""What an observation is about; the card shows it in that section."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A number or a range; `about` where the source itself says so. In JSON: 36.4, [41, 51] or {"about": 39}."""

    low: float
    high: float
    about: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """The conditions of a run. Two runs are compared only if all of them but the language are equal."""

    engine: str
    version: str
    box: str
    """The machine: number and name of its GPUs, and their link."""
    streams: int | None = None
    """Concurrent requests; raw results say it themselves. May be unknown for another drafter."""
    language: str | None = None
    """Of the prompts: a language code."""
    flags: tuple[str, ...] = ()
    """Beside those of the drafter."""
    env: Mapping[str, str] = field(default_factory=dict)
    prompts: str | None = None
    output_tokens: int | None = None
    """Per request."""
    temperature: float | None = None
    repeats: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One benchmark. `drafter` is null for the baseline, "assistant" for the bundle's own, else another's name."""

    setup: Setup
    drafter: str | None
    num_speculative_tokens: int | None = None
    figures: Mapping[str, Figure]
    raw: tuple[str, ...] = ()
    also_for: tuple[str, ...] = ()
    """Further languages that this baseline stands for; `note` says why."""
    note: str | None = None
    workload: tuple[int, int] | None = None
    """Prompts and input tokens, known from raw results."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """A result that is no benchmark run: a size, a comparison, something that was tried and failed."""

    topic: str
    subject: str
    figure: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One measurement file. `basis` is "measured" with this bundle's tools, or "reported" by someone else."""

    file: str
    basis: str
    source: str
    """Who measured, or where it was reported."""
    body: str
    """The quantized body that ran: a bundle's name, or the name of a published one."""
    link: str | None = None
    runs: tuple[Run, ...] = ()
    observations: tuple[Observation, ...] = ()


def load_measurements(paths: Iterable[Path]) -> tuple[Measurement, ...]:
    """Every measurement file, sorted by name; RecipeError with every problem of every file."""
    measurements, findings = read_measurements(paths)
    if wrong := errors(findings):
        hint = "the module bundler/measurements.py documents every key"
        raise RecipeError(f"measurement files have {len(wrong)} problem(s)", hint=hint, findings=findings)
    return measurements


def read_measurements(paths: Iterable[Path]) -> tuple[tuple[Measurement, ...], list[Finding]]:
    """Every measurement file that can be read, and what is wrong with them.

    Raw result files may be among `paths`: the files that name them read them. One that no file names lacks its
    context, and is a finding.
    """
    findings: list[Finding] = []
    documents: list[tuple[Path, Mapping[str, Any]]] = []
    raw: list[Path] = []
    for path in sorted(paths, key=lambda path: path.name):
        if is_pytorch_file(path):
            continue
        document, problem = _load_document(path)
        if problem is not None:
            findings.append(problem)
        elif document is None or is_result(document):
            raw.append(path)
        else:
            documents.append((path, document))
    measurements = []
    for path, document in documents:
        reader = _Reader(path)
        measurements.append(reader.measurement(document))
        findings += reader.findings
    named = {name for measurement in measurements for run in measurement.runs for name in run.raw}
    hint = 'name it as "raw" in a measurement file that gives language, box, engine version and drafter'
    for path in raw:
        if path.name not in named and not any(finding.where.startswith(path.name) for finding in findings):
            findings.append(error("bench-no-context", path.name, "is a raw result that no file names", hint))
    return tuple(measurements), findings + _check_duplicates(measurements)


def list_files(paths: Iterable[Path]) -> list[Path]:
    """The measurement files and the raw results that they name, sorted: what a bundle carries."""
    paths = [path for path in paths if not is_pytorch_file(path)]
    found = set(paths)
    for path in paths:
        measurements, _ = read_measurements([path])
        found |= {path.parent / name for measurement in measurements for run in measurement.runs for name in run.raw}
    return sorted(path for path in found if path.is_file())


def _load_document(path: Path) -> tuple[Mapping[str, Any] | None, Finding | None]:
    """A measurement file's object; None for JSON lines, which only raw results are."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        return None, error("measurement-unreadable", path.name, f"cannot be read: {exc}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as exc:
        if _is_lines(text):
            return None, None
        return None, error("measurement-unreadable", path.name, f"is no JSON: {exc}")
    if not isinstance(document, dict):
        return None, error("measurement-unreadable", path.name, "is no JSON object")
    return document, None


def _is_lines(text: str) -> bool:
    try:
        return is_result(json.loads(text.lstrip().partition("\n")[0]))
    except (ValueError, RecursionError):
        return False


def _check_duplicates(measurements: Sequence[Measurement]) -> list[Finding]:
    seen: dict[object, str] = {}
    findings = []
    for measurement in measurements:
        for run in measurement.runs:
            key = (measurement.body, comparison_key(run), run.setup.language, run.drafter, run.num_speculative_tokens)
            if key in seen:
                message = f"the same run as in {seen[key]}"
                hint = "give the mean of repeats, or name their raw files in one run"
                findings.append(error("measurement-duplicate", measurement.file, message, hint))
            seen.setdefault(key, measurement.file)
    return findings


def comparison_key(run: Run) -> tuple[object, ...]:
    """What two runs must share, beside the body, to stand side by side: all but language, drafter and repeats."""
    setup = run.setup
    return (
        setup.engine, setup.version, setup.box, setup.streams, setup.flags, tuple(sorted(setup.env.items())),
        setup.prompts, setup.output_tokens, setup.temperature,
    )  # fmt: skip


_STRINGS = "a list of strings"
_KINDS: Mapping[str, str] = {
    "schema": "1", "basis": '"reported" or "measured"', "source": "a string", "body": "a string", "link": "a string",
    "runs": "a list of objects", "observations": "a list of objects", "engine": "a string", "version": "a string",
    "box": "a string", "streams": "a positive integer", "language": "a string", "flags": _STRINGS,
    "env": "an object of strings", "prompts": "a string", "output_tokens": "a positive integer",
    "temperature": "a number", "repeats": "a positive integer", "drafter": "a string or null",
    "num_speculative_tokens": "a positive integer", "figures": "an object", "raw": _STRINGS, "also_for": _STRINGS,
    "note": "a string", "topic": f"one of {', '.join(TOPICS)}", "subject": "a string", "figure": "a string",
    "text": "a string",
}  # fmt: skip


def _fits(kind: str, value: object) -> bool:
    if kind == "a string or null":
        return value is None or (isinstance(value, str) and bool(value))
    if kind == "a string":
        return isinstance(value, str) and bool(value.strip())
    if kind == "a positive integer":
        return type(value) is int and value > 0
    if kind == "a number":
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if kind in (_STRINGS, "a list of objects"):
        inner = str if kind == _STRINGS else dict
        return isinstance(value, list) and all(isinstance(item, inner) for item in value)
    if kind in ("an object", "an object of strings"):
        strict = kind.endswith("strings")
        return isinstance(value, dict) and (not strict or all(isinstance(item, str) for item in value.values()))
    if kind.startswith("one of "):
        return value in TOPICS
    return value == SCHEMA and type(value) is int if kind == "1" else value in ("reported", "measured")


class _Reader:
    """Reads one file; every problem goes to `findings`, and what is wrong is left out of the values."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.findings: list[Finding] = []

    def _take(self, place: str, table: Mapping[str, Any], known: set[str], needed: set[str]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in table.items():
            where = f"{self.path.name}: {place}{key}"
            if key not in known:
                near = difflib.get_close_matches(key, sorted(known), n=1)
                hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(known))}"
                self.findings.append(error("measurement-key", where, "unknown key", hint))
            elif not _fits(_KINDS[key], value):
                self.findings.append(error("measurement-value", where, f"must be {_KINDS[key]}, is {value!r}"))
            else:
                values[key] = tuple(value) if isinstance(value, list) else value
        for key in sorted(needed - table.keys()):
            self.findings.append(error("measurement-missing", f"{self.path.name}: {place}{key}", "is missing"))
        return values

    def measurement(self, document: Mapping[str, Any]) -> Measurement:
        setup = {item.name for item in fields(Setup)}
        own = {"schema", "basis", "source", "body", "link", "runs", "observations"}
        values = self._take("", document, own | setup, {"schema", "basis", "source", "body"})
        if not document.get("runs") and not document.get("observations"):
            self.findings.append(error("measurement-missing", f"{self.path.name}: runs", "no run and no observation"))
        common = {key: values[key] for key in setup & values.keys()}
        runs = [run for n, raw in enumerate(values.get("runs", ())) for run in self._runs(f"runs[{n}].", raw, common)]
        seen = [self._observation(f"observations[{n}].", raw) for n, raw in enumerate(values.get("observations", ()))]
        return Measurement(
            file=self.path.name,
            basis=values.get("basis", "reported"),
            source=values.get("source", ""),
            body=values.get("body", ""),
            link=values.get("link"),
            runs=tuple(runs),
            observations=tuple(observation for observation in seen if observation is not None),
        )

    def _observation(self, place: str, table: Mapping[str, Any]) -> Observation | None:
        keys = {item.name for item in fields(Observation)}
        values = self._take(place, table, keys, keys)
        return Observation(**values) if values.keys() == keys else None

    def _runs(self, place: str, table: Mapping[str, Any], common: dict[str, Any]) -> list[Run]:
        """The runs of one entry: one, or one per concurrency of its raw results."""
        before = len(self.findings)
        setup_keys = {item.name for item in fields(Setup)}
        own = {"drafter", "num_speculative_tokens", "figures", "raw", "also_for", "note"}
        values = common | self._take(place, table, own | setup_keys, {"drafter"})
        where = f"{self.path.name}: {place}"
        for item in fields(Setup):
            if item.default is MISSING and item.default_factory is MISSING and item.name not in values:
                self.findings.append(error("measurement-missing", f"{where}{item.name}", "is missing, here and above"))
        if ("figures" in table) == ("raw" in table):
            message = "give either the figures or the raw result files"
            self.findings.append(error("measurement-missing", f"{where}figures", message))
        if values.get("drafter") and "num_speculative_tokens" not in values and "figures" not in values:
            self.findings.append(error("measurement-missing", f"{where}num_speculative_tokens", "is missing"))
        figures = self._figures(f"{where}figures", values.pop("figures", {}))
        compared = values.get("drafter") in (None, ASSISTANT) and "raw" not in values
        if compared and "streams" not in values:
            self.findings.append(error("measurement-missing", f"{where}streams", "is missing, here and above"))
        results = self._results(where, values) if "raw" in values else []
        if len(self.findings) > before:
            return []
        setup = {key: values.pop(key) for key in setup_keys & values.keys()}
        if "raw" not in values:
            return [Run(setup=Setup(**setup), figures=figures, **values)]
        runs = []
        for bench in make_benches(results, setup.get("streams")):
            taken = {"streams": bench.streams, "repeats": bench.repeats}
            taken["output_tokens"] = setup.get("output_tokens") or bench.output_tokens
            found = {key: Figure(low=value, high=value) for key, value in bench.figures.items()}
            made = Setup(**{**setup, **taken})
            runs.append(Run(setup=made, figures=found, workload=bench.workload, **values))
        return runs

    def _results(self, where: str, values: Mapping[str, Any]) -> list[Result]:
        results: list[Result] = []
        for name in values["raw"]:
            found, findings = load_results(self.path.parent / name)
            self.findings += findings
            if found:
                self.findings += check_drafting(name, found, drafter=values.get("drafter") is not None)
            for result in found:
                counted = result.get("max_concurrency")
                if counted is None and "streams" not in values:
                    message = "has no max_concurrency, so the run must give streams"
                    self.findings.append(error("bench-streams", f"{where}streams", f"{name} {message}"))
                elif counted is not None and values.get("streams", counted) != counted:
                    message = f"says {values['streams']}, {name} was run with {counted}"
                    self.findings.append(error("bench-streams", f"{where}streams", message))
            results += found
        return results

    def _figures(self, where: str, table: Mapping[str, Any]) -> dict[str, Figure]:
        figures = {}
        for key, value in table.items():
            if key not in FIGURES:
                near = difflib.get_close_matches(key, FIGURES, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(FIGURES)}"
                self.findings.append(error("measurement-key", f"{where}.{key}", "unknown figure", hint))
            elif (figure := _make_figure(value)) is None:
                message = f'must be a number, [low, high] or {{"about": number}}, is {value!r}'
                self.findings.append(error("measurement-value", f"{where}.{key}", message))
            elif key == "acceptance_rate" and figure.high > 100:
                message = f"is a percentage, cannot be {figure.high}"
                self.findings.append(error("measurement-value", f"{where}.{key}", message))
            else:
                figures[key] = figure
        return figures


def _make_figure(value: object) -> Figure | None:
    about = isinstance(value, dict) and value.keys() == {"about"}
    inner: Any = value["about"] if isinstance(value, dict) and about else value
    low, high = inner if isinstance(inner, list) and len(inner) == 2 else (inner, inner)
    if not _fits("a number", low) or not _fits("a number", high) or not 0 <= low <= high:
        return None
    return Figure(low=float(low), high=float(high), about=about)
