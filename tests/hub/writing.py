"""What the test Hub is told to do: repos and their settings, contents, commits, tags and branches.

LFS content is served from another origin (localhost instead of 127.0.0.1), as the real Hub does: a client must leave
its token behind there, and reads a file's metadata from the redirect only if the redirect leaves the Hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import yaml
from starlette.responses import JSONResponse, Response

from .call import Call
from .git import make_pointer
from .reading import serve_content
from .store import HubError, Repo

LICENCES = {"apache-2.0", "mit", "gemma", "llama3", "cc-by-4.0", "other"}


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


def _front_matter(card: str) -> Any:
    match = re.match(r"---[ \t]*\n(.*?)\n---[ \t]*(\n|$)", card, re.DOTALL)
    return yaml.safe_load(match[1]) if match else None


def validate_yaml(call: Call) -> Response:
    problems, warnings = _check_card(call.json()["content"])
    body = {"errors": [{"message": p} for p in problems], "warnings": [{"message": w} for w in warnings]}
    return JSONResponse(body, 400 if problems else 200)


def _check_card(card: str) -> tuple[list[str], list[str]]:
    problems, warnings = [], []
    try:
        matter = _front_matter(card)
    except yaml.YAMLError as exc:
        matter = {}
        problems.append(f"Invalid YAML: {exc}")
    if matter is None:
        warnings.append("empty or missing yaml metadata in repo card")
    elif matter and matter.get("license") and matter["license"] not in LICENCES:
        problems.append('"license" must be one of [...]')
    if matter and "base_model" in matter and not matter["base_model"]:
        problems.append('"base_model" must be a string or an array of strings')
    return problems, warnings


def preupload(call: Call) -> Response:
    pull = _is_pull(call["rev"]) or "create_pr" in call.request.query_params
    repo, asked = call.repo(write=True, pull=pull), call.json()
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
    pull = upload and _is_pull(asked.get("ref", {}).get("name", ""))
    repo = call.repo(write=upload, pull=pull, content=not upload)
    server, objects = call.server, []
    for wanted in asked["objects"]:
        oid, size = wanted["oid"], wanted["size"]
        answer: dict[str, Any] = {"oid": oid, "size": size, "authenticated": True}
        if not upload:
            answer["actions"] = {"download": {"href": f"{server.storage}/_lfs/{oid}"}}
        elif oid not in repo.objects:  # that another repo has it is no reason not to send it
            action: dict[str, Any] = {"href": f"{server.storage}/_lfs/{oid}?repo={repo.kind}:{repo.repo_id}"}
            if size >= server.multipart_bytes and "multipart" in asked.get("transfers", []):
                count = -(-size // server.part_bytes)
                parts = {f"{n:05d}": f"{server.storage}/_lfs/{oid}/{n}" for n in range(1, count + 1)}
                action["header"] = {"chunk_size": str(server.part_bytes), **parts}
            verify = {"href": f"{server.endpoint}/{repo.repo_id}.git/info/lfs/verify"}
            answer["actions"] = {"upload": action, "verify": verify}
        objects.append(answer)
    return JSONResponse({"transfer": "basic", "objects": objects}, media_type="application/vnd.git-lfs+json")


def lfs_verify(call: Call) -> Response:
    call.repo(pull=True)
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
        _keep(call, oid, call.body)
    elif call.request.method == "POST":
        numbers = [p["partNumber"] for p in call.json()["parts"]]
        _keep(call, oid, b"".join(call.server.parts.pop((oid, number)) for number in numbers))
        return JSONResponse({})
    elif oid in store.objects:
        return serve_content(call, store.objects[oid], {"ETag": f'"{oid}"'})
    else:
        raise HubError(404, "no such object")
    return Response(headers={"ETag": f'"{hashlib.md5(call.body).hexdigest()}"'})


def _keep(call: Call, oid: str, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != oid:
        raise HubError(400, "the content does not have this sha256")
    kind, _, repo_id = call.request.query_params["repo"].partition(":")
    call.store.objects[oid] = content
    call.store.repos[kind, repo_id].objects.add(oid)


def duplicate_files(call: Call) -> Response:
    """Give another repo what this one has in xet storage, without sending it through a client."""
    source, asked = call.repo(content=True), call.json()
    target = call.store.find(call.token, asked["target"]["type"], asked["target"]["name"], write=True)
    failed = []
    for file in asked["files"]:
        if file["sha256"] in source.objects and call.store.xet_hashes.get(file["sha256"]) == file["xetHash"]:
            target.objects.add(file["sha256"])
        else:
            failed.append({"sha256": file["sha256"], "error": "not in the storage of this region"})
    return JSONResponse({"failed": failed})


def _is_pull(revision: str) -> bool:
    return revision.startswith("refs/pr/")


def commit(call: Call) -> Response:
    revision = call["rev"]
    repo, token = call.repo(write=True, pull=_is_pull(revision)), call.token
    assert token is not None
    if _is_pull(revision):
        repo.check_pull(revision, token)
    ref = revision if _is_pull(revision) else f"refs/heads/{revision}"
    operations = [json.loads(line) for line in call.body.splitlines()]
    header = operations[0]["value"]
    with call.store.lock:
        head = repo.commit_of(ref)
        if header.get("parentCommit") not in {None, head}:
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        changes = {o["value"]["path"]: _make_blob(call, repo, head, o["key"], o["value"]) for o in operations[1:]}
        if problems := _check_card((changes.get("README.md") or b"").decode())[0]:
            raise HubError(400, f"Invalid metadata in README.md: {problems}")
        oid = repo.git.commit(
            ref, changes, title=header["summary"], body=header.get("description", ""), author=token.user
        )
    url = f"{call.server.endpoint}/{repo.repo_id}/commit/{oid}"
    return JSONResponse({"success": True, "commitOid": oid, "commitUrl": url, "hookOutput": ""})


def _make_blob(call: Call, repo: Repo, head: str, key: str, value: dict[str, Any]) -> bytes | None:
    """What a commit puts in the place of a file; None to delete it."""
    if key == "file":
        return base64.b64decode(value["content"])
    if key == "deletedFile":
        if value["path"] not in repo.git.files(head):
            raise HubError(404, "A file with this name doesn't exist", code="EntryNotFound")
        return None
    if key != "lfsFile":
        raise HubError(400, f"unknown operation {key}")
    oid = value["oid"]
    if oid not in repo.objects and call.server.xet is not None:
        content = call.server.xet.read(oid, value["size"])
        if content is not None:
            call.store.objects[oid], call.store.xet_hashes[oid] = content, call.server.xet.hashes[oid]
            repo.objects.add(oid)
    if oid not in repo.objects:
        raise HubError(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
    return make_pointer(oid, len(call.store.objects[oid]))


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
