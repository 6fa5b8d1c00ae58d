"""The line to the Hub: one client, patience where a call may be repeated, plain words where the Hub says no.

HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE mean what they mean in huggingface_hub, which alone sees the token.
"""

from __future__ import annotations

import errno
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from bundler import __version__
from bundler.errors import BundlerError

if TYPE_CHECKING:
    from huggingface_hub import HfApi

T = TypeVar("T")
Progress = Callable[[str, int, int], None]
"""Told the file at hand, the bytes done and the bytes in all."""

WAITS_S = (1.0, 2.0, 4.0, 8.0)
"""Pauses between the attempts at something that the Hub was too busy for."""
SILENCE_S = 60.0
"""How long the Hub may say nothing; the client itself would wait for ever for an answer that does not come."""
_GUARDING = threading.Lock()
_MAX_TOLD_WAIT_S = 300.0  # the Hub counts requests in windows of five minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class Client:
    """huggingface_hub's client, and the error that a refusal means here: SourceError or PublishError."""

    api: HfApi
    error: type[BundlerError]

    @property
    def endpoint(self) -> str:
        """Where the Hub is: https://huggingface.co unless HF_ENDPOINT says otherwise."""
        return self.api.endpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A file as the Hub lists it: an LFS file has a `sha256`, a plain one is known by git's own `blob_id`."""

    path: str
    size_bytes: int
    sha256: str | None
    blob_id: str
    xet_hash: str | None = None
    """Where the Hub keeps the content in its xet storage, it can be copied from repo to repo by this."""


def make_client(error: type[BundlerError]) -> Client:
    """The client that every call goes through, guarded; its progress bars are off, for the verbs show their own."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.utils import disable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is None:
        disable_progress_bars()
    _guard_sessions()
    return Client(api=HfApi(library_name="bundler", library_version=__version__), error=error)


def headers(client: Client) -> dict[str, str]:
    """Request headers as the client's own calls have them."""
    from huggingface_hub.utils import build_hf_headers

    api = client.api
    return dict(build_hf_headers(library_name=api.library_name, library_version=api.library_version))


def list_files(client: Client, repo_id: str, commit: str) -> dict[str, RemoteFile]:
    """Every file of a repo at a commit, by path."""
    from huggingface_hub.hf_api import RepoFile

    def call() -> dict[str, RemoteFile]:
        return {
            entry.path: RemoteFile(
                path=entry.path,
                size_bytes=entry.size,
                sha256=entry.lfs.sha256 if entry.lfs else None,
                blob_id=entry.blob_id,
                xet_hash=entry.xet_hash,
            )
            for entry in client.api.list_repo_tree(repo_id, revision=commit, recursive=True)
            if isinstance(entry, RepoFile)
        }

    return ask(client, repo_id, call)


