"""Everything that can be known to be wrong with a push before its first byte is sent, all of it at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from bundler import card, hash_cache, hub, manifest
from bundler.engines import check_serve, load_facts
from bundler.errors import BundlerError, PublishError, VerificationError
from bundler.findings import Finding, Severity, error, errors, warning
from bundler.front_matter import check_front_matter
from bundler.hub import SAMPLE_BYTES, Account, Client, PullRequest, RemoteRepo
from bundler.manifest import FileEntry
from bundler.names import check_name
from bundler.recipe import load_bundled
from bundler.secrets import check_secrets
from bundler.shipment import Order, PushPlan, Shipment, make_plan, make_shipment
from bundler.verify import verify

T = TypeVar("T")
Step = Callable[[str], None]

MAX_FILE_BYTES = 500_000_000_000
ADVISED_FILES = 100
FREE_PRIVATE_BYTES = 100_000_000_000
_LIMITS = "huggingface.co/docs/hub/storage-limits"
_MAX_TEXT_BYTES = 50_000_000
_BAD_TAG = re.compile(r"^[-./]|[\x00-\x20\x7f~^:?*\[\\]|\.\.|//|@\{|[./]$|\.lock$|^@$|^refs/")  # git check-ref-format
_OWN_NOTES = {"card-renamed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A push that nothing stands in the way of."""

    account: Account
    shipment: Shipment
    pull: PullRequest | None
    """The pull request that is continued, where there is one."""
    plan: PushPlan


class Gathered(list[Finding]):
    """Findings, among them every refusal to answer a question."""

    def ask(self, where: str, question: Callable[[], T]) -> T | None:
        """The answer; None, and a finding more, where there is none."""
        try:
            return question()
        except BundlerError as exc:
            self += exc.findings or [error("hub-refused", where, str(exc).removeprefix(f"{where}: "), exc.hint)]
            return None


def prepare(client: Client, root: Path, order: Order, step: Step) -> Ready:
    """A push with its plan; else VerificationError where the bundle is at fault, PublishError where only the rest is.

    What costs nothing comes first. The bundle is hashed only if nothing else is wrong, and of it only those files
    whose state on disk is not one that a hash is remembered for.
    """
    of_bundle, of_push = Gathered(), Gathered(check_order(order))
    named = not of_push
    shipment = of_bundle.ask(str(root), lambda: _look_at_bundle(root, order, of_bundle, of_push))
    account = of_push.ask(client.endpoint, lambda: hub.find_account(client))
    ready = None
    if account is not None:
        settings = f"{client.endpoint}/settings/tokens"
        of_push += hub.check_account(account, order.repo_id, settings, pull_request=order.pull_request)
    if account is not None and shipment is not None and named:
        ready = of_push.ask(order.repo_id, lambda: _ask_hub(client, order, shipment, account, of_push))
    if shipment is not None and not errors([*of_bundle, *of_push]):
        of_bundle += _check_hashes(shipment, step)
    if ready is None or errors([*of_bundle, *of_push]):
        raise _refusal(root, of_bundle, of_push)
    told = [
        found for found in (*of_bundle, *of_push) if found.severity is not Severity.NOTE or found.code in _OWN_NOTES
    ]
    return replace(ready, plan=replace(ready.plan, findings=tuple(told)))


def find_target(
    client: Client, order: Order, account: Account, title: str
) -> tuple[RemoteRepo | None, PullRequest | None]:
    """Where the commit goes: main, or the pull request that this account has open under this title."""
    repo = hub.find_repo(client, order.repo_id)
    if not order.pull_request or repo is None:
        return repo, None
    pull = hub.find_pull_request(client, order.repo_id, account.user, title)
    return (hub.find_repo(client, order.repo_id, pull.ref), pull) if pull else (repo, None)


