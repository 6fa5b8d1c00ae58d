"""The plan as one JSON document: sizes in bytes, times in seconds, keys only ever added within one `schema`."""

from __future__ import annotations

import dataclasses
from typing import Any

from bundler.engines import render_bash
from bundler.findings import Finding
from bundler.plan import BakePlan, Plan, licence_of, parameters_of, weight_bytes
from bundler.serve_plan import BoxFit, ServePlan
from bundler.serving import ASSUMPTIONS, Fit
from bundler.source import Source
from bundler.workload import BASES, room_bytes

SCHEMA = 1


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """What `bundle plan --json` prints."""
    recipe, layout = plan.recipe, plan.layout
    return {
        "schema": SCHEMA,
        "name": recipe.name,
        "kind": plan.kind.value,
        "body": _source(plan.body),
        "drafter": {**_source(plan.drafter), "num_speculative_tokens": recipe.drafter.num_speculative_tokens},
        "quantization": {**dataclasses.asdict(recipe.quantization), "ignore": layout.ignore},
        "calibration": {**dataclasses.asdict(recipe.calibration), "commit": plan.dataset_commit},
        "serve": dataclasses.asdict(recipe.serve),
        "groups": [dataclasses.asdict(group) for group in plan.groups],
        "quantized_modules": len(layout.quantized),
        "quantized_parameters": layout.quantized_parameters,
        "kept_parameters": layout.kept_parameters,
        "dropped_tensors": layout.dropped,
        "shards": [{"path": shard.file, "size_bytes": shard.nbytes} for shard in layout.shards],
        "body_bytes": plan.body_bytes,
        "drafter_bytes": plan.drafter_bytes,
        "total_bytes": plan.body_bytes + plan.drafter_bytes,
        "findings": _findings(plan.findings),
        "serving": _serving(plan.serving) if plan.serving else None,
        "bake": _bake(plan.bake) if plan.bake else None,
    }


def _source(source: Source) -> dict[str, Any]:
    return {
        "model": source.model,
        "revision": source.revision,
        "commit": source.commit,
        "licence": licence_of(source),
        "licence_link": source.card.get("license_link"),
        "parameters": parameters_of(source),
        "weight_bytes": weight_bytes(source),
        "date": source.date,
        "gated": source.gated,
        "file_bytes": sum(file.size_bytes for file in source.files),
    }


def _serving(serving: ServePlan) -> dict[str, Any]:
    model, kv = serving.model, serving.model.kv
    return {
        "tensor_parallel_sizes": serving.sizes,
        "context_tokens": serving.needed_tokens,
        "kv": {
            "sliding_layers": kv.sliding.layers,
            "sliding_token_bytes": kv.sliding.token_bytes(),
            "sliding_kept_tokens": kv.kept_tokens,
            "window_tokens": kv.window,
            "full_layers": kv.full.layers,
            "full_token_bytes": kv.full.token_bytes(),
            "shared_layers": kv.shared_layers,
            "element_bytes": kv.full.element_bytes,
        },
        "weights": {
            "body": {str(size): model.body.on_card(size) for size in serving.sizes},
            "drafter": {str(size): model.drafter.on_card(size) for size in serving.sizes},
        },
        "cards": [_box_fit(fit) for fit in serving.fits],
        "target": _box_fit(serving.target) if serving.target else None,
        "smallest": _fit(serving.smallest) if serving.smallest else None,
        "releases": [dataclasses.asdict(release) for release in serving.releases],
        "command": render_bash(serving.command),
        "assumptions": [{"text": text, "source": source} for text, source in ASSUMPTIONS],
    }


def _box_fit(fit: BoxFit) -> dict[str, Any]:
    return {**_box(fit.drafting), "drafting": _fit(fit.drafting), "alone": _fit(fit.alone)}


def _box(fit: Fit) -> dict[str, Any]:
    return {"cards": fit.box.count, "card": fit.box.card.name, "card_bytes": fit.box.card.nbytes}


def _fit(fit: Fit) -> dict[str, Any]:
    figures = {name: value for name, value in dataclasses.asdict(fit).items() if name not in ("box", "drafter")}
    return {**_box(fit), **figures}


def _bake(bake: BakePlan) -> dict[str, Any]:
    machine, workload = bake.machine, bake.workload
    return {
        "machine": {
            "cores": machine.cores,
            "memory_bytes": machine.memory_bytes,
            "free_memory_bytes": machine.free_memory_bytes,
            "matmul_rate": round(machine.matmul_rate),
            "bf16_units": machine.bf16_units,
            "hash_rate": round(machine.hash_rate),
            "gpus": [dataclasses.asdict(gpu) for gpu in machine.gpus],
        },
        "tokens": workload.tokens,
        "flops": workload.flops,
        "memory_bytes": {
            **workload.activation_bytes,
            "one layer": workload.working_bytes,
            "libraries": workload.libraries_bytes,
        },
        "peak_bytes": workload.peak_bytes(room_bytes(machine)),
        "spilled_bytes": workload.spilled_bytes(room_bytes(machine)),
        "disk": {
            "source": {"path": str(machine.cache.path), "size_bytes": workload.source_bytes},
            "missing_bytes": workload.missing_bytes,
            "output": {"path": str(machine.output.path), "size_bytes": workload.output_bytes},
            "free_bytes": {str(place.path): place.free_bytes for place in (machine.cache, machine.output)},
        },
        "times": [dataclasses.asdict(estimate) for estimate in bake.estimates],
        "reliefs": [dataclasses.asdict(relief) for relief in bake.reliefs],
        "bases": [{"text": text, "source": source} for text, source in BASES],
        "findings": _findings(bake.findings),
    }


def _findings(findings: tuple[Finding, ...]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(finding) for finding in findings]
