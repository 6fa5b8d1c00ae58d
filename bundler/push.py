"""`bundle push`: a proven bundle becomes one commit, and what the Hub then holds is compared with what was sent.

Contents go ahead unseen, one commit guarded by its parent shows them, so strangers see the whole old bundle or the
whole new one. A push that broke off, at whatever point, is finished by running it again.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundler import hub
from bundler.errors import PublishError
from bundler.findings import errors
from bundler.hash_cache import cache_folder, read_state
from bundler.hub import WAITS_S, Client, Progress, Upload
from bundler.manifest import FileEntry
from bundler.preflight import Ready, Step, find_target, prepare
from bundler.remote import check_published, download_and_verify
from bundler.shipment import Order, PushPlan, Shipment, check_listing, clear_parts, make_plan

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

_TOGETHER_BYTES = 10_000_000
"""Up to this size, files are small: kept in memory while they are sent, and sent with one request."""


class Status(StrEnum):
    """How a push ended; `planned` is a dry run's end."""

    PLANNED = "planned"
    UNCHANGED = "unchanged"
    PUBLISHED = "published"
    PULL_REQUEST = "pull-request"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a push did; for a dry run, what it would do."""

    status: Status
    repo_id: str
    url: str
    """The page of the repo, or of the pull request."""
    commit: str | None
    """What main, or the pull request, is at now; None where a dry run found no repo."""
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
    pull_request: bool = False,
    prune: bool | None = None,
    full: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    download: Progress | None = None,
    step: Step = lambda what: None,
) -> Outcome:
    """Publish the bundle in `root` as one commit on main of `repo_id`, and check what strangers will get.

    A new repo is created private; with `private=False` the repo is opened last. `pull_request` commits to this
    account's pull request for the bundle, open or new; tag and visibility then stay as they are. `prune` deletes what
    is not the bundle's (None: only where bundles put everything there). `full` downloads the commit again to verify
    it. A dry run changes nothing. `progress` hears of what is sent, `download` of what comes back.

    VerificationError if the bundle is not what its manifest says, PublishError if the Hub refuses or holds something
    else; either names everything that is known to be wrong.
    """
    order = Order(repo_id=repo_id, private=private, tag=tag, message=message, pull_request=pull_request, prune=prune)
    client = hub.make_client(PublishError)
    if dry_run:
        ready = prepare(client, root, order, step)
        return _make_outcome(client, order, ready, Status.PLANNED, ready.plan.base, private=ready.plan.private)
    with _alone(client, root, order):
        clear_parts(root)
        ready = _open_target(client, order, prepare(client, root, order, step))
        commit, status = ready.plan.base or "", Status.UNCHANGED
        if ready.plan.changes:
            _write_card(ready.shipment)
            commit = _send_and_commit(client, order, ready, progress)
            status = Status.PULL_REQUEST if ready.pull else Status.PUBLISHED
        if ready.plan.changes or full or _is_unfinished(client, order, ready, commit):
            step("fetching back what the Hub holds")
            _check_commit(client, ready, commit, full=full, progress=download)
        return _announce(client, order, ready, status, commit)


# ------------------------------------------------------------------------------------------------------------ steps


@contextmanager
def _alone(client: Client, root: Path, order: Order) -> Iterator[None]:
    """Keeps a second push to the same repo, or of the same bundle, from this machine out."""
    from filelock import FileLock, Timeout

    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home folder that nobody may write to
        folder = Path(tempfile.gettempdir())
    names = (f"{client.endpoint}/{order.repo_id}", str(root.resolve()))
    locks = [FileLock(folder / f"push-{hashlib.sha256(name.encode()).hexdigest()[:16]}.lock") for name in names]
    try:
        for lock in locks:
            lock.acquire(blocking=False)
        yield
    except Timeout as exc:
        message = f"another push of {root} or to {order.repo_id} is at work on this machine"
        raise PublishError(message, hint="wait for it, or stop it") from exc
    finally:
        for lock in locks:
            lock.release()


def _open_target(client: Client, order: Order, ready: Ready) -> Ready:
    """The repo, created private where there is none, or the pull request; with a plan that starts from there."""
    if ready.plan.base is not None and (not order.pull_request or ready.pull or not ready.plan.changes):
        return ready
    name = ready.shipment.manifest.name
    if order.pull_request:
        text = f"The bundle {name}, proven with `bundle verify`."
        hub.open_pull_request(client, order.repo_id, ready.account.user, _title(ready), text)
    else:
        hub.create_repo(client, order.repo_id)
    repo, pull = find_target(client, order, ready.account, _title(ready))
    plan = make_plan(client, ready.shipment, order, repo, pull)
    return replace(ready, pull=pull, plan=replace(plan, findings=ready.plan.findings))


def _title(ready: Ready) -> str:
    return f"Publish {ready.shipment.manifest.name}"


def _write_card(shipment: Shipment) -> None:
    try:
        shipment.write_card()
    except OSError as exc:
        hint = "make room, or make the folder writable: the card is to name the repo"
        raise PublishError(
            f"{shipment.root}: cannot write README.md and bundle.json: {exc.strerror}", hint=hint
        ) from exc


def _send_and_commit(client: Client, order: Order, ready: Ready, progress: Progress | None) -> str:
    """The id of the one commit. Where the Hub does not copy the drafter's weights, they are sent like all others."""
    plan = ready.plan
    additions = _send(client, ready.shipment, plan, progress)
    try:
        return _commit(client, order, ready, plan, additions)
    except hub.Overtaken:
        raise
    except PublishError:
        if not plan.copy:
            raise
    plan = replace(plan, copy=())
    return _commit(client, order, ready, plan, _send(client, ready.shipment, plan, progress))