def check_order(order: Order) -> list[Finding]:
    """Whether repo id and tag are names that the Hub, git and vLLM take."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    findings = check_name(order.repo_id, order.repo_id)
    try:
        validate_repo_id(order.repo_id)
        fits = order.repo_id.count("/") == 1
    except HFValidationError:
        fits = False
    if not fits:
        findings.append(error("repo-name", order.repo_id, "is no repo id", "write namespace/name"))
    if order.tag is not None and (not order.tag or _BAD_TAG.search(order.tag)):
        findings.append(
            error("tag-name", f"tag {order.tag!r}", "is no name that git takes", "letters, digits, dots, dashes")
        )
    return findings


# -------------------------------------------------------------------------------------------------- without the Hub


def _look_at_bundle(root: Path, order: Order, of_bundle: Gathered, of_push: Gathered) -> Shipment:
    faults = verify(root, is_known=lambda entry, path: True)
    try:
        shipment, of_card = make_shipment(root, order.repo_id)
    except VerificationError:
        of_bundle += faults
        raise
    of_bundle += [found for found in faults if not (found.code == "file-size" and found.where in shipment.rendered)]
    of_bundle += check_secrets(_read_texts(shipment))
    of_push += [*of_card, *_check_card(shipment), *check_limits(shipment.entries), *_check_engine(shipment)]
    return shipment


def _read_texts(shipment: Shipment) -> dict[str, bytes]:
    """What may hold a secret: every small file but weights and what is a public source's own, byte for byte."""
    made = shipment.manifest
    public = {
        (prefix + file.path, file.sha256)
        for source, prefix in ((made.body, ""), (made.drafter, "assistant/"))
        if source.commit is not None
        for file in source.files
    }
    return {
        entry.path: shipment.read(entry.path)
        for entry in shipment.entries
        if not entry.path.endswith(".safetensors")
        and (entry.path, entry.sha256) not in public
        and ((shipment.root / entry.path).is_file() and entry.size_bytes <= _MAX_TEXT_BYTES)
    }


def _check_card(shipment: Shipment) -> list[Finding]:
    if "README.md" not in {entry.path for entry in shipment.entries}:
        return []
    return check_front_matter(shipment.read("README.md").decode("utf-8", "replace"))


def check_limits(entries: Sequence[FileEntry]) -> list[Finding]:
    """Whether the Hub takes files of these sizes, and as many of them at once."""
    findings = [
        error(
            "push-file-size", entry.path, f"has {entry.size_bytes} bytes; the Hub takes 500 GB a file", source=_LIMITS
        )
        for entry in entries
        if entry.size_bytes > MAX_FILE_BYTES
    ]
    if len(entries) > ADVISED_FILES:
        message = f"{len(entries)} files in one commit; the Hub advises at most {ADVISED_FILES}"
        findings.append(warning("push-many-files", "bundle", message, source=_LIMITS))
    return findings


def _check_engine(shipment: Shipment) -> list[Finding]:
    """What is known by now of the engine that the card tells people to use, beside the errors, which verify has."""
    try:
        recipe = load_bundled(shipment.root)
        parts = card.load_parts(shipment.root, shipment.manifest)
    except (BundlerError, OSError, ValueError):
        return []  # verify says what is wrong there
    found = check_serve(load_facts(), card.make_setting(recipe, parts))
    return [finding for finding in found if finding.severity is not Severity.ERROR]


def _check_hashes(shipment: Shipment, step: Step) -> list[Finding]:
    known = hash_cache.load()
    changed = {
        entry.path
        for entry in shipment.manifest.files
        if (state := shipment.states.get(entry.path)) is None or known.get(state) != entry.sha256
    }
    if any(entry.size_bytes >= hash_cache.WORTH_BYTES for entry in shipment.manifest.files if entry.path in changed):
        step("hashing the bundle")
    faults = manifest.compare(
        shipment.manifest,
        shipment.root,
        is_known=lambda entry, path: entry.path not in changed | shipment.rendered.keys(),
    )
    faults = [found for found in faults if found.where not in shipment.rendered]
    if not faults:
        fresh = [entry for entry in shipment.manifest.files if entry.path in changed]
        hash_cache.remember(fresh, shipment.states, shipment.root)
    return faults


