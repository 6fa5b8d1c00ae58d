"""What the test Hub tells: who someone is, what repos there are and what they hold."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs

from starlette.responses import JSONResponse, RedirectResponse, Response

from .call import DATE, Call
from .git import Entry
from .store import HubError, Store, Stored


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
            "disabled": repo.disabled,
            "usedStorage": repo.used_bytes or sum(file.size for file in files.values()),
            "lastModified": DATE,
            "createdAt": DATE,
            "downloads": 0,
            "likes": 0,
            "tags": [],
            "siblings": [{"rfilename": path} for path in files],
        }
    )


def _describe(store: Store, entry: Entry) -> dict[str, Any]:
    if entry.is_folder:
        return {"type": "directory", "oid": entry.oid, "size": 0, "path": entry.path}
    described = {"type": "file", "oid": entry.oid, "size": entry.size, "path": entry.path}
    if entry.sha256 is not None:
        described["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
        if entry.sha256 in store.xet_hashes:
            described["xetHash"] = store.xet_hashes[entry.sha256]
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
        headers["Link"] = f'<{call.server.page_origin}{call.request.url.path}?{query}>; rel="next"'
    return JSONResponse([_describe(call.store, entry) for entry in entries[first:last]], headers=headers)


def paths_info(call: Call) -> Response:
    repo = call.repo()
    wanted = set(parse_qs(call.body.decode()).get("paths", []))
    return JSONResponse(
        [_describe(call.store, e) for e in repo.git.tree(repo.commit_of(call["rev"])) if e.path in wanted]
    )


def resolve_file(call: Call) -> Response:
    repo = call.repo(content=True)
    commit = repo.commit_of(call["rev"])
    entry = repo.git.files(commit).get(call["path"])
    headers = {"X-Repo-Commit": commit}
    if entry is None:
        raise HubError(404, "Entry not found", code="EntryNotFound")
    if entry.sha256 is None:
        return serve_content(call, repo.git.read(commit, entry.path), headers | {"ETag": f'"{entry.oid}"'})
    headers |= {"X-Linked-Etag": f'"{entry.sha256}"', "X-Linked-Size": str(entry.size)}
    if call.server.xet is not None and entry.sha256 in call.server.xet.hashes:
        token = f"{call.server.endpoint}/api/{repo.kind}s/{repo.repo_id}/xet-read-token/{commit}"
        headers |= {"X-Xet-Hash": call.server.xet.hashes[entry.sha256], "Link": f'<{token}>; rel="xet-auth"'}
    return RedirectResponse(f"{call.server.storage}/_lfs/{entry.sha256}", 302, headers=headers)


def serve_content(call: Call, data: bytes | Stored, headers: dict[str, str]) -> Response:
    headers["Accept-Ranges"] = "bytes"
    status, length = 200, len(data)
    first, last = 0, length - 1
    if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", call.request.headers.get("range", "")):
        first, last = int(asked[1]), min(int(asked[2] or length), length - 1)
        if first >= length:
            raise HubError(416, "Range Not Satisfiable")
        status = 206
        headers["Content-Range"] = f"bytes {first}-{last}/{length}"
    if call.request.method == "HEAD":
        return Response(status_code=status, headers=headers | {"Content-Length": str(last + 1 - first)})
    return Response(data[first : last + 1], status, headers=headers)


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
