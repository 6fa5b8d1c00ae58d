"""`bundle build`: recipe → plan → body, drafter, card, manifest → verified → dist/<name>, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from bundler import __version__, card, card_checks, drafter, hub, licence, manifest, quantize, sidefiles, verify
from bundler.checkpoint import load_json
from bundler.engines import Box
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
from bundler.machine import look
from bundler.manifest import FileEntry, Manifest, QuantizationEntry, SourceEntry, SourceFileEntry
from bundler.measurements import list_files
from bundler.plan import Plan, make_plan
from bundler.quantize import parallel
from bundler.quantize.environment import versions
from bundler.quantize.journal import Journal, open_journal
from bundler.recipe import Recipe, SourceRef, local_path
from bundler.source import Source, SourceFile

JOURNAL = "journal.jsonl"
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
    bake: Callable[[quantize.Progress], None] = lambda progress: None
    step: Callable[[str], None] = lambda what: None


@dataclass(frozen=True, kw_only=True, slots=True)
class Means:
    """What a build may use of this machine."""

    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """A finished bundle: where it is, and its manifest."""

    folder: Path
    manifest: Manifest


def build(
    recipe: Recipe, dist: Path, *, replace: bool = False, means: Means | None = None, watch: Watch | None = None
) -> Built | None:
    """Make dist/<name>. What a stopped build finished is kept in dist/.<name>.stage and not done again.

    RecipeError, SourceError, CompatibilityError, QuantizationError or VerificationError; dist/<name> is then as it
    was, and the error says where the stage is once there is one. Under torchrun, ranks other than 0 help and get None.
    """
    means = means or Means()
    watch = watch if watch and parallel.rank() == 0 else Watch()
    target, stage = dist / recipe.name, dist / f".{recipe.name}.stage"
    if target.exists() and not replace:
        raise RecipeError(f"{target} exists", hint="give --replace, or another folder with --out")
    plan = resolve(recipe, dist, refusing=True)
    watch.plan(plan)
    refuse(plan)
    with parallel.group(quantize.open_device(means.device)):
        if parallel.rank() > 0:
            _help(recipe, plan, stage, means)
            return None
        with _stage(stage):
            made = _make_bundle(recipe, plan, stage, means, watch)
            if target.exists():
                target.rename(stage / "replaced")
            (stage / "bundle").rename(target)
        shutil.rmtree(stage)
    return Built(folder=target, manifest=made)


def resolve(recipe: Recipe, dist: Path = Path("dist"), *, box: Box | None = None, refusing: bool = False) -> Plan:
    """Look every source up, and this machine, and plan; nothing large is downloaded.

    `box` is one that the bundle might be served on; with `refusing`, what this machine lacks is an error.
    """
    assistant_ref = SourceRef(model=recipe.drafter.model, revision=recipe.drafter.revision)
    with ThreadPoolExecutor() as pool:
        sources = [pool.submit(hub.resolve, ref, recipe.folder) for ref in (recipe.body, assistant_ref)]
        dataset, companion = pool.submit(_resolve_dataset, recipe), pool.submit(_find_companion, recipe)
        body, assistant = (source.result() for source in sources)
    plan = make_plan(
        recipe,
        body,
        assistant,
        dataset.result(),
        machine=look(hub.cache_folder(), dist),
        target=box,
        companion=companion.result(),
        refuse=refusing,
    )
    of_card = card_checks.check_recipe(recipe, card.make_parts(body, assistant))
    return replace(plan, findings=(*plan.findings, *of_card))


def _resolve_dataset(recipe: Recipe) -> str | None:
    local = local_path(recipe.calibration.dataset, recipe.folder) is not None
    return None if local else hub.resolve_dataset(recipe.calibration.dataset, recipe.calibration.revision)


def _find_companion(recipe: Recipe) -> bool | None:
    """Whether the QAT drafter is there that the recipe could have; None where it has it, or names a local folder."""
    name = drafter.companion_of(recipe.body.model, recipe.drafter.model)
    try:
        return hub.is_there(name) if name and local_path(name, recipe.folder) is None else None
    except SourceError:  # a question of advice: the Hub need not answer it
        return None


def refuse(plan: Plan) -> None:
    """Raise what the plan found to be impossible, all of it at once."""
    if found := errors([*plan.findings, *(plan.bake.findings if plan.bake else ())]):
        raise CompatibilityError("this recipe cannot become a bundle that serves", findings=found)


def _make_bundle(recipe: Recipe, plan: Plan, stage: Path, means: Means, watch: Watch) -> Manifest:
    bundle = stage / "bundle"
    if found := errors(quantize.check()):
        raise QuantizationError("this environment cannot bake", findings=found)
    _clear(bundle, {shard.file for shard in plan.layout.shards})
    watch.step("fetching the sources")
    body, assistant = (hub.fetch(source, progress=watch.fetch) for source in (plan.body, plan.drafter))
    if found := errors(drafter.check_tokenizers(body.folder, assistant.folder)):
        raise CompatibilityError("the drafter speaks another vocabulary than the body", findings=found)
    before = _marks(body)
    journal = open_journal(stage / JOURNAL, _fingerprint(recipe, plan, before))
    _write_side_files(recipe, plan, body, bundle)
    copied = drafter.copy(assistant.folder, assistant.files, bundle / drafter.FOLDER)
    parallel.barrier()

    watch.step("quantizing the body")
    with ThreadPoolExecutor(1) as pool:
        hashing = pool.submit(_hash_source, body)
        quantization = _quantize(recipe, plan, body, bundle, journal, means, watch)
        body_entry = hashing.result()
    assert quantization is not None  # this is rank 0
    if _marks(body) != before:
        raise SourceError(f"{body.model} changed while it was read", hint="remove the stage and build again")
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
    if found := errors(verify.verify(bundle)):
        raise VerificationError("the bundle that was built is broken", findings=found)
    return made


def _help(recipe: Recipe, plan: Plan, stage: Path, means: Means) -> None:
    """What a rank other than 0 does: its share of the quantizing, once rank 0 has prepared the stage."""
    parallel.barrier()
    body = hub.fetch(plan.body)
    journal = open_journal(stage / JOURNAL, _fingerprint(recipe, plan, _marks(body)))
    _quantize(recipe, plan, body, stage / "bundle", journal, means, Watch())


def _quantize(
    recipe: Recipe, plan: Plan, body: Source, bundle: Path, journal: Journal, means: Means, watch: Watch
) -> QuantizationEntry | None:
    return quantize.run(
        recipe,
        body,
        plan.layout,
        bundle,
        journal=journal,
        dataset_commit=plan.dataset_commit,
        tell=watch.bake,
        device=means.device,
        memory_limit_bytes=means.memory_limit_bytes,
    )


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
    processor = next(bundle / name for name in sidefiles.PROCESSORS if (bundle / name).is_file())
    config = sidefiles.complete_vision(to_published_schema(body.config)[0], load_json(processor))
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


def _marks(source: Source) -> list[tuple[str, int, str]]:
    """What shows that a source's files are others now: size, and the Hub's hash or the time of the last change."""
    stats = [(file, (source.folder / file.path).stat()) for file in source.files]
    return [(file.path, stat.st_size, file.sha256 or str(stat.st_mtime_ns)) for file, stat in stats]


def _fingerprint(recipe: Recipe, plan: Plan, marks: Sequence[tuple[str, int, str]]) -> str:
    """What decides the bytes of the body: the recipe's own part in it, the source's files, the tool versions."""
    parts: Mapping[str, object] = {
        "quantization": repr(recipe.quantization),
        "calibration": repr(recipe.calibration),
        "dataset": plan.dataset_commit,
        "commit": plan.body.commit,
        "body": marks,
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
    kept = f"what is done is kept in {stage}; the same command carries on from there"
    try:
        yield
    except BundlerError as exc:
        exc.hint = f"{exc.hint}. {kept}" if exc.hint else kept
        raise
    except OSError as exc:
        message = f"cannot write {exc.filename or stage}: {exc.strerror or exc}"
        raise QuantizationError(message, hint=f"make room on the disk; {kept}") from exc
    finally:
        lock.release()
