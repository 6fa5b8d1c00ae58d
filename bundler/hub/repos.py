"""The calls that publishing is made of, each one question or one change; `push` knows their order.

Never `upload_folder`, `upload_large_folder` or `hf upload`: they may make several commits, so that a repo is seen half
changed (huggingface_hub guides/upload; upload_folder splits into "(part N)" commits since 1.2x).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from bundler.errors import PublishError
from bundler.findings import Finding, error
from bundler.hub.client import Client, ask, headers, is_transient, status_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.hf_api import CommitOperation

SAMPLE_BYTES = 512
"""The Hub decides by a file's first bytes whether git or its large file storage keeps it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Whose token this is and what the token itself says it may do."""

    user: str
    orgs: tuple[str, ...]
    role: str | None
    """`read`, `write` or `fineGrained`; None where the Hub does not say."""
    scopes: Mapping[str, tuple[str, ...]]
    """Of a fine-grained token: user, organization or repo → what is allowed there."""
    pays: bool
    """Whether more private storage than the free share is to be expected."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteRepo:
    """A repo as it stands at a revision."""

    head: str
    private: bool
    """Whether it is closed to strangers."""
    gated: bool
    """Whether strangers must accept terms before they download."""
    disabled: bool
    used_bytes: int
    """What its history takes on the Hub; 0 where the Hub does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
    """A file that the Hub can take from another of its repos, so that nobody has to send it."""

    path: str
    model: str
    commit: str
    source_path: str


class CommitUnanswered(PublishError):
    """A commit that may have landed: its answer was lost, or the branch has moved since."""


class Overtaken(PublishError):
    """Somebody else's commit came first; nothing of it was overwritten."""


def find_account(client: Client) -> Account:
    """The account that this token belongs to; PublishError without a token that the Hub accepts."""
    who = ask(client, client.endpoint, lambda: client.api.whoami(cache=True))
    token = who.get("auth", {}).get("accessToken", {})
    scoped = token.get("fineGrained", {}).get("scoped", [])
    orgs = who.get("orgs", [])
    return Account(
        user=str(who.get("name")),
        orgs=tuple(str(org.get("name")) for org in orgs),
        role=token.get("role"),
        scopes={str(scope.get("entity", {}).get("name")): tuple(scope.get("permissions", ())) for scope in scoped},
        pays=bool(who.get("isPro") or who.get("canPay") or any(org.get("isEnterprise") for org in orgs)),
    )


def check_account(account: Account, repo_id: str, settings: str, *, pull_request: bool = False) -> list[Finding]:
    """Whether this token may write to a repo, as far as it can tell itself; `settings` is where tokens are made.

    Anyone whose token may write can open a pull request in a repo that they see.
    """
    namespace, user = repo_id.split("/")[0], account.user
    findings = []
    if namespace not in {user, *account.orgs} and not pull_request:
        hint = "change the repo id, log in as another, or open a pull request: --pr"
        findings.append(error("namespace-foreign", repo_id, f"{user} does not belong to {namespace}", hint))
    if account.role == "read":
        message, hint = f"this token of {user} may only read", f"take one that may write: {settings}"
        findings.append(error("token-read-only", repo_id, message, hint))
    granted = {scope for name in (namespace, repo_id) for scope in account.scopes.get(name, ())}
    if account.role == "fineGrained" and "repo.write" not in granted and not pull_request:
        message = f"this token of {user} may not write to {repo_id}"
        findings.append(error("token-scope", repo_id, message, f"allow it there: {settings}"))
    return findings


def check_card(client: Client, repo_id: str, card: str) -> list[Finding]:
    """Everything that the Hub would refuse the card's front matter for."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    url, question = f"{client.endpoint}/api/validate-yaml", {"content": card, "repoType": "model"}

    def call() -> dict[str, Any]:
        response = get_session().post(url, json=question, headers=headers(client))
        if response.status_code != 400:
            hf_raise_for_status(response)
        return dict(response.json())

    problems, hint = ask(client, repo_id, call).get("errors", []), "correct the recipe's card and render it again"
    return [
        error("card-refused", "README.md", f"is refused by the Hub: {problem.get('message')}", hint)
        for problem in problems
    ]


def find_repo(client: Client, repo_id: str, revision: str | None = None) -> RemoteRepo | None:
    """The model repo as it stands, or None where this token sees none."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    def call() -> RemoteRepo | None:
        try:
            info = client.api.model_info(repo_id, revision=revision)
        except RepositoryNotFoundError as exc:
            if isinstance(exc, GatedRepoError):
                raise
            return None
        return RemoteRepo(
            head=str(info.sha),
            private=bool(info.private),
            gated=bool(info.gated),
            disabled=bool(info.disabled),
            used_bytes=info.used_storage or 0,
        )

    return ask(client, repo_id, call, revision=revision)


