"""Engine releases against what the rows say of them for one bundle: which runs it, which does not, and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from bundler.engines.facts import Fact, Facts, Setting, Verdict, allowed_releases, select_facts
from bundler.errors import CompatibilityError

WORKS, REMEDY, BROKEN, UNKNOWN = "works", "with a remedy", "broken", "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One release: `verdict` is works, with a remedy, broken or unknown."""

    version: str
    verdict: str
    why: tuple[str, ...]
    """What breaks, or what to set, each with who says so."""
    basis: str
    """`measured` where one of our own rows says it, else `reported`, else nothing."""
    transformers: str
    allowed: bool
    """Whether the recipe's own range holds it."""


def make_matrix(facts: Facts, setting: Setting, versions: Iterable[str] = ()) -> list[Line]:
    """Every release that was tried, or just these versions, oldest first."""
    named = sorted(set(versions), key=Version)
    everything = replace(setting, serve=replace(setting.serve, version=""))
    chosen = named or allowed_releases(facts, everything.serve)
    inside = allowed_releases(facts, setting.serve)
    return [_line(facts, everything, version, version in inside) for version in chosen]


def first_that_works(lines: Sequence[Line]) -> str | None:
    """The oldest release that runs everything as it is."""
    return next((line.version for line in lines if line.verdict == WORKS), None)


def _line(facts: Facts, setting: Setting, version: str, allowed: bool) -> Line:
    exact = replace(setting, serve=replace(setting.serve, version=f"=={version}"))
    matches = [match.fact for match in select_facts(facts, exact)]
    rows = [row for row in matches if _counts(row) and SpecifierSet(row.versions).contains(version, prereleases=True)]
    broken = [row for row in rows if row.verdict is Verdict.BROKEN]
    hopeless = [row for row in broken if not row.remedy]
    works = [row for row in rows if row.verdict is Verdict.WORKS]
    decisive = hopeless or broken or works
    verdict = BROKEN if hopeless else REMEDY if broken else WORKS if works else UNKNOWN
    beside = next((r.transformers for r in facts.releases if r.version == version), "")
    return Line(
        version=version,
        verdict=verdict,
        why=tuple(_why(row) for row in hopeless or broken),
        basis="measured" if any(row.basis == "measured" for row in decisive) else "reported" if decisive else "",
        transformers=beside,
        allowed=allowed,
    )


def _counts(row: Fact) -> bool:
    """Rows about releases, and traps that only some versions have."""
    return row.section == "release" or (row.section == "trap" and bool(row.versions))


def _why(row: Fact) -> str:
    return f"{row.title}: {row.do if row.remedy else row.text} ({', '.join(row.source)})"


def check_required(facts: Facts, setting: Setting, required: str) -> None:
    """CompatibilityError unless `vllm==X` runs it as it is."""
    name, _, version = required.partition("==")
    if name != setting.serve.engine or not version:
        raise CompatibilityError(f"{required!r} names no {setting.serve.engine} release", hint="write vllm==0.32.0")
    (line,) = make_matrix(facts, setting, [version])
    if line.verdict != WORKS:
        why = "; ".join(line.why) or "nothing is recorded about it"
        first = first_that_works(make_matrix(facts, setting))
        raise CompatibilityError(f"{required}: {line.verdict}. {why}", hint=f"the first that runs it all is {first}")
