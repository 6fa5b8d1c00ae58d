"""Measurement files: read whole, every fault at once, and put side by side only what is comparable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bundler.errors import RecipeError
from bundler.measurements import Figure, list_files, load_measurements, read_measurements
from bundler.tables import make_headline, make_tables, other_drafters

REPORTED = Path(__file__).parents[1] / "recipes" / "31b-abliterated" / "reported-vllm-0.21.0.json"
BASE: dict[str, Any] = {
    "schema": 1,
    "basis": "measured",
    "source": "bundle measure 0.1.0",
    "body": "tiny-31b",
    "engine": "vllm",
    "version": "0.32.0",
    "box": "1 x RTX PRO 6000",
    "language": "en",
}


def bench(**changes: Any) -> dict[str, Any]:
    """A result as `vllm bench serve --save-result` writes it, without a drafter."""
    return {
        "date": "20261130-120000", "backend": "openai-chat", "label": None, "model_id": "tiny-31b", "num_prompts": 8,
        "request_rate": "inf", "max_concurrency": 1, "duration": 20.0, "completed": 8, "failed": 0,
        "total_input_tokens": 800, "total_output_tokens": 2048, "request_throughput": 0.4, "output_throughput": 40.0,
        "total_token_throughput": 60.0, "median_ttft_ms": 100.0, "median_tpot_ms": 25.0, "mean_ttft_ms": 110.0,
        "mean_tpot_ms": 26.0,
    } | changes  # fmt: skip


def drafted(**changes: Any) -> dict[str, Any]:
    """The same with a drafter: acceptance rate in percent, rates per position as fractions."""
    counted = {
        "spec_decode_acceptance_rate": 50.0, "spec_decode_acceptance_length": 3.0, "spec_decode_num_drafts": 500,
        "spec_decode_draft_tokens": 2000, "spec_decode_accepted_tokens": 1000,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.4, 0.2],
    }  # fmt: skip
    return bench(output_throughput=100.0, median_tpot_ms=10.0) | counted | changes


def write(folder: Path, runs: list[dict[str, Any]], name: str = "m.json", **changes: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({**BASE, **changes, "runs": runs}), encoding="utf-8")
    return path


def codes(paths: list[Path]) -> list[str]:
    return [finding.code for finding in read_measurements(paths)[1]]


def run(**values: Any) -> dict[str, Any]:
    return {"streams": 1, "drafter": None, "figures": {"output_throughput": 40}} | values


# ---- what was reported before this project measured anything ------------------------------------------------------


def test_the_reported_figures_of_the_31b_are_all_there() -> None:
    """Every figure of the published table is in the file, and the multipliers that follow are computed."""
    measurements = load_measurements([REPORTED])
    single, several = make_tables(measurements)
    rows = {(row.streams, row.language): row for table in (single, several) for row in table.rows}
    seen = {
        key: (
            row.baseline and row.baseline.figures["output_throughput"].low,
            row.drafted and row.drafted.figures["output_throughput"].low,
            row.multiplier and round(row.multiplier.low, 2),
        )
        for key, row in rows.items()
    }
    assert seen == {
        (1, "ja"): (36.4, 85.7, 2.35),
        (1, "en"): (36.4, 106.1, 2.91),
        (4, "ja"): (139.5, 211.6, 1.52),
        (4, "en"): (139.5, 251.9, 1.81),
        (8, "ja"): (252.9, 320.1, 1.27),
        (8, "en"): (252.9, 387.2, 1.53),
    }
    acceptance = {key: row.drafted.figures["acceptance_rate"] for key, row in rows.items() if row.drafted}
    assert acceptance[1, "ja"] == Figure(low=41, high=51)
    assert acceptance[8, "en"] == Figure(low=53, high=53, about=True)


def test_the_headline_is_the_single_stream_multiplier_of_each_language() -> None:
    """The headline is computed from the tables, best language first."""
    headline = make_headline(load_measurements([REPORTED]))
    assert [(row.language, round(row.multiplier.low, 1)) for _, row in headline if row.multiplier] == [
        ("en", 2.9),
        ("ja", 2.4),
    ]


def test_other_drafters_are_kept_apart() -> None:
    """A drafter that is not the bundle's never enters the tables of the bundle's."""
    measurements = load_measurements([REPORTED])
    rates = [entry.figures["acceptance_rate"].high for _, _, entry in other_drafters(measurements)]
    assert rates == [3, 16]


def test_what_was_measured_comes_before_what_was_reported(tmp_path: Path) -> None:
    """A headline of our own wins over a reported one, even when it is smaller."""
    slow = run(drafter="assistant", num_speculative_tokens=4, figures={"output_throughput": 44})
    measurements = load_measurements([REPORTED, write(tmp_path, [run(), slow])])
    ((table, row),) = make_headline(measurements)
    assert (table.basis, row.multiplier) == ("measured", Figure(low=1.1, high=1.1))


# ---- results of vllm bench serve ----------------------------------------------------------------------------------


def write_raw(folder: Path, name: str, *results: dict[str, Any]) -> None:
    (folder / name).write_text("\n".join(json.dumps(result) for result in results) + "\n", encoding="utf-8")


def test_raw_results_are_read_as_they_are(tmp_path: Path) -> None:
    """Percent stays percent, request_rate may be "inf", and the multiplier comes from the output throughput."""
    write_raw(tmp_path, "base.json", bench())
    write_raw(tmp_path, "mtp.json", drafted())
    path = write(
        tmp_path,
        [
            {"drafter": None, "raw": ["base.json"]},
            {"drafter": "assistant", "num_speculative_tokens": 4, "raw": ["mtp.json"]},
        ],
    )
    ((row,),) = [table.rows for table in make_tables(load_measurements([path]))]
    assert row.multiplier == Figure(low=2.5, high=2.5)
    assert row.drafted
    assert row.drafted.figures["acceptance_rate"] == Figure(low=50, high=50)
    assert row.drafted.figures["acceptance_length"] == Figure(low=3, high=3)
    assert row.drafted.setup.output_tokens == 256


def test_repeats_are_averaged_and_concurrencies_kept_apart(tmp_path: Path) -> None:
    """A file of --append-result holds a result a line: repeats become their mean, each concurrency a run."""
    lines = [bench(output_throughput=30.0), bench(output_throughput=50.0), bench(max_concurrency=4)]
    write_raw(tmp_path, "all.json", *lines)
    (measurement,) = load_measurements([write(tmp_path, [{"drafter": None, "raw": ["all.json"]}])])
    seen = {
        entry.setup.streams: (entry.setup.repeats, entry.figures["output_throughput"].low)
        for entry in measurement.runs
    }
    assert seen == {1: (2, 40.0), 4: (1, 40.0)}


def test_a_folder_of_measurements_reads_whole(tmp_path: Path) -> None:
    """Raw files beside the file that names them are no strangers, and *.pytorch.json is never read."""
    write_raw(tmp_path, "base.json", bench(), bench())
    (tmp_path / "base.pytorch.json").write_text("[]")
    path = write(tmp_path, [{"drafter": None, "raw": ["base.json"]}])
    measurements = load_measurements(tmp_path.glob("*.json"))
    assert [measurement.file for measurement in measurements] == ["m.json"]
    assert list_files([path]) == [tmp_path / "base.json", path]


@pytest.mark.parametrize(
    ("entry", "raw", "code"),
    [
        ({"drafter": "assistant", "num_speculative_tokens": 4}, bench(), "bench-not-drafting"),
        ({"drafter": None}, drafted(), "bench-drafting"),
        ({"drafter": None}, bench(failed=2, completed=6), "bench-failed"),
        ({"drafter": None}, bench(completed=6), "bench-failed"),
        ({"drafter": None, "streams": 8}, bench(), "bench-streams"),
        ({"drafter": None}, bench(max_concurrency=None), "bench-streams"),
        ({"drafter": None}, bench(output_throughput="fast"), "bench-unreadable"),
        ({"drafter": None}, bench(completed="all"), "bench-unreadable"),
        ({"drafter": None}, bench(max_concurrency="many"), "bench-unreadable"),
        ({"drafter": None}, bench(output_throughput=float("inf")), "bench-unreadable"),
        (
            {"drafter": "assistant", "num_speculative_tokens": 4},
            drafted(spec_decode_draft_tokens="x"),
            "bench-unreadable",
        ),
        (
            {"drafter": "assistant", "num_speculative_tokens": 4},
            drafted(spec_decode_per_position_acceptance_rates=0.5),
            "bench-unreadable",
        ),
        ({"drafter": None}, {"hello": 1}, "bench-unreadable"),
        (
            {"drafter": "assistant", "num_speculative_tokens": 4},
            drafted(spec_decode_acceptance_rate=0.5),
            "bench-inconsistent",
        ),
        (
            {"drafter": "assistant", "num_speculative_tokens": 4},
            drafted(spec_decode_per_position_acceptance_rates=[80, 60]),
            "bench-inconsistent",
        ),
    ],
)
def test_a_raw_result_that_does_not_fit_its_label_is_refused(
    tmp_path: Path, entry: dict[str, Any], raw: dict[str, Any], code: str
) -> None:
    """A mislabelled, failed or half-counted result never becomes a cell."""
    write_raw(tmp_path, "raw.json", raw)
    assert code in codes([write(tmp_path, [{**entry, "raw": ["raw.json"]}])])


def test_a_raw_result_without_context_is_refused(tmp_path: Path) -> None:
    """vLLM does not record box, language or drafter: a result that no measurement file names cannot be shown."""
    write_raw(tmp_path, "raw.json", bench())
    assert codes([tmp_path / "raw.json"]) == ["bench-no-context"]


def test_a_raw_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A cell needs its source file."""
    assert codes([write(tmp_path, [{"drafter": None, "raw": ["gone.json"]}])]) == ["bench-unreadable"]