# ------------------------------------------------------------------------------------------------------ from the Hub


def _ask_hub(client: Client, order: Order, shipment: Shipment, account: Account, found: Gathered) -> Ready:
    found += hub.check_account(
        account, order.repo_id, f"{client.endpoint}/settings/tokens", pull_request=order.pull_request
    )
    if "README.md" in {entry.path for entry in shipment.entries}:
        found += hub.check_card(client, order.repo_id, shipment.read("README.md").decode("utf-8", "replace"))
    repo, pull = find_target(client, order, account, f"Publish {shipment.manifest.name}")
    plan = make_plan(client, shipment, order, repo, pull)
    found += [*_check_repo(client, order, repo, account, plan), *plan.findings, *_check_tag(client, order, plan)]
    if repo is not None and not errors(found):
        found += hub.check_uploads(
            client,
            order.repo_id,
            plan.revision,
            {entry.path: (entry.size_bytes, _read_sample(shipment, entry)) for entry in plan.send},
            pull_request=order.pull_request,
        )
    return Ready(account=account, shipment=shipment, pull=pull, plan=plan)


def _read_sample(shipment: Shipment, entry: FileEntry) -> bytes:
    if entry.path in shipment.rendered:
        return shipment.rendered[entry.path][:SAMPLE_BYTES]
    with (shipment.root / entry.path).open("rb") as file:
        return file.read(SAMPLE_BYTES)


def _check_repo(
    client: Client, order: Order, repo: RemoteRepo | None, account: Account, plan: PushPlan
) -> list[Finding]:
    where, findings = order.repo_id, []
    if repo is None:
        if order.pull_request:
            hint = "check the name; without --pr it is created"
            findings.append(error("repo-missing", where, "does not exist, or is closed to this token", hint))
        for kind in hub.other_types(client, where):
            message = f"exists as a {kind}; a model of the same name is another repo"
            findings.append(warning("repo-other-type", where, message, "is the name right?"))
    elif repo.disabled:
        findings.append(error("repo-disabled", where, "was disabled by the Hub", f"see {client.endpoint}/{where}"))
    elif not repo.private and order.private and not order.pull_request:
        message, hint = (
            "is public: strangers see the bundle as soon as it is committed",
            "push to a private repo, or with --public",
        )
        findings.append(warning("push-public", where, message, hint))
    if repo is not None and repo.gated:
        findings.append(warning("repo-gated", where, "is gated: who downloads must accept its terms and log in"))
    used = repo.used_bytes if repo else 0
    if plan.private and not account.pays and used + plan.send_bytes > FREE_PRIVATE_BYTES:
        message = f"would hold {used + plan.send_bytes} bytes; the free share of private storage is 100 GB"
        findings.append(warning("push-quota", where, message, f"see {client.endpoint}/settings/billing", _LIMITS))
    return findings


def _check_tag(client: Client, order: Order, plan: PushPlan) -> list[Finding]:
    """Whether the tag is taken by another commit than this push ends at."""
    if order.tag is None or plan.base is None or order.pull_request:
        return []
    taken = hub.find_tag(client, order.repo_id, order.tag)
    if taken is None or (taken == plan.base and not plan.changes):
        return []
    message = f"is on {taken}, which is another state of the bundle"
    return [error("tag-taken", f"tag {order.tag} of {order.repo_id}", message, "choose another tag")]


def _refusal(root: Path, of_bundle: list[Finding], of_push: list[Finding]) -> BundlerError:
    found = list(dict.fromkeys(errors([*of_bundle, *of_push])))
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    message, hint = f"{found[0].where} {found[0].message}{more}", found[0].hint
    if errors(of_bundle):
        return VerificationError(message, hint=f"`bundle verify {root}` shows what is wrong with it", findings=found)
    return PublishError(message, hint=hint, findings=found)
