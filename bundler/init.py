"""`bundle init`: a body becomes a commented recipe that plans without errors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from bundler import card, card_checks, engines, hub
from bundler.body import check_origin
from bundler.drafter import check_pair
from bundler.engines import Setting
from bundler.errors import CompatibilityError, RecipeError, SourceError
from bundler.findings import Finding, errors
from bundler.front_matter import UNCENSORED
from bundler.gemma4 import Kind, find_kind, to_published_schema
from bundler.plan import Plan, licence_of, make_plan
from bundler.recipe import Recipe, Serve, SourceRef, parse
from bundler.recipe_rules import is_local
from bundler.source import Source

DATASET = "HuggingFaceH4/ultrachat_200k"
_SPLIT = "train_sft"
_CONTEXT_TOKENS = 32_768
_SAMPLES = 256
_QAT = re.compile(r"(^|[-_./])qat([-_.]|$)", re.IGNORECASE)
_SIZES = {5376: "31B", 2816: "26B-A4B", 3840: "12B", 2560: "E4B", 1536: "E2B"}
"""hidden_size → what Google calls a body of that width."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A new recipe, and what it plans to."""

    path: Path
    plan: Plan


def init(body: str, out: Path | None = None, *, drafter: str | None = None, dataset: str | None = None) -> Written:
    """Write a recipe for a Gemma 4 body on the Hub or in a folder; by default ./NAME.toml.

    Without a `drafter` the one that belongs to the body is looked for, by name and by shape; without a `dataset` it is
    ultrachat, or the calibration.jsonl beside a local body. SourceError if body or drafter cannot be had,
    CompatibilityError if they do not become a bundle, RecipeError if the file is there already.
    """
    folder = out.parent if out else Path()
    source = hub.resolve(SourceRef(model=_named(body, folder)), folder)
    kind = find_kind(source.config)
    assistant = _take(drafter, source, folder) if drafter else _find(source, folder)
    name = _make_name(source)
    path = out or Path(f"{name}.toml")
    if path.exists():
        raise RecipeError(f"{path} exists", hint="remove it, or name another file with --out")
    recipe = _fit(_make_text(name, kind, source, assistant, _dataset(dataset, source, folder)), folder, kind)
    plan = make_plan(recipe, source, assistant)
    recipe = _choose_context(recipe, plan)
    plan = make_plan(recipe, source, assistant)
    of_card = card_checks.check_recipe(recipe, card.make_parts(source, assistant))
    if found := errors([*plan.findings, *of_card]):
        raise CompatibilityError(f"{source.model} and {assistant.model} do not become a bundle", findings=found)
    path.write_text(recipe.text, encoding="utf-8", newline="\n")
    return Written(path=path, plan=plan)


def _named(model: str, folder: Path) -> str:
    """A model as a recipe in `folder` names it: a folder that is there is meant, else a Hub id."""
    if not is_local(model) and not Path(model).is_dir():
        return model
    relative = os.path.relpath(Path(model).expanduser().resolve(), folder.resolve())
    return Path(relative).as_posix() if relative.startswith("..") else f"./{Path(relative).as_posix()}"


def _take(model: str, body: Source, folder: Path) -> Source:
    drafter = hub.resolve(SourceRef(model=_named(model, folder)), folder)
    if found := errors(_pair(body, drafter)):
        raise CompatibilityError(f"{drafter.model} is no drafter for {body.model}", findings=found)
    return drafter


def _find(body: Source, folder: Path) -> Source:
    """The first candidate that is there and fits."""
    tried = list(dict.fromkeys(_candidates(body, folder)))
    for model in tried:
        try:
            drafter = hub.resolve(SourceRef(model=model), folder)
        except SourceError:
            continue
        if not errors(_pair(body, drafter)):
            return drafter
    raise SourceError(
        f"no drafter was found that fits {body.model}; looked for {', '.join(tried) or 'none'}",
        hint="name one: --drafter ORG/NAME, or a folder",
    )


def _candidates(body: Source, folder: Path) -> Iterator[str]:
    parents = body.card.get("base_model") or []
    parents = [str(parent) for parent in (parents if isinstance(parents, list) else [parents])]
    if body.commit is None:
        beside = body.folder.parent
        near = [Path(f"{body.folder}-assistant"), beside / "drafter", beside / "assistant"]
        yield from (_named(str(path), folder) for path in near if path.is_dir())
    else:
        parents.insert(0, body.model)
    yield from (f"{parent}-assistant" for parent in parents)
    size = _SIZES.get(body.config["text_config"].get("hidden_size"))
    if size:
        if any(_QAT.search(name) for name in parents):
            yield f"google/gemma-4-{size}-it-qat-q4_0-unquantized-assistant"
        yield f"google/gemma-4-{size}-it-assistant"


def _pair(body: Source, drafter: Source) -> list[Finding]:
    config, _ = to_published_schema(body.config)
    drafter_config, _ = to_published_schema(drafter.config)
    return check_pair(config, drafter_config, drafter.tensors)


def _make_name(body: Source) -> str:
    stem = (body.folder.name if body.commit is None else body.model.rpartition("/")[2]) or "gemma-4"
    if body.commit is None and stem in ("body", "model"):
        stem = body.folder.parent.name
    stem = re.sub(r"-q4_0-unquantized", "", stem)
    return f"{re.sub(r'[^A-Za-z0-9._-]+|--+', '-', stem).strip('-._')[:80]}-NVFP4-MTP"


