"""What is sent, and what that makes of the repo as it stands: nouns and pure comparisons; `push` acts on them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from bundler import card, hub, manifest
from bundler.findings import Finding, error, note, warning
from bundler.hash_cache import FileState, read_states
from bundler.hub import Client, Copy, PullRequest, RemoteFile, RemoteRepo
from bundler.manifest import FileEntry, Manifest

MAX_MANIFEST_BYTES = 20_000_000
ATTRIBUTES = ".gitattributes"
"""The Hub's own file in every repo; never deleted."""
PART = ".part"
_MAX_PLAIN_BYTES = 50_000_000  # five times what the Hub keeps in git
_DOWNLOAD_LINE = re.compile(r"hf download ([\w.-]+/[\w.-]+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """What the user asked for."""

    repo_id: str
    private: bool = True
    """False opens the repo, last of all."""
    tag: str | None = None
    message: str | None = None
    pull_request: bool = False
    prune: bool | None = None
    """Whether files that are not the bundle's are deleted; None: only where bundles put all of them there."""


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """A bundle on its way to one repo."""

    root: Path
    manifest: Manifest
    rendered: Mapping[str, bytes]
    """Card and bundle.json where they are made anew, because the card is to name this repo."""
    states: Mapping[str, FileState | None]
    """How every file lay on disk before it was verified."""

    @cached_property
    def entries(self) -> tuple[FileEntry, ...]:
        """Every file that is sent: those of the manifest, and bundle.json itself, sorted by path."""
        content = self.read(manifest.NAME)
        own = FileEntry(
            path=manifest.NAME,
            size_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            role="manifest",
        )
        return tuple(sorted((*self.manifest.files, own), key=lambda entry: entry.path))

    def read(self, path: str) -> bytes:
        """A small file as it is sent."""
        return self.rendered[path] if path in self.rendered else (self.root / path).read_bytes()

    def holds(self, entry: FileEntry, remote: RemoteFile) -> bool:
        """Whether the Hub has our file: an LFS file is known by its SHA-256, a plain one by git's id of the blob."""
        if remote.size_bytes != entry.size_bytes:
            return False
        if remote.sha256 is not None or entry.size_bytes > _MAX_PLAIN_BYTES:
            return remote.sha256 == entry.sha256
        content = self.read(entry.path)  # plain files are small: the Hub keeps large ones as LFS
        unchanged = hashlib.sha256(content).hexdigest() == entry.sha256  # since it was verified
        return unchanged and remote.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def write_card(self) -> None:
        """Put what was rendered into the bundle's folder, the card first; OSError if that cannot be written.

        What is stopped in between is made good by the next shipment.
        """
        try:
            for path in sorted(self.rendered, key=lambda path: path == manifest.NAME):
                part = self.root / f"{path}{PART}"
                part.write_bytes(self.rendered[path])
                part.replace(self.root / path)
        finally:
            clear_parts(self.root)


def clear_parts(root: Path) -> None:
    """Remove what a push that was killed while it wrote the card has left behind."""
    for name in ("README.md", manifest.NAME):
        (root / f"{name}{PART}").unlink(missing_ok=True)


def make_shipment(root: Path, repo_id: str) -> tuple[Shipment, list[Finding]]:
    """A bundle with a card that names the repo it goes to; VerificationError if its manifest cannot be read."""
    made = manifest.load(root)
    states = read_states(root, made.files)
    shipment = Shipment(root=root, manifest=made, rendered={}, states=states)
    readme = root / "README.md"
    entry = next((entry for entry in made.files if entry.path == readme.name), None)
    if entry is None or not readme.is_file():
        return shipment, []
    text = readme.read_bytes()
    match = _DOWNLOAD_LINE.search(text.decode("utf-8", "replace"))
    named = match[1] if match else repo_id
    stale = hashlib.sha256(text).hexdigest() != entry.sha256
    if named == repo_id and not stale:
        return shipment, []
    wanted = card.render_bundle(root, made, repo_id=repo_id).encode()
    if named == repo_id and text != wanted:
        return shipment, []  # changed by hand: verify says so
    findings = []
    if named != repo_id:
        findings.append(note("card-renamed", "README.md", f"names {named}; it is rendered again for {repo_id}"))
        if text != card.render_bundle(root, made, repo_id=named).encode():
            message = "is not what this version renders: what was written into it by hand, if anything, is lost"
            findings.append(warning("card-edited", "README.md", message, "put it into a section of the recipe's card"))
    changed = replace(entry, size_bytes=len(wanted), sha256=hashlib.sha256(wanted).hexdigest())
    renewed = replace(made, files=tuple(changed if file is entry else file for file in made.files))
    rendered = {readme.name: wanted, manifest.NAME: manifest.render(renewed).encode()}
    return replace(shipment, manifest=renewed, rendered=rendered), findings


@dataclass(frozen=True, kw_only=True, slots=True)
class PushPlan:
    """What a push makes of a repo, file by file."""

    repo_id: str
    revision: str
    """The branch, or the pull request's ref, that the commit goes to."""
    base: str | None
    """The commit that the plan starts from; None where there is no repo yet."""
    private: bool
    """Whether the repo is closed to strangers. A new one is."""
    add: tuple[FileEntry, ...]
    replace: tuple[FileEntry, ...]
    copy: tuple[Copy, ...]
    """Those of the two above that the Hub takes from the drafter's own repo."""
    keep: tuple[FileEntry, ...]
    """Files of the bundle that the repo has already."""
    delete: tuple[RemoteFile, ...]
    leave: tuple[RemoteFile, ...]
    """Files that are not the bundle's and stay as they are."""
    findings: tuple[Finding, ...]

    @property
    def changes(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self.add or self.replace or self.delete)

    @property
    def send(self) -> tuple[FileEntry, ...]:
        """The files whose content is sent, small ones first, so that a refusal comes early."""
        copied = {copy.path for copy in self.copy}
        sent = [entry for entry in (*self.add, *self.replace) if entry.path not in copied]
        return tuple(sorted(sent, key=lambda entry: (entry.size_bytes, entry.path)))

    @property
    def send_bytes(self) -> int:
        """The most that has to be sent: what the Hub has stored already is not sent again."""
        return sum(entry.size_bytes for entry in self.send)


def make_plan(
    client: Client, shipment: Shipment, order: Order, repo: RemoteRepo | None, pull: PullRequest | None
) -> PushPlan:
    """Compare a shipment with a repo as it stands at the commit that `repo` names."""
    theirs = hub.list_files(client, order.repo_id, repo.head) if repo else {}
    previous = _previous_paths(client, order.repo_id, repo.head, theirs) if repo else set()
    ours = {entry.path: entry for entry in shipment.entries}
    same = {path for path, entry in ours.items() if path in theirs and shipment.holds(entry, theirs[path])}
    others = [theirs[path] for path in sorted(theirs.keys() - ours.keys() - {ATTRIBUTES})]
    foreign = [file for file in others if file.path not in previous]
    prune = not foreign if order.prune is None else order.prune
    kept = [] if prune else others
    attributes = [theirs[ATTRIBUTES]] if ATTRIBUTES in theirs.keys() - ours.keys() else []
    fresh = [entry for entry in shipment.entries if entry.path not in same]
    return PushPlan(
        repo_id=order.repo_id,
        revision=pull.ref if pull else "main",
        base=repo.head if repo else None,
        private=repo.private if repo else True,
        add=tuple(entry for entry in fresh if entry.path not in theirs),
        replace=tuple(entry for entry in fresh if entry.path in theirs),
        copy=tuple(_find_copies(client, shipment, fresh)) if repo else (),
        keep=tuple(entry for entry in shipment.entries if entry.path in same),
        delete=tuple(others if prune else ()),
        leave=(*attributes, *kept),
        findings=tuple(_check_left(order, kept, foreign)),
    )


def _previous_paths(client: Client, repo_id: str, head: str, theirs: Mapping[str, RemoteFile]) -> set[str]:
    """What the bundle.json in the repo lists; nothing where it cannot be read, so that nothing is deleted."""
    listed = theirs.get(manifest.NAME)
    if listed is None or listed.size_bytes > MAX_MANIFEST_BYTES:
        return set()
    text = hub.read_file(client, repo_id, head, listed)
    try:
        return {str(entry["path"]) for entry in json.loads(text)["files"]}
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()


def _find_copies(client: Client, shipment: Shipment, fresh: Iterable[FileEntry]) -> list[Copy]:
    """Weights of the drafter that its own repo still has, in storage that the Hub can copy from."""
    source = shipment.manifest.drafter
    weights = [entry for entry in fresh if entry.role == "drafter" and entry.path.endswith(".safetensors")]
    if source.commit is None or not weights:
        return []
    try:
        theirs = hub.list_files(client, source.model, source.commit)
    except client.error:  # moved, closed or gone: then the files are sent
        return []
    found = []
    for entry in weights:
        path = entry.path.partition("/")[2]
        remote = theirs.get(path)
        if remote is not None and remote.sha256 == entry.sha256 and remote.xet_hash:
            found.append(Copy(path=entry.path, model=source.model, commit=source.commit, source_path=path))
    return found


def _check_left(order: Order, kept: Iterable[RemoteFile], foreign: Iterable[RemoteFile]) -> list[Finding]:
    paths, strange = [file.path for file in kept], {file.path for file in foreign}
    if not paths:
        return []
    what = "that no bundle put there" if strange else "of the bundle before"
    message = f"{len(paths)} files stay, some {what}: {', '.join(paths[:5])}"
    return [warning("push-foreign", order.repo_id, message, "--prune deletes them in the same commit")]


def check_listing(shipment: Shipment, plan: PushPlan, theirs: Mapping[str, RemoteFile]) -> list[Finding]:
    """Every difference between a tree and what the plan makes of the repo, by path."""
    ours = {entry.path: entry for entry in shipment.entries}
    left = {file.path: file for file in plan.leave}
    findings = []
    for path in sorted(ours.keys() | left.keys() | theirs.keys()):
        remote = theirs.get(path)
        if path in ours and remote is None:
            findings.append(error("remote-missing", path, "is not there"))
        elif path in ours and remote is not None and not shipment.holds(ours[path], remote):
            findings.append(error("remote-differs", path, "has another size or hash there"))
        elif path not in ours and remote != left.get(path):
            findings.append(error("remote-unexpected", path, "was changed there by somebody else"))
    return findings
