"""What the test Hub answers: one plain function an endpoint, from a `Call` to a response.

LFS content is served from another origin (localhost instead of 127.0.0.1), as the real Hub does: a client must leave
its token behind there, and reads a file's metadata from the redirect only if the redirect leaves the Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

import yaml
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response

from .git import Entry, make_pointer
from .store import HubError, Repo, Store, Token

if TYPE_CHECKING:
    from .server import HubServer

LICENCES = {"apache-2.0", "mit", "gemma", "llama3", "cc-by-4.0", "other"}
DATE = "2026-01-01T00:00:00.000Z"


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


# --------------------------------------------------------------------------------------------------------- routes

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
