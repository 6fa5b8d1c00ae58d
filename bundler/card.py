"""README.md: recorded data in, text out. Pure; what is not recorded does not appear.

Sentences live in templates/card.md.jinja, engine facts in engines/*.toml, figures in measurement files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import FunctionLoader, StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from bundler import card_tables as views
from bundler.checkpoint import load_json
from bundler.engines import (
    FOLDER,
    Facts,
    Match,
    Setting,
    Verdict,
    load_facts,
    make_release_ranges,
    make_serve_command,
    render_bash,
    render_powershell,
    select_facts,
)
from bundler.errors import CompatibilityError, RecipeError, SourceError, VerificationError
from bundler.evidence import Evidence, make_digest, make_tested
from bundler.evidence import load_all as load_evidence
from bundler.front_matter import make_front_matter, render_front_matter
from bundler.gemma4 import Kind, find_kind, kv_geometry, own_layer_types
from bundler.manifest import FileEntry, Manifest, hash_file
from bundler.manifest import load as load_manifest
from bundler.manifest import write as write_manifest
from bundler.markdown import cell, code, link, prose
from bundler.measurements import Measurement, load_measurements
from bundler.recipe import Recipe, load_bundled, parse
from bundler.recipe import load as load_recipe
from bundler.resources import load_resource
from bundler.source import Source
from bundler.tables import make_headline, make_tables

_KIND_IN_NAME = (
    (re.compile(r"(?i)(?<![a-z0-9])e[24]b(?![a-z0-9])"), Kind.PER_LAYER),
    (re.compile(r"(?i)(?<![a-z0-9])26b-a4b(?![a-z0-9])"), Kind.MOE),
    (re.compile(r"(?i)(?<![a-z0-9])12b(?![a-z0-9])"), Kind.UNIFIED),
    (re.compile(r"(?i)(?<![a-z0-9])31b(?![a-z0-9])"), Kind.DENSE),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What is known of the two checkpoints; everything may be unknown before a build."""

    body_config: Mapping[str, Any] | None = None
    drafter_config: Mapping[str, Any] | None = None
    body_card: Mapping[str, Any] = field(default_factory=dict)
    """Front matter of the body's own card."""
    drafter_card: Mapping[str, Any] = field(default_factory=dict)


def make_parts(body: Source, drafter: Source) -> Parts:
    """The parts as two resolved sources describe them."""
    return Parts(
        body_config=body.config, drafter_config=drafter.config, body_card=body.card, drafter_card=drafter.card
    )


def load_parts(bundle: Path, manifest: Manifest) -> Parts:
    """The parts of a finished bundle: its two config.json, and the cards that the manifest recorded.

    SourceError if a config cannot be read.
    """
    body, drafter = (load_json(bundle / path) for path in ("config.json", "assistant/config.json"))
    return Parts(
        body_config=body, drafter_config=drafter, body_card=manifest.body.card, drafter_card=manifest.drafter.card
    )


def load_sections(folder: Path, paths: Sequence[Path]) -> tuple[str, ...]:
    """The publisher's own markdown sections; RecipeError if one cannot be read."""
    texts = []
    for path in paths:
        try:
            texts.append((folder / path).read_text(encoding="utf-8").strip())
        except (OSError, UnicodeDecodeError) as exc:
            raise RecipeError(f"cannot read the card section {path}: {exc}") from exc
    return tuple(texts)


def render_recipe(recipe: Recipe, parts: Parts | None = None) -> str:
    """The card as it would be before a bake; RecipeError where a measurement file or a section cannot be read."""
    measurements = load_measurements(recipe.folder / path for path in recipe.card.measurements)
    sections = load_sections(recipe.folder, recipe.card.sections)
    return render(recipe, None, measurements, load_facts(), parts=parts, sections=sections)


