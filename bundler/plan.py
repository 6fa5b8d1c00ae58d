"""The plan: everything about a bundle that its recipe and its sources' metadata tell, before any weight is read."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from bundler import engines
from bundler.body import (
    check_layout,
    check_origin,
    check_side_files,
    check_source,
    check_tensor_parallel,
    is_attention_quantized,
)
from bundler.checkpoint import Shape, render_index
from bundler.drafter import check_pair, check_source_files, check_source_names, check_tokenizers
from bundler.engines import Box
from bundler.errors import CompatibilityError
from bundler.findings import Finding, error, errors, warning
from bundler.gemma4 import Kind, find_kind, make_ignore, to_published_schema
from bundler.groups import ModuleGroup, make_groups
from bundler.hostile import check_templates
from bundler.layout import Layout, make_layout
from bundler.licence import check_licences
from bundler.machine import Machine
from bundler.recipe import Recipe
from bundler.serve_plan import ServePlan, check_serve_plan, make_serve_plan
from bundler.source import Source
from bundler.workload import (
    Estimate,
    Relief,
    Workload,
    check_machine,
    halve,
    in_float32,
    make_estimates,
    make_workload,
    room_bytes,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BakePlan:
    """What the bake takes on one machine. None of it is recorded: it says nothing about the bundle."""

    workload: Workload
    machine: Machine
    estimates: tuple[Estimate, ...]
    reliefs: tuple[Relief, ...]
    """What halves the calibration."""
    findings: tuple[Finding, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What `bundle build` is about to do, and everything there is to say about it first."""

    recipe: Recipe
    kind: Kind
    body: Source
    drafter: Source
    dataset_commit: str | None
    """None for a local file."""
    layout: Layout
    groups: tuple[ModuleGroup, ...]
    serving: ServePlan | None
    """None where the drafter does not fit the body, so that there is nothing to serve."""
    bake: BakePlan | None
    """None where no machine was looked at."""
    findings: tuple[Finding, ...]

    @property
    def body_bytes(self) -> int:
        """Size of the body's shards and their index."""
        return self.layout.nbytes + len(render_index(self.layout.shards).encode())

    @property
    def drafter_bytes(self) -> int:
        """Size of the drafter's weights."""
        return weight_bytes(self.drafter)


def make_plan(
    recipe: Recipe,
    body: Source,
    drafter: Source,
    dataset_commit: str | None = None,
    *,
    machine: Machine | None = None,
    target: Box | None = None,
    companion: bool | None = None,
    refuse: bool = False,
) -> Plan:
    """Plan a bundle from metadata: configs, headers and the small files in the sources' folders, no weights.

    `machine` is where it would be baked, and `refuse` says that it is about to be, so that what this machine lacks is
    an error; `target` is a box to serve it on; `companion` whether the QAT drafter that a QAT body could have exists.
    Faults are the plan's `findings`. CompatibilityError, with every finding, where the body cannot be laid out at all.
    """
    kind = find_kind(body.config)
    of_body, of_both = check_source(body), _check_sources(recipe, body, drafter, companion)
    drafter_config, of_drafter = _check_drafter(recipe, body, drafter)
    of_both += of_drafter
    if fatal := errors(of_body):
        message = f"{body.model} cannot be quantized: {fatal[0].message}"
        raise CompatibilityError(message, hint=fatal[0].hint, findings=[*of_body, *of_both])
    config, _ = to_published_schema(body.config)
    shapes = _shapes(body)
    layout = make_layout(shapes, config, make_ignore(kind, recipe.quantization.ignore))
    of_layout = check_layout(layout, shapes, recipe.quantization.ignore)
    if is_attention_quantized(layout):
        of_layout += check_origin(body)
    facts = engines.load_facts()
    setting = engines.Setting(
        serve=recipe.serve, kind=kind, num_speculative_tokens=recipe.drafter.num_speculative_tokens
    )
    of_engine, serving = engines.check_serve(facts, setting), None
    if drafter_config is not None:
        pair = (config, drafter_config)
        serving = make_serve_plan(recipe, setting, facts, pair, _output_shapes(layout), _shapes(drafter), target)
        of_engine += check_serve_plan(serving, recipe, target)
    if target and target.card.sm:
        of_engine += engines.check_hardware(facts, setting, target.card.sm)
    made = Plan(
        recipe=recipe,
        kind=kind,
        body=body,
        drafter=drafter,
        dataset_commit=dataset_commit,
        layout=layout,
        groups=make_groups(layout),
        serving=serving,
        bake=None,
        findings=(*of_body, *of_layout, *of_both, *of_engine),
    )
    return dataclasses.replace(made, bake=_make_bake_plan(made, machine, refuse)) if machine else made


