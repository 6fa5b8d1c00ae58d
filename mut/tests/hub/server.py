"""The HTTP side: one handler an endpoint, faults on demand, a log of every request.

Handlers are plain functions from a `Call` to a response; `HubServer` runs them on a thread of its own. LFS content is
served from another origin (localhost instead of 127.0.0.1), as the real Hub does: a client must leave its token behind
there, and reads a file's metadata from the redirect only if the redirect leaves the Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .git import Entry, make_pointer
from .store import HubError, Repo, Store, Token

LICENCES = {"apache-2.0", "mit", "gemma", "llama3", "cc-by-4.0", "other"}
DATE = "2026-01-01T00:00:00.000Z"


@dataclass(kw_only=True)
class Fault:
    """What happens to the next `times` requests whose method and path match.

    `status` answers in place of the handler; with `after`, the handler does its work first and only its answer is
    lost. `reset` breaks the connection off behind the head of an answer (of `status`, else 200). `edit` changes the
    body of the handler's answer, and `set_status` its status. `meanwhile` runs before the handler: somebody else's
    doing, between two requests of a client.
    """

    method: str
    path: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False
    reset: bool = False
    edit: Callable[[bytes], bytes] | None = None
    set_status: int | None = None
    meanwhile: Callable[[], object] | None = None


@dataclass(kw_only=True)
class Logged:
    """One request as it came in and what went out."""

    method: str
    path: str
    range: str | None
    user_agent: str
    status: int = 0
    sent_bytes: int = 0

    @property
    def is_write(self) -> bool:
        """Whether the request could change anything on the Hub."""
        return self.method not in {"GET", "HEAD"} and not self.path.endswith("/api/validate-yaml")


@dataclass(kw_only=True)
class Call:
    """One request as a handler sees it."""

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
        try:
            return self.store.tokens[header.removeprefix("Bearer ")]
        except KeyError:
            raise HubError(401, "Invalid credentials in Authorization header") from None

    def __getitem__(self, name: str) -> str:
        """A part of the path, decoded; `refs%2Fpr%2F1` is one part."""
        return unquote(self.request.path_params.get(name, ""))

    @property
    def kind(self) -> str:
        return self.request.path_params.get("kinds", "models").removesuffix("s")

    def repo(self, *, write: bool = False, content: bool = False) -> Repo:
        return self.store.find(self.token, self.kind, f"{self['ns']}/{self['name']}", write=write, content=content)

    def json(self) -> Any:
        return json.loads(self.body or b"{}")


# ---------------------------------------------------------------------------------------------- people and repos


def whoami(call: Call) -> Response:
    token = call.token
    if token is None:
        raise HubError(401, "Invalid username or password.")
    access: dict[str, Any] = {"displayName": "test", "role": token.role, "createdAt": DATE}
    if token.role == "fineGrained":
        scoped = [{"entity": {"name": name}, "permissions": list(scope)} for name, scope in token.scopes.items()]
        access["fineGrained"] = {"global": [], "scoped": scoped}
    orgs = [{"type": "org", "name": org} for org in token.orgs]
    auth = {"type": "access_token", "accessToken": access}
    return JSONResponse({"type": "user", "id": "0", "name": token.user, "orgs": orgs, "auth": auth})


def create_repo(call: Call) -> Response:
    asked, token = call.json(), call.token
    kind = asked.get("type") or "model"
    repo_id = f"{asked.get('organization') or (token.user if token else '')}/{asked['name']}"
    call.store.check_write(token, repo_id)
    url = f"{call.server.endpoint}/{'' if kind == 'model' else kind + 's/'}{repo_id}"
    if (kind, repo_id) in call.store.repos:
        message = f"You already created this {kind} repo"
        raise HubError(409, message, body={"error": message, "url": url})
    call.store.create(repo_id, kind=kind, private=asked.get("visibility") == "private" or bool(asked.get("private")))
    return JSONResponse({"url": url, "name": repo_id, "id": "0"})


def change_settings(call: Call) -> Response:
    repo, asked = call.repo(write=True), call.json()
    if "visibility" in asked:
        repo.private = asked["visibility"] == "private"
    repo.private = asked.get("private", repo.private)
    repo.gated = asked.get("gated", repo.gated)
    return JSONResponse({"private": repo.private, "gated": repo.gated})


def repo_info(call: Call) -> Response:
    repo = call.repo()
    commit = repo.commit_of(call["rev"] or "main")
    files = repo.git.files(commit)
    return JSONResponse(
        {
            "_id": "0",
            "id": repo.repo_id,
            "author": repo.repo_id.split("/")[0],
            "sha": commit,
            "private": repo.private,
            "gated": repo.gated,
            "disabled": False,
            "lastModified": DATE,
            "createdAt": DATE,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": path} for path in files],
        }
    )


# ------------------------------------------------------------------------------------------------------- reading


def _describe(entry: Entry) -> dict[str, Any]:
    if entry.is_folder:
        return {"type": "directory", "oid": entry.oid, "size": 0, "path": entry.path}
    described = {"type": "file", "oid": entry.oid, "size": entry.size, "path": entry.path}
    if entry.sha256 is not None:
        described["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    return described


def list_tree(call: Call) -> Response:
    repo = call.repo()
    commit = repo.commit_of(call["rev"])
    recursive = call.request.query_params.get("recursive", "").lower() == "true"
    entries = repo.git.tree(commit, call["path"], recursive=recursive)
    if call["path"] and not entries:
        raise HubError(404, f"{call['path']} does not exist on {commit}", code="EntryNotFound")
    first = int(call.request.query_params.get("cursor", 0))
    last = first + call.server.page_size
    headers = {}
    if last < len(entries):
        query = f"recursive={recursive}&expand=False&cursor={last}"
        headers["Link"] = f'<{call.server.endpoint}{call.request.url.path}?{query}>; rel="next"'
    return JSONResponse([_describe(entry) for entry in entries[first:last]], headers=headers)


def paths_info(call: Call) -> Response:
    repo = call.repo()
    wanted = set(parse_qs(call.body.decode()).get("paths", []))
    return JSONResponse([_describe(e) for e in repo.git.tree(repo.commit_of(call["rev"])) if e.path in wanted])


def resolve_file(call: Call) -> Response:
    repo = call.repo(content=True)
    commit = repo.commit_of(call["rev"])
    entry = repo.git.files(commit).get(call["path"])
    headers = {"X-Repo-Commit": commit}
    if entry is None:
        raise HubError(404, "Entry not found", code="EntryNotFound")
    if entry.sha256 is None:
        return _content(call, repo.git.read(commit, entry.path), headers | {"ETag": f'"{entry.oid}"'})
    headers |= {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size)}
    return RedirectResponse(f"{call.server.storage}/_lfs/{entry.sha256}", 302, headers=headers)


def _content(call: Call, data: bytes, headers: dict[str, str]) -> Response:
    headers["Accept-Ranges"] = "bytes"
    status, body = 200, data
    if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", call.request.headers.get("range", "")):
        first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
        if first >= len(data):
            raise HubError(416, "Range Not Satisfiable")
        status, body = 206, data[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
    if call.request.method == "HEAD":
        return Response(status_code=status, headers=headers | {"Content-Length": str(len(body))})
    return Response(body, status, headers=headers)


def list_refs(call: Call) -> Response:
    answer: dict[str, list[dict[str, str]]] = {"branches": [], "tags": [], "converts": [], "pullRequests": []}
    groups = {"heads": "branches", "tags": "tags"}
    for ref, commit in call.repo().git.refs().items():
        _, group, name = ref.split("/", 2)
        answer[groups.get(group, "pullRequests")].append({"name": name, "ref": ref, "targetCommit": commit})
    return JSONResponse(answer)


def list_commits(call: Call) -> Response:
    repo = call.repo()
    return JSONResponse(
        [
            {"id": c.oid, "authors": [{"user": c.author}], "date": DATE, "title": c.title, "message": ""}
            for c in repo.git.log(repo.commit_of(call["rev"]))
        ]
    )


# ------------------------------------------------------------------------------------------------------- writing


def _front_matter(card: str) -> Any:
    match = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*(\n|$)", card, re.DOTALL)
    return yaml.safe_load(match[1]) if match else None


def validate_yaml(call: Call) -> Response:
    problems, warnings = [], []
    try:
        matter = _front_matter(call.json()["content"])
    except yaml.YAMLError as exc:
        matter = {}
        problems.append(f"Invalid YAML: {exc}")
    if matter is None:
        warnings.append("empty or missing yaml metadata in repo card")
    elif matter and matter.get("license") and matter["license"] not in LICENCES:
        problems.append('"license" must be one of [...]')
    if matter and "base_model" in matter and not matter["base_model"]:
        problems.append('"base_model" must be a string or an array of strings')
    body = {"errors": [{"message": p} for p in problems], "warnings": [{"message": w} for w in warnings]}
    return JSONResponse(body, 400 if problems else 200)


def preupload(call: Call) -> Response:
    repo, asked = call.repo(write=True), call.json()
    commit = repo.commit_of(call["rev"])
    present = repo.git.files(commit)
    answers = []
    for file in asked["files"]:
        path = file["path"]
        lfs = repo.uses_lfs(commit, path, file["size"], base64.b64decode(file["sample"]))
        answer = {
            "path": path,
            "uploadMode": "lfs" if lfs else "regular",
            "shouldIgnore": repo.ignores(commit, path, asked.get("gitIgnore")),
        }
        if entry := present.get(path):
            answer["oid"] = entry.sha256 or entry.oid
        answers.append(answer)
    return JSONResponse({"files": answers, "commitOid": commit})


def lfs_batch(call: Call) -> Response:
    asked = call.json()
    upload = asked["operation"] == "upload"
    repo = call.repo(write=upload, content=not upload)
    server, objects = call.server, []
    for wanted in asked["objects"]:
        oid, size = wanted["oid"], wanted["size"]
        answer: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
        if not upload:
            answer["actions"] = {"download": {"href": f"{server.storage}/_lfs/{oid}"}}
        elif oid not in call.store.objects:
            action: dict[str, Any] = {"href": f"{server.storage}/_lfs/{oid}"}
            if size >= server.multipart_bytes and "multipart" in asked.get("transfers", []):
                count = -(-size // server.part_bytes)
                parts = {f"{n:05d}": f"{server.storage}/_lfs/{oid}/{n}" for n in range(1, count + 1)}
                action["header"] = {"chunk_size": str(server.part_bytes), **parts}
            verify = {"href": f"{server.endpoint}/{repo.repo_id}.git/info/lfs/verify"}
            answer["actions"] = {"upload": action, "verify": verify}
        objects.append(answer)
    return JSONResponse({"transfer": "basic", "objects": objects}, media_type="application/vnd.git-lfs+json")


def lfs_verify(call: Call) -> Response:
    call.repo(write=True)
    asked = call.json()
    if len(call.store.objects.get(asked["oid"], b"")) != asked["size"]:
        raise HubError(404, "Object does not exist")
    return JSONResponse({})


def lfs_object(call: Call) -> Response:
    """The storage host: single PUT, one part of many, completion of the parts, download."""
    if "authorization" in call.request.headers:
        raise HubError(400, "a token came to the storage host")
    oid, part, store = call["oid"], call["part"], call.store
    if call.request.method == "PUT" and part:
        call.server.parts[oid, int(part)] = call.body
    elif call.request.method == "PUT":
        _keep(store, oid, call.body)
    elif call.request.method == "POST":
        numbers = [p["partNumber"] for p in call.json()["parts"]]
        _keep(store, oid, b"".join(call.server.parts.pop((oid, number)) for number in numbers))
        return JSONResponse({})
    elif oid in store.objects:
        return _content(call, store.objects[oid], {"ETag": f'"{oid}"'})
    else:
        raise HubError(404, "no such object")
    return Response(headers={"ETag": f'"{hashlib.md5(call.body).hexdigest()}"'})


def _keep(store: Store, oid: str, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != oid:
        raise HubError(400, "the content does not have this sha256")
    store.objects[oid] = content


def commit(call: Call) -> Response:
    repo, token = call.repo(write=True), call.token
    assert token is not None
    header: dict[str, Any] = {}
    changes: dict[str, bytes | None] = {}
    with call.store.lock:
        head = repo.commit_of(f"refs/heads/{call['rev']}")
        for operation in map(json.loads, call.body.splitlines()):
            key, value = operation["key"], operation["value"]
            if key == "header":
                header = value
                if header.get("parentCommit") not in {None, head}:
                    raise HubError(412, "A commit has happened since. Please refresh and try again.")
            elif key == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                content = call.store.objects.get(value["oid"])
                if content is None:
                    raise HubError(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
                changes[value["path"]] = make_pointer(value["oid"], len(content))
            elif key == "deletedFile":
                if value["path"] not in repo.git.files(head):
                    raise HubError(404, "A file with this name doesn't exist", code="EntryNotFound")
                changes[value["path"]] = None
            else:
                raise HubError(400, f"unknown operation {key}")
        oid = repo.git.commit(
            f"refs/heads/{call['rev']}",
            changes,
            title=header["summary"],
            body=header.get("description", ""),
            author=token.user,
        )
    url = f"{call.server.endpoint}/{repo.repo_id}/commit/{oid}"
    return JSONResponse({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})


def create_tag(call: Call) -> Response:
    return _create_ref(call, f"refs/tags/{call.json()['tag']}", call["rev"])


def create_branch(call: Call) -> Response:
    return _create_ref(call, f"refs/heads/{call['rev']}", call.json().get("startingPoint") or "main")


def _create_ref(call: Call, ref: str, start: str) -> Response:
    repo = call.repo(write=True)
    if ref in repo.git.refs():
        raise HubError(409, "Reference already exists")
    repo.git.set_ref(ref, repo.commit_of(start))
    return Response(status_code=201)


def delete_tag(call: Call) -> Response:
    return _delete_ref(call, f"refs/tags/{call['rev']}")


def delete_branch(call: Call) -> Response:
    return _delete_ref(call, f"refs/heads/{call['rev']}")


def _delete_ref(call: Call, ref: str) -> Response:
    repo = call.repo(write=True)
    if ref not in repo.git.refs():
        raise HubError(404, "no such reference", code="RevisionNotFound")
    repo.git.delete_ref(ref)
    return Response()


# ------------------------------------------------------------------------------------------------------- serving

REPO = "/api/{kinds}/{ns}/{name}"
ENDPOINTS: list[tuple[str, str, Callable[[Call], Response]]] = [
    ("GET", "/api/whoami-v2", whoami),
    ("POST", "/api/repos/create", create_repo),
    ("POST", "/api/validate-yaml", validate_yaml),
    ("GET", REPO, repo_info),
    ("GET", REPO + "/revision/{rev}", repo_info),
    ("PUT", REPO + "/settings", change_settings),
    ("GET", REPO + "/tree/{rev}", list_tree),
    ("GET", REPO + "/tree/{rev}/{path:path}", list_tree),
    ("POST", REPO + "/paths-info/{rev}", paths_info),
    ("GET", REPO + "/refs", list_refs),
    ("GET", REPO + "/commits/{rev}", list_commits),
    ("POST", REPO + "/preupload/{rev}", preupload),
    ("POST", REPO + "/commit/{rev}", commit),
    ("POST", REPO + "/tag/{rev}", create_tag),
    ("DELETE", REPO + "/tag/{rev}", delete_tag),
    ("POST", REPO + "/branch/{rev}", create_branch),
    ("DELETE", REPO + "/branch/{rev}", delete_branch),
    ("POST", "/{ns}/{name}.git/info/lfs/objects/batch", lfs_batch),
    ("POST", "/{ns}/{name}.git/info/lfs/verify", lfs_verify),
    ("PUT", "/_lfs/{oid}", lfs_object),
    ("POST", "/_lfs/{oid}", lfs_object),
    ("GET", "/_lfs/{oid}", lfs_object),
    ("PUT", "/_lfs/{oid}/{part}", lfs_object),
    ("GET", "/{ns}/{name}/resolve/{rev}/{path:path}", resolve_file),
    ("GET", "/{kinds}/{ns}/{name}/resolve/{rev}/{path:path}", resolve_file),
]


class HubServer:
    """The server: a store, the faults to come, the requests that were, and the thread that serves them."""

    def __init__(self, folder: Path) -> None:
        # the protocol is named, because asyncio turns Nagle's delay off only where it is: 40 ms a request otherwise
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        port = self._socket.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self.storage = f"http://localhost:{port}"
        self.reset(folder)
        config = uvicorn.Config(self._make_app(), lifespan="off", ws="none", http="h11", log_config=None)
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def reset(self, folder: Path) -> None:
        """An empty Hub whose repos lie in `folder`, with nothing wrong and nothing logged."""
        self.store = Store(folder)
        self.faults: list[Fault] = []
        self.log: list[Logged] = []
        self.parts: dict[tuple[str, int], bytes] = {}
        self.page_size = 1000
        """Tree entries in one answer."""
        self.multipart_bytes, self.part_bytes = 5_000_000_000, 16_000_000

    def start(self) -> None:
        """Serve until `stop`."""
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.01)

    def stop(self) -> None:
        """Close every connection and end the thread."""
        self._uvicorn.should_exit = True
        self._thread.join()

    def writes(self) -> list[str]:
        """Every logged request that could have changed something, as `METHOD path`."""
        return [f"{entry.method} {entry.path}" for entry in self.log if entry.is_write]

    def _make_app(self) -> ASGIApp:
        routes = [Route(path, self._endpoint(handler), methods=[method]) for method, path, handler in ENDPOINTS]
        return _Front(self, Starlette(routes=routes))

    def _endpoint(self, handler: Callable[[Call], Response]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            call = Call(server=self, request=request, body=await request.body())
            try:
                return await run_in_threadpool(handler, call)
            except HubError as exc:
                headers = {"X-Error-Message": exc.message} | ({"X-Error-Code": exc.code} if exc.code else {})
                return JSONResponse(exc.body, exc.status, headers=headers)

        return endpoint


class _Front:
    """In front of the routes: logs every request, plays the faults, and keeps `%2F` inside one part of a path."""

    def __init__(self, server: HubServer, app: ASGIApp) -> None:
        self.server, self.app = server, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope["raw_path"].decode().split("?")[0]
        path = re.sub(r"%2[fF]", "%2F", unquote(re.sub(r"%2[fF]", "%252F", raw)))
        scope = {**scope, "path": path}
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        logged = Logged(
            method=scope["method"],
            path=path,
            range=headers.get("range"),
            user_agent=headers.get("user-agent", ""),
        )
        self.server.log.append(logged)

        async def send_logged(message: Message) -> None:
            logged.status = message.get("status", logged.status)
            logged.sent_bytes += len(message.get("body", b""))
            await send(message)

        fault = self._next_fault(logged)
        if fault is None:
            return await self.app(scope, receive, send_logged)
        if fault.meanwhile is not None:
            await run_in_threadpool(fault.meanwhile)
        if fault.edit is not None:
            send_logged = _edited(send_logged, fault.edit, fault.set_status)
        if fault.status is None and not fault.reset:
            return await self.app(scope, receive, send_logged)
        if fault.after:
            await self.app(scope, receive, _nowhere)
        else:
            while (await receive()).get("more_body"):
                pass
        if fault.reset:  # an answer that promises a body and ends without one: uvicorn closes the connection
            head = [(b"content-length", b"1")]
            return await send({"type": "http.response.start", "status": fault.status or 200, "headers": head})
        return await JSONResponse({"error": "fault"}, fault.status, headers=fault.headers)(scope, receive, send_logged)

    def _next_fault(self, logged: Logged) -> Fault | None:
        for fault in self.server.faults:
            if fault.times > 0 and fault.method == logged.method and re.search(fault.path, logged.path):
                fault.times -= 1
                return fault
        return None


async def _nowhere(message: Message) -> None:
    pass


def _edited(send: Send, edit: Callable[[bytes], bytes], status: int | None) -> Send:
    """Holds the head of an answer back until its body is complete, then sends both, changed."""
    held: list[Message] = []

    async def send_edited(message: Message) -> None:
        held.append(message)
        if message["type"] != "http.response.body" or message.get("more_body"):
            return
        body = edit(b"".join(part.get("body", b"") for part in held))
        head = [(name, value) for name, value in held[0]["headers"] if name.lower() != b"content-length"]
        head.append((b"content-length", str(len(body)).encode()))
        await send({**held[0], "status": status or held[0]["status"], "headers": head})
        await send({"type": "http.response.body", "body": body})

    return send_edited
