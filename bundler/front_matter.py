"""The YAML block at the head of a card, which the Hub reads: made from the sources' own cards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from bundler.findings import Finding, error, note, warning
from bundler.recipe import Recipe
from bundler.recipe_rules import is_local
from bundler.resources import load_resource
from bundler.source import parse_front_matter

UNCENSORED = re.compile(r"abliterat|uncensored|heretic", re.IGNORECASE)
_BLOCK = re.compile(r"\A---\n(.*?\n)---\n", re.DOTALL)


def make_front_matter(
    recipe: Recipe, body_card: Mapping[str, Any], body_config: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The front matter of a bundle's card; a key whose value is not known is left out.

    `base_model` is the body's direct parent alone: the Hub reads a list as a merge (hub docs, model-cards).
    """
    matter = {key: body_card[key] for key in ("license", "license_name", "license_link") if body_card.get(key)}
    languages = list(recipe.card.languages) or body_card.get("language")
    if languages:
        matter["language"] = languages
    if not is_local(recipe.body.model):
        matter |= {"base_model": recipe.body.model, "base_model_relation": "quantized"}
    matter["library_name"] = recipe.serve.engine
    sees = body_config is not None and "vision_config" in body_config
    if task := body_card.get("pipeline_tag") or ("image-text-to-text" if sees else None):
        matter["pipeline_tag"] = task
    matter["tags"] = _tags(recipe, body_card)
    return matter


def _tags(recipe: Recipe, body_card: Mapping[str, Any]) -> list[str]:
    own = ["gemma4", recipe.quantization.scheme.lower(), "compressed-tensors", "mtp", "speculative-decoding"]
    given = body_card.get("tags")
    inherited = [tag for tag in given if isinstance(tag, str)] if isinstance(given, list) else []
    named = ["abliterated"] if "abliterated" in recipe.body.model.lower() else []
    return list(dict.fromkeys([*own, *named, *inherited]))


def render_front_matter(matter: Mapping[str, Any]) -> str:
    """The block with its fences, as safe YAML."""
    text = yaml.safe_dump(dict(matter), sort_keys=False, allow_unicode=True, default_flow_style=False)
    return f"---\n{text}---\n"


def hub_licences() -> frozenset[str]:
    """Every licence identifier that the Hub accepts."""
    lines = load_resource("hub-licences.txt").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def check_front_matter(text: str, where: str = "README.md") -> list[Finding]:
    """What the Hub would refuse in a card's front matter (`/api/validate-yaml`), and what it would misread."""
    block = _BLOCK.match(text)
    try:
        matter = parse_front_matter(block[1]) if block else {}
    except ValueError as exc:
        return [error("card-not-yaml", where, f"the front matter {exc}")]
    if not matter:
        return [error("card-not-yaml", where, "there is no front matter", "start the card with a `---` block")]
    findings = _check_licence(matter, where)
    base = matter.get("base_model", "")
    if base is None or (isinstance(base, list) and (not base or None in base)):
        findings.append(error("card-base-model", f"{where}: base_model", "is empty", "name the body's direct parent"))
    elif isinstance(base, list) and len(base) > 1:
        message = "is a list, which the Hub reads as a merge"
        findings.append(
            warning("card-base-model-list", f"{where}: base_model", message, "name the direct parent alone")
        )
    return findings


def _check_licence(matter: Mapping[str, Any], where: str) -> list[Finding]:
    licence = matter.get("license")
    place = f"{where}: license"
    if not licence:
        return [note("card-licence-open", place, "is not known yet; it comes from the body's own card at build time")]
    if not isinstance(licence, str) or licence not in hub_licences():
        message = f"{licence!r} is no licence identifier of the Hub"
        return [error("card-licence-unlisted", place, message, "use `other` with license_name and license_link")]
    if licence == "other" and not matter.get("license_name"):
        return [error("card-licence-unnamed", place, "`other` needs a license_name", "and a license_link")]
    return []
