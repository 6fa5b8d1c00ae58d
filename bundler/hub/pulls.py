"""Pull requests: one for a bundle, found again by its author and title, shown as ready when its commit is checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bundler.errors import PublishError
from bundler.hub.client import Client, ask


@dataclass(frozen=True, kw_only=True, slots=True)
class PullRequest:
    """An open or draft pull request. Its commits are on `ref`; `url` is its page."""

    number: int
    draft: bool
    ref: str
    url: str


def find_pull_request(client: Client, repo_id: str, author: str, title: str) -> PullRequest | None:
    """The newest pull request of this author and title that is not merged or closed."""
    return ask(client, repo_id, lambda: _find(client, repo_id, author, title))


def open_pull_request(client: Client, repo_id: str, author: str, title: str, description: str) -> PullRequest:
    """Open a draft from where main is now. A lost answer opens no second one: it is looked up before each attempt."""

    def call() -> PullRequest:
        known = _find(client, repo_id, author, title)
        made = known or client.api.create_pull_request(repo_id, title=title, description=description)
        return known or _make(client, repo_id, made)

    return ask(client, repo_id, call)


def show_pull_request(client: Client, repo_id: str, pull: PullRequest, author: str, title: str) -> None:
    """Take a draft out of draft state, so that the repo's owners are asked to merge it."""

    def call() -> None:
        known = _find(client, repo_id, author, title)
        if known is not None and known.draft and known.number == pull.number:
            client.api.change_discussion_status(repo_id, pull.number, "open")

    ask(client, repo_id, call)


def _find(client: Client, repo_id: str, author: str, title: str) -> PullRequest | None:
    found = client.api.get_repo_discussions(repo_id, author=author, discussion_type="pull_request")
    mine = [
        pull for pull in found if pull.title == title and pull.author == author and pull.status in {"draft", "open"}
    ]
    return _make(client, repo_id, max(mine, key=lambda pull: pull.num)) if mine else None


def _make(client: Client, repo_id: str, pull: Any) -> PullRequest:
    if not isinstance(pull.num, int) or pull.git_reference is None:
        raise PublishError(f"{repo_id}: the Hub answers with no pull request", hint="check HF_ENDPOINT")
    return PullRequest(
        number=pull.num,
        draft=pull.status == "draft",
        ref=pull.git_reference,
        url=f"{client.endpoint}/{repo_id}/discussions/{pull.num}",
    )
