"""What is printed, and where: whole lines in pipes, wrapped ones in terminals, nothing beside the JSON."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from functools import cache
from pathlib import Path

import pytest

from bundler import printing
from bundler.engines import parse_box
from bundler.errors import RecipeError
from bundler.findings import error, note, warning
from bundler.hub import RemoteFile
from bundler.machine import Gpu, Machine, Place
from bundler.manifest import FileEntry
from bundler.plan import Plan, make_plan
from bundler.push import Outcome, PushPlan, Status
from tests.test_plan import plan_of, published, recipe_for

ESCAPE = "\x1b["
LONG = (
    "an explanation of what is wrong here that is so long that no terminal of eighty columns can show it in one line"
)
FINDINGS = [
    note("a-note", "body", "a remark"),
    error("an-error", "serve.version", LONG, "try [bold]something[/bold] else :smile:", "vLLM #1"),
    warning("a-warning", "name", "a warning"),
]


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """A clock that goes on by a fixed step at every look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


PLACE = Place(path=Path("somewhere"), free_bytes=10**12, device="1")
MACHINE = Machine(
    cores=2,
    memory_bytes=25 * 10**9,
    free_memory_bytes=20 * 10**9,
    matmul_rate=1e11,
    bf16_units=True,
    hash_rate=1e9,
    gpus=(Gpu(name="NVIDIA H200", memory_bytes=141 * 10**9, tflops=989),),
    cache=PLACE,
    output=dataclasses.replace(PLACE, path=Path("dist"), device="2"),
)


@cache
def real_plan(body: str, target: str | None = None) -> Plan:
    """A plan at real size, for a machine and a box."""
    sources = (published(body), published(f"{body}-assistant"))
    return make_plan(recipe_for(body), *sources, machine=MACHINE, target=parse_box(target) if target else None)


