"""Tables out of measurements: what may stand side by side, the multiplier, and the headline. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bundler.measurements import ASSISTANT, Figure, Measurement, Run, comparison_key


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line: a language at a concurrency, the baseline and one run with the drafter (either may be absent)."""

    streams: int
    language: str | None
    baseline: Run | None
    drafted: Run | None
    multiplier: Figure | None
    """Output throughput with the drafter over that of the baseline; None where one is not known."""
    sources: tuple[int, ...]
    """Numbers of the measurements that the figures come from, counted from 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows that share body, engine, version, box, flags, prompts and output length."""

    body: str
    basis: str
    run: Run
    """One of them, for the conditions that they share."""
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def make_tables(measurements: Sequence[Measurement]) -> list[Table]:
    """Every baseline and every run with the bundle's drafter, in tables of what is comparable.

    One stream and several streams never share a table; a baseline of another language stands in only where its own
    file says so.
    """
    groups: dict[object, list[tuple[int, Measurement, Run]]] = {}
    for number, measurement in enumerate(measurements, start=1):
        for run in measurement.runs:
            if run.drafter in (None, ASSISTANT):
                engine, version, box, _, *rest = comparison_key(run)
                single = run.setup.streams == 1
                key = (measurement.body, measurement.basis, single, engine, version, box, *rest)
                groups.setdefault(key, []).append((number, measurement, run))
    tables = []
    for entries in groups.values():
        runs = [run for _, _, run in entries]
        rows = _make_rows([(number, run) for number, _, run in entries])
        notes = tuple(dict.fromkeys(run.note for run in runs if run.note))
        _, measurement, run = entries[0]
        tables.append(Table(body=measurement.body, basis=measurement.basis, run=run, rows=tuple(rows), notes=notes))
    return sorted(tables, key=lambda table: (table.basis != "measured", table.rows[0].streams > 1))


def _make_rows(entries: Sequence[tuple[int, Run]]) -> list[Row]:
    baselines = [(number, run) for number, run in entries if run.drafter is None]
    rows = []
    used: set[int] = set()
    for number, run in entries:
        if run.drafter is None:
            continue
        found = _baseline_for(run, baselines)
        sources = tuple(sorted({number, found[0]} if found else {number}))
        baseline = found[1] if found else None
        used |= {id(baseline)}
        rows.append(_make_row(run.setup.language, baseline, run, sources))
    rows += [_make_row(run.setup.language, run, None, (number,)) for number, run in baselines if id(run) not in used]
    return sorted(rows, key=_order)


def _order(row: Row) -> tuple[int, str, int]:
    return row.streams, row.language or "", (row.drafted and row.drafted.num_speculative_tokens) or 0


def _baseline_for(run: Run, baselines: Iterable[tuple[int, Run]]) -> tuple[int, Run] | None:
    same = [entry for entry in baselines if comparison_key(entry[1]) == comparison_key(run)]
    language = run.setup.language
    own = [entry for entry in same if entry[1].setup.language == language and entry[1].workload == run.workload]
    return next(iter(own or [entry for entry in same if language in entry[1].also_for]), None)


def _make_row(language: str | None, baseline: Run | None, drafted: Run | None, sources: tuple[int, ...]) -> Row:
    run = drafted or baseline
    assert run is not None
    multiplier = None
    if baseline is not None and drafted is not None:
        multiplier = _divide(drafted.figures.get("output_throughput"), baseline.figures.get("output_throughput"))
    return Row(
        streams=run.setup.streams or 0,
        language=language,
        baseline=baseline,
        drafted=drafted,
        multiplier=multiplier,
        sources=sources,
    )


def _divide(above: Figure | None, below: Figure | None) -> Figure | None:
    """The least and the most that the quotient of two figures can be."""
    if above is None or below is None or not below.low:
        return None
    return Figure(low=above.low / below.high, high=above.high / below.low, about=above.about or below.about)


def make_headline(measurements: Sequence[Measurement]) -> list[tuple[Table, Row]]:
    """The single-stream rows with a multiplier, best first; measured ones where there are any, else reported ones."""
    found = [
        (table, row)
        for table in make_tables(measurements)
        for row in table.rows
        if row.streams == 1 and row.multiplier is not None
    ]
    measured = [(table, row) for table, row in found if table.basis == "measured"]
    best: dict[str | None, tuple[Table, Row]] = {}
    for table, row in measured or found:
        known = best.get(row.language)
        if known is None or _low(row) > _low(known[1]):
            best[row.language] = (table, row)
    return sorted(best.values(), key=lambda entry: -_low(entry[1]))


def _low(row: Row) -> float:
    return row.multiplier.low if row.multiplier else 0.0


def other_drafters(measurements: Sequence[Measurement]) -> list[tuple[int, Measurement, Run]]:
    """Runs with a drafter that is not the bundle's, with the number of their measurement."""
    return [
        (number, measurement, run)
        for number, measurement in enumerate(measurements, start=1)
        for run in measurement.runs
        if run.drafter not in (None, ASSISTANT)
    ]
