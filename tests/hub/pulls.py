"""Pull requests of the test Hub: a draft has a ref of its own, refs/pr/N, that starts where main was."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse, Response

from .call import DATE, Call
from .store import HubError, Pull, Repo


def list_pulls(call: Call) -> Response:
    repo, asked = call.repo(), call.request.query_params
    pulls = [pull for pull in repo.pulls.values() if asked.get("author") in (None, pull.author)]
    described = [_describe(repo, pull) for pull in sorted(pulls, key=lambda pull: -pull.number)]
    return JSONResponse({"count": len(described), "start": 0, "discussions": described})


def open_pull(call: Call) -> Response:
    repo, token = call.repo(pull=True), call.token
    assert token is not None
    with call.store.lock:
        pull = Pull(number=len(repo.pulls) + 1, author=token.user, title=call.json()["title"])
        repo.pulls[pull.number] = pull
        repo.git.set_ref(pull.ref, repo.head())
    return JSONResponse({"num": pull.number})


def show_pull(call: Call) -> Response:
    repo = call.repo()
    pull = _find(repo, call)
    details = {"events": [], "filesWithConflicts": [], "changes": {"base": "refs/heads/main"}, "diff": ""}
    return JSONResponse(_describe(repo, pull) | details)


def change_status(call: Call) -> Response:
    repo = call.repo(pull=True)
    pull, status = _find(repo, call), call.json()["status"]
    if pull.status == status:
        raise HubError(400, f"the pull request is {status} already")
    pull.status = status
    event = {"id": "0", "type": "status-change", "createdAt": DATE, "author": {"name": pull.author}}
    return JSONResponse({"newStatus": event | {"data": {"status": status}}})


def _find(repo: Repo, call: Call) -> Pull:
    pull = repo.pulls.get(int(call["number"]))
    if pull is None:
        raise HubError(404, "Not found")
    return pull


def _describe(repo: Repo, pull: Pull) -> dict[str, Any]:
    return {
        "num": pull.number,
        "title": pull.title,
        "status": pull.status,
        "isPullRequest": True,
        "createdAt": DATE,
        "author": {"name": pull.author},
        "repo": {"name": repo.repo_id, "type": repo.kind},
    }
