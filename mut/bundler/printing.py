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

from bundler.errors import BundlerError
from bundler.findings import Finding, Severity
from bundler.plan import Plan, licence_of, weight_bytes
from bundler.source import Source

if TYPE_CHECKING:
    from bundler.hub import RemoteFile
    from bundler.manifest import FileEntry
    from bundler.push import Outcome

_COLOURS = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}
_PIPE_WIDTH = 10_000  # nothing wraps where no terminal shows it, so that grep finds whole sentences
_HEARTBEAT_S = 10.0

Report = Callable[..., None]
"""report(done, total, tokens=…, what=…): how far the work is."""


def print_plan(plan: Plan) -> None:
    """A plan for people: what goes in, what becomes of it module by module, what comes out, warnings and notes.

    The plan's errors are left to the error that refuses it.
    """
    recipe, calibration, serve, layout = plan.recipe, plan.recipe.calibration, plan.recipe.serve, plan.layout
    dataset = calibration.dataset
    if plan.dataset_commit:
        dataset = f"{dataset} ({calibration.split}) at {plan.dataset_commit[:12]}"
    samples = f"{_count(calibration.num_samples, 'sample')} of at most {calibration.max_seq_length:,} tokens"
    cards = "1 card"
    if serve.tensor_parallel_size > 1:
        cards = f"{serve.tensor_parallel_size} cards, {serve.interconnect}"
    context = f", {serve.max_model_len:,} tokens of context" if serve.max_model_len else ""
    drafted = f"{_count(recipe.drafter.num_speculative_tokens, 'token')} drafted a step"
    shards = _count(len(layout.shards), "shard")
    _write(
        Text.assemble(
            (recipe.name, "bold"), f"\n{recipe.quantization.scheme} body and drafter, Gemma 4 {plan.kind}\n"
        ),
        _labelled(
            ("body", plan.body.model, _describe(plan.body)),
            ("drafter", plan.drafter.model, _describe(plan.drafter)),
            ("calibration", dataset, f"{samples}, seed {calibration.seed}"),
            (
                "serving",
                f"{serve.engine} {serve.version} on {cards}",
                f"KV cache {serve.kv_cache_dtype}{context}, {drafted}",
            ),
        ),
        Text(),
        _group_table(plan),
        Text(),
        _labelled(
            (
                "body",
                _exact(plan.body_bytes),
                f"{shards} and the index; {_short_bytes(weight_bytes(plan.body))} before",
            ),
            ("drafter", _exact(plan.drafter_bytes), "copied byte for byte"),
            ("together", _exact(plan.body_bytes + plan.drafter_bytes), "tokenizers, card and licence come on top"),
        ),
    )
    if remarks := [finding for finding in plan.findings if finding.severity is not Severity.ERROR]:
        _write(Text())
        print_findings(remarks)


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
    _write(Text(", ".join(_count(counted[kind], kind) for kind in order if kind in counted)), to_stderr=to_stderr)


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
        *(("delete", "red", file) for file in plan.delete),
        *(("leave", "dim", file) for file in plan.foreign),
    ]
    table = Table.grid(padding=(0, 2))
    for style in ("", "", "dim"):
        table.add_column(style=style, overflow="fold")
    for verb, colour, file in changes:
        table.add_row(Text(verb, colour), file.path, _short_bytes(file.size_bytes))
    at = f" at {outcome.commit[:12]}" if outcome.commit else ""
    kept = f"{_count(len(plan.keep), 'file')} there already, at most {_short_bytes(plan.send_bytes)} to send"
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
                words[1] = f"{_short_bytes(done)} of {_short_bytes(total)}"
            if tokens and fresh > 0 and elapsed > 0:
                words.append(f"{tokens * fresh / elapsed:,.0f} tokens/s")
            words.append(f"{_clock(elapsed)} elapsed")
            if fresh > 0 and done < total:
                words.append(f"{_clock(elapsed * (total - done) / fresh)} left")
            draw(done, total, ", ".join(word for word in words if word), elapsed)
            if done >= total:
                shown.close()  # what comes next may want the last line for itself

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


def _labelled(*rows: tuple[str, str, str]) -> Table:
    """Label, value, and what there is to say of it on a line below."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value, remark in rows:
        table.add_row(f"{label:<11}", Text.assemble(value, "\n", (remark, "dim")))
    return table


def _group_table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("group", "becomes"):
        table.add_column(name, no_wrap=True)
    for name in ("modules", "parameters", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", style="dim")
    for group in plan.groups:
        becomes = Text(plan.recipe.quantization.scheme, "green") if group.quantized else Text("bf16")
        figures = (f"{group.modules:,}", _short_count(group.parameters), _short_bytes(group.size_bytes))
        table.add_row(group.name, becomes, *figures, group.reason)
    return table


def _describe(source: Source) -> str:
    at = f"{source.revision or 'main'} at {source.commit[:12]}" if source.commit else "local folder"
    parameters = sum(tensor.shape.numel for tensor in source.tensors.values())
    licence = licence_of(source) or "no licence named"
    return f"{at}, {licence}, {_short_count(parameters)} parameters, {_short_bytes(weight_bytes(source))}"


def _short_bytes(size: int) -> str:
    return f"{size} bytes" if size < 1000 else f"{_short(size)}B"


def _exact(size: int) -> str:
    return f"{_short_bytes(size)} ({size:,} bytes)"


def _short_count(count: int) -> str:
    return _short(count).replace("G", "B").replace("k", "K") if count >= 1000 else str(count)


def _short(value: float) -> str:
    """Three figures and a decimal prefix: 20.4 G."""
    prefixes = iter(("", "k", "M", "G", "T"))
    prefix = next(prefixes)
    while value >= 999.5:
        value, prefix = value / 1000, next(prefixes)
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f} {prefix}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
