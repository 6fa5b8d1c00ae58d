"""Result files of `vllm bench serve --save-result`, read as they are.

Fields as vLLM writes them: `spec_decode_acceptance_rate` is a PERCENTAGE, `spec_decode_per_position_acceptance_rates`
are FRACTIONS, acceptance length is 1 + accepted/drafts, and no `spec_decode_*` at all means that nothing was drafted.
`--append-result` writes one JSON object a line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundler.findings import Finding, error

Result = Mapping[str, Any]
_MEANS = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "mean_ttft_ms", "mean_tpot_ms")

_COUNTED = tuple(
    f"spec_decode_{name}"
    for name in ("acceptance_rate", "acceptance_length", "num_drafts", "draft_tokens", "accepted_tokens")
)
_POSITIONS = "spec_decode_per_position_acceptance_rates"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Repeats of one benchmark at one concurrency, put together."""

    streams: int
    repeats: int
    workload: tuple[int, int]
    """Prompts and input tokens of one repeat; results of different workloads are not compared."""
    output_tokens: int
    """Per request, rounded."""
    figures: Mapping[str, float]
    """Under vLLM's names, acceptance without its `spec_decode_` prefix; acceptance_rate in percent."""


def is_result(value: object) -> bool:
    """Whether a JSON value looks like one result of `vllm bench serve`."""
    return isinstance(value, dict) and {"output_throughput", "completed", "num_prompts"} <= value.keys()


def is_pytorch_file(path: Path) -> bool:
    """Whether this is the second file that `--save-result` may write for a dashboard; it is never read."""
    return path.name.endswith(".pytorch.json")


def load_results(path: Path) -> tuple[list[Result], list[Finding]]:
    """Every result in a file, which holds one JSON object or one a line; none of them if one is not whole."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        return [], [error("bench-unreadable", path.name, f"cannot be read: {exc}")]
    try:
        values = [json.loads(text)]
    except (ValueError, RecursionError):
        try:
            values = [json.loads(line) for line in text.splitlines() if line.strip()]
        except (ValueError, RecursionError) as exc:
            return [], [error("bench-unreadable", path.name, f"is neither JSON nor JSON lines: {exc}")]
    if not values or not all(is_result(value) for value in values):
        hint = "name the file that --save-result wrote"
        return [], [error("bench-unreadable", path.name, "is no result of `vllm bench serve`", hint)]
    findings = [finding for value in values for finding in _check_result(path.name, value)]
    return ([] if findings else values), findings


def _check_result(where: str, result: Result) -> list[Finding]:
    findings = []
    for key in ("output_throughput", "total_input_tokens", "total_output_tokens", "num_prompts", "completed"):
        if not _is_number(result.get(key)) or result[key] <= 0:
            findings.append(
                error("bench-unreadable", f"{where}: {key}", f"is no positive number: {result.get(key)!r}")
            )
    for key in ("failed", "max_concurrency", *_COUNTED):
        if result.get(key) is not None and not _is_number(result[key]):
            findings.append(error("bench-unreadable", f"{where}: {key}", f"is no number: {result[key]!r}"))
    positions = result.get(_POSITIONS) or []
    if not isinstance(positions, list) or not all(_is_number(value) for value in positions):
        findings.append(error("bench-unreadable", f"{where}: {_POSITIONS}", "is no list of numbers"))
    if findings:
        return findings
    failed, completed, asked = result.get("failed") or 0, result["completed"], result["num_prompts"]
    if failed or completed < asked:
        message = f"{completed} of {asked} requests completed, {failed} failed"
        findings.append(error("bench-failed", where, message, "run it again; a table shows whole runs only"))
    rate = result.get("spec_decode_acceptance_rate")
    drafted, accepted = result.get("spec_decode_draft_tokens"), result.get("spec_decode_accepted_tokens") or 0
    if rate is not None and drafted and abs(100 * accepted / drafted - rate) > 0.5:
        message = f"{rate} %, but {accepted} of {drafted} tokens were accepted"
        hint = "vLLM writes this rate as a percentage"
        findings.append(error("bench-inconsistent", f"{where}: spec_decode_acceptance_rate", message, hint))
    if any(not 0 <= value <= 1 for value in positions):
        message = "holds a value outside 0 to 1"
        findings.append(error("bench-inconsistent", f"{where}: {_POSITIONS}", message, "these are fractions"))
    return findings


def check_drafting(where: str, results: Sequence[Result], *, drafter: bool) -> list[Finding]:
    """Whether the results fit their label: with a drafter, tokens were drafted; without, none were."""
    counted = ["spec_decode_num_drafts" in result for result in results]
    if drafter and not all(counted):
        hint = 'the server had no --speculative-config; label the run `"drafter": null`'
        return [error("bench-not-drafting", where, "labelled with a drafter, but no spec_decode_* was counted", hint)]
    if not drafter and any(counted):
        hint = 'label the run `"drafter": "assistant"`'
        return [error("bench-drafting", where, "labelled as baseline, but tokens were drafted", hint)]
    return []


def make_benches(results: Sequence[Result], streams: int | None) -> list[Bench]:
    """Repeats put together, one value per concurrency; `streams` where the results do not say it themselves."""
    groups: dict[int, list[Result]] = {}
    for result in results:
        groups.setdefault(result.get("max_concurrency") or streams or 0, []).append(result)
    return [_make_bench(count, groups[count]) for count in sorted(groups)]


def _make_bench(streams: int, results: Sequence[Result]) -> Bench:
    figures = {}
    for key in _MEANS:
        values = [result[key] for result in results if _is_number(result.get(key))]
        if len(values) == len(results):
            figures[key] = math.fsum(values) / len(values)
    drafts, drafted, accepted = (
        sum(result.get(f"spec_decode_{key}") or 0 for result in results)
        for key in ("num_drafts", "draft_tokens", "accepted_tokens")
    )
    if drafts and drafted:
        figures["acceptance_rate"] = 100 * accepted / drafted
        figures["acceptance_length"] = 1 + accepted / drafts
    first = results[0]
    return Bench(
        streams=streams,
        repeats=len(results),
        workload=(first["num_prompts"], first["total_input_tokens"]),
        output_tokens=round(sum(r["total_output_tokens"] for r in results) / sum(r["completed"] for r in results)),
        figures=figures,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
