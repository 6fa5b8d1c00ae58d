"""A bundle → findings. Works on a directory it has never seen, without torch and without the network.

Every fault is reported in one run. What bytes cannot show is whether the model answers well: that takes an engine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bundler import drafter, sidefiles
from bundler.checkpoint import INDEX, Tensor, is_lfs_pointer, load_json
from bundler.engines import Setting, check_serve, load_facts
from bundler.errors import BundlerError, CompatibilityError, SourceError, VerificationError
from bundler.evidence import check_evidence
from bundler.findings import Finding, Severity, error, errors, warning
from bundler.gemma4 import find_kind, to_published_schema
from bundler.hostile import check_hostile
from bundler.inventory import body_shapes
from bundler.layout import Layout, make_layout
from bundler.manifest import NAME, Known, Manifest, compare, list_files, load
from bundler.names import check_name, check_path
from bundler.recipe import load_bundled
from bundler.scales import check_scales
from bundler.weights import check_inventory, check_shards

_WRITTEN = re.compile(rf"config\.json|{re.escape(INDEX)}|model-\d{{5}}-of-\d{{5}}\.safetensors")
_UNUSABLE = {"config-kind", "config-geometry"}
_DOWNLOAD = "download the bundle again"


def verify(root: Path, *, is_known: Known | None = None, weights: bool = True) -> list[Finding]:
    """Everything that is wrong with the bundle in `root`; an empty list if it is what its manifest says and will load.

    Files of which `is_known` says that they still have the manifest's hash are not hashed; with `weights=False`, only
    the headers of the shards are looked at. Never raises for a bad bundle: whatever cannot be read is a finding too.
    """
    if not root.is_dir():
        return [error("bundle-missing", str(root), "is no folder", "give the path of a bundle")]
    findings = _check_paths(root)
    manifest: Manifest | None = None
    try:
        manifest = load(root)
    except VerificationError as exc:
        findings += exc.findings
    else:
        findings += compare(manifest, root, is_known=is_known) + _check_origin(manifest) + _check_recipe(manifest)
        findings += check_evidence(root, manifest)
    config = _read(root, "config.json", findings)
    findings += _check_side_files(root, manifest, config or {}) + check_hostile(root)
    shards, faults = check_shards(root)
    findings += faults + (check_scales(root, shards.tensors) if weights else [])
    if config is not None:
        faults = sidefiles.check_config(config)
        findings += faults
        if _UNUSABLE.isdisjoint(finding.code for finding in faults):
            layout = make_layout(body_shapes(config), config, sidefiles.usable_ignore(config))
            findings += sidefiles.check_quantization(config) + check_inventory(layout, shards)
            if manifest is not None:
                findings += _check_record(manifest, layout) + _check_engine(root, config)
    if (root / drafter.FOLDER).is_dir():
        findings += _check_drafter(root, config, weights)
    return list(dict.fromkeys(findings))


def _check_paths(root: Path) -> list[Finding]:
    """What must not be in a bundle whatever its manifest says: odd names, links out, pointers."""
    top = root.resolve()
    location = check_name(str(top), str(root))
    findings = [replace(finding, severity=Severity.WARNING) for finding in location]
    for folder, folders, names in os.walk(top):
        here = Path(folder)
        if here == top / ".cache":
            folders[:] = [name for name in folders if name != "huggingface"]
        for name in sorted(folders + names):
            path = here / name
            where = path.relative_to(top).as_posix()
            if path.is_symlink() and not _is_inside(path, top):
                message = "is a link to a folder, or out of the bundle, or to nothing"
                findings.append(error("path-link", where, message, "put the file itself here"))
            if not path.is_file():
                if not path.is_dir() and not path.is_symlink():
                    findings.append(error("path-special", where, "is no regular file"))
                continue
            findings += check_path(where)
            if path.suffix not in (".json", ".safetensors") and is_lfs_pointer(path):
                findings.append(error("lfs-pointer", where, "is a Git LFS pointer, not the file", _DOWNLOAD))
    return findings


def _is_inside(link: Path, top: Path) -> bool:
    """Whether a link is to a file of the bundle, or to a blob of the Hub cache that the bundle is a snapshot in."""
    target = link.resolve()
    blobs = top.parent.parent / "blobs" if top.parent.name == "snapshots" else top
    return target.is_file() and (target.is_relative_to(top) or target.is_relative_to(blobs))


def _read(root: Path, name: str, findings: list[Finding]) -> dict[str, Any] | None:
    """A JSON file of the bundle; None if it is absent, or, with a finding, if it cannot be read."""
    if not (root / name).is_file():
        return None
    try:
        return load_json(root / name)
    except SourceError as exc:
        if is_lfs_pointer(root / name):
            findings.append(error("lfs-pointer", name, str(exc), exc.hint))
        else:
            findings.append(error("json-unreadable", name, str(exc), exc.hint or _DOWNLOAD))
        return None


def _check_origin(manifest: Manifest) -> list[Finding]:
    """Whether every file that is a copy has the hash that its source's file has."""
    body = {file.path: file.sha256 for file in manifest.body.files}
    own = {f"{drafter.FOLDER}/{file.path}": file.sha256 for file in manifest.drafter.files}
    findings = []
    for entry in manifest.files:
        if entry.role not in ("body", "drafter") or _WRITTEN.fullmatch(entry.path):
            continue
        sources, model = (body, manifest.body.model) if entry.role == "body" else (own, manifest.drafter.model)
        if entry.path not in sources:
            message = f"is no file of its source, {model}, and no file that a build writes"
            findings.append(error("source-unknown", entry.path, message, "move it out of the bundle"))
        elif sources[entry.path] != entry.sha256:
            message = f"is not the file that {model} has: SHA-256 {entry.sha256}, source {sources[entry.path]}"
            findings.append(error("source-differs", entry.path, message, "build the bundle again"))
    return findings