def _make_bake_plan(plan: Plan, machine: Machine, refuse: bool) -> BakePlan:
    from bundler.quantize import check as check_environment

    sources = (plan.body, plan.drafter)
    files = [(source.folder / file.path, file.size_bytes) for source in sources for file in source.files]
    parts: dict[str, int] = {
        "source_bytes": sum(size for _, size in files),
        "missing_bytes": sum(size for path, size in files if not path.exists()),
        "output_bytes": plan.body_bytes + plan.drafter_bytes,
    }
    float32, room = in_float32(plan.recipe.quantization.compute, machine), room_bytes(machine)
    workload = make_workload(plan.recipe, plan.body, plan.layout, float32=float32, **parts)
    reliefs = []
    for change, smaller in halve(plan.recipe):
        less = make_workload(smaller, plan.body, plan.layout, float32=float32, **parts)
        relief = Relief(
            change=change,
            peak_bytes=less.peak_bytes(room),
            spilled_bytes=less.spilled_bytes(room),
            seconds=make_estimates(less, machine)[0].seconds,
        )
        reliefs.append(relief)
    lacking = check_environment()
    if not refuse:
        lacking = [warning(fault.code, fault.where, fault.message, fault.hint, fault.source) for fault in lacking]
    return BakePlan(
        workload=workload,
        machine=machine,
        estimates=make_estimates(workload, machine),
        reliefs=tuple(reliefs),
        findings=(*lacking, *check_machine(workload, machine, refuse=refuse)),
    )


def weight_bytes(source: Source) -> int:
    """Size of a source's safetensors files that hold its tensors."""
    shards = {tensor.file for tensor in source.tensors.values()}
    return sum(file.size_bytes for file in source.files if file.path in shards)


def licence_of(source: Source) -> str | None:
    """The licence as the source's own card names it."""
    licence = source.card.get("license_name") or source.card.get("license")
    return str(licence) if licence else None


def parameters_of(source: Source) -> int:
    """Elements of a source's tensors, as the Hub counts them: the tied head once, buffers too."""
    return sum(tensor.shape.numel for tensor in source.tensors.values())


def _shapes(source: Source) -> dict[str, Shape]:
    return {name: tensor.shape for name, tensor in source.tensors.items()}


def _output_shapes(layout: Layout) -> dict[str, Shape]:
    return {name: tensor.shape for shard in layout.shards for name, tensor in shard.tensors.items()}


def _check_sources(recipe: Recipe, body: Source, drafter: Source, companion: bool | None) -> list[Finding]:
    findings = [*check_side_files(body), *check_licences(body, drafter), *check_source_files(body, drafter)]
    findings += check_source_names(recipe.body.model, recipe.drafter.model, companion)
    for source in (body, drafter):  # a bake runs the body's, and a bundle holds both
        findings += check_templates(source.folder, [file.path for file in source.files])
    if all((source.folder / "tokenizer.json").is_file() for source in (body, drafter)):
        findings += check_tokenizers(body.folder, drafter.folder)
    return findings


def _check_drafter(recipe: Recipe, body: Source, drafter: Source) -> tuple[dict[str, Any] | None, list[Finding]]:
    """The drafter's config in the published schema, or None where it cannot serve this body, and what is wrong."""
    where, source = "assistant/config.json", "vLLM #51744, #52768"
    hint = "take the original's config.json"
    try:
        config, _ = to_published_schema(body.config)
    except CompatibilityError:
        return None, []  # check_source says so
    try:
        drafter_config, resaved = to_published_schema(drafter.config)
    except CompatibilityError as exc:
        return None, [error("drafter-config-schema", where, str(exc), hint, source)]
    findings = check_pair(config, drafter_config, drafter.tensors)
    fits = not errors(findings)
    if resaved:
        message = "was saved again by transformers >= 5.15 (per_layer_config), and a drafter is copied as it is"
        findings.append(warning("drafter-config-schema", where, message, hint, source))
    if not any(finding.code == "config-geometry" for finding in findings):
        findings += check_tensor_parallel(recipe.serve.tensor_parallel_size, config, drafter_config)
    return (drafter_config if fits else None), findings