def other_types(client: Client, repo_id: str) -> list[str]:
    """As what else than a model a repo of this name exists."""

    def exists(kind: str) -> bool:
        return ask(client, repo_id, lambda: bool(client.api.repo_exists(repo_id, repo_type=kind)))

    return [kind for kind in ("dataset", "space") if exists(kind)]


def create_repo(client: Client, repo_id: str) -> None:
    """Create a private model repo, where there is none yet."""
    ask(client, repo_id, lambda: client.api.create_repo(repo_id, private=True, exist_ok=True))


def check_uploads(
    client: Client, repo_id: str, revision: str, files: Mapping[str, tuple[int, bytes]], *, pull_request: bool = False
) -> list[Finding]:
    """Whether the Hub takes every file, from size and first bytes; sends and changes nothing.

    A .gitignore in the repo would make the Hub drop files from a commit without a word.
    """
    from huggingface_hub.utils import get_session, hf_raise_for_status

    url = f"{client.endpoint}/api/models/{repo_id}/preupload/{quote(revision, safe='')}"
    asked = [
        {"path": path, "size": size, "sample": base64.b64encode(sample).decode()}
        for path, (size, sample) in files.items()
    ]

    def call() -> list[dict[str, Any]]:
        answers = []
        for start in range(0, len(asked), 256):  # as many at once as the client asks for
            response = get_session().post(
                url,
                json={"files": asked[start : start + 256]},
                params={"create_pr": "1"} if pull_request else {},
                headers=headers(client),
            )
            hf_raise_for_status(response)
            answers += response.json()["files"]
        return answers

    hint = f"take that line out: {client.endpoint}/{repo_id}/blob/{revision}/.gitignore"
    return [
        error("push-ignored", str(answer["path"]), f"would be dropped by the .gitignore in {repo_id}", hint)
        for answer in ask(client, repo_id, call)
        if answer.get("shouldIgnore")
    ]


def commit(
    client: Client,
    repo_id: str,
    revision: str,
    additions: Iterable[CommitOperationAdd],
    copies: Iterable[Copy],
    deletions: Iterable[str],
    *,
    parent: str,
    message: str,
) -> str:
    """One commit on top of `parent` and of nothing else; its id.

    CommitUnanswered where it may have landed, PublishError where it has not. Only 429, which says that nothing was
    done, is answered by trying again.
    """
    operations = [*additions, *_make_operations(copies, deletions)]

    def call() -> str:
        return client.api.create_commit(
            repo_id, operations, commit_message=message, parent_commit=parent, revision=revision
        ).oid

    try:
        return ask(client, repo_id, call, may_repeat=lambda exc: status_of(exc) == 429)
    except PublishError as exc:
        cause = exc.__cause__
        if cause is not None and (is_transient(cause) or status_of(cause) == 412 or _is_garbled(cause)):
            raise CommitUnanswered(str(exc), hint=exc.hint) from cause
        raise


def _make_operations(copies: Iterable[Copy], deletions: Iterable[str]) -> Iterator[CommitOperation]:
    from huggingface_hub import CommitOperationCopy, CommitOperationDelete

    for copy in copies:
        yield CommitOperationCopy(
            copy.source_path, copy.path, src_revision=copy.commit, src_repo_id=copy.model, src_repo_type="model"
        )
    for path in deletions:
        yield CommitOperationDelete(path, is_folder=False)


def _is_garbled(exc: BaseException) -> bool:
    return isinstance(exc, json.JSONDecodeError | UnicodeDecodeError)


def find_tag(client: Client, repo_id: str, tag: str) -> str | None:
    """The commit that a tag is on, or None."""
    refs = ask(client, repo_id, lambda: client.api.list_repo_refs(repo_id))
    return next((str(ref.target_commit) for ref in refs.tags if ref.name == tag), None)


def set_tag(client: Client, repo_id: str, tag: str, commit: str) -> None:
    """Put a tag on a commit, unless it is there already; PublishError if it is on another one."""
    if find_tag(client, repo_id, tag) == commit:
        return
    ask(client, repo_id, lambda: client.api.create_tag(repo_id, tag=tag, revision=commit, exist_ok=True))
    target = find_tag(client, repo_id, tag)  # exist_ok hides that the tag was elsewhere
    if target != commit:
        raise PublishError(f"tag {tag} of {repo_id} is on {target}, not on {commit}", hint="choose another tag")


def make_public(client: Client, repo_id: str) -> None:
    """Let everyone see a repo."""
    ask(client, repo_id, lambda: client.api.update_repo_settings(repo_id, private=False))
