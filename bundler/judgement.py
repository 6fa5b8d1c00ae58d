"""What an engine did with a bundle, held against what must be: answers, drafts, weights, kernels, our reference."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bundler import reference
from bundler.errors import BundlerError
from bundler.evidence import Answer, Outcome, Reference, Run
from bundler.findings import Finding, error, errors, note
from bundler.inventory import body_shapes
from bundler.layout import make_layout
from bundler.prompts import PROMPTS, make_image, make_messages
from bundler.session import where_of
from bundler.sidefiles import usable_ignore

JUDGED_TOKENS = 16
TIE_NATS = 0.15
"""Two choices this close in log-probability are one in bf16: either may win when the batch has another shape."""
REFERENCE_NATS = 0.25
"""How far a token may be, by the reference, below its first choice; beside twice what rounding alone does."""
NOISE_NATS = 0.3
_FUSED = re.compile(r"\.(q|k|v)_proj$|\.(gate|up)_proj$|\.experts\.\d+\..*$")
_BY_FAULT = {"engine-fault": Outcome.ENGINE_FAULT, "engine-not-provable": Outcome.NOT_PROVABLE}


def find_outcome(findings: Sequence[Finding]) -> Outcome:
    """Proven without an error; a fault of the engine or the device only where nothing else is wrong."""
    codes = {finding.code for finding in errors(findings)}
    if not codes:
        return Outcome.PROVEN
    known = codes & _BY_FAULT.keys()
    if codes - _BY_FAULT.keys():
        return Outcome.FAILED
    return Outcome.ENGINE_FAULT if "engine-fault" in known else Outcome.NOT_PROVABLE


def check_runs(
    runs: Sequence[Run], config: Mapping[str, Any], *, known_answer: bool = False, untrained: bool = False
) -> list[Finding]:
    """What the engine's own behaviour says: answers, drafts, weights, kernels, attention groups."""
    findings: list[Finding] = []
    for run in runs:
        findings += [*_check_answers(run, known_answer), *_check_weights(run, config)]
        if run.head_check.startswith("fails"):
            findings.append(
                error(
                    "engine-fault",
                    where_of(run.drafter),
                    "this version's own check of attention groups, which its GPU backends make at start, "
                    + run.head_check,
                    source="vllm-project/vllm#42650, vllm-project/vllm#43543",
                )
            )
    if len(runs) == 2 and runs[1].answers:
        findings += [*_compare_answers(*runs), *check_drafts(runs[1], untrained)]
    return findings


def _check_answers(run: Run, known_answer: bool) -> Iterator[Finding]:
    where = where_of(run.drafter)
    for answer in run.answers:
        if known_answer:
            wanted = answer.prompt_ids[-1:]
            wrong = sum((token,) != wanted for token in answer.token_ids)
            if wrong or not answer.token_ids:
                message = f"{wrong} of {len(answer.token_ids)} tokens are not the one that the twin must repeat"
                yield error("answer-wrong", f"{answer.prompt}, {where}", message)
        elif not answer.text.strip():
            message = f"is empty ({len(answer.token_ids)} tokens)"
            yield error("answer-empty", f"{answer.prompt}, {where}", message, "bundle verify may know why")
        if not answer.prompt_ids or not answer.token_ids:
            yield error("answer-without-ids", f"{answer.prompt}, {where}", "the engine gives no token ids to judge")


def _check_weights(run: Run, config: Mapping[str, Any]) -> Iterator[Finding]:
    where = where_of(run.drafter)
    shared = _shared_layers(config)
    for name, (count, total) in sorted(run.unfilled.items()):
        layer = re.search(r"\.layers\.(\d+)\.self_attn\.", name)
        if layer and int(layer[1]) in shared and "Gemma4MTP" not in name and re.search(r"qkv_proj|k_norm", name):
            continue  # K and V of a layer that reads another layer's: never used
        if "Gemma4MTP" in name and re.search(r"qkv_proj|k_norm", name):
            continue  # a drafter reads the body's K and V
        message = f"no tensor of the checkpoint filled {count} of its {total} parts"
        yield error("weight-unfilled", f"{name}, {where}", message, "the engine answers all the same")
    expected = _fused_modules(config)
    schemes = {name: count for name, count in run.kernels.items() if not name.endswith(("Kernel", "Backend"))}
    if run.runner and expected and sum(schemes.values()) != expected:
        message = f"{sum(schemes.values())} layers run quantized, config.json means {expected}"
        yield error("kernels-differ", where, message)