@pytest.mark.parametrize("size", ["31B", "26B-A4B", "12B", "E4B"])
@pytest.mark.parametrize("columns", [80, 160])
def test_a_plan_fits_the_terminal(
    size: str, columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line of a plan but the serve line, which is to be copied, is wider than the terminal; none ends in blanks.

    Each group and each box stays on one line, and no figure is cut off.
    """
    monkeypatch.setenv("COLUMNS", str(columns))
    plan = real_plan(f"google/gemma-4-{size}-it-qat-q4_0-unquantized", "1xH200")
    printing.print_plan(plan)
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if "--speculative-config" not in line) <= columns
    assert all(line == line.rstrip() and "…" not in line for line in lines)
    for group in plan.groups:
        (line,) = [line for line in lines if line.startswith(f"  {group.name}  ")]
        assert line.endswith(group.reason)
        assert f" {group.modules:,} " in line
    assert plan.serving is not None
    for fit in plan.serving.fits:
        (line,) = [line for line in lines if line.startswith(f"  {fit.drafting.box}  ")]
        assert len(line.split("  ")) > 6


def test_a_plan_says_what_it_takes_and_where_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Memory, disk, time with its basis on CPU and GPU, what halves it; a token's price, boxes, releases, the line."""
    printing.print_plan(real_plan("google/gemma-4-31B-it-qat-q4_0-unquantized", "4x16GB"))
    out = capsys.readouterr().out
    for text in (
        "hidden states 5.64 GB (in a file)", "63.5 GB to download", "1.00 TB free in somewhere, 1.00 TB in dist",
        "on CPU, 2 cores", "on NVIDIA H200", "524,288 tokens", "--set calibration.num_samples=128",
        "901 kB a token in bf16", "81.9 kB in 10 full layers", "819 kB in 50 sliding layers",
        "1, 2, 4, 8 can share both models", "0.23.0 to 0.24.0: yes", 'vllm serve "$D"', "GPU KV cache size",
        "--json lists",
    ):  # fmt: skip
        assert text in out


def test_a_plan_for_more_cards_than_are_usual(capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor parallel size that nobody has is refused elsewhere; the plan is shown without boxes."""
    printing.print_plan(plan_of(more="serve.tensor_parallel_size = 64"))
    assert "64 cards" in capsys.readouterr().out


def test_a_plan_that_cannot_serve_is_still_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """With a drafter that does not fit, the plan is shown without serving, and on no machine without the bake."""
    body = "google/gemma-4-31B-it-qat-q4_0-unquantized"
    plan = make_plan(recipe_for(body), published(body), published("google/gemma-4-12B-it-assistant"))
    printing.print_plan(plan)
    out = capsys.readouterr().out
    assert "output" in out
    assert "serve line" not in out
    assert "the bake" not in out


def test_a_plan_says_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan shows sources, commit, licence, calibration, serving, exact sizes and the sum."""
    plan = plan_of()
    printing.print_plan(plan)
    out = capsys.readouterr().out
    for text in (
        plan.body.model, plan.drafter.model, "main at cccccccccccc", "apache-2.0", "256 samples", "2,048 tokens",
        "vllm >=0.23 on 1 card", f"({plan.body_bytes:,} bytes)", f"({plan.drafter_bytes:,} bytes)",
        f"({plan.body_bytes + plan.drafter_bytes:,} bytes)", "20.4 GB", "5 shards", "31.3 B parameters",
    ):  # fmt: skip
        assert text in out
    assert ESCAPE not in out


def test_a_plan_leaves_its_errors_to_the_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors are printed once, on stderr, by what refuses; warnings and notes belong to the plan."""
    plan = plan_of(ignore="['re:.*q_proj', 're:.*nowhere']")
    printing.print_plan(plan)
    out = capsys.readouterr().out
    assert "dead-ignore" in out
    assert "fused-group-split" not in out


def test_findings_come_worst_first_and_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Errors, then warnings, then notes, each with place, code and advice; the last line counts them."""
    printing.print_findings(FINDINGS)
    out, err = capsys.readouterr()
    assert err == ""
    assert [code for code in re.findall(r"\[(an?-\w+)\]", out)] == ["an-error", "a-warning", "a-note"]
    assert out.splitlines()[-1] == "1 error, 1 warning, 1 note"


def test_text_of_others_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets and colons in a message are printed as they are."""
    printing.print_findings(FINDINGS)
    assert "try [bold]something[/bold] else :smile:" in capsys.readouterr().out


def test_pipes_get_whole_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Where no terminal shows it, a message stays on one line, without colour and without blanks at its end."""
    printing.print_findings(FINDINGS)
    out = capsys.readouterr().out
    assert f"{LONG} (vLLM #1)" in out
    assert not re.search(r" $", out, re.MULTILINE)
    assert ESCAPE not in out


def test_no_findings_print_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A clean result is no output at all."""
    printing.print_findings([])
    assert capsys.readouterr() == ("", "")


def test_terminals_get_colour_unless_they_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal shows severities in colour; NO_COLOR is honoured."""
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    printing.print_findings(FINDINGS)
    assert "\x1b[1;31merror" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    printing.print_findings(FINDINGS)
    assert not re.search(r"\x1b\[(\d+;)*3\d", terminal.getvalue())


def test_an_error_goes_to_stderr_with_all_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    """An error prints its findings, then what went wrong, then what to do next; stdout stays empty."""
    printing.print_error(RecipeError("the recipe has 3 problems", hint="read the manual", findings=FINDINGS))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-2:] == ["error: the recipe has 3 problems", "next: read the manual"]
    assert "[an-error]" in err


def test_json_is_all_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """print_json writes one document on stdout that reads back as it was, and nothing on stderr."""
    document = {"name": "日本", "sizes": [1, 2]}
    printing.print_json(document)
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == (document, "")
    assert "日本" in out


def test_results_can_be_copied(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A command that is longer than the terminal is wide is not broken."""
    monkeypatch.setenv("COLUMNS", "40")
    command = "bundle push dist/a-bundle-with-a-long-name --repo ORG/NAME --dry-run"
    printing.print_result("done", command)
    assert capsys.readouterr().out.splitlines() == ["done", f"  {command}"]


def test_steps_do_not_disturb_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """What is being done is told on stderr."""
    printing.print_step("hashing")
    assert capsys.readouterr() == ("", "hashing\n")


def test_heartbeat_in_pipes(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal there is a line at first, at the end, and at most every ten seconds between."""
    with printing.progress("quantizing", "layer", clock=Clock(4.0)) as report:
        for done in range(1, 9):
            report(done, 8, tokens=2000)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(",")[0] for line in err.splitlines()] == [
        "quantizing: layer 1/8",
        "quantizing: layer 4/8",
        "quantizing: layer 7/8",
        "quantizing: layer 8/8",
    ]


def test_speed_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Speed and time left come from this run's work: layers that an earlier run finished do not count."""
    with printing.progress("quantizing", "layer", clock=Clock(30.0)) as report:
        report(40, 60, tokens=3000)
        report(42, 60, tokens=3000)
    first, second = capsys.readouterr().err.splitlines()
    assert first == "quantizing: layer 40/60, 0:30 elapsed"
    assert second == "quantizing: layer 42/60, 100 tokens/s, 1:00 elapsed, 9:00 left"


def test_bytes_are_shown_as_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """A transfer shows what it is at, and how much of how much is there."""
    with printing.progress("fetch", "bytes", clock=Clock(1.0)) as report:
        report(5_000_000, 20_000_000_000, what="model.safetensors")
    assert capsys.readouterr().err.startswith("fetch: model.safetensors, 5.00 MB of 20.0 GB")


def test_nothing_to_report_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Work that never starts shows no empty bar."""
    with printing.progress("fetch", "bytes"):
        pass
    assert capsys.readouterr() == ("", "")


def test_two_kinds_of_work_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a terminal each work has its own bar, gone from the moving part of the screen once it is finished."""
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "100")
    with printing.progress("layers", "layer") as layer, printing.progress("fetch", "bytes") as fetch:
        fetch(1, 2)
        fetch(2, 2)
        layer(1, 2, tokens=10)
        layer(2, 2, tokens=10)
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", terminal.getvalue())
    assert shown.index("2 bytes of 2 bytes") < shown.index("layer 2/2")