# ---- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "where", "code"),
    [
        ({"schema": 2}, "schema", "measurement-value"),
        ({"schema": True}, "schema", "measurement-value"),
        ({"basis": "guessed"}, "basis", "measurement-value"),
        ({"boxx": "x"}, "boxx", "measurement-key"),
        ({"source": ""}, "source", "measurement-value"),
        ({"flags": "--x"}, "flags", "measurement-value"),
        ({"env": {"A": 1}}, "env", "measurement-value"),
        ({"temperature": "cold"}, "temperature", "measurement-value"),
    ],
)
def test_a_wrong_key_is_named(tmp_path: Path, change: dict[str, Any], where: str, code: str) -> None:
    """Each fault names file and key."""
    _, findings = read_measurements([write(tmp_path, [run()], **change)])
    assert [(finding.code, finding.where) for finding in findings] == [(code, f"m.json: {where}")]


@pytest.mark.parametrize(
    ("values", "where", "code"),
    [
        ({"drafter": 1}, "runs[0].drafter", "measurement-value"),
        ({"streams": 0}, "runs[0].streams", "measurement-value"),
        ({"streams": True}, "runs[0].streams", "measurement-value"),
        ({"figures": {"speed": 3}}, "runs[0].figures.speed", "measurement-key"),
        ({"figures": {"output_throughput": [5, 3]}}, "runs[0].figures.output_throughput", "measurement-value"),
        ({"figures": {"output_throughput": -1}}, "runs[0].figures.output_throughput", "measurement-value"),
        ({"figures": {"acceptance_rate": 140}}, "runs[0].figures.acceptance_rate", "measurement-value"),
        ({"figures": {"acceptance_rate": float("nan")}}, "runs[0].figures.acceptance_rate", "measurement-value"),
        ({"raw": ["x.json"]}, "runs[0].figures", "measurement-missing"),
        ({"lang": "en"}, "runs[0].lang", "measurement-key"),
    ],
)
def test_a_wrong_run_is_named(tmp_path: Path, values: dict[str, Any], where: str, code: str) -> None:
    """Each fault of a run names file, run and key."""
    _, findings = read_measurements([write(tmp_path, [run(**values)])])
    assert (code, f"m.json: {where}") in [(finding.code, finding.where) for finding in findings]


