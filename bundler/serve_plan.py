"""How a bundle can be served: on how many of which cards, with how much context, by which releases and which line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bundler import engines
from bundler.body import TENSOR_PARALLEL_SIZES, check_tensor_parallel
from bundler.checkpoint import Shape
from bundler.engines import Box, Facts, Setting
from bundler.findings import Finding, error, note, warning
from bundler.recipe import Recipe
from bundler.serving import DEFAULT_BATCHED_TOKENS, Fit, Model, make_model

_BUDGET = "--max-num-batched-tokens"


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxFit:
    """A bundle on one box, with the drafter and without."""

    drafting: Fit
    alone: Fit


@dataclass(frozen=True, kw_only=True, slots=True)
class ServePlan:
    """All that is known about serving before there is anything to serve."""

    model: Model
    needed_tokens: int
    """The context that one stream must have: the recipe's, or the model's own."""
    sizes: tuple[int, ...]
    """Numbers of cards that can share both models."""
    fits: tuple[BoxFit, ...]
    """The usual cards, as many of each as the recipe says."""
    target: BoxFit | None
    """The box that was asked for."""
    smallest: Fit | None
    """The least that serves what the recipe asks for; None if no eight usual cards do."""
    releases: tuple[engines.ReleaseRange, ...]
    command: engines.ServeCommand


def make_serve_plan(
    recipe: Recipe,
    setting: Setting,
    facts: Facts,
    configs: tuple[Mapping[str, Any], Mapping[str, Any]],
    body: Mapping[str, Shape],
    drafter: Mapping[str, Shape],
    target: Box | None,
) -> ServePlan:
    """Plan for a finished body's and a drafter's tensors and their configs in the published schema, in this order."""
    serve, (body_config, drafter_config) = recipe.serve, configs
    command = engines.make_serve_command(serve, recipe.drafter, engines.select_facts(facts, setting))
    args = dict(zip(command.args, command.args[1:], strict=False))
    model = make_model(
        body,
        body_config,
        drafter,
        num_speculative_tokens=recipe.drafter.num_speculative_tokens,
        kv_cache_dtype=serve.kv_cache_dtype,
        max_num_batched_tokens=int(args.get(_BUDGET, DEFAULT_BATCHED_TOKENS)),
        versions=engines.allowed_releases(facts, serve),
    )
    sizes = tuple(
        size
        for size in TENSOR_PARALLEL_SIZES
        if not check_tensor_parallel(size, body_config, drafter_config) and not _is_broken(size, setting, facts)
    )
    needed = serve.max_model_len or model.kv.max_tokens
    count = serve.tensor_parallel_size
    boxes = [Box(count=count, card=card) for card in engines.usual_cards() if count <= card.most]
    return ServePlan(
        model=model,
        needed_tokens=needed,
        sizes=sizes,
        fits=tuple(fit_box(model, box) for box in boxes),
        target=fit_box(model, Box(count=min(count, target.count), card=target.card)) if target else None,
        smallest=model.smallest(sizes, needed),
        releases=tuple(engines.make_release_ranges(facts, setting)),
        command=command,
    )


def fit_box(model: Model, box: Box) -> BoxFit:
    """One bundle on one box."""
    return BoxFit(drafting=model.fit(box), alone=model.fit(box, drafter=False))


def _is_broken(size: int, setting: Setting, facts: Facts) -> bool:
    """Whether the facts say that this many cards do not work, whatever the release."""
    serve = dataclasses.replace(setting.serve, tensor_parallel_size=size)
    return any(
        match.every and match.fact.verdict is engines.Verdict.BROKEN and not match.fact.remedy
        for match in engines.select_facts(facts, dataclasses.replace(setting, serve=serve))
        if match.fact.when.tensor_parallel and match.fact.section in ("release", "trap")
    )


def check_serve_plan(plan: ServePlan, recipe: Recipe, target: Box | None) -> list[Finding]:
    """Whether there is a box, and this `target` if it is given, that serves what the recipe asks for."""
    serve, kv = recipe.serve, plan.model.kv
    at = "serve.max_model_len"
    if plan.needed_tokens > kv.max_tokens:
        message = f"is {plan.needed_tokens:,}; the body was made for at most {kv.max_tokens:,} tokens"
        source = "config.json, max_position_embeddings; vLLM refuses more"
        return [error("context-too-long", at, message, f"at most {kv.max_tokens}", source)]
    if plan.smallest is None:
        message = f"no 1 to 8 of the usual cards have room for {plan.needed_tokens:,} tokens"
        return [warning("no-card-fits", at, message, "ask for less context, or serve.kv_cache_dtype = 'fp8'")]
    findings = []
    if serve.max_model_len is None:
        message = f"is left out, so an engine wants room for the model's own {kv.max_tokens:,} tokens"
        findings.append(note("context-not-said", at, message, "say what your cards have room for"))
    if target is None or plan.target is None:
        return findings
    size = serve.tensor_parallel_size
    if size > target.count:
        message = f"is {size}, the target {target} has {target.count}"
        return [*findings, error("target-cards", "serve.tensor_parallel_size", message, _sizes_up_to(plan, target))]
    if size < target.count:
        message = (
            f"{size} of the {target.count} cards are used; serve.tensor_parallel_size says how many share a model"
        )
        findings.append(note("target-cards-idle", "--target", message, _sizes_up_to(plan, target)))
    return findings + _check_room(plan, target)


def _check_room(plan: ServePlan, target: Box) -> list[Finding]:
    assert plan.target is not None
    fit, alone, needed = plan.target.drafting, plan.target.alone, plan.needed_tokens
    if fit.context_tokens >= needed:
        return []
    if fit.kv_bytes <= 0:
        message = f"weights and work take {-fit.kv_bytes / 1e9:.1f} GB more than each card gives: no KV cache is left"
    else:
        message = f"room for {fit.context_tokens:,} tokens of context, {needed:,} asked"
    advice = []
    if fit.context_tokens >= 1024:
        advice.append(f"serve.max_model_len = {fit.context_tokens // 1024 * 1024}")
    if alone.context_tokens >= needed:
        advice.append("serve without the drafter")
    better = [size for size in plan.sizes if fit.box.count < size <= target.count]
    enough = [n for n in better if plan.model.fit(Box(count=n, card=target.card)).context_tokens >= needed]
    if enough:
        advice.append(f"serve.tensor_parallel_size = {enough[0]}")
    if plan.smallest:
        advice.append(f"the smallest box that has room is {plan.smallest.box}")
    return [error("target-too-small", f"--target {target}", message, "; or ".join(advice) or None, "an estimate")]


def _sizes_up_to(plan: ServePlan, target: Box) -> str:
    return "possible: " + ", ".join(str(size) for size in plan.sizes if size <= target.count)