def render_bundle(bundle: Path, manifest: Manifest | None = None, *, repo_id: str | None = None) -> str:
    """The card of a finished bundle from what lies in it: manifest, recipe, configs, measurements/ and assets/."""
    manifest = manifest or load_manifest(bundle)
    try:
        recipe = parse((bundle / "recipe.toml").read_text(encoding="utf-8"), bundle)
        parts = load_parts(bundle, manifest)
    except (OSError, ValueError, SourceError) as exc:
        raise VerificationError(f"the bundle {bundle} is not whole: {exc}", hint="bundle verify says what is") from exc
    measurements = load_measurements((bundle / "measurements").glob("*.json"))
    sections = load_sections(bundle / "assets", [Path(path.name) for path in recipe.card.sections])
    tested = [item for item in load_evidence(bundle) if item.bundle_sha256 == make_digest(manifest)]
    return render(
        recipe, manifest, measurements, load_facts(), parts=parts, sections=sections, repo_id=repo_id, evidence=tested
    )


def write_bundle(bundle: Path, *, repo_id: str | None = None) -> None:
    """Render a bundle's README.md again, and put its new hash into bundle.json."""
    manifest = load_manifest(bundle)
    part = bundle / "README.md.part"
    part.write_text(render_bundle(bundle, manifest, repo_id=repo_id), encoding="utf-8", newline="\n")
    part.replace(bundle / "README.md")
    size_bytes, sha256 = hash_file(bundle / "README.md")
    card = FileEntry(path="README.md", size_bytes=size_bytes, sha256=sha256, role="card")
    files = [entry for entry in manifest.files if entry.path != card.path]
    write_manifest(bundle, replace(manifest, files=tuple(sorted([*files, card], key=lambda entry: entry.path))))


def render(
    recipe: Recipe,
    manifest: Manifest | None,
    measurements: Sequence[Measurement],
    facts: Facts,
    *,
    parts: Parts | None = None,
    sections: Sequence[str] = (),
    repo_id: str | None = None,
    evidence: Sequence[Evidence] = (),
) -> str:
    """The whole card. Without a manifest it is a preview: what a bake would record is left out.

    `repo_id` is where the bundle goes, where that is not the recipe's `publish.repo_id`.
    """
    known = _complete(parts or Parts(), manifest)
    setting = make_setting(recipe, known)
    matches = select_facts(facts, setting)
    repo = repo_id or recipe.publish.repo_id
    context = {
        "recipe": recipe,
        "manifest": manifest,
        "parts": known,
        "kind": setting.kind.value if setting.kind else None,
        "repo": repo,
        "page": repo or f"ORG/{recipe.name}",
        "serve": _serve_lines(recipe, matches, repo),
        "matches": {section: [m for m in matches if m.fact.section == section] for section in _SECTIONS},
        "reports": [_source(number, entry) for number, entry in enumerate(measurements, start=1)],
        "headline": [views.headline(table, row) for table, row in make_headline(measurements)],
        "reported": bool(measurements) and all(entry.basis == "reported" for entry in measurements),
        "tested": make_tested(evidence),
        "releases": make_release_ranges(facts, setting),
        "release_notes": _works(matches),
        "tables": views.measured_tables(make_tables(measurements)),
        "others": views.other_drafters(measurements),
        "observed": {name: views.observations(measurements, topics) for name, topics in _TOPICS.items()},
        "sizes": _sizes(manifest),
        "kv": _kv_bytes(known.body_config),
        "kept": views.kept(setting.kind, recipe.quantization.ignore),
        "files": views.provenance(manifest) if manifest else [],
        "origins": views.sources(manifest) if manifest else [],
        "sections": sections,
    }
    body = _environment().get_template("card.md.jinja").render(context)
    matter = render_front_matter(make_front_matter(recipe, known.body_card, known.body_config))
    return matter + "\n" + re.sub(r"\n{3,}", "\n\n", body).strip() + "\n"


