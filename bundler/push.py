"""`bundle push`: a proven bundle becomes one commit, and what the Hub then holds is compared with what was sent.

Contents go ahead unseen, one commit guarded by its parent shows them, so strangers see the whole old bundle or the
whole new one. A push that broke off is finished by running it again.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundler import hub, manifest
from bundler.errors import PublishError, VerificationError
from bundler.findings import Finding, error, errors, warning
from bundler.front_matter import check_front_matter
from bundler.hub import WAITS_S, Client, Progress, RemoteFile, RemoteRepo
from bundler.manifest import FileEntry, Manifest
from bundler.verify import verify

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

_MAX_MANIFEST_BYTES = 20_000_000


class Status(StrEnum):
    """How a push ended; `planned` is a dry run's end."""

    PLANNED = "planned"
    UNCHANGED = "unchanged"
    PUBLISHED = "published"


@dataclass(frozen=True, kw_only=True, slots=True)
class PushPlan:
    """What a push makes of a repo, file by file."""

    repo_id: str
    base: str | None
    """The commit that the plan starts from; None where there is no repo yet."""
    private: bool
    """Whether the repo is closed to strangers. A new one is."""
    add: tuple[FileEntry, ...]
    replace: tuple[FileEntry, ...]
    keep: tuple[FileEntry, ...]
    """Files of the bundle that the repo has already."""
    delete: tuple[RemoteFile, ...]
    """Files that the bundle published there before lists and this one does not."""
    foreign: tuple[RemoteFile, ...]
    """Files that no bundle put there; they stay as they are."""
    findings: tuple[Finding, ...]

    @property
    def changes(self) -> bool:
        """Whether there is anything to commit."""
        return bool(self.add or self.replace or self.delete)

    @property
    def send_bytes(self) -> int:
        """The most that has to be sent: what the Hub has stored already is not sent again."""
        return sum(entry.size_bytes for entry in (*self.add, *self.replace))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a push did; for a dry run, what it would do."""

    status: Status
    repo_id: str
    url: str
    commit: str | None
    """What main is at now; None where a dry run found no repo."""
    tag: str | None
    private: bool
    """Whether the repo is closed to strangers now."""
    plan: PushPlan

    def to_dict(self) -> dict[str, Any]:
        """The outcome in plain values, for `--json`."""
        return {**asdict(self), "plan": {**asdict(self.plan), "send_bytes": self.plan.send_bytes}}


def push(
    root: Path,
    repo_id: str,
    *,
    private: bool = True,
    tag: str | None = None,
    message: str | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Publish the bundle in `root` as one commit on main of `repo_id`, and check what the Hub holds afterwards.

    A new repo is created private; with `private=False` the repo is opened last. A dry run changes nothing. Raises
    VerificationError if the bundle is not what its manifest says, PublishError if the Hub refuses or holds something
    else.
    """
    client = hub.make_client(PublishError)
    hub.check_account(client, repo_id)
    bundle = _load_verified(root)
    _check_card(client, repo_id, root)
    plan = _make_plan(client, root, bundle, repo_id, private)
    _check_tag(client, plan, tag)
    if dry_run:
        return _make_outcome(client, Status.PLANNED, plan, plan.base, tag, plan.private)
    if plan.base is None:
        hub.create_repo(client, repo_id)
        plan = _make_plan(client, root, bundle, repo_id, private)
    status, commit = Status.UNCHANGED, plan.base or ""
    if plan.changes:
        additions = _upload(client, root, plan, progress)
        commit = _commit(client, root, plan, additions, message or f"Publish {bundle.name}")
        _verify_remote(client, root, plan, commit)
        status = Status.PUBLISHED
    if tag is not None:
        hub.set_tag(client, repo_id, tag, commit)
    if plan.private and not private:
        hub.make_public(client, repo_id)
    return _make_outcome(client, status, plan, commit, tag, plan.private and private)


