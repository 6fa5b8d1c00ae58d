"""The plan as a person reads it, in 80 columns or more: what goes in and comes out, what it takes, where it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from bundler.figures import count, duration, exact_bytes, short_bytes, short_count
from bundler.plan import BakePlan, Plan, licence_of, parameters_of, weight_bytes
from bundler.serve_plan import BoxFit, ServePlan
from bundler.serving import Fit
from bundler.source import Source
from bundler.workload import room_bytes

_GATES = {"no": "not gated", "auto": "gated, granted at once", "manual": "gated, granted by hand"}


def render_plan(plan: Plan) -> Iterator[RenderableType]:
    """The plan's parts in order, each under its heading; findings and the serve line are the printer's."""
    recipe, layout = plan.recipe, plan.layout
    yield Text.assemble((recipe.name, "bold"), f"\n{recipe.quantization.scheme} body and drafter, Gemma 4 {plan.kind}")
    yield _heading("sources")
    yield _rows(*_sources(plan))
    yield _heading("the body, group by group")
    yield Padding(_group_table(plan), (0, 0, 0, 2))
    yield _heading("output")
    shards = f"{count(len(layout.shards), 'shard')} and the index; {short_bytes(weight_bytes(plan.body))} before"
    shown = short_count(layout.quantized_parameters + layout.kept_parameters)
    yield _rows(
        ("body", exact_bytes(plan.body_bytes), f"{shards}; {shown} parameters, as the Hub counts them"),
        ("drafter", exact_bytes(plan.drafter_bytes), "copied byte for byte"),
        ("together", exact_bytes(plan.body_bytes + plan.drafter_bytes), "tokenizers, card and licence come on top"),
    )
    if plan.bake:
        yield _heading("the bake on this machine")
        yield _rows(*_bake(plan.bake))
    if plan.serving:
        yield _heading("serving")
        yield _rows(*_serving(plan, plan.serving))
        yield Text()
        yield Padding(_fit_table(plan.serving), (0, 0, 0, 2))


def _heading(text: str) -> Text:
    return Text(f"\n{text}", "bold")


def _rows(*rows: tuple[str, str, str]) -> RenderableType:
    """Label, value, and what there is to say of it on a line below."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value, remark in rows:
        text = Text(value)
        if remark:
            text.append(f"\n{remark}", "dim")
        table.add_row(f"{label:<11}", text)
    return Padding(table, (0, 0, 0, 2))


def _sources(plan: Plan) -> Iterator[tuple[str, str, str]]:
    calibration = plan.recipe.calibration
    dataset = calibration.dataset
    if plan.dataset_commit:
        dataset = f"{dataset} ({calibration.split}) at {plan.dataset_commit[:12]}"
    samples = f"{count(calibration.num_samples, 'sample')} of at most {calibration.max_seq_length:,} tokens"
    yield "body", plan.body.model, _describe(plan.body)
    yield "drafter", plan.drafter.model, _describe(plan.drafter)
    yield "calibration", dataset, f"{samples}, seed {calibration.seed}"


def _describe(source: Source) -> str:
    at = f"{source.revision or 'main'} at {source.commit[:12]}" if source.commit else "local folder"
    words = [at + (f" of {source.date}" if source.date else "")]
    words.append(licence_of(source) or "no licence named")
    if source.gated:
        words.append(_GATES.get(source.gated, source.gated))
    words += [f"{short_count(parameters_of(source))} parameters", short_bytes(weight_bytes(source))]
    return ", ".join(words)