def _check_recipe(manifest: Manifest) -> list[Finding]:
    message = f"is not the recipe that {NAME} was built from, whose SHA-256 is {manifest.recipe_sha256}"
    return [
        error("recipe-hash", entry.path, message, "put the original recipe back, or build again")
        for entry in manifest.files
        if entry.role == "recipe" and entry.sha256 != manifest.recipe_sha256
    ]


def _check_record(manifest: Manifest, layout: Layout) -> list[Finding]:
    """Whether what the manifest says was quantized is what config.json says."""
    record = manifest.quantization
    pairs = (
        ("scheme", record.scheme, "NVFP4"),
        ("format", record.format, sidefiles.FORMAT),
        ("ignore", record.ignore, layout.ignore),
        ("quantized_modules", record.quantized_modules, len(layout.quantized)),
        ("quantized_parameters", record.quantized_parameters, layout.quantized_parameters),
        ("kept_parameters", record.kept_parameters, layout.kept_parameters),
    )
    return [
        error("manifest-record", f"{NAME}: quantization.{key}", f"is {said!r:.60}, config.json means {means!r:.60}")
        for key, said, means in pairs
        if said != means
    ]


def _check_engine(root: Path, config: Mapping[str, Any]) -> list[Finding]:
    """What is known against the releases that the bundle's own recipe tells people to serve it with."""
    try:
        recipe = load_bundled(root)
    except BundlerError:
        return []  # without its recipe a bundle has other faults
    setting = Setting(
        serve=recipe.serve,
        kind=find_kind(config),
        multimodal="vision_config" in config,
        num_speculative_tokens=recipe.drafter.num_speculative_tokens,
    )
    return errors(check_serve(load_facts(), setting))


def _check_side_files(root: Path, manifest: Manifest | None, config: Mapping[str, Any]) -> list[Finding]:
    present = {path.as_posix() for path in list_files(root)}
    listed = {entry.path for entry in manifest.files} if manifest else set()  # what is gone of these is said already
    findings = sidefiles.check_presence(present | listed)
    tokenizer = _read(root, "tokenizer.json", findings)
    settings = _read(root, "tokenizer_config.json", findings) or {}
    generation = _read(root, "generation_config.json", findings)
    name = "processor_config.json" if "processor_config.json" in present else "preprocessor_config.json"
    processor = _read(root, name, findings) or {}
    vocabulary: dict[str, int] = {}
    if tokenizer is not None:
        try:
            vocabulary = drafter.make_vocabulary(tokenizer)
        except SourceError as exc:
            findings.append(error("tokenizer-vocab", "tokenizer.json", str(exc), _DOWNLOAD))
    if generation is not None:
        findings += sidefiles.check_generation(generation, config, vocabulary)
    findings += sidefiles.check_chat_template(present | listed, settings)
    findings += sidefiles.check_tokenizer(tokenizer or {}, settings, vocabulary, config)
    return findings + sidefiles.check_processor(processor, config)


def _check_drafter(root: Path, body_config: Mapping[str, Any] | None, weights: bool) -> list[Finding]:
    folder, at = root / drafter.FOLDER, f"{drafter.FOLDER}/"
    findings: list[Finding] = []
    config = _read(root, f"{at}config.json", findings)
    shards, faults = check_shards(folder, at, index_required=False)
    findings += faults
    if config is not None and body_config is not None:
        pair = _check_pair(body_config, config, shards.tensors)
        if shards.lost or not shards.whole:
            pair = [finding for finding in pair if finding.code != "drafter-tensor-missing"]
        findings += pair
    findings += drafter.check_token_ordering(folder, shards.tensors) if weights else []
    findings += drafter.check_tokenizers(root, folder)
    hint = "copy it from the drafter's repository"
    if not (folder / "README.md").is_file():
        message = "is missing: the drafter's own card has to come with it"
        findings.append(warning("drafter-card-missing", f"{at}README.md", message, hint))
    if not (folder / "generation_config.json").is_file():
        message = "is missing: transformers reads the number of drafts from it"
        findings.append(warning("drafter-generation-missing", f"{at}generation_config.json", message, hint))
    return findings


def _check_pair(
    body_config: Mapping[str, Any], config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> list[Finding]:
    where = f"{drafter.FOLDER}/config.json"
    source, hint = "vLLM #51744, #52768", "take the original's config.json"
    try:
        published, resaved = to_published_schema(config)
    except CompatibilityError as exc:
        return [error("drafter-config-schema", where, str(exc), hint, source)]
    findings = drafter.check_pair(body_config, published, tensors)
    if resaved:
        message = "was saved again by transformers >= 5.15 (per_layer_config): vLLM before 0.29 refuses it"
        findings.append(warning("drafter-config-schema", where, message, hint, source))
    return findings
