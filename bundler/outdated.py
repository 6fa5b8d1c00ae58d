"""Whether a bundle's sources have moved on since it was built: body, drafter and chat template, file by file."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

from bundler import hub, manifest
from bundler.errors import SourceError
from bundler.findings import Finding, note, warning
from bundler.hub import Client, RemoteFile
from bundler.manifest import Manifest, SourceEntry
from bundler.recipe import Recipe
from bundler.remote import parse_address
from bundler.shipment import MAX_MANIFEST_BYTES

_KINDS = {
    "weights": re.compile(r"[^/]*\.safetensors(\.index\.json)?"),
    "chat template": re.compile(r"chat_template\.\w+"),
    "tokenizer": re.compile(r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens)\.(json|model)"),
    "config": re.compile(r"(config|generation_config|(pre|video_pre)?processor_config|preprocessor_config)\.json"),
}
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REBUILD = "build it again, or pin the revision in the recipe"


def load_recorded(recipe: Recipe, place: str | None, dist: Path) -> Manifest:
    """The manifest of the recipe's bundle: in folder or repo `place`, else in dist/<name>, else as it is published.

    SourceError where there is none.
    """
    folder = Path(place) if place else dist / recipe.name
    if (folder / manifest.NAME).is_file():
        return manifest.load(folder)
    address = parse_address(place or recipe.publish.repo_id or "")
    if address is None:
        hint = "name it with --bundle: a folder, or ORG/NAME"
        raise SourceError(f"there is no bundle of {recipe.name} in {folder}", hint=hint)
    client = hub.make_client(SourceError)
    commit = hub.find_commit(client, address.repo_id, address.revision)
    listed = hub.list_files(client, address.repo_id, commit).get(manifest.NAME)
    if listed is None or listed.size_bytes > MAX_MANIFEST_BYTES:
        raise SourceError(f"{address.repo_id} holds no bundle: no {manifest.NAME}", hint="is the name right?")
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / manifest.NAME).write_bytes(hub.read_file(client, address.repo_id, commit, listed))
        return manifest.load(Path(scratch))


def check_outdated(recipe: Recipe, recorded: Manifest) -> list[Finding]:
    """Every source that is not any more what the bundle was built from; SourceError where the Hub does not say."""
    client = hub.make_client(SourceError)
    findings = []
    for role, wanted, entry in (
        ("body", recipe.body.model, recorded.body),
        ("drafter", recipe.drafter.model, recorded.drafter),
    ):
        if wanted != entry.model:
            message = f"is {wanted} in the recipe, and the bundle was built from {entry.model}"
            findings.append(warning("source-other", f"{role}.model", message, "build it again"))
        elif entry.commit is None:
            findings.append(note("source-local", f"{role}.model", f"{entry.model} is a folder, which has no commits"))
        else:
            findings += _check_source(client, role, entry, entry.commit)
    return findings


def _check_source(client: Client, role: str, entry: SourceEntry, commit: str) -> list[Finding]:
    where = f"{role}.model"
    revision = None if entry.revision is None or _COMMIT.fullmatch(entry.revision) else entry.revision
    head = hub.find_commit(client, entry.model, revision)
    if head == commit:
        return []
    now = hub.list_files(client, entry.model, head)
    try:
        before = hub.list_files(client, entry.model, commit)
    except SourceError:
        message = f"{entry.model} is at {head} now, and the commit that the bundle was built from, {commit}, is gone"
        return [warning("source-gone", where, message, _REBUILD)]
    changed = _find_changes(before, now)
    moved = f"{entry.model} is at {head} now, the bundle was built from {commit}"
    findings = []
    if "chat template" in changed:
        findings.append(warning("template-moved", where, f"{moved}; its chat template changed", _REBUILD))
    if rest := [kind for kind in changed if kind not in ("chat template", "other files")]:
        findings.append(warning("source-moved", where, f"{moved}; changed: {', '.join(rest)}", _REBUILD))
    return findings or [
        note("source-touched", where, f"{moved}; nothing that goes into a bundle changed but its card")
    ]


def _find_changes(before: Mapping[str, RemoteFile], now: Mapping[str, RemoteFile]) -> list[str]:
    """The kinds of files that are not the same in two trees."""
    paths = [path for path in sorted(before.keys() | now.keys()) if before.get(path) != now.get(path)]
    kinds = {next((kind for kind, names in _KINDS.items() if names.fullmatch(path)), "other files") for path in paths}
    return [kind for kind in (*_KINDS, "other files") if kind in kinds]