def _group_table(plan: Plan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("group", "becomes"):
        table.add_column(name, no_wrap=True)
    for name in ("modules", "parameters", "size"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why", style="dim")
    for group in plan.groups:
        becomes = Text(plan.recipe.quantization.scheme, "green") if group.quantized else Text("bf16")
        figures = (f"{group.modules:,}", short_count(group.parameters), short_bytes(group.size_bytes))
        table.add_row(group.name, becomes, *figures, group.reason)
    return table


def _bake(bake: BakePlan) -> Iterator[tuple[str, str, str]]:
    machine, work = bake.machine, bake.workload
    room = room_bytes(machine)
    parts = {**work.activation_bytes, "one layer": work.working_bytes, "libraries": work.libraries_bytes}
    shown = [
        f"{what} {short_bytes(nbytes)}{' (in a file)' if what in work.activation_bytes and nbytes > room else ''}"
        for what, nbytes in sorted(parts.items(), key=lambda part: -part[1])
    ]
    free = f"{short_bytes(machine.free_memory_bytes)} of {short_bytes(machine.memory_bytes)} are free"
    yield "memory", f"up to {_memory(work.peak_bytes(room), work.spilled_bytes(room))}; {free}", ", ".join(shown)
    kept = "stage and bundle are one folder that is renamed at the end"
    places = f"{short_bytes(machine.cache.free_bytes)} free in {_home(machine.cache.path)}"
    if machine.output.device != machine.cache.device:
        places += f", {short_bytes(machine.output.free_bytes)} in {_home(machine.output.path)}"
    part = f" of {short_bytes(work.source_bytes)}" if work.missing_bytes < 0.99 * work.source_bytes else ""
    fetched = f"{short_bytes(work.missing_bytes)}{part} to download"
    if not work.missing_bytes:
        fetched = f"the sources' {short_bytes(work.source_bytes)} are here"
    written = f"{short_bytes(work.output_bytes + work.spilled_bytes(room))} to write to {_home(machine.output.path)}"
    yield "disk", f"{fetched}, {written}", f"{places}; {kept}"
    for estimate in bake.estimates:
        yield "time", f"{duration(estimate.seconds)} on {estimate.device}", estimate.basis
    if reliefs := [
        f"--set {relief.change}: {_memory(relief.peak_bytes, relief.spilled_bytes)}, {duration(relief.seconds)}"
        for relief in bake.reliefs
    ]:
        yield "less", "\n".join(reliefs), ""


def _memory(peak_bytes: int, spilled_bytes: int) -> str:
    return short_bytes(peak_bytes) + (f" and {short_bytes(spilled_bytes)} in a file" if spilled_bytes else "")


def _home(path: Path) -> str:
    return f"~/{path.relative_to(Path.home())}" if path.is_relative_to(Path.home()) else str(path)


def _serving(plan: Plan, serving: ServePlan) -> Iterator[tuple[str, str, str]]:
    recipe, serve, kv = plan.recipe, plan.recipe.serve, serving.model.kv
    size = serve.tensor_parallel_size
    where = f"{count(size, 'card')}, {serve.interconnect}" if size > 1 else "1 card"
    context = f"{serving.needed_tokens:,} tokens of context" + ("" if serve.max_model_len else " (the model's own)")
    drafted = f"{count(recipe.drafter.num_speculative_tokens, 'token')} drafted a step"
    dtype = {"auto": "bf16", "bfloat16": "bf16"}.get(serve.kv_cache_dtype, serve.kv_cache_dtype)
    remark = f"KV cache {dtype}, {context}, {drafted}"
    yield "asked", f"{serve.engine} {serve.version} on {where}", remark
    sizes = ", ".join(map(str, serving.sizes)) or "no number"
    smallest = "none of the usual boxes has room for that context"
    if serving.smallest:
        smallest = f"{serving.smallest.box} is the smallest that has room for that context"
    yield "cards", f"{sizes} can share both models", smallest
    shared = f"; {count(kv.shared_layers, 'layer')} read another's" if kv.shared_layers else ""
    full, sliding = short_bytes(kv.full.token_bytes()), short_bytes(kv.sliding.token_bytes())
    remark = (
        f"{full} in {count(kv.full.layers, 'full layer')}; a stream's last {kv.kept_tokens:,} tokens also {sliding} "
        f"in {count(kv.sliding.layers, 'sliding layer')}{shared}"
    )
    yield "KV cache", f"{short_bytes(kv.token_bytes())} a token in {dtype}", remark
    for number, release in enumerate(serving.releases):
        tried = f" (tried with transformers {release.transformers})" if release.transformers else ""
        yield "" if number else "releases", f"{release.versions}: {release.answer}{tried}", ""
    if not serving.target and not serving.fits:
        return
    fit = (serving.target or serving.fits[0]).drafting
    drafter = serving.model.drafter.on_card(fit.box.count)
    body, work = short_bytes(fit.weights_bytes - drafter), short_bytes(fit.work_bytes)
    yield (
        "each card",
        f"{short_bytes(fit.weights_bytes)} of weights",
        f"body {body}, drafter {short_bytes(drafter)}; and {work} to work with",
    )


def _fit_table(serving: ServePlan) -> Table:
    """A box a line: the KV cache of one card, then how much context fits."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("on", no_wrap=True)
    for name in ("KV cache", "tokens", "1 stream", "8 streams", "alone, 1", "alone, 8"):
        table.add_column(name, justify="right", no_wrap=True)
    target = serving.target
    fits = [fit for fit in serving.fits if target is None or fit.drafting.box != target.drafting.box]
    if target:
        table.add_row(Text(str(target.drafting.box), "bold"), *_fit_cells(target, serving.needed_tokens))
    for fit in fits:
        table.add_row(str(fit.drafting.box), *_fit_cells(fit, serving.needed_tokens))
    return table


def _fit_cells(fit: BoxFit, needed: int) -> list[Text]:
    drafting, alone = fit.drafting, fit.alone
    cache = Text(short_bytes(drafting.kv_bytes)) if drafting.kv_bytes > 0 else Text("no room", "red")
    enough = "green" if drafting.context_tokens >= needed else "yellow"
    return [
        cache,
        _tokens(drafting, drafting.kv_tokens),
        _tokens(drafting, drafting.context_tokens, enough),
        _tokens(drafting, drafting.context_tokens_of_8),
        _tokens(alone, alone.context_tokens),
        _tokens(alone, alone.context_tokens_of_8),
    ]


def _tokens(fit: Fit, tokens: int, style: str = "") -> Text:
    return Text(short_count(tokens), style) if fit.kv_bytes > 0 else Text("-", "dim")
