"""One request as a handler of the test Hub sees it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from starlette.requests import Request

from .store import HubError, Repo, Store, Token

if TYPE_CHECKING:
    from .server import HubServer

DATE = "2026-01-01T00:00:00.000Z"


@dataclass(kw_only=True)
class Call:
    """A request with its body, and what the server knows of who sent it."""

    server: HubServer
    request: Request
    body: bytes

    @property
    def store(self) -> Store:
        return self.server.store

    @property
    def token(self) -> Token | None:
        """Whose token came along; 401 if it is no token of ours."""
        header = self.request.headers.get("authorization")
        if header is None:
            return None
        token = self.store.tokens.get(header.removeprefix("Bearer "))
        if token is None:
            raise HubError(401, "Invalid credentials in Authorization header")
        if token.expired:
            raise HubError(401, 'User Access Token "laptop" is expired')
        return token

    def __getitem__(self, name: str) -> str:
        """A part of the path, decoded; `refs%2Fpr%2F1` is one part."""
        return unquote(self.request.path_params.get(name, ""))

    @property
    def kind(self) -> str:
        return self.request.path_params.get("kinds", "models").removesuffix("s")

    def repo(self, *, write: bool = False, pull: bool = False, content: bool = False) -> Repo:
        """The repo of the path; `write` to it, `pull`: to a pull request in it, or download from it (`content`)."""
        repo_id = f"{self['ns']}/{self['name']}"
        return self.store.find(self.token, self.kind, repo_id, write=write and not pull, pull=pull, content=content)

    def json(self) -> Any:
        return json.loads(self.body or b"{}")