def _send(client: Client, shipment: Shipment, plan: PushPlan, progress: Progress | None) -> list[CommitOperationAdd]:
    """Send every new content, small files first and together, so that a refusal comes early."""
    additions, done = [], 0
    for batch in _make_batches(plan.send):

        def tell(sent: int, name: str = batch[-1].path, before: int = done) -> None:
            if progress is not None:
                progress(name, min(before + sent, plan.send_bytes), plan.send_bytes)

        tell(0)
        uploads = [_load(shipment, entry) for entry in batch]
        try:
            additions += hub.upload(client, plan.repo_id, plan.revision, uploads, tell)
        finally:  # storage that knows the hash refuses a file that was changed; the reason is here
            for entry in batch:
                _check_unchanged(shipment, entry)
        size = sum(entry.size_bytes for entry in batch)
        tell(size)
        done += size
    return additions


def _make_batches(entries: Sequence[FileEntry]) -> list[list[FileEntry]]:
    small = [entry for entry in entries if entry.size_bytes <= _TOGETHER_BYTES]
    large = [[entry] for entry in entries if entry.size_bytes > _TOGETHER_BYTES]
    return [small, *large] if small else large


def _load(shipment: Shipment, entry: FileEntry) -> Upload:
    """A small file is read now and compared with its hash; a large one is read while it is sent."""
    _check_unchanged(shipment, entry)
    content: Path | bytes = shipment.root / entry.path
    if entry.size_bytes <= _TOGETHER_BYTES and not entry.path.endswith(".safetensors"):
        content = shipment.read(entry.path)
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise _changed(entry)
    return Upload(path=entry.path, content=content, sha256=entry.sha256)


def _check_unchanged(shipment: Shipment, entry: FileEntry) -> None:
    """PublishError if a file is no longer what it was before it was verified."""
    state = shipment.states.get(entry.path)
    if state is not None and entry.path not in shipment.rendered and read_state(shipment.root / entry.path) != state:
        raise _changed(entry)


def _changed(entry: FileEntry) -> PublishError:
    return PublishError(
        f"{entry.path} was changed while it was being pushed", hint="nothing was committed; push again"
    )


def _commit(
    client: Client, order: Order, ready: Ready, plan: PushPlan, additions: Sequence[CommitOperationAdd]
) -> str:
    """The one commit. Where its answer is lost, the branch says whether it landed; only if not is it tried again."""
    base, waits = plan.base or "", iter(WAITS_S)
    message = order.message or _title(ready)
    deletions = [file.path for file in plan.delete]
    while True:
        try:
            return hub.commit(
                client, plan.repo_id, plan.revision, additions, plan.copy, deletions, parent=base, message=message
            )
        except hub.CommitUnanswered as exc:
            repo = hub.find_repo(client, plan.repo_id, plan.revision if ready.pull else None)
            if repo is not None and repo.head != base:
                if not check_listing(ready.shipment, plan, hub.list_files(client, plan.repo_id, repo.head)):
                    return repo.head
                raise hub.Overtaken(
                    f"somebody else committed to {plan.repo_id} meanwhile ({repo.head}); nothing was overwritten",
                    hint="look at that commit, then push again",
                ) from exc
            wait = next(waits, None)
            if wait is None:
                raise
            time.sleep(wait)


def _is_unfinished(client: Client, order: Order, ready: Ready, commit: str) -> bool:
    """Whether an earlier push of the same files ended before it tagged the commit or opened the repo."""
    if ready.pull is not None:
        return ready.pull.draft
    untagged = order.tag is not None and hub.find_tag(client, order.repo_id, order.tag) != commit
    return untagged or (ready.plan.private and not order.private)


def _check_commit(client: Client, ready: Ready, commit: str, *, full: bool, progress: Progress | None) -> None:
    """PublishError with everything in the commit that is not as it was sent, in the listing and in what downloads."""
    shipment, repo_id = ready.shipment, ready.plan.repo_id
    files = hub.list_files(client, repo_id, commit)
    found = check_listing(shipment, ready.plan, files)
    if not found:
        ours = {path: file for path, file in files.items() if path in {entry.path for entry in shipment.entries}}
        if full:
            found = download_and_verify(client, repo_id, commit, ours, progress=progress)
        else:
            found = check_published(
                client, repo_id, commit, ours, expect=lambda path, size: _head(shipment, path, size)
            )
    if found := errors(found):
        message = f"commit {commit} of {repo_id} is not what was sent: {found[0].where} {found[0].message}"
        hint = "do not use that commit; push again, and tell the Hub's support if it stays so"
        raise PublishError(message, hint=hint, findings=found)


def _head(shipment: Shipment, path: str, size: int) -> bytes:
    with (shipment.root / path).open("rb") as file:
        return file.read(size)


def _announce(client: Client, order: Order, ready: Ready, status: Status, commit: str) -> Outcome:
    """Tag and visibility, last; for a pull request, that it is ready."""
    private = ready.plan.private
    if ready.pull is not None:
        hub.show_pull_request(client, order.repo_id, ready.pull, ready.account.user, _title(ready))
    elif not order.pull_request:
        if order.tag is not None:
            hub.set_tag(client, order.repo_id, order.tag, commit)
        if private and not order.private:
            hub.make_public(client, order.repo_id)
            private = False
    return _make_outcome(client, order, ready, status, commit, private=private)


def _make_outcome(
    client: Client, order: Order, ready: Ready, status: Status, commit: str | None, *, private: bool
) -> Outcome:
    return Outcome(
        status=status,
        repo_id=order.repo_id,
        url=ready.pull.url if ready.pull else f"{client.endpoint}/{order.repo_id}",
        commit=commit,
        tag=None if order.pull_request else order.tag,
        private=private,
        plan=ready.plan,
    )
