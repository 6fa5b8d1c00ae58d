"""`bundle build`: recipe → plan → body, drafter, card, manifest → verified → dist/<name>, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bundler import __version__, card, card_checks, drafter, hub, licence, manifest, quantize, verify
from bundler.errors import (
    BundlerError,
    CompatibilityError,
    QuantizationError,
    RecipeError,
    SourceError,
    VerificationError,
)
from bundler.findings import errors
from bundler.gemma4 import to_published_schema
from bundler.manifest import FileEntry, Manifest, SourceEntry, SourceFileEntry
from bundler.measurements import list_files
from bundler.plan import Plan, make_plan
from bundler.quantize.environment import versions
from bundler.quantize.journal import open_journal
from bundler.recipe import Recipe, SourceRef, local_path
from bundler.source import Source, SourceFile

_SIDE_FILES = re.compile(
    r"(generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|processor_config|"
    r"preprocessor_config|video_preprocessor_config)\.json|tokenizer\.model|chat_template\.(jinja|json)|NOTICE([.-]\w+)?"
)
"""What of a body's source is carried as it is, beside its weights: all that its processor and `generate` read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Who is told what is going on; each defaults to nobody."""

    plan: Callable[[Plan], None] = lambda plan: None
    fetch: hub.Progress = lambda path, done, total: None
    layer: quantize.OnLayer = lambda done, count, tokens: None
    step: Callable[[str], None] = lambda what: None


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A finished bundle: where it is, and its manifest."""

    folder: Path
    manifest: Manifest


def build(recipe: Recipe, dist: Path, *, replace: bool = False, watch: Watch | None = None) -> Built:
    """Make dist/<name>. What a stopped build finished is kept in dist/.<name>.stage and not done again.

    RecipeError, SourceError, CompatibilityError, QuantizationError or VerificationError; dist/<name> is then as it
    was, and the error says where the stage is once there is one.
    """
    watch = watch or Watch()
    target, stage = dist / recipe.name, dist / f".{recipe.name}.stage"
    if target.exists() and not replace:
        raise RecipeError(f"{target} exists", hint="give --replace, or another folder with --out")
    plan = resolve(recipe)
    watch.plan(plan)
    refuse(plan)
    with _stage(stage):
        made = _make_bundle(recipe, plan, stage, watch)
        if target.exists():
            target.rename(stage / "replaced")
        (stage / "bundle").rename(target)
    shutil.rmtree(stage)
    return Built(folder=target, manifest=made)


def resolve(recipe: Recipe) -> Plan:
    """Look every source up and plan; nothing large is downloaded."""
    body = hub.resolve(recipe.body, recipe.folder)
    drafter_ref = SourceRef(model=recipe.drafter.model, revision=recipe.drafter.revision)
    assistant = hub.resolve(drafter_ref, recipe.folder)
    dataset = recipe.calibration.dataset
    local = local_path(dataset, recipe.folder) is not None
    commit = None if local else hub.resolve_dataset(dataset, recipe.calibration.revision)
    plan = make_plan(recipe, body, assistant, commit)
    of_card = card_checks.check_recipe(recipe, card.make_parts(body, assistant))
    return replace(plan, findings=(*plan.findings, *of_card))


def refuse(plan: Plan) -> None:
    """Raise what the plan found to be impossible, all of it at once."""
    if found := errors(plan.findings):
        raise CompatibilityError("this recipe cannot become a bundle that serves", findings=found)


def _make_bundle(recipe: Recipe, plan: Plan, stage: Path, watch: Watch) -> Manifest:
    bundle = stage / "bundle"
    _clear(bundle, {shard.file for shard in plan.layout.shards})
    watch.step("fetching the sources")
    body, assistant = (hub.fetch(source, progress=watch.fetch) for source in (plan.body, plan.drafter))
    if found := errors(drafter.check_tokenizers(body.folder, assistant.folder)):
        raise CompatibilityError("the drafter speaks another vocabulary than the body", findings=found)

    watch.step("hashing the sources")
    body_entry = _hash_source(body)
    journal = open_journal(stage / "journal.jsonl", _fingerprint(recipe, plan, body_entry))
    _write_side_files(recipe, plan, body, bundle)
    copied = drafter.copy(assistant.folder, assistant.files, bundle / drafter.FOLDER)

    watch.step("quantizing the body")
    quantization = quantize.run(
        recipe, body, plan.layout, bundle, journal=journal, dataset_commit=plan.dataset_commit, on_layer=watch.layer
    )
    of_fidelity = quantize.check_fidelity(recipe.fidelity, quantization)
    if found := errors(of_fidelity):
        raise QuantizationError("the baked body is not faithful to its source", findings=found)
    watch.step("hashing the bundle")
    made = Manifest(
        name=recipe.name,
        tool={"bundler": __version__, **versions()},
        recipe_sha256=hashlib.sha256(recipe.text.encode()).hexdigest(),
        body=body_entry,
        drafter=_entry(assistant, copied),
        quantization=quantization,
        findings=(*plan.findings, *of_fidelity),
        files=manifest.make_entries(bundle),
    )
    (bundle / "README.md").write_text(card.render_bundle(bundle, made), encoding="utf-8", newline="\n")
    size_bytes, sha256 = manifest.hash_file(bundle / "README.md")
    readme = FileEntry(path="README.md", size_bytes=size_bytes, sha256=sha256, role="card")
    made = replace(made, files=tuple(sorted((*made.files, readme), key=lambda entry: entry.path)))
    manifest.write(bundle, made)
    watch.step("verifying the bundle")
    found = errors(verify.verify(bundle))
    if found:
        raise VerificationError("the bundle that was built is broken", findings=found)
    return made


def _clear(bundle: Path, shards: set[str]) -> None:
    """Leave of an unfinished bundle only the shards; all else is made anew in a moment."""
    bundle.mkdir(exist_ok=True)
    for path in bundle.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in shards:
            path.unlink()


def _write_side_files(recipe: Recipe, plan: Plan, body: Source, bundle: Path) -> None:
    for file in body.files:
        if _SIDE_FILES.fullmatch(file.path):
            shutil.copyfile(body.folder / file.path, bundle / file.path)
    config, _ = to_published_schema(body.config)
    config["quantization_config"] = quantize.make_quantization_config(recipe.quantization, plan.layout.ignore)
    _write(bundle / "config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    _write(bundle / "recipe.toml", recipe.text)
    (bundle / "LICENSE").write_bytes(licence.make_licence(body))
    measured = list_files(recipe.folder / path for path in recipe.card.measurements)
    sections = [recipe.folder / path for path in recipe.card.sections]
    for folder, paths in (("measurements", measured), ("assets", sections)):
        for path in paths:
            (bundle / folder).mkdir(exist_ok=True)
            shutil.copyfile(path, bundle / folder / path.name)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="")


def _hash_source(source: Source) -> SourceEntry:
    files = []
    for file in source.files:
        size_bytes, sha256 = manifest.hash_file(source.folder / file.path)
        if size_bytes != file.size_bytes or file.sha256 not in (None, sha256):
            where = source.folder / file.path
            raise SourceError(f"{where} is not the file that {source.model} lists", hint="remove it and build again")
        files.append(SourceFile(path=file.path, size_bytes=size_bytes, sha256=sha256))
    return _entry(source, files)


def _entry(source: Source, files: list[SourceFile]) -> SourceEntry:
    return SourceEntry(
        model=source.model,
        revision=source.revision,
        commit=source.commit,
        card=source.card,
        files=tuple(
            SourceFileEntry(path=file.path, size_bytes=file.size_bytes, sha256=str(file.sha256)) for file in files
        ),
    )


def _fingerprint(recipe: Recipe, plan: Plan, body: SourceEntry) -> str:
    """What decides the bytes of the body: the recipe's own part in it, the source's files, the tool versions."""
    parts: Mapping[str, object] = {
        "quantization": repr(recipe.quantization),
        "calibration": repr(recipe.calibration),
        "dataset": plan.dataset_commit,
        "body": [(file.path, file.sha256) for file in body.files],
        "tool": {"bundler": __version__, **versions()},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


@contextmanager
def _stage(stage: Path) -> Iterator[None]:
    """Hold the stage folder alone; an error on the way out says that the stage is kept."""
    from filelock import FileLock, Timeout

    stage.mkdir(parents=True, exist_ok=True)
    lock = FileLock(stage / "lock")
    try:
        lock.acquire(blocking=False)
    except Timeout as exc:
        raise QuantizationError(f"another build is at work in {stage}", hint="wait for it, or stop it") from exc
    try:
        yield
    except BundlerError as exc:
        kept = f"what is done is kept in {stage}; the same command carries on from there"
        exc.hint = f"{exc.hint}. {kept}" if exc.hint else kept
        raise
    finally:
        lock.release()
