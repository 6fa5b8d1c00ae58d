"""Everything that is printed: results on stdout; progress, errors and their findings on stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bundler import engines
from bundler.errors import BundlerError
from bundler.figures import clock as clock_time
from bundler.figures import count, short_bytes
from bundler.findings import Finding, Severity
from bundler.plan import Plan
from bundler.plan_view import render_plan

if TYPE_CHECKING:
    from pathlib import Path

    from bundler.diff import Difference
    from bundler.engines.environments import Environment
    from bundler.engines.matrix import Line
    from bundler.evidence import Evidence
    from bundler.hub import RemoteFile
    from bundler.manifest import FileEntry
    from bundler.push import Outcome
    from bundler.quantize import Progress as Baking

_COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_PIPE_WIDTH = 10_000  # nothing wraps where no terminal shows it, so that grep finds whole sentences
_HEARTBEAT_S = 10.0
_FIT_NOTE = (
    "KV cache: of each card. `tokens` fit however streams are cut; then the longest context of 1 stream, and of 8 at "
    "once, with the drafter and alone. An estimate: the line `GPU KV cache size` in vLLM's own log decides."
)

Report = Callable[..., None]
"""report(done, total, tokens=…, what=…): how far the work is."""


def print_plan(plan: Plan) -> None:
    """A plan for people: what goes in, what comes out, what it takes, where it can be served, warnings and notes.

    The plan's errors are left to the error that refuses it.
    """
    _write(*render_plan(plan))
    if plan.serving:
        note = Text(f"{_FIT_NOTE} --json lists what this rests on.", "dim")
        _write(Padding(note, (0, 0, 0, 2)), Text("\nserve line, D being the folder of the bundle", "bold"))
        print_lines(engines.render_bash(plan.serving.command, "D").splitlines())
    both = (*plan.findings, *(plan.bake.findings if plan.bake else ()))
    if remarks := [finding for finding in both if finding.severity is not Severity.ERROR]:
        _write(Text())
        print_findings(remarks)


def print_differences(left: str, right: str, differences: Iterable[Difference]) -> None:
    """Differences section by section: what the left side has, then the right; a long text from where they part."""
    differences = list(differences)
    if not differences:
        return print_result(f"{left} and {right} do not differ")
    _write(Text.assemble((f"- {left}\n", "red"), (f"+ {right}", "green")))
    for section in dict.fromkeys(difference.section for difference in differences):
        _write(Text(f"\n{section}", "bold"))
        for found in (difference for difference in differences if difference.section == section):
            times = Text(f" ({found.count} times)" if found.count > 1 else "", "dim")
            _write(Padding(Text.assemble(found.where, times), (0, 0, 0, 2)))
            for mark, colour, text in zip("-+", ("red", "green"), _parting(found.left, found.right), strict=True):
                if text is not None:
                    words = "has it" if text == found.where else text
                    _write(Padding(Text(f"{mark} {words}", colour), (0, 0, 0, 4)))
    places = sum(difference.count for difference in differences)
    return _write(Text(f"\n{count(places, 'difference')}"))


def _parting(left: str | None, right: str | None) -> tuple[str | None, str | None]:
    """Two texts, each cut to the first line in which they differ."""
    if left is None or right is None:
        return tuple(text and text.splitlines()[0] for text in (left, right))  # type: ignore[return-value]
    lines = [*zip(left.splitlines(), right.splitlines(), strict=False)]
    for ours, theirs in lines:
        if ours != theirs:
            return ours, theirs
    longer = [text.splitlines()[len(lines) :][:1] for text in (left, right)]
    return tuple(more[0] if more else "(ends here)" for more in longer)  # type: ignore[return-value]


def print_lines(lines: Iterable[str]) -> None:
    """Lines to be copied, indented; none is broken, however narrow the terminal."""
    console = _console()
    for line in lines:
        console.print(Text(f"  {line}"), soft_wrap=True)


def print_findings(findings: Iterable[Finding], *, to_stderr: bool = False) -> None:
    """Every finding with its code, place and advice, the worst first, and how many of each there are."""
    order = list(Severity)
    findings = sorted(findings, key=lambda finding: order.index(finding.severity))
    if not findings:
        return
    for finding in findings:
        head = (f"{finding.severity:<8}", _COLOURS[finding.severity])
        lines = Text(finding.message)
        if finding.source:
            lines.append(f" ({finding.source})", "dim")
        if finding.hint:
            lines.append_text(Text.assemble("\n", ("hint: ", "green"), finding.hint))
        _write(
            Text.assemble(head, (finding.where, "bold"), (f" [{finding.code}]", "dim")),
            Padding(lines, (0, 0, 0, 8)),
            to_stderr=to_stderr,
        )
    counted = Counter(finding.severity for finding in findings)
    _write(Text(", ".join(count(counted[kind], kind) for kind in order if kind in counted)), to_stderr=to_stderr)


def print_error(error: BundlerError) -> None:
    """What went wrong, every finding behind it, and what to do next; on stderr."""
    print_findings(error.findings, to_stderr=True)
    lines = Text.assemble(("error: ", "bold red"), str(error))
    if error.hint:
        lines.append_text(Text.assemble("\n", ("next: ", "green"), error.hint))
    _write(lines, to_stderr=True)


def print_json(document: object) -> None:
    """One JSON document on stdout."""
    sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=False) + "\n")


def print_result(headline: str, *lines: str) -> None:
    """What came out, and what to type next; no line is broken, so that commands can be copied."""
    console = _console()
    for text in (Text(headline, "bold"), *(Text(f"  {line}") for line in lines)):
        console.print(text, soft_wrap=True)


def print_step(what: str) -> None:
    """What is being done now; on stderr."""
    _write(Text(what, "dim"), to_stderr=True)


def print_outcome(outcome: Outcome) -> None:
    """What a push did, or would do, file by file."""
    plan = outcome.plan
    changes: list[tuple[str, str, FileEntry | RemoteFile]] = [
        *(("add", "green", file) for file in plan.add),
        *(("replace", "yellow", file) for file in plan.replace),
        *(("keep", "dim", file) for file in plan.keep if outcome.status == "planned"),
        *(("delete", "red", file) for file in plan.delete),
        *(("leave", "dim", file) for file in plan.leave),
    ]
    copied = {copy.path: f", copied from {copy.model}" for copy in plan.copy}
    table = Table.grid(padding=(0, 2))
    for style in ("", "", "dim"):
        table.add_column(style=style, overflow="fold")
    for verb, colour, file in changes:
        table.add_row(Text(verb, colour), file.path, short_bytes(file.size_bytes) + copied.get(file.path, ""))
    at = f" at {outcome.commit[:12]}" if outcome.commit else ""
    kept = f"{count(len(plan.keep), 'file')} there already, at most {short_bytes(plan.send_bytes)} to send"
    _write(table if changes else Text("no file differs"), Text(kept, "dim"))
    print_findings(plan.findings)
    visible = "private" if outcome.private else "public"
    print_result(f"{outcome.status}: {outcome.url}{at} ({visible})", *([f"tag {outcome.tag}"] if outcome.tag else []))


@contextmanager
def progress(label: str, unit: str, *, clock: Callable[[], float] = time.monotonic) -> Iterator[Report]:
    """Show how far some work is, from its first report on: a bar where stderr is a terminal, else a line now and then.

    Yields report(done, total, tokens=0, what=""): `unit`s done and in all (`bytes` are shown as sizes), the tokens
    that each unit takes, and what is being worked on. Speed is of the work since the first report.
    """
    with ExitStack() as shown:
        start, base, draw = 0.0, 0, None

        def report(done: int, total: int, tokens: int = 0, what: str = "") -> None:
            nonlocal start, base, draw
            if draw is None:
                start, base = clock(), done
                draw = shown.enter_context(_draw(label))
            elapsed, fresh = clock() - start, done - base
            words = [what, f"{unit} {done}/{total}"]
            if unit == "bytes":
                words[1] = f"{short_bytes(done)} of {short_bytes(total)}"
            if tokens and fresh > 0 and elapsed > 0:
                words.append(f"{tokens * fresh / elapsed:,.0f} tokens/s")
            if unit == "bytes" and fresh > 0 and elapsed > 0:
                words.append(f"{short_bytes(int(fresh / elapsed))}/s")
            words.append(f"{clock_time(elapsed)} elapsed")
            if fresh > 0 and done < total:
                words.append(f"{clock_time(elapsed * (total - done) / fresh)} left")
            draw(done, total, ", ".join(word for word in words if word), elapsed)
            if done >= total:
                shown.close()  # what comes next may want the last line for itself

        yield report


@contextmanager
def baking(*, clock: Callable[[], float] = time.monotonic) -> Iterator[Callable[[Baking], None]]:
    """Show a bake: layer, tokens a second, share of the measured peak, memory, time left."""
    from bundler.quantize.memory import anonymous_bytes

    with ExitStack() as shown:
        start, draw = 0.0, None

        def report(state: Baking) -> None:
            nonlocal start, draw
            if draw is None:
                start, draw = clock(), shown.enter_context(_draw("layers"))
            elapsed = clock() - start
            words = [f"layer {state.layers}/{state.num_layers}"]
            if state.tokens and elapsed > 0:
                words.append(f"{state.tokens / elapsed:,.0f} tokens/s")
                if state.peak_flops:
                    words.append(f"{state.flops / elapsed / state.peak_flops:.0%} of peak")
            if anonymous := anonymous_bytes():
                words.append(f"{short_bytes(anonymous)} of memory")
            words.append(f"{clock_time(elapsed)} elapsed")
            if 0 < state.tokens < state.num_tokens:
                words.append(f"{clock_time(elapsed * (state.num_tokens - state.tokens) / state.tokens)} left")
            over = state.layers == state.num_layers
            done, total = (1, 1) if over else (state.tokens, max(state.num_tokens, state.tokens + 1))
            draw(done, total, ", ".join(words), elapsed)
            if over:
                shown.close()

        yield report


@contextmanager
def _draw(label: str) -> Iterator[Callable[[int, int, str, float], None]]:
    console = _console(to_stderr=True)
    if console.is_terminal:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TextColumn("{task.fields[words]}"))
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(label, total=None, words="")
            yield lambda done, total, words, elapsed: bar.update(task, completed=done, total=total, words=words)
        return
    last = -_HEARTBEAT_S

    def beat(done: int, total: int, words: str, elapsed: float) -> None:
        nonlocal last
        if done >= total or elapsed - last >= _HEARTBEAT_S:
            last = elapsed
            console.print(Text(f"{label}: {words}"), soft_wrap=True)

    yield beat


def _console(*, to_stderr: bool = False) -> Console:
    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(stderr=to_stderr, highlight=False, markup=False, emoji=False, width=width)


def _write(*parts: RenderableType, to_stderr: bool = False) -> None:
    """Print without the blanks that rich fills lines up with, which would spoil a log or a paste."""
    console = _console(to_stderr=to_stderr)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    console.file.write(re.sub(r" +((?:\x1b\[[\d;]*m)*)$", r"\1", captured.get(), flags=re.MULTILINE))


def print_evidence(evidence: Evidence) -> None:
    """What an engine did with a bundle: answers, drafts, agreement, findings, and what the outcome does not say."""
    from bundler.evidence import make_tested

    (row,), notes = make_tested([evidence])
    rows = [("engine", row.engine, row.device), ("served", row.subject, f"kernels: {row.kernels}")]
    rows += [("alone", row.body, ""), ("drafter", row.drafter, "")]
    for answer in evidence.runs[0].answers if evidence.runs else ():
        rows.append((answer.prompt, repr(answer.asked), repr(answer.text)))
    table = Table.grid(padding=(0, 2))
    for style in ("bold", "", "dim"):
        table.add_column(style=style, overflow="fold")
    for cells in rows:
        table.add_row(*map(Text, cells))
    _write(table)
    print_findings(evidence.findings)
    print_result(f"{evidence.outcome}: {row.outcome}", f"recorded in {evidence.file} and in the card's table")
    for text in notes:
        _write(Text(text.replace("**", "").replace("`", ""), "dim"))


def print_environments(found: Iterable[tuple[Environment, int, int]], folder: Path) -> None:
    """Every engine environment: what it holds, its size, and what removing it frees."""
    table = Table(box=None, pad_edge=False)
    for name in ("engine", "device", "with", "size", "its own"):
        table.add_column(name)
    for environment, total, own in found:
        release = environment.release
        beside = ", ".join(f"{name} {environment.packages[name]}" for name in _BESIDE if name in environment.packages)
        sizes = (short_bytes(total), short_bytes(own))
        table.add_row(f"{release.engine} {release.version}", release.device, beside, *sizes)
    _write(table if table.row_count else Text("no engine is installed"))
    _write(Text(f"in {folder}; what is not its own is shared with uv's cache and freed with that", "dim"))


_BESIDE = ("torch", "transformers", "compressed-tensors")


def print_matrix(lines: Iterable[Line], first: str | None) -> None:
    """Engine releases, what is known of each for one bundle, and why."""
    table = Table(box=None, pad_edge=False)
    for name in ("release", "verdict", "known", "transformers", "why"):
        table.add_column(name, overflow="fold")
    colours = {"works": "green", "with a remedy": "yellow", "broken": "bold red"}
    none_works = True
    for line in lines:
        none_works = none_works and line.verdict != "works"
        verdict = Text(line.verdict, colours.get(line.verdict, "dim"))
        asked = line.version if line.allowed else f"({line.version})"
        table.add_row(asked, verdict, line.basis, line.transformers, "\n".join(line.why))
    _write(table, Text("a release in brackets is outside the recipe's range", "dim"))
    if none_works:
        print_result("none of these releases runs it all", *([f"the first that does is {first}"] if first else []))
    elif first:
        print_result(f"the first release that runs it all is {first}")