def test_every_fault_of_every_file_is_reported_at_once(tmp_path: Path) -> None:
    """One run of the tool names all faults, with the nearest valid key."""
    first = write(tmp_path, [run(streems=1), run(figures={})], "a.json", vershun="1")
    second = write(tmp_path, [], "b.json")
    third = tmp_path / "c.json"
    third.write_text("{")
    with pytest.raises(RecipeError) as caught:
        load_measurements([first, second, third, tmp_path / "gone.json"])
    findings = {(finding.where, finding.code): finding.hint for finding in caught.value.findings}
    assert findings["a.json: vershun", "measurement-key"] == "did you mean version?"
    assert findings["a.json: runs[0].streems", "measurement-key"] == "did you mean streams?"
    assert ("b.json: runs", "measurement-missing") in findings
    assert ("c.json", "measurement-unreadable") in findings
    assert ("gone.json", "measurement-unreadable") in findings


def test_a_run_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    """Two values for one cell cannot both be shown."""
    assert codes([write(tmp_path, [run(), run()])]) == ["measurement-duplicate"]


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[1]", b"[" * 100_000, b"", b"{}"])
def test_whatever_a_file_holds_it_is_a_finding(tmp_path: Path, content: bytes) -> None:
    """No content of a file escapes as an exception."""
    path = tmp_path / "m.json"
    path.write_bytes(content)
    assert set(codes([path])) <= {"measurement-unreadable", "measurement-missing"}
    assert codes([path])


def test_a_file_that_says_nothing_is_refused(tmp_path: Path) -> None:
    """A measurement file holds a run or an observation."""
    assert codes([write(tmp_path, [])]) == ["measurement-missing"]


# ---- what may stand side by side ----------------------------------------------------------------------------------

WITH = {"drafter": "assistant", "num_speculative_tokens": 4, "figures": {"output_throughput": 80}}


@pytest.mark.parametrize(
    "change",
    [
        {"version": "0.31.0"}, {"box": "2 x B200"}, {"flags": ["--x"]}, {"env": {"A": "1"}}, {"temperature": 1},
        {"output_tokens": 512}, {"prompts": "others"}, {"streams": 2}, {"language": "ja"}, {"engine": "sglang"},
    ],
)  # fmt: skip
def test_runs_under_other_conditions_are_not_compared(tmp_path: Path, change: dict[str, Any]) -> None:
    """A multiplier exists only between runs whose conditions are all equal."""
    tables = make_tables(load_measurements([write(tmp_path, [run(), run(**WITH, **change)])]))
    assert [row.multiplier for table in tables for row in table.rows] == [None, None]


def test_bodies_are_not_compared(tmp_path: Path) -> None:
    """Another bake of the same model is another body."""
    paths = [write(tmp_path, [run()], "a.json"), write(tmp_path, [run(**WITH)], "b.json", body="another")]
    assert [row.multiplier for table in make_tables(load_measurements(paths)) for row in table.rows] == [None, None]


def test_equal_conditions_in_two_files_are_compared(tmp_path: Path) -> None:
    """Baseline and drafter may lie in two files; the row names both."""
    paths = [write(tmp_path, [run()], "a.json"), write(tmp_path, [run(**WITH)], "b.json")]
    ((row,),) = [table.rows for table in make_tables(load_measurements(paths))]
    assert (row.multiplier, row.sources) == (Figure(low=2, high=2), (1, 2))


def test_results_of_other_prompts_are_not_compared(tmp_path: Path) -> None:
    """Raw results tell how many prompts and input tokens they had; different ones stand apart."""
    write_raw(tmp_path, "base.json", bench())
    write_raw(tmp_path, "mtp.json", drafted(total_input_tokens=900))
    path = write(
        tmp_path,
        [
            {"drafter": None, "raw": ["base.json"]},
            {"drafter": "assistant", "num_speculative_tokens": 4, "raw": ["mtp.json"]},
        ],
    )
    assert [row.multiplier for table in make_tables(load_measurements([path])) for row in table.rows] == [None, None]


def test_a_baseline_stands_for_another_language_only_where_its_file_says_so(tmp_path: Path) -> None:
    """`also_for` lets a baseline be used for a further language; its note travels with the table."""
    note = "Equally fast in both."
    path = write(tmp_path, [run(also_for=["ja"], note=note), run(**WITH, language="ja")])
    ((row,),) = [table.rows for table in make_tables(load_measurements([path]))]
    assert row.multiplier == Figure(low=2, high=2)
    assert make_tables(load_measurements([path]))[0].notes == (note,)


def test_a_range_gives_a_range(tmp_path: Path) -> None:
    """The multiplier of ranges is the least and the most that it can be."""
    ranged = [
        run(figures={"output_throughput": [40, 50]}),
        run(**{**WITH, "figures": {"output_throughput": [80, 100]}}),
    ]
    ((row,),) = [table.rows for table in make_tables(load_measurements([write(tmp_path, ranged)]))]
    assert row.multiplier == Figure(low=1.6, high=2.5)


def test_the_order_of_the_files_does_not_matter(tmp_path: Path) -> None:
    """A bundle renders the same card whether its files are listed or found."""
    paths = [write(tmp_path, [run()], "a.json"), write(tmp_path, [run(**WITH)], "b.json"), REPORTED]
    assert load_measurements(paths) == load_measurements(reversed(paths))