@pytest.mark.parametrize(
    ("size", "text"),
    [(999, "999 bytes"), (1000, "1.00 kB"), (999_499, "999 kB"), (999_500, "1.00 MB"), (62_546_338_296, "62.5 GB")],
)
def test_sizes_have_three_figures(size: int, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A size is shown with three figures and a decimal prefix, as the Hub shows it."""
    with printing.progress("x", "bytes", clock=Clock(1.0)) as report:
        report(size, size)
    assert f"x: {text} of {text}" in capsys.readouterr().err


def test_an_outcome_lists_every_change(capsys: pytest.CaptureFixture[str]) -> None:
    """A push shows each file that comes, changes, goes or stays foreign, and where the result is."""
    entries = [
        FileEntry(path=f"{name}.json", size_bytes=2048, sha256="0" * 64, role="body")
        for name in ("new", "changed", "kept")
    ]
    theirs = [RemoteFile(path=f"{name}.bin", size_bytes=10, sha256=None, blob_id="1") for name in ("old", "foreign")]
    plan = PushPlan(
        repo_id="someone/gemma",
        revision="main",
        base="b" * 40,
        private=True,
        add=(entries[0],),
        replace=(entries[1],),
        copy=(),
        keep=(entries[2],),
        delete=(theirs[0],),
        leave=(theirs[1],),
        findings=(),
    )
    outcome = Outcome(
        status=Status.PUBLISHED,
        repo_id="someone/gemma",
        url="https://hub/x",
        commit="c" * 40,
        tag="v1",
        private=True,
        plan=plan,
    )
    printing.print_outcome(outcome)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["add", "new.json", "2.05", "kB"],
        ["replace", "changed.json", "2.05", "kB"],
        ["delete", "old.bin", "10", "bytes"],
        ["leave", "foreign.bin", "10", "bytes"],
        ["1", "file", "there", "already,", "at", "most", "4.10", "kB", "to", "send"],
        f"published: https://hub/x at {'c' * 12} (private)".split(),
        ["tag", "v1"],
    ]