def _shared_layers(config: Mapping[str, Any]) -> range:
    text = config["text_config"]
    count = text["num_hidden_layers"]
    return range(count - (text.get("num_kv_shared_layers") or 0), count)


def _fused_modules(config: Mapping[str, Any]) -> int:
    """Quantized layers as engines build them: q/k/v as one, gate/up as one, all experts of a layer as one."""
    if "quantization_config" not in config:
        return 0
    layout = make_layout(body_shapes(config), config, usable_ignore(config))
    return len(
        {
            _FUSED.sub(lambda match: match[0][:2] if match[0][1] == "e" else _part(match[0]), name)
            for name in layout.quantized
        }
    )


def _part(suffix: str) -> str:
    return ".qkv" if suffix[1] in "qkv" else ".gate_up"


def _compare_answers(alone: Run, drafted: Run) -> Iterator[Finding]:
    for one, other in zip(alone.answers, drafted.answers, strict=True):
        where = f"{one.prompt}, with the drafter"
        if one.prompt_ids != other.prompt_ids:
            yield error("answer-differs", where, "the same prompt became other tokens")
            continue
        if one.token_ids == other.token_ids:
            continue
        pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
        at = next((index for index, (a, b) in pairs if a != b), min(len(one.token_ids), len(other.token_ids)))
        gap = _gap(one, other, at)
        if gap is not None and gap <= TIE_NATS:
            message = f"differs from token {at} on, where both choices are {gap:g} nats apart: a tie in bf16"
            yield note("answer-tie", where, message)
        else:
            apart = f", {gap:g} nats apart" if gap is not None else ""
            yield error(
                "answer-differs",
                where,
                f"differs from token {at} on{apart}: {other.text!r:.80}, alone {one.text!r:.80}",
            )


def _gap(one: Answer, other: Answer, at: int) -> float | None:
    if at >= len(one.tops) or at >= len(other.token_ids) or at >= len(one.token_ids):
        return None
    top = one.tops[at]
    first, second = (top.get(str(answer.token_ids[at])) for answer in (one, other))
    return None if first is None or second is None else round(abs(first - second), 4)


def check_drafts(run: Run, untrained: bool = False) -> Iterator[Finding]:
    """What the drafter did, by the engine's own counters."""
    drafts, accepted = run.counters.get("drafts", 0), run.counters.get("accepted_tokens", 0)
    if not drafts:
        yield error("drafter-idle", "with the drafter", "the engine counts no drafts: it served without the drafter")
    elif not accepted and not untrained:
        message = f"none of {run.counters.get('draft_tokens', 0)} drafted tokens was accepted"
        hint = "a drafter that fits accepts more than half; --untrained is for one with random weights"
        yield error("drafter-accepts-nothing", "with the drafter", message, hint, "vLLM #41789")


def refer(subject: Path, answers: Sequence[Answer]) -> tuple[tuple[Reference, ...], list[Finding]]:
    """Hold the answers against the bundle's own weights; how far each agrees, and what is wrong."""
    image = make_image()
    prompts = {prompt.name: prompt for prompt in PROMPTS}
    asked = [
        reference.Answered(
            name=answer.prompt,
            prompt_ids=answer.prompt_ids,
            answer_ids=answer.token_ids,
            image=image if answer.image else None,
            messages=tuple(make_messages(prompts[answer.prompt])),
        )
        for answer in answers
        if answer.prompt_ids and answer.token_ids
    ]
    try:
        agreements = reference.compare(subject, asked, first=JUDGED_TOKENS)
    except BundlerError as exc:
        faults = [finding for finding in exc.findings][:10]
        return (), [error("reference-impossible", "the body", str(exc), exc.hint), *faults]
    findings = []
    for one in agreements:
        if one.prompt_differs:
            message = "the engine makes other tokens of the prompt than the bundle's own processor"
            findings.append(error("reference-prompt", one.name, message))
            continue
        words = (
            f"{one.equal} of {one.tokens} tokens are the reference's own choice; at worst it prefers another by "
            f"{one.worst_gap:g} nats, where rounding alone moves it by {one.noise:g}"
        )
        if one.worst_gap > REFERENCE_NATS + 2 * one.noise:
            findings.append(error("reference-differs", one.name, words))
        elif one.noise > NOISE_NATS:
            findings.append(note("reference-noisy", one.name, f"{words}: too near to chance to tell much"))
    told = tuple(
        Reference(
            prompt=one.name,
            tokens=one.tokens,
            equal=one.equal,
            worst_gap=one.worst_gap,
            mean_gap=one.mean_gap,
            noise=one.noise,
        )
        for one in agreements
    )
    return told, findings
