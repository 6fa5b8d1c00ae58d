"""What is wrong with a card before anyone sees it: front matter, a missing warning, the publisher's own sections."""

from __future__ import annotations

import re
from collections.abc import Sequence

from bundler.card import Parts, load_sections, render
from bundler.engines import load_facts
from bundler.findings import Finding, error, note, warning
from bundler.front_matter import UNCENSORED, check_front_matter
from bundler.measurements import ASSISTANT, read_measurements
from bundler.recipe import Recipe
from bundler.recipe_rules import is_local


def check_recipe(recipe: Recipe, parts: Parts | None = None) -> list[Finding]:
    """Everything that the card of this recipe would get wrong, its measurement files included."""
    measurements, findings = read_measurements(recipe.folder / path for path in recipe.card.measurements)
    sections = load_sections(recipe.folder, recipe.card.sections)
    text = render(recipe, None, measurements, load_facts(), parts=parts, sections=sections)
    findings += check_card(recipe, text, parts=parts, sections=sections)
    dtype = recipe.serve.kv_cache_dtype
    drafted = [run for entry in measurements for run in entry.runs if run.drafter == ASSISTANT]
    if dtype != "auto" and drafted and not any(dtype in flag for run in drafted for flag in run.setup.flags):
        message = f"the serve line uses {dtype}, and no acceptance rate was measured with it"
        hint = "measure with the KV cache that the card prints: the drafter reads it"
        findings.append(
            warning("card-kv-unmeasured", "serve.kv_cache_dtype", message, hint, "vllm-project/vllm#52987")
        )
    return findings


def check_card(
    recipe: Recipe,
    text: str,
    *,
    parts: Parts | None = None,
    sections: Sequence[str] = (),
) -> list[Finding]:
    """What is wrong with a rendered card: its front matter, a missing warning, the publisher's own sections."""
    findings = check_front_matter(text)
    tags = (parts or Parts()).body_card.get("tags")
    names = [recipe.body.model, *(tag for tag in (tags if isinstance(tags, list) else []) if isinstance(tag, str))]
    if any(UNCENSORED.search(name) for name in names) and not recipe.card.warnings:
        message = f"{recipe.body.model} has its refusals removed, and the card does not say so"
        findings.append(error("card-warning-missing", "card.warnings", message, "add a sentence for its users"))
    if is_local(recipe.body.model):
        message = "a local folder has no page on the Hub, so the card names no base_model"
        findings.append(note("card-base-model-local", "body.model", message))
    for path, section in zip(recipe.card.sections, sections, strict=False):
        findings += _check_section(str(path), section, recipe.publish.repo_id)
    return findings


def _check_section(where: str, text: str, repo: str | None) -> list[Finding]:
    findings = []
    if not text.startswith("## "):
        findings.append(error("card-section-heading", where, "must start with a `## ` heading"))
    if re.search(r"(?m)^\s*\|?(\s*:?-{3,}:?\s*\|)+|<table", text):
        hint = "put the figures into a measurement file"
        findings.append(
            error("card-table-unsourced", where, "holds a table; tables come from measurement files", hint)
        )
    if repo and f"{repo}/assistant" in text.replace(f"huggingface.co/{repo}", ""):
        message = f"{repo}/assistant is no Hub id; the drafter is a local path"
        findings.append(error("card-drafter-id", where, message, source="vllm-project/vllm#52940"))
    if re.search(r'speculative-config[^\n]*"quantization"', text):
        message = "`quantization` in --speculative-config breaks a bf16 drafter"
        findings.append(error("card-drafter-quantization", where, message, source="vllm-project/vllm#45420"))
    if "--override-generation-config" in text and "eos_token_id" not in text:
        message = "--override-generation-config drops the list of stop tokens"
        hint = "repeat eos_token_id in it, or leave it out"
        findings.append(warning("card-stop-tokens", where, message, hint, "vllm-project/vllm#45591"))
    return findings
