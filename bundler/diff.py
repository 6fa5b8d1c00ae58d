"""`bundle diff`: what differs between two recipes, bundles or repos, from recipe and sources to config and card."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from bundler import build, card, hub, quantize
from bundler.checkpoint import Shape, load_json, load_tensors
from bundler.errors import RecipeError, SourceError
from bundler.gemma4 import to_published_schema
from bundler.manifest import NAME as MANIFEST
from bundler.recipe import Recipe, SourceRef, load, load_bundled, parse
from bundler.recipe_rules import is_local

SECTIONS = ("recipe", "sources", "modules", "tensors", "config", "card")
_CARD = "README.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One side: for each section, what is where."""

    name: str
    sections: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One place where the sides are not alike; None where a side has nothing there."""

    section: str
    where: str
    left: str | None
    right: str | None
    count: int = 1
    """How many places this stands for: `layers.*` for as many layers."""


def look(name: str) -> View:
    """A recipe file, a bundle's or checkpoint's folder, or a Hub id (ORG/NAME, ORG/NAME@REVISION); no weight is read.

    RecipeError or SourceError if it is none of these or cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return _look_at_folder(name, path)
    if path.suffix == ".toml":
        return _look_at_recipe(name, load(path))
    if is_local(name) or "/" not in name:
        raise SourceError(f"there is no {name}", hint="give a recipe (.toml), a bundle's folder, or ORG/NAME")
    return _look_at_repo(name)


def compare(left: View, right: View) -> list[Difference]:
    """Every difference, in the order of SECTIONS; a section that one side does not know at all is left out."""
    found = []
    for section in SECTIONS:
        ours, theirs = left.sections.get(section), right.sections.get(section)
        if ours is None or theirs is None:
            continue
        for where in sorted(ours.keys() | theirs.keys()):
            if ours.get(where) != theirs.get(where):
                found.append(Difference(section=section, where=where, left=ours.get(where), right=theirs.get(where)))
    return found


def gather(differences: list[Difference]) -> list[Difference]:
    """Equal differences of many layers, experts or shards as one, numbers written as `*`."""

    def key(difference: Difference) -> tuple[int, str, str, str]:
        where = re.sub(r"(?<=\.)\d+(?=\.)", "*", difference.where)
        return SECTIONS.index(difference.section), where, str(difference.left), str(difference.right)

    gathered = []
    for (_, where, _, _), group in groupby(sorted(differences, key=key), key):
        first, *more = group
        gathered.append(dataclasses.replace(first, where=where if more else first.where, count=1 + len(more)))
    return gathered


def _look_at_recipe(name: str, recipe: Recipe) -> View:
    plan = build.resolve(recipe)
    config, _ = to_published_schema(plan.body.config)
    config["quantization_config"] = quantize.make_quantization_config(recipe.quantization, plan.layout.ignore)
    sources = {"body": _at(plan.body.model, plan.body.commit), "drafter": _at(plan.drafter.model, plan.drafter.commit)}
    sources["calibration"] = _at(recipe.calibration.dataset, plan.dataset_commit)
    shapes = {name: tensor.shape for shard in plan.layout.shards for name, tensor in shard.tensors.items()}
    text = card.render_recipe(recipe, card.make_parts(plan.body, plan.drafter))
    return View(name=name, sections=_sections(_settings(recipe), sources, shapes, config, text))


def _look_at_folder(name: str, folder: Path) -> View:
    settings = _settings(load_bundled(folder)) if (folder / "recipe.toml").is_file() else None
    manifest = load_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else None
    shapes = {name: tensor.shape for name, tensor in load_tensors(folder).items()}
    text = (folder / _CARD).read_text(encoding="utf-8") if (folder / _CARD).is_file() else ""
    config = load_json(folder / "config.json")
    return View(name=name, sections=_sections(settings, _sources(manifest), shapes, config, text))


def _look_at_repo(name: str) -> View:
    repo_id, _, revision = name.partition("@")
    source = hub.resolve(SourceRef(model=repo_id, revision=revision or None), Path())
    client = hub.make_client(SourceError)
    assert source.commit is not None
    files = hub.list_files(client, repo_id, source.commit)
    settings = None
    if recipe := files.get("recipe.toml"):
        try:
            settings = _settings(parse(hub.read_file(client, repo_id, source.commit, recipe).decode(), Path()))
        except (RecipeError, UnicodeDecodeError) as exc:
            raise SourceError(f"{repo_id}: its recipe.toml cannot be read: {exc}") from exc
    manifest = load_json(source.folder / MANIFEST) if (source.folder / MANIFEST).is_file() else None
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    text = (source.folder / _CARD).read_text(encoding="utf-8") if (source.folder / _CARD).is_file() else ""
    return View(name=name, sections=_sections(settings, _sources(manifest), shapes, source.config, text))


def _sections(
    settings: Mapping[str, str] | None,
    sources: Mapping[str, str] | None,
    shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
    text: str,
) -> dict[str, Mapping[str, str]]:
    found: dict[str, Mapping[str, str] | None] = {
        "recipe": settings,
        "sources": sources,
        "modules": _modules(shapes),
        "tensors": {name: f"{shape.dtype} {list(shape.dims)}" for name, shape in shapes.items()},
        "config": _flatten(config),
        "card": _card(text),
    }
    return {section: values for section, values in found.items() if values is not None}


def _settings(recipe: Recipe) -> dict[str, str]:
    values = dataclasses.asdict(recipe)
    del values["text"], values["folder"]
    return _flatten(values)


def _sources(manifest: Mapping[str, Any] | None) -> dict[str, str] | None:
    """The sources that a manifest names, read without judging it: an older or newer one is compared all the same."""
    if manifest is None:
        return None
    quantization = manifest.get("quantization")
    calibration = quantization.get("calibration") if isinstance(quantization, Mapping) else None
    entries = {
        "body": (manifest.get("body"), "model"),
        "drafter": (manifest.get("drafter"), "model"),
        "calibration": (calibration, "dataset"),
    }
    return {
        role: _at(str(entry.get(key)), entry.get("commit"))
        for role, (entry, key) in entries.items()
        if isinstance(entry, Mapping)
    }


def _at(model: str, commit: str | None) -> str:
    return f"{model} at {commit[:12]}" if commit else model


def _modules(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """What each module with a weight is stored as."""
    modules = {}
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight":
            modules[module] = shape.dtype
        elif leaf == "weight_packed":
            modules[module] = "NVFP4"
    return modules


def _flatten(value: Any, at: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        return {where: text for key, item in value.items() for where, text in _flatten(item, f"{at}.{key}").items()}
    plain = value if isinstance(value, str | int | float | bool | None) else json.dumps(value, default=str)
    return {at.removeprefix("."): json.dumps(plain) if isinstance(plain, bool | None) else str(plain)}


def _card(text: str) -> dict[str, str]:
    """The front matter's lines by key, and the text under each heading."""
    matter, body = "", text
    if match := re.match(r"---\n(.*?\n)---\n", text, re.DOTALL):
        matter, body = match[1], text[match.end() :]
    parts = {f"front matter: {part.partition(':')[0]}": part.strip() for part in re.split(r"\n(?=\w)", matter) if part}
    for part in re.split(r"^(?=#{1,6} )", body, flags=re.MULTILINE):
        if part.strip():
            heading = part.splitlines()[0] if part.startswith("#") else "before the first heading"
            parts[heading] = part.strip()
    return parts
