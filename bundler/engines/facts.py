"""Engine facts: rows of TOML with a source and a date, and which of them speak about one bundle.

A new break is a new row, never an `if`. What no row speaks of is unknown, and is said to be.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from importlib import resources
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from bundler.findings import Finding, error, note, warning
from bundler.gemma4 import Kind
from bundler.recipe import Serve

SECTIONS = ("release", "requirement", "trap", "advice", "hardware", "calibration", "limit")
FORMATS = ("", "modelopt", "bf16", "quantized-drafter")
_ANY_ENGINE = ("hardware", "calibration", "limit")
KIND_WORDS = {kind.name.lower().replace("_", "-"): kind for kind in Kind}


class Verdict(StrEnum):
    """What happens. `broken` beside an `env`, `flags` or `pins` means: broken unless that is given."""

    WORKS = "works"
    DEGRADED = "degraded"
    BROKEN = "broken"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class When:
    """Which bundles a row speaks about; what is not given does not matter."""

    kinds: tuple[Kind, ...] = ()
    """In TOML: dense, moe, per-layer, unified."""
    drafter: bool | None = None
    multimodal: bool | None = None
    tensor_parallel: str = ""
    """A specifier on the tensor parallel size: ">=2", "==2"."""
    kv_cache_dtype: tuple[str, ...] = ()
    interconnect: str | None = None
    format: str = ""
    """How the weights are stored, where that is not as bundler stores them: modelopt, bf16, quantized-drafter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One row: an engine and its versions, what is seen there, what to do, and who says so."""

    id: str
    section: str
    """Where a card shows it: one of SECTIONS."""
    verdict: Verdict
    title: str
    text: str
    source: tuple[str, ...]
    """`owner/repo#N` for GitHub, else words."""
    basis: str
    """`measured` by us, or `reported` by others."""
    checked: datetime.date
    engine: str = "vllm"
    versions: str = ""
    """A PEP 440 specifier set; empty for every version."""
    when: When = When()
    do: str = ""
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    pins: tuple[str, ...] = ()
    hardware: tuple[str, ...] = ()
    num_speculative_tokens: tuple[int, int] | None = None
    """The least and the most that pay."""

    @property
    def remedy(self) -> bool:
        """Whether the row itself says how to get past the break."""
        return bool(self.flags or self.env or self.pins)


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """One engine release that was tried, and the transformers beside it."""

    engine: str
    version: str
    transformers: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Every row and every release that was tried."""

    rows: tuple[Fact, ...]
    releases: tuple[Release, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One bundle as it is meant to be served. `kind` is None where the body's config.json is not at hand."""

    serve: Serve
    kind: Kind | None
    drafter: bool = True
    multimodal: bool = True
    num_speculative_tokens: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """A row that speaks about a setting."""

    fact: Fact
    releases: tuple[str, ...]
    """The allowed releases that it concerns."""
    every: bool
    """Whether it concerns all of them, so that its flags belong into the serve line."""


def parse_facts(text: str, where: str) -> tuple[Facts, list[str]]:
    """One TOML file → its rows, and everything that is wrong with it."""
    problems: list[str] = []
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        return Facts(rows=(), releases=()), [f"{where}: {exc}"]
    releases = [Release(engine="vllm", **release) for release in table.get("release", [])]
    rows = []
    for number, raw in enumerate(table.get("fact", [])):
        place = f"{where}: {raw.get('id', f'row {number + 1}')}"
        found = _problems(raw)
        problems += [f"{place}: {problem}" for problem in found]
        if not found:
            rows.append(_make_fact(raw))
    return Facts(rows=tuple(rows), releases=tuple(releases)), problems


def load_facts() -> Facts:
    """Every row that ships with bundler; ValueError with every fault if one is not well formed."""
    rows: list[Fact] = []
    releases: list[Release] = []
    problems: list[str] = []
    folder = resources.files("bundler.engines")
    for name in ("vllm.toml", "others.toml"):
        facts, found = parse_facts((folder / name).read_text(encoding="utf-8"), name)
        rows += facts.rows
        releases += facts.releases
        problems += found
    ids = [row.id for row in rows]
    problems += [f"{name} is used twice" for name in sorted({name for name in ids if ids.count(name) > 1})]
    if problems:
        raise ValueError("\n".join(problems))
    return Facts(rows=tuple(rows), releases=tuple(releases))


def _problems(raw: Mapping[str, Any]) -> list[str]:
    known = {field.name for field in fields(Fact)}
    when = raw.get("when", {})
    found = [f"unknown key {key}" for key in raw if key not in known]
    found += [f"unknown key when.{key}" for key in when if key not in {field.name for field in fields(When)}]
    needed = ("id", "section", "verdict", "title", "text", "source", "basis", "checked")
    found += [f"{key} is missing" for key in needed if not raw.get(key)]
    if raw.get("section") not in SECTIONS:
        found.append(f"section must be one of {', '.join(SECTIONS)}")
    if raw.get("verdict") not in list(Verdict):
        found.append(f"verdict must be one of {', '.join(Verdict)}")
    if raw.get("basis") not in ("reported", "measured"):
        found.append("basis must be reported or measured")
    if type(raw.get("checked")) is not datetime.date:
        found.append("checked must be a date")
    if when.get("format", "") not in FORMATS:
        found.append(f"when.format must be one of {', '.join(FORMATS[1:])}")
    found += [f"no such kind: {word}" for word in when.get("kinds", ()) if word not in KIND_WORDS]
    for key, specifier in (
        ("versions", raw.get("versions", "")),
        ("when.tensor_parallel", when.get("tensor_parallel")),
    ):
        try:
            SpecifierSet(specifier or "")
        except InvalidSpecifier:
            found.append(f"{key} is no version specifier: {specifier}")
    return found


def _make_fact(raw: Mapping[str, Any]) -> Fact:
    when = _tuples(raw.get("when", {}))
    when["kinds"] = tuple(KIND_WORDS[word] for word in when.get("kinds", ()))
    return Fact(**{**_tuples(raw), "verdict": Verdict(raw["verdict"]), "when": When(**when)})


def _tuples(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}


def allowed_releases(facts: Facts, serve: Serve) -> list[str]:
    """The releases that were tried and that the recipe's version range allows, oldest first."""
    versions = [release.version for release in facts.releases if release.engine == serve.engine]
    return sorted(SpecifierSet(serve.version).filter(versions, prereleases=True), key=Version)


def select_facts(facts: Facts, setting: Setting) -> tuple[Match, ...]:
    """The rows that speak about this setting, in the order of the files.

    A row about another interconnect is kept, without the claim that it concerns every release: the reader's box may
    be the other kind. Of other engines, only what concerns hardware, calibration and limits is kept.
    """
    allowed = allowed_releases(facts, setting.serve)
    asked = SpecifierSet(setting.serve.version)
    matches = []
    for fact in facts.rows:
        other = fact.engine != setting.serve.engine
        if (other and fact.section not in _ANY_ENGINE) or not _speaks_about(fact.when, setting):
            continue
        concerned = tuple(SpecifierSet(fact.versions).filter(allowed, prereleases=True))
        named = [spec.version for spec in SpecifierSet(fact.versions) if spec.operator in ("==", "===")]
        if not (other or concerned or any(_contains(asked, version) for version in named) or not allowed):
            continue
        here = fact.when.interconnect in (None, setting.serve.interconnect)
        matches.append(Match(fact=fact, releases=concerned, every=here and concerned == tuple(allowed)))
    return tuple(matches)


def _contains(specifier: SpecifierSet, version: str) -> bool:
    try:
        return specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:  # "0.22.*": the releases themselves were looked at already
        return False


def _speaks_about(when: When, setting: Setting) -> bool:
    serve = setting.serve
    return (
        (not when.kinds or setting.kind in when.kinds)
        and when.drafter in (None, setting.drafter)
        and when.multimodal in (None, setting.multimodal)
        and not when.format
        and (not when.kv_cache_dtype or serve.kv_cache_dtype in when.kv_cache_dtype)
        and SpecifierSet(when.tensor_parallel).contains(str(serve.tensor_parallel_size))
    )


def check_serve(facts: Facts, setting: Setting) -> list[Finding]:
    """What the rows say against serving this bundle as the recipe means to."""
    serve = setting.serve
    allowed = allowed_releases(facts, serve)
    where = "serve.version"
    if not any(row.engine == serve.engine and row.section == "release" for row in facts.rows):
        return [note("engine-unknown", "serve.engine", f"nothing is recorded about {serve.engine} with Gemma 4")]
    if not allowed:
        return [warning("engine-untried", where, f"no {serve.engine} release that was tried is in {serve.version!r}")]
    found: list[Finding] = []
    for match in select_facts(facts, setting):
        fact, sources = match.fact, ", ".join(match.fact.source)
        if fact.num_speculative_tokens is not None:
            least, most = fact.num_speculative_tokens
            if not least <= setting.num_speculative_tokens <= most:
                message = f"{setting.num_speculative_tokens} asked; {fact.text}"
                found.append(note("draft-length-unusual", "drafter.num_speculative_tokens", message, source=sources))
            continue
        if fact.section not in ("release", "trap") or fact.verdict is Verdict.WORKS or fact.when.interconnect:
            continue
        specific = fact.section == "release" or fact.when.kinds or fact.when.kv_cache_dtype
        if not specific or fact.hardware:
            continue
        message = f"{serve.engine} {_spell(match.releases) or fact.versions}: {fact.title}. {fact.text}"
        if fact.verdict is Verdict.UNKNOWN:
            found.append(warning("engine-unproven", where, message, fact.do or None, sources))
        elif fact.remedy:
            found.append(note("engine-remedy", where, message, fact.do or None, sources))
        elif match.every or allowed[0] in match.releases:
            found.append(error("engine-broken", where, message, fact.do or None, sources))
        else:
            found.append(warning("engine-broken-release", where, message, fact.do or None, sources))
    return found


def check_hardware(facts: Facts, setting: Setting, sm: int) -> list[Finding]:
    """What the rows say about a card of this compute capability (120 for SM120)."""
    found = []
    for match in select_facts(facts, setting):
        fact, sources = match.fact, ", ".join(match.fact.source)
        if fact.engine != setting.serve.engine or not any(_covers(words, sm) for words in fact.hardware):
            continue
        message = f"SM{sm}: {fact.title}. {fact.text}"
        if fact.verdict is not Verdict.WORKS:
            say = error if fact.verdict is Verdict.BROKEN and fact.section == "trap" else warning
            found.append(say(f"hardware-{fact.verdict}", "--target", message, fact.do or None, sources))
    return found


def _covers(words: str, sm: int) -> bool:
    """Whether `SM86`, `SM120 (RTX 50)` or a range of two capabilities speaks about one."""
    bounds = [int(number) for number in re.findall(r"SM(\d+)", words)]
    return bool(bounds) and bounds[0] <= sm <= bounds[-1]


def _spell(versions: Sequence[str]) -> str:
    if not versions:
        return ""
    return versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReleaseRange:
    """Neighbouring releases with one answer."""

    versions: str
    answer: str
    transformers: str


def make_release_ranges(facts: Facts, setting: Setting) -> list[ReleaseRange]:
    """Every allowed release → what is known of it, neighbours with the same answer put together, newest last."""
    matches = [match for match in select_facts(facts, setting) if match.fact.section == "release"]
    tried = {release.version: release.transformers for release in facts.releases}
    groups: list[tuple[str, list[str]]] = []
    for version in allowed_releases(facts, setting.serve):
        answer = _answer([match.fact for match in matches if version in match.releases])
        if groups and groups[-1][0] == answer:
            groups[-1][1].append(version)
        else:
            groups.append((answer, [version]))
    ranges = []
    for answer, versions in groups:
        beside = list(dict.fromkeys(tried[version] for version in versions))
        ranges.append(ReleaseRange(versions=_spell(versions), answer=answer, transformers=_spell(beside)))
    return ranges


def _answer(facts: Iterable[Fact]) -> str:
    """The worst verdict that was given; a break with a remedy is answered with the remedy."""
    facts = list(facts)
    broken = [fact for fact in facts if fact.verdict is Verdict.BROKEN]
    if any(not fact.remedy for fact in broken):
        return "no: " + next(fact.title for fact in broken if not fact.remedy)
    remedies = [
        word
        for fact in broken
        for word in (*(f"{k}={v}" for k, v in (fact.env or {}).items()), *fact.flags, *fact.pins)
    ]
    if remedies:
        return "only with " + ", ".join(f"`{word}`" for word in remedies)
    return "yes" if any(fact.verdict is Verdict.WORKS for fact in facts) else "not known"