@cache
def _environment() -> SandboxedEnvironment:
    """Made once: parsing the template takes longer than rendering it."""
    environment = SandboxedEnvironment(
        loader=FunctionLoader(load_resource), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "cell": cell,
        "code": code,
        "prose": prose,
        "link": link,
        "fact_sources": views.fact_sources,
    }
    environment.filters |= {
        "gb": views.gigabytes,
        "count": views.count,
        "model": views.model_link,
        "refs": views.references,
    }
    return environment


_TOPICS = {
    "size": ("size",),
    "memory": ("memory", "parallelism"),
    "quality": ("quality",),
    "speed": ("speed",),
    "siblings": ("siblings",),
    "drafters": ("drafters",),
}
"""Where in the card the topics of observations stand."""


def _works(matches: Sequence[Match]) -> list[str]:
    """What "yes" in the table of releases rests on."""
    works = [m.fact.text for m in matches if m.fact.section == "release" and m.fact.verdict is Verdict.WORKS]
    return list(dict.fromkeys(works))


_SECTIONS = ("requirement", "trap", "advice", "hardware", "calibration", "limit")


def make_setting(recipe: Recipe, parts: Parts) -> Setting:
    """What the engine facts are asked about."""
    config = parts.body_config
    return Setting(
        serve=recipe.serve,
        kind=_find_kind(config, recipe.body.model),
        multimodal=config is None or "vision_config" in config,
        num_speculative_tokens=recipe.drafter.num_speculative_tokens,
    )


def load_setting(source: Path) -> Setting:
    """What the engine facts are asked about a recipe file, or a bundle's folder."""
    if source.suffix == ".toml":
        return make_setting(load_recipe(source), Parts())
    recipe = load_bundled(source)
    return make_setting(recipe, load_parts(source, load_manifest(source)))


def _find_kind(config: Mapping[str, Any] | None, model: str) -> Kind | None:
    """From config.json; before it is at hand, from the size in the published name (E4B, 12B, 26B-A4B, 31B)."""
    if config is not None:
        try:
            return find_kind(config)
        except CompatibilityError:
            return None
    return next((kind for pattern, kind in _KIND_IN_NAME if pattern.search(model)), None)


def _complete(parts: Parts, manifest: Manifest | None) -> Parts:
    if manifest is None:
        return parts
    return Parts(
        body_config=parts.body_config,
        drafter_config=parts.drafter_config,
        body_card=parts.body_card or manifest.body.card,
        drafter_card=parts.drafter_card or manifest.drafter.card,
    )


def _serve_lines(recipe: Recipe, matches: Sequence[Match], repo: str | None) -> dict[str, str]:
    name = repo or recipe.name
    both = make_serve_command(recipe.serve, recipe.drafter, matches, name=name)
    alone = make_serve_command(recipe.serve, None, matches, model=repo or FOLDER, name=name)
    return {
        "bash": render_bash(both),
        "powershell": render_powershell(both),
        "alone": render_bash(alone),
        "name": name,
    }


def _source(number: int, measurement: Measurement) -> dict[str, object]:
    return {
        "number": number,
        "file": f"measurements/{measurement.file}",
        "basis": measurement.basis,
        "who": measurement.source,
        "body": measurement.body,
        "link": measurement.link,
    }


def _sizes(manifest: Manifest | None) -> dict[str, int]:
    """Bytes of body and drafter; empty before a bake."""
    if manifest is None:
        return {}
    return {
        role: sum(entry.size_bytes for entry in manifest.files if entry.role == role) for role in ("body", "drafter")
    }


def _kv_bytes(config: Mapping[str, Any] | None) -> dict[str, int] | None:
    """KV cache bytes per token in bf16 (keys and values, 2 bytes each), per kind of layer; None if unknown."""
    text = (config or {}).get("text_config")
    if not isinstance(text, Mapping) or not text.get("layer_types"):
        return None
    totals = {"sliding_attention": 0, "full_attention": 0}
    for layer in own_layer_types(text):
        heads, head_dim = kv_geometry(text, layer)
        totals[layer] = totals.get(layer, 0) + heads * head_dim * 2 * 2
    return {**totals, "window": int(text["sliding_window"])}
