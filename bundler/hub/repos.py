"""The calls that publishing is made of, each one question or one change; `push` knows their order.

Never `upload_folder`, `upload_large_folder` or `hf upload`: they may make several commits, so that a repo is seen half
changed (huggingface_hub guides/upload; upload_folder splits into "(part N)" commits since 1.2x).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundler.errors import PublishError
from bundler.hub.client import TIMEOUT_S, Client, ask, headers, is_transient, status_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.hf_api import CommitOperation


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteRepo:
    """A repo as it stands: the commit at the end of main, and whether it is closed to strangers."""

    head: str
    private: bool


class CommitUnanswered(PublishError):
    """A commit that may have landed: its answer was lost, or main has moved since."""


def check_account(client: Client, repo_id: str) -> None:
    """PublishError unless the token may write to this repo, as far as the token itself can tell."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo_id):
        raise PublishError(f"{repo_id} is no repo id", hint="write namespace/name")
    who = ask(client, repo_id, lambda: client.api.whoami(cache=True))
    namespace, user = repo_id.split("/")[0], who.get("name")
    token = who.get("auth", {}).get("accessToken", {})
    role, scopes = token.get("role"), token.get("fineGrained", {}).get("scoped", [])
    settings = f"{client.endpoint}/settings/tokens"
    if namespace not in {user, *(org.get("name") for org in who.get("orgs", []))}:
        raise PublishError(f"{user} does not belong to {namespace}", hint="change the repo id, or log in as another")
    if role == "read":
        raise PublishError(f"this token of {user} may only read", hint=f"take one that may write: {settings}")
    if role == "fineGrained" and not any(
        scope.get("entity", {}).get("name") in {namespace, repo_id} and "repo.write" in scope.get("permissions", [])
        for scope in scopes
    ):
        raise PublishError(f"this token of {user} may not write to {repo_id}", hint=f"allow it there: {settings}")


def validate_card(client: Client, repo_id: str, card: str) -> None:
    """PublishError with everything that the Hub would refuse the card's front matter for."""
    from huggingface_hub.utils import get_session, hf_raise_for_status

    url, question = f"{client.endpoint}/api/validate-yaml", {"content": card, "repoType": "model"}

    def call() -> dict[str, Any]:
        response = get_session().post(url, json=question, headers=headers(client), timeout=TIMEOUT_S)
        if response.status_code != 400:
            hf_raise_for_status(response)
        return dict(response.json())

    if problems := ask(client, repo_id, call).get("errors", []):
        said = "; ".join(str(problem.get("message")) for problem in problems)
        raise PublishError(f"the Hub refuses README.md: {said}", hint="correct the recipe's card and render it again")


def find_repo(client: Client, repo_id: str) -> RemoteRepo | None:
    """The model repo as it stands, or None where this token sees none."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    def call() -> RemoteRepo | None:
        try:
            info = client.api.model_info(repo_id)
        except RepositoryNotFoundError as exc:
            if isinstance(exc, GatedRepoError):
                raise
            return None
        return RemoteRepo(head=str(info.sha), private=bool(info.private))

    return ask(client, repo_id, call)


def create_repo(client: Client, repo_id: str) -> None:
    """Create a private model repo, where there is none yet."""
    ask(client, repo_id, lambda: client.api.create_repo(repo_id, private=True, exist_ok=True))


def upload(client: Client, repo_id: str, path: str, file: Path, sha256: str) -> CommitOperationAdd:
    """Send a file's content ahead of the commit that will show it; nothing of it is visible yet.

    PublishError if a .gitignore in the repo would make the Hub drop the file from the commit without a word.
    """
    from huggingface_hub import CommitOperationAdd

    operation = CommitOperationAdd(path, file)
    operation.upload_info.sha256 = bytes.fromhex(sha256)  # else the client reads the whole file to compute it
    ask(client, repo_id, lambda: client.api.preupload_lfs_files(repo_id, [operation], free_memory=False))
    if operation._should_ignore:  # known to the client under no public name
        hint = f"take that line out: {client.endpoint}/{repo_id}/blob/main/.gitignore"
        raise PublishError(f"a .gitignore in {repo_id} would drop {path} from the commit", hint=hint)
    return operation


def commit(
    client: Client,
    repo_id: str,
    additions: Iterable[CommitOperationAdd],
    deletions: Iterable[str],
    *,
    parent: str,
    message: str,
) -> str:
    """One commit on top of `parent` and of nothing else; its id.

    CommitUnanswered where it may have landed, PublishError where it has not. Only 429, which says that nothing was
    done, is answered by trying again.
    """
    from huggingface_hub import CommitOperationDelete

    operations: list[CommitOperation] = list(additions)
    operations += [CommitOperationDelete(path, is_folder=False) for path in deletions]

    def call() -> str:
        return client.api.create_commit(repo_id, operations, commit_message=message, parent_commit=parent).oid

    try:
        return ask(client, repo_id, call, may_repeat=lambda exc: status_of(exc) == 429)
    except PublishError as exc:
        cause = exc.__cause__
        if cause is not None and (is_transient(cause) or status_of(cause) == 412 or _is_garbled(cause)):
            raise CommitUnanswered(str(exc), hint=exc.hint) from cause
        raise


def _is_garbled(exc: BaseException) -> bool:
    return isinstance(exc, json.JSONDecodeError | UnicodeDecodeError)


def find_tag(client: Client, repo_id: str, tag: str) -> str | None:
    """The commit that a tag is on, or None."""
    refs = ask(client, repo_id, lambda: client.api.list_repo_refs(repo_id))
    return next((str(ref.target_commit) for ref in refs.tags if ref.name == tag), None)


def set_tag(client: Client, repo_id: str, tag: str, commit: str) -> None:
    """Put a tag on a commit; PublishError if it is on another one."""
    ask(client, repo_id, lambda: client.api.create_tag(repo_id, tag=tag, revision=commit, exist_ok=True))
    target = find_tag(client, repo_id, tag)  # exist_ok hides that the tag was elsewhere
    if target != commit:
        raise PublishError(f"tag {tag} of {repo_id} is on {target}, not on {commit}", hint="choose another tag")


def make_public(client: Client, repo_id: str) -> None:
    """Let everyone see a repo."""
    ask(client, repo_id, lambda: client.api.update_repo_settings(repo_id, private=False))