def _make_outcome(
    client: Client, status: Status, plan: PushPlan, commit: str | None, tag: str | None, private: bool
) -> Outcome:
    url = f"{client.endpoint}/{plan.repo_id}"
    return Outcome(status=status, repo_id=plan.repo_id, url=url, commit=commit, tag=tag, private=private, plan=plan)


def _load_verified(root: Path) -> Manifest:
    """The manifest, once `verify` has nothing against the bundle; VerificationError with all that it has."""
    if found := errors(verify(root)):
        raise VerificationError(_sum_up(found), hint=f"`bundle verify {root}` shows them all", findings=found)
    return manifest.load(root)


def _sum_up(found: Sequence[Finding]) -> str:
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return f"{found[0].where} {found[0].message}{more}"


def _check_card(client: Client, repo_id: str, root: Path) -> None:
    """PublishError with all that we, or else the Hub, would refuse the card for."""
    card = (root / "README.md").read_text(encoding="utf-8")
    if found := errors(check_front_matter(card)):
        raise PublishError(_sum_up(found), hint=found[0].hint, findings=found)
    hub.validate_card(client, repo_id, card)


def _make_plan(client: Client, root: Path, bundle: Manifest, repo_id: str, private: bool) -> PushPlan:
    repo = hub.find_repo(client, repo_id)
    theirs = hub.list_files(client, repo_id, repo.head) if repo else {}
    previous = _previous_paths(client, repo_id, repo.head, theirs) if repo else set()
    ours = sorted(_files_of(root, bundle), key=lambda entry: entry.path)
    same = {entry.path for entry in ours if entry.path in theirs and _is_same(root, entry, theirs[entry.path])}
    others = [theirs[path] for path in sorted(theirs.keys() - {entry.path for entry in ours})]
    foreign = [file for file in others if file.path not in previous]
    return PushPlan(
        repo_id=repo_id,
        base=repo.head if repo else None,
        private=repo.private if repo else True,
        add=tuple(entry for entry in ours if entry.path not in theirs),
        replace=tuple(entry for entry in ours if entry.path in theirs and entry.path not in same),
        keep=tuple(entry for entry in ours if entry.path in same),
        delete=tuple(file for file in others if file.path in previous),
        foreign=tuple(foreign),
        findings=tuple(_check_repo(repo_id, repo, foreign, private)),
    )


def _files_of(root: Path, bundle: Manifest) -> list[FileEntry]:
    """Every file that is sent: those of the manifest, and bundle.json itself."""
    size_bytes, sha256 = manifest.hash_file(root / manifest.NAME)
    return [*bundle.files, FileEntry(path=manifest.NAME, size_bytes=size_bytes, sha256=sha256, role="manifest")]


def _previous_paths(client: Client, repo_id: str, head: str, theirs: Mapping[str, RemoteFile]) -> set[str]:
    """What the bundle.json in the repo lists; nothing where it cannot be read, so that nothing is deleted."""
    listed = theirs.get(manifest.NAME)
    if listed is None or listed.size_bytes > _MAX_MANIFEST_BYTES:
        return set()
    text = hub.read_bytes(client, repo_id, head, manifest.NAME, 0, listed.size_bytes)
    try:
        return {str(entry["path"]) for entry in json.loads(text)["files"]} - {".gitattributes"}
    except (ValueError, KeyError, TypeError, RecursionError):
        return set()


def _check_repo(repo_id: str, repo: RemoteRepo | None, foreign: Iterable[RemoteFile], private: bool) -> list[Finding]:
    findings = []
    if repo is not None and private and not repo.private:
        message = "is public: strangers see the bundle as soon as it is committed"
        findings.append(
            warning("push-public", repo_id, message, "push to a private repo, or set publish.private = false")
        )
    if paths := [file.path for file in foreign if file.path != ".gitattributes"]:
        message = f"has {len(paths)} files that are not this bundle's: {', '.join(paths[:5])}"
        findings.append(warning("push-foreign", repo_id, message, "they stay; delete them there if nobody needs them"))
    return findings