def _dataset(dataset: str | None, body: Source, folder: Path) -> dict[str, str | int]:
    beside = body.folder.parent / "calibration.jsonl"
    if dataset is None and body.commit is None and beside.is_file():
        dataset = str(beside)
    if dataset is None:
        return {"dataset": DATASET, "split": _SPLIT, "num_samples": _SAMPLES}
    if not is_local(dataset):
        return {"dataset": dataset, "num_samples": _SAMPLES}
    path = Path(dataset).expanduser()
    rows = _SAMPLES
    if path.suffix == ".jsonl" and path.is_file():
        rows = sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
    return {"dataset": _named(dataset, folder), "num_samples": max(1, min(rows, _SAMPLES))}


def _make_text(name: str, kind: Kind, body: Source, drafter: Source, dataset: dict[str, str | int]) -> str:
    return f"""\
# Gemma 4 {kind}: an NVFP4 body with its drafter. recipes/README.md explains every key; what is left out has a default.
edition = 1
name = {_toml(name)}

[body]
{_describe(body)}
model = {_toml(body.model)}

[quantization]
{_quantization(body)}

[calibration]
# The conversations that set the ranges of the activations.
{_lines(dataset)}
max_seq_length = 2048         # tokens; longer samples are cut

[drafter]
{_describe(drafter)}
model = {_toml(drafter.model)}
num_speculative_tokens = {_draft_length(kind, body)}

[serve]
{_VERSION}
{_CONTEXT}

[card]
title = {_toml(name.replace("-NVFP4-MTP", "").replace("-", " ") + ": NVFP4 + MTP")}{_warnings(body)}

[publish]
private = true                # until `bundle push --public`
"""


_VERSION, _CONTEXT = "# version", "# context"


def _toml(value: str | int) -> str:
    return json.dumps(value, ensure_ascii=False)


def _lines(values: dict[str, str | int]) -> str:
    return "\n".join(f"{key} = {_toml(value)}" for key, value in values.items())


def _describe(source: Source) -> str:
    link = source.card.get("license_link")
    licence = (licence_of(source) or "no licence named") + (f", {link}" if link else "")
    at = f"main was {source.commit[:12]} of {source.date} when this was written" if source.commit else "a local folder"
    return f"# {at}. Licence: {licence}"


def _quantization(body: Source) -> str:
    scheme = 'scheme = "NVFP4"              # 4-bit weights and activations'
    if not check_origin(body):
        return scheme
    return (
        f"{scheme}\n# Nothing says that this body was trained for 4 bit (QAT); in 4 bit attention breaks others.\n"
        'ignore = ["re:.*self_attn.*"]'
    )


def _warnings(body: Source) -> str:
    if not UNCENSORED.search(body.model):
        return ""
    warning = "Refusal behaviour was removed upstream. You are responsible for what you deploy; use it lawfully."
    return f"\nwarnings = [{_toml(warning)}]"


def _draft_length(kind: Kind, body: Source) -> str:
    """The number that pays for this kind by what is known; the least of a range, but for E4B, which bears more."""
    setting = Setting(serve=Serve(), kind=kind)
    matches = engines.select_facts(engines.load_facts(), setting)
    ranges = [match.fact for match in matches if match.fact.num_speculative_tokens]
    if not ranges or ranges[0].num_speculative_tokens is None:
        return "4"
    least, most = ranges[0].num_speculative_tokens
    chosen = most if kind is Kind.PER_LAYER and body.config["text_config"]["hidden_size"] > 1536 else least
    return f"{chosen}    # {ranges[0].text.rstrip('.')}"


def _fit(text: str, folder: Path, kind: Kind) -> Recipe:
    """The recipe with the oldest vLLM from which on nothing is known to be broken."""
    facts = engines.load_facts()
    for version in engines.allowed_releases(facts, Serve(version=">=0.21")):
        wanted = f">={version.removesuffix('.0')}"
        setting = Setting(serve=Serve(version=wanted), kind=kind)
        if not any(found.answer.startswith("no:") for found in engines.make_release_ranges(facts, setting)):
            line = (
                f"version = {_toml(wanted):<22}# vLLM; the first release from which on nothing is known to be broken"
            )
            return parse(text.replace(_VERSION, line), folder)
    return parse(text.replace(_VERSION, 'version = ">=0.21"'), folder)


def _choose_context(recipe: Recipe, plan: Plan) -> Recipe:
    """The recipe with a context that one usual card has room for, and the card."""
    assert plan.serving is not None
    model = plan.serving.model
    tokens = min(_CONTEXT_TOKENS, model.kv.max_tokens)
    box = model.smallest((1,), tokens) or model.smallest(plan.serving.sizes, tokens)
    cards = f"tensor_parallel_size = {box.box.count}\n" if box and box.box.count > 1 else ""
    where = f"; {box.box} is the smallest box with room for it" if box else ""
    line = f"{cards}max_model_len = {tokens:<14}# tokens{where}"
    return parse(recipe.text.replace(_CONTEXT, line), recipe.folder)
