"""The plan: everything about a bundle that its recipe and its sources' metadata tell, before any weight is read."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from bundler import engines
from bundler.body import check_layout, check_origin, check_side_files, check_source, check_tensor_parallel
from bundler.checkpoint import render_index
from bundler.drafter import check_pair, check_source_names, check_tokenizers
from bundler.errors import CompatibilityError
from bundler.findings import Finding, errors, warning
from bundler.gemma4 import Kind, find_kind, make_ignore, to_published_schema
from bundler.layout import QUANTIZED_PARTS, Layout, make_layout
from bundler.licence import check_licences
from bundler.recipe import Recipe
from bundler.source import Source

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleGroup:
    """Modules of the finished body that are treated alike, for one reason."""

    name: str
    quantized: bool
    modules: int
    parameters: int
    size_bytes: int
    reason: str
    """Why they stay bf16; empty for the quantized."""


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
    findings: tuple[Finding, ...]

    @property
    def body_bytes(self) -> int:
        """Size of the body's shards and their index."""
        return self.layout.nbytes + len(render_index(self.layout.shards).encode())

    @property
    def drafter_bytes(self) -> int:
        """Size of the drafter's weights."""
        return weight_bytes(self.drafter)


def make_plan(recipe: Recipe, body: Source, drafter: Source, dataset_commit: str | None = None) -> Plan:
    """Plan a bundle from metadata: configs, headers and the small files in the sources' folders, no weights.

    Faults are the plan's `findings`. CompatibilityError, with every finding, where the body cannot be laid out at all.
    """
    kind = find_kind(body.config)
    of_body, of_both = check_source(body), _check_sources(recipe, body, drafter)
    if fatal := errors(of_body):
        message = f"{body.model} cannot be quantized: {fatal[0].message}"
        raise CompatibilityError(message, hint=fatal[0].hint, findings=[*of_body, *of_both])
    config, _ = to_published_schema(body.config)
    shapes = {name: tensor.shape for name, tensor in body.tensors.items()}
    layout = make_layout(shapes, config, make_ignore(kind, recipe.quantization.ignore))
    of_layout = check_layout(layout, shapes, recipe.quantization.ignore)
    setting = engines.Setting(
        serve=recipe.serve, kind=kind, num_speculative_tokens=recipe.drafter.num_speculative_tokens
    )
    of_engine = engines.check_serve(engines.load_facts(), setting)
    return Plan(
        recipe=recipe,
        kind=kind,
        body=body,
        drafter=drafter,
        dataset_commit=dataset_commit,
        layout=layout,
        groups=tuple(_make_groups(layout)),
        findings=(*of_body, *of_layout, *of_both, *of_engine),
    )


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """The plan as `--json` prints it; sizes in bytes, keys only ever added within one `schema`."""
    recipe, layout = plan.recipe, plan.layout
    return {
        "schema": SCHEMA,
        "name": recipe.name,
        "kind": plan.kind.value,
        "body": _source_to_dict(plan.body),
        "drafter": {
            **_source_to_dict(plan.drafter),
            "num_speculative_tokens": recipe.drafter.num_speculative_tokens,
        },
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
        "findings": [dataclasses.asdict(finding) for finding in plan.findings],
    }


def weight_bytes(source: Source) -> int:
    """Size of a source's safetensors files that hold its tensors."""
    shards = {tensor.file for tensor in source.tensors.values()}
    return sum(file.size_bytes for file in source.files if file.path in shards)


def licence_of(source: Source) -> str | None:
    """The licence as the source's own card names it."""
    licence = source.card.get("license_name") or source.card.get("license")
    return str(licence) if licence else None


def _source_to_dict(source: Source) -> dict[str, Any]:
    return {
        "model": source.model,
        "revision": source.revision,
        "commit": source.commit,
        "licence": licence_of(source),
        "licence_link": source.card.get("license_link"),
        "parameters": sum(tensor.shape.numel for tensor in source.tensors.values()),
        "weight_bytes": weight_bytes(source),
    }


def _check_sources(recipe: Recipe, body: Source, drafter: Source) -> list[Finding]:
    findings = [*check_origin(body), *check_side_files(body), *check_licences(body, drafter)]
    findings += check_source_names(recipe.body.model, recipe.drafter.model)
    try:
        (config, _), (drafter_config, resaved) = map(to_published_schema, (body.config, drafter.config))
    except CompatibilityError:
        return findings  # check_source says so of the body; of the drafter check_pair does
    pair = check_pair(config, drafter_config, drafter.tensors)
    findings += pair
    if resaved:
        message = "was saved again by transformers >= 5.15 (per_layer_config), and a drafter is copied as it is"
        hint = "take the original's config.json"
        where = "assistant/config.json"
        findings.append(warning("drafter-config-schema", where, message, hint, "vLLM #51744, #52768"))
    if not any(finding.code == "config-geometry" for finding in pair):
        findings += check_tensor_parallel(recipe.serve.tensor_parallel_size, config, drafter_config)
    if all((source.folder / "tokenizer.json").is_file() for source in (body, drafter)):
        findings += check_tokenizers(body.folder, drafter.folder)
    return findings


_GROUPS = (
    ("attention", r"\.language_model\.layers\.\d+\.self_attn\.[qkvo]_proj\.", ""),
    ("experts", r"\.experts\.", ""),
    ("mlp", r"\.language_model\.layers\.\d+\.mlp\.", ""),
    ("vision", r"\.(vision_tower|embed_vision|vision_embedder)\.", "engines keep it bf16"),
    ("audio", r"\.(audio_tower|embed_audio)\.", "engines keep it bf16"),
    ("per-layer table", r"embed_tokens_per_layer\.", "a lookup table"),
    ("per-layer", r"per_layer", "much loss, small gain"),  # exllamav3 #253: twice the KL divergence for 1 % of size
    ("embeddings", r"(embed_tokens|lm_head)\.", "shared with the head"),
    ("router", r"\.router\.", "picks the experts"),
    ("norms, scalars", r"", "vectors"),
)
"""Name, which tensors, why they stay bf16; the first pattern that is found in a tensor's name decides."""


def _make_groups(layout: Layout) -> list[ModuleGroup]:
    """Every tensor of the output in one group, quantized groups first."""
    sizes = {name: tensor.shape for shard in layout.shards for name, tensor in shard.tensors.items()}
    rows: dict[tuple[bool, str], list[tuple[str, int, int]]] = {}
    for module, (out_features, in_features) in layout.quantized.items():
        nbytes = sum(sizes[f"{module}.{part}"].nbytes for part in QUANTIZED_PARTS)
        rows.setdefault((True, _group_of(f"{module}.")), []).append((module, out_features * in_features, nbytes))
    for name, shape in layout.kept.items():
        rows.setdefault((False, _group_of(name)), []).append((name.rpartition(".")[0], shape.numel, shape.nbytes))
    reasons = {name: reason for name, _, reason in _GROUPS}
    order = [(quantized, name) for quantized in (True, False) for name in reasons]
    return [
        ModuleGroup(
            name=name,
            quantized=quantized,
            modules=len({module for module, _, _ in rows[quantized, name]}),
            parameters=sum(parameters for _, parameters, _ in rows[quantized, name]),
            size_bytes=sum(nbytes for _, _, nbytes in rows[quantized, name]),
            reason="" if quantized else reasons[name] or "quantization.ignore",
        )
        for quantized, name in order
        if (quantized, name) in rows
    ]


def _group_of(tensor: str) -> str:
    return next(name for name, pattern, _ in _GROUPS if re.search(pattern, tensor))