def read_bytes(client: Client, repo_id: str, commit: str, path: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` (exclusive) of a file at a commit, and never more, whatever the server sends."""
    if end <= start:
        return b""

    def call() -> bytes:
        with _open(client, repo_id, commit, path, {"Range": f"bytes={start}-{end - 1}"}) as response:
            if response.status_code != 206:
                raise client.error(f"{client.endpoint} does not serve parts of files", hint="check HF_ENDPOINT")
            return _read(response, end - start)[: end - start]

    return ask(client, repo_id, call)


def read_file(client: Client, repo_id: str, commit: str, file: RemoteFile) -> bytes:
    """A whole file at a commit, for small ones; `client.error` if it is not as long as the Hub's listing says."""

    def call() -> bytes:
        with _open(client, repo_id, commit, file.path, {}) as response:
            return _read(response, file.size_bytes + 1)

    content = ask(client, repo_id, call)
    if len(content) != file.size_bytes:
        more = "more than " if len(content) > file.size_bytes else f"{len(content)} instead of "
        raise client.error(f"{repo_id}: {file.path} comes with {more}{file.size_bytes} bytes", hint="try again later")
    return content


@contextmanager
def _open(client: Client, repo_id: str, commit: str, path: str, asked: dict[str, str]) -> Iterator[Any]:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import hf_raise_for_status, http_stream_backoff

    url = hf_hub_url(repo_id, path, revision=commit, endpoint=client.endpoint)
    sent = {**headers(client), **asked, "Accept-Encoding": "identity"}
    with http_stream_backoff("GET", url, headers=sent, max_retries=0) as response:
        hf_raise_for_status(response)
        yield response


def _read(response: Any, enough_bytes: int) -> bytes:
    """The body, read until there is enough of it."""
    received = bytearray()
    for chunk in response.iter_bytes():
        received += chunk
        if len(received) >= enough_bytes:
            break
    return bytes(received)


def ask(
    client: Client,
    repo_id: str,
    call: Callable[[], T],
    *,
    revision: str | None = None,
    may_repeat: Callable[[BaseException], bool] | None = None,
) -> T:
    """The answer to a call, repeated while the Hub is busy; `client.error` in plain words where there is none.

    `may_repeat` says which exceptions a further attempt is right for; without it, those that `is_transient` names.
    """
    from huggingface_hub import errors

    foreign = (OSError, ValueError, RuntimeError, errors.HTTPError, errors.EntryNotFoundError)  # hf_xet: RuntimeError
    waits: Iterator[float] = iter(WAITS_S)
    while True:
        try:
            return call()
        except foreign as exc:
            cause = _find_cause(exc)
            wait = next(waits, None)
            if wait is None or not (may_repeat or is_transient)(cause):
                message, hint = _explain(cause, repo_id, client.endpoint, revision)
                raise client.error(message, hint=hint) from cause
            time.sleep(_told_wait_s(cause) or wait)


def _guard_sessions() -> None:
    """Every request of the client's sessions has a limit, also where it asks for none, and keeps the token at home.

    A factory, because the client takes a new session after a line that broke. Redirects and further pages are its
    requests too.
    """
    from huggingface_hub import get_session, set_client_factory

    with _GUARDING:  # a second factory would take the session away from a thread that is at work with it
        session: Any = get_session()
        kind, hooks = type(session), session.event_hooks
        if _set_limit not in hooks["request"]:
            hooks = {**hooks, "request": [*hooks["request"], _set_limit, _keep_token]}
            set_client_factory(lambda: kind(event_hooks=hooks, follow_redirects=True, timeout=None))


def _set_limit(request: Any) -> None:
    limits = request.extensions.get("timeout", {})
    kinds = ("connect", "read", "write", "pool")
    request.extensions["timeout"] = {kind: limits.get(kind) or SILENCE_S for kind in kinds}


def _keep_token(request: Any) -> None:
    """An answer may send the client on, to storage or to a next page: the token does not go to another origin."""
    from huggingface_hub import constants

    home = type(request.url)(constants.ENDPOINT)
    if (request.url.scheme, request.url.netloc) != (home.scheme, home.netloc):
        request.headers.pop("authorization", None)


def _find_cause(exc: BaseException) -> BaseException:
    """The answer or broken line behind an exception: the client wraps some in errors of its own that say less."""
    from huggingface_hub import errors

    cause: BaseException | None = exc
    while cause is not None and not isinstance(cause, (errors.HTTPError, errors.OfflineModeIsEnabled)):
        cause = cause.__cause__
    return cause or exc


def status_of(exc: BaseException) -> int | None:
    """The HTTP status that an exception stands for, if any."""
    response = getattr(exc, "response", None)
    return getattr(response, "status_code", None)


def is_transient(exc: BaseException) -> bool:
    """Whether the same call may well succeed a little later: the Hub is busy, or the line broke."""
    from huggingface_hub import errors

    if isinstance(exc, errors.OfflineModeIsEnabled):
        return False
    if (status := status_of(exc)) is not None:
        return status in {408, 429} or status >= 500
    return isinstance(exc, (errors.HTTPError, ConnectionError, TimeoutError))


def _told_wait_s(exc: BaseException) -> float:
    """The pause that a 429 asks for: `Retry-After: 5`, or `RateLimit: "api";r=0;t=5`; 0 where it says nothing."""
    told = getattr(getattr(exc, "response", None), "headers", {})
    after, window = told.get("retry-after", ""), told.get("ratelimit", "")
    match = re.fullmatch(r"\d+", after) or re.search(r"(?<=;t=)\d+", window)
    return min(float(match[0]), _MAX_TOLD_WAIT_S) if match else 0.0


def _explain(exc: BaseException, repo_id: str, endpoint: str, revision: str | None) -> tuple[str, str]:
    """What happened and what to do next, for every way in which the Hub says no."""
    from huggingface_hub import errors

    page, login = f"{endpoint}/{repo_id}", "`hf auth login`, or set HF_TOKEN"
    status = status_of(exc)
    answered = getattr(getattr(exc, "response", None), "headers", {}).get("x-error-message")
    said = str(answered or getattr(exc, "server_message", None) or exc).strip().split("\n")[0] or type(exc).__name__
    said = re.sub(r"(Bearer |hf_)\S+", r"\1…", said)  # the HTTP library quotes a header that it cannot send
    if isinstance(exc, errors.OfflineModeIsEnabled):
        return f"{repo_id}: HF_HUB_OFFLINE is set", "unset it, or name a local folder"
    if isinstance(exc, errors.LocalTokenNotFoundError):
        return f"{repo_id}: nobody is logged in", login
    if isinstance(exc, errors.HFValidationError):
        return f"{repo_id} is no repo id", "write namespace/name; a local folder starts with ./ or /"
    if isinstance(exc, errors.GatedRepoError):
        return f"{repo_id} is gated", f"accept its terms at {page}, then {login}"
    if isinstance(exc, errors.RevisionNotFoundError):
        return f"{repo_id} has no revision {revision or 'main'}", f"see {page}/commits/main"
    if isinstance(exc, errors.RepositoryNotFoundError):
        return f"{repo_id} does not exist, or is private and closed to this token", f"check the name, or {login}"
    if status == 401:
        why = ", which has expired" if "expired" in said.lower() else ""
        return f"{repo_id}: the Hub does not accept this token{why}", f"{login}: {endpoint}/settings/tokens"
    if status == 403:
        return f"{repo_id}: the Hub refuses: {said}", f"see what the token may do: {endpoint}/settings/tokens"
    if status == 412:
        return f"{repo_id}: somebody else committed meanwhile", f"see {page}/commits/main, then try again"
    if status is not None:
        return f"{repo_id}: the Hub answers {status}: {said}", "try again later"
    if isinstance(exc, (errors.HTTPError, ConnectionError, TimeoutError)):
        return f"{repo_id}: cannot reach {endpoint}: {said}", "check the network and HF_ENDPOINT"
    if isinstance(exc, json.JSONDecodeError | UnicodeDecodeError):
        return (
            f"{repo_id}: {endpoint} answers with something that is no JSON",
            "is a proxy in between? check HF_ENDPOINT",
        )
    if isinstance(exc, OSError) and exc.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}:
        return (
            f"{repo_id}: no room for a download: {exc.strerror}",
            "make room, or set HF_HOME or TMPDIR to another disk",
        )
    return f"{repo_id}: {said}", f"see {page}"