def _check_tag(client: Client, plan: PushPlan, tag: str | None) -> None:
    """PublishError if the tag is taken by another commit than this push ends at, before anything is sent."""
    taken = hub.find_tag(client, plan.repo_id, tag) if tag is not None and plan.base is not None else None
    if taken is not None and (taken != plan.base or plan.changes):
        message = f"tag {tag} of {plan.repo_id} is on {taken}, which is another state of the bundle"
        raise PublishError(message, hint="choose another tag")


def _upload(client: Client, root: Path, plan: PushPlan, progress: Progress | None) -> list[CommitOperationAdd]:
    """Send every new content, small files first, so that a refusal comes early."""
    additions, done = [], 0
    for entry in sorted((*plan.add, *plan.replace), key=lambda entry: entry.size_bytes):
        if progress is not None:
            progress(entry.path, done, plan.send_bytes)
        additions.append(hub.upload(client, plan.repo_id, entry.path, root / entry.path, entry.sha256))
        done += entry.size_bytes
        if progress is not None:
            progress(entry.path, done, plan.send_bytes)
    return additions


def _commit(client: Client, root: Path, plan: PushPlan, additions: Iterable[CommitOperationAdd], message: str) -> str:
    """The one commit. Where its answer is lost, main says whether it landed; only if it has not is it tried again."""
    additions, deletions, base = list(additions), [file.path for file in plan.delete], plan.base or ""
    waits = iter(WAITS_S)
    while True:
        try:
            return hub.commit(client, plan.repo_id, additions, deletions, parent=base, message=message)
        except hub.CommitUnanswered as exc:
            repo = hub.find_repo(client, plan.repo_id)
            if repo is not None and repo.head != base:
                if not _check_remote(root, plan, hub.list_files(client, plan.repo_id, repo.head)):
                    return repo.head
                raise PublishError(
                    f"somebody else committed to {plan.repo_id} meanwhile ({repo.head}); nothing was overwritten",
                    hint="look at that commit, then push again",
                ) from exc
            wait = next(waits, None)
            if wait is None:
                raise
            time.sleep(wait)


def _verify_remote(client: Client, root: Path, plan: PushPlan, commit: str) -> None:
    """PublishError with every file that the Hub does not hold as it was sent."""
    if found := _check_remote(root, plan, hub.list_files(client, plan.repo_id, commit)):
        message = f"commit {commit} of {plan.repo_id} is not what was sent: {_sum_up(found)}"
        hint = "do not use that commit; push again, and tell the Hub's support if it stays so"
        raise PublishError(message, hint=hint, findings=found)


def _check_remote(root: Path, plan: PushPlan, theirs: Mapping[str, RemoteFile]) -> list[Finding]:
    """Every difference between a tree and what the plan makes of the repo, by path."""
    ours = {entry.path: entry for entry in (*plan.add, *plan.replace, *plan.keep)}
    foreign = {file.path: file for file in plan.foreign}
    findings = []
    for path in sorted(ours.keys() | foreign.keys() | theirs.keys()):
        remote = theirs.get(path)
        if path in ours and remote is None:
            findings.append(error("remote-missing", path, "is not there"))
        elif path in ours and remote is not None and not _is_same(root, ours[path], remote):
            findings.append(error("remote-differs", path, "has another size or hash there"))
        elif path not in ours and remote != foreign.get(path):
            findings.append(error("remote-unexpected", path, "was changed there by somebody else"))
    return findings


def _is_same(root: Path, entry: FileEntry, remote: RemoteFile) -> bool:
    """Whether the Hub holds our file: an LFS file is known by its SHA-256, a plain one by git's id of the blob."""
    if remote.size_bytes != entry.size_bytes:
        return False
    if remote.sha256 is not None:
        return remote.sha256 == entry.sha256
    content = (root / entry.path).read_bytes()  # plain files are small: the Hub keeps large ones as LFS
    unchanged = hashlib.sha256(content).hexdigest() == entry.sha256  # since it was verified
    return unchanged and remote.blob_id == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
