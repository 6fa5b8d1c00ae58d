"""The test Hub's contract: what unmodified huggingface_hub and `hf` do with it, step by step, as with the real one.

`python -m hub.contract [--xet]` starts a Hub and runs every step with the client of that interpreter. A step is a line
here: what is done, and what must come of it. It prints one JSON line a step and exits 1 if one went otherwise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .server import Fault, HubServer
from .store import Token
from .xet import Xet

REPO = "acme/model"
CARD = b"---\nlicense: apache-2.0\nbase_model: acme/base\nbase_model_relation: quantized\n---\n# A model\n"
Step = tuple[str, Callable[[], object], object]
"""What is done, how, and the value or exception that must come of it."""


def make_steps(server: HubServer, folder: Path) -> Iterator[Step]:
    """Every step, in order; later ones stand on earlier ones."""
    from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete, HfApi, errors

    alice, bob, reader, nobody = HfApi(), HfApi(token="hf_bob"), HfApi(token="hf_alice_read"), HfApi(token=False)
    weights = os.urandom(300_000)
    files = {"README.md": CARD, "config.json": b"{}", "empty.txt": b"", "model.safetensors": weights}
    http = errors.HfHubHTTPError

    # who is who
    yield "whoami", lambda: alice.whoami()["auth"]["accessToken"]["role"], "write"
    yield "whoami, wrong token", lambda: HfApi(token="hf_no").whoami(), http
    server.store.tokens["hf_old"] = Token(user="alice", expired=True)
    yield "whoami, expired token", lambda: HfApi(token="hf_old").whoami(), http

    # repos
    yield "info of no repo", lambda: alice.model_info(REPO), errors.RepositoryNotFoundError
    yield "create", lambda: str(alice.create_repo(REPO, private=True).repo_id), REPO
    yield "create again", lambda: alice.create_repo(REPO), http
    yield "create again, exist_ok", lambda: alice.create_repo(REPO, exist_ok=True).repo_id, REPO
    yield "exist_ok leaves it private", lambda: alice.model_info(REPO).private, True
    yield "create in another's namespace", lambda: bob.create_repo("acme/x"), http
    yield "create with a token that reads", lambda: reader.create_repo("acme/x"), http
    yield "private to bob", lambda: bob.model_info(REPO), errors.RepositoryNotFoundError
    yield "private to nobody", lambda: nobody.model_info(REPO), errors.RepositoryNotFoundError

    # commits
    def add(**changes: object) -> str:
        operations = [CommitOperationAdd(path, data) for path, data in files.items()]
        return str(alice.create_commit(REPO, operations, commit_message="first", **changes).oid)  # type: ignore[arg-type]

    yield (
        "commit without rights",
        lambda: bob.create_commit(REPO, [CommitOperationAdd("a", b"a")], commit_message="x"),
        errors.RepositoryNotFoundError,
    )
    yield "commit on a stale parent", lambda: add(parent_commit="0" * 40), http
    first = add()
    yield "the commit is the head", lambda: alice.model_info(REPO).sha, first

    def tree() -> dict[str, tuple[int, str]]:
        entries = [entry for entry in alice.list_repo_tree(REPO, recursive=True) if hasattr(entry, "blob_id")]
        return {e.path: (e.size, e.lfs.sha256 if e.lfs else e.blob_id) for e in entries if e.path != ".gitattributes"}

    expected = {
        path: (len(data), hashlib.sha256(data).hexdigest() if path.endswith(".safetensors") else _blob_id(data))
        for path, data in files.items()
    }
    yield "sizes and hashes of the tree", tree, expected
    if server.xet is not None:
        yield "weights went through xet", lambda: list(server.xet.hashes), [expected["model.safetensors"][1]]
    yield "paths info", lambda: [e.path for e in alice.get_paths_info(REPO, ["README.md", "no"])], ["README.md"]
    yield "the same commit is none", lambda: add(), first
    yield (
        "a bad card",
        lambda: alice.upload_file(repo_id=REPO, path_in_repo="README.md", path_or_fileobj=b"---\nlicense: wat\n---\n"),
        ValueError,
    )
    yield (
        "delete what is not there",
        lambda: alice.create_commit(REPO, [CommitOperationDelete("no")], commit_message="x"),
        errors.EntryNotFoundError,
    )
    yield (
        "copy within a repo",
        lambda: (
            alice.create_commit(
                REPO, [CommitOperationCopy("model.safetensors", "copy.safetensors")], commit_message="copy"
            ).oid
            != first
        ),
        True,
    )
    yield (
        "delete",
        lambda: (
            alice.create_commit(REPO, [CommitOperationDelete("copy.safetensors")], commit_message="delete").oid
            != first
        ),
        True,
    )
    yield "the tree after both", tree, expected
    yield "history", lambda: [c.title for c in alice.list_repo_commits(REPO)], [
        "delete", "copy", "first", "initial commit"
    ]  # fmt: skip
    server.store.xet_hashes.setdefault(expected["model.safetensors"][1], "0" * 64)
    alice.create_repo("acme/second")
    yield (
        "copy from another repo",
        lambda: (
            alice.create_commit(
                "acme/second",
                [CommitOperationCopy("model.safetensors", "m.safetensors", src_repo_id=REPO, src_repo_type="model")],
                commit_message="copy",
            ).oid
            != first
        ),
        True,
    )
    yield "the copy is whole", lambda: server.store.read("acme/second", "m.safetensors") == weights, True

    # tags, branches, pull requests
    yield "tag", lambda: alice.create_tag(REPO, tag="v1", revision=first), None
    yield "tag again", lambda: alice.create_tag(REPO, tag="v1"), http
    yield "exist_ok leaves the tag", lambda: alice.create_tag(REPO, tag="v1", exist_ok=True), None
    yield (
        "where the tag is",
        lambda: [(r.name, r.target_commit) for r in alice.list_repo_refs(REPO).tags],
        [("v1", first)],
    )
    yield "branch", lambda: alice.create_branch(REPO, branch="next", revision=first), None
    yield "no such revision", lambda: alice.model_info(REPO, revision="v9"), errors.RevisionNotFoundError
    alice.update_repo_settings(REPO, private=False)
    pull = bob.create_pull_request(REPO, title="Proposal")
    yield "a pull request is a draft", lambda: (pull.num, pull.status, pull.git_reference), (1, "draft", "refs/pr/1")
    proposed = [CommitOperationAdd("proposal.txt", b"p")]
    yield "bob may not commit to main", lambda: bob.create_commit(REPO, proposed, commit_message="x"), http
    yield (
        "bob may commit to his pull request",
        lambda: (
            bob.create_commit(
                REPO, [CommitOperationAdd("proposal.txt", b"p")], commit_message="x", revision="refs/pr/1"
            ).oid
            == server.store.repos["model", REPO].git.refs()["refs/pr/1"]
        ),
        True,
    )
    yield "open it", lambda: bob.change_discussion_status(REPO, 1, "open").new_status, "open"
    yield (
        "find it",
        lambda: [
            (d.num, d.status, d.author)
            for d in bob.get_repo_discussions(REPO, author="bob", discussion_type="pull_request")
        ],
        [(1, "open", "bob")],
    )
    yield "main is as it was", tree, expected

    # downloads
    yield "download", lambda: Path(nobody.hf_hub_download(REPO, "model.safetensors")).read_bytes() == weights, True
    yield "a part of a file", lambda: _read_part(server, first), weights[10:20]
    server.store.repos["model", REPO].gated = "manual"
    yield "gated for nobody", lambda: nobody.hf_hub_download(REPO, "config.json", revision="v1"), errors.GatedRepoError
    yield "gated for bob", lambda: bob.hf_hub_download(REPO, "config.json", revision="v1"), errors.GatedRepoError
    yield "not for its owner", lambda: bool(alice.hf_hub_download(REPO, "config.json", revision="v1")), True
    server.store.repos["model", REPO].gated = False

    # faults, where the client has no patience of its own
    server.faults.append(Fault(method="POST", path="/commit/", status=503))
    yield (
        "503 at the commit",
        lambda: alice.create_commit(REPO, [CommitOperationAdd("a", b"a")], commit_message="x"),
        http,
    )
    yield "and nothing of it is there", tree, expected

    # the command line
    whole = folder / "whole"
    yield "hf auth whoami", lambda: "alice" in _hf("auth", "whoami"), True
    yield "hf download", lambda: bool(_hf("download", REPO, "--revision", "v1", "--local-dir", str(whole))), True
    part = ("download", REPO, "--include", "*.json", "--local-dir", str(folder / "part"))
    yield "hf download, a part", lambda: bool(_hf(*part)), True
    yield "nothing else came", lambda: [p.name for p in (folder / "part").iterdir() if p.is_file()], ["config.json"]
    yield "every byte of it", lambda: {p: (whole / p).read_bytes() for p in files} == files, True
    verify = ("cache", "verify", REPO, "--revision", "v1", "--local-dir", str(whole))
    yield "hf cache verify", lambda: bool(_hf(*verify)), True
    yield "hf cache verify, spoilt", lambda: _hf(*_spoilt(whole, verify)), subprocess.CalledProcessError
    server.store.repos["model", "acme/second"].private = True
    closed = ("download", "acme/second", "--local-dir", str(folder / "closed"))
    yield "hf download, closed", lambda: _hf(*closed, token="hf_bob"), subprocess.CalledProcessError


def _blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _read_part(server: HubServer, commit: str) -> bytes:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import get_session

    url = hf_hub_url(REPO, "model.safetensors", revision=commit, endpoint=server.endpoint)
    return bytes(get_session().get(url, headers={"Range": "bytes=10-19"}).content)


def _hf(*arguments: str, token: str = "hf_alice") -> str:
    command = [str(Path(sys.executable).with_name("hf")), *arguments]
    environment = {**os.environ, "HF_TOKEN": token}
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, stdin=subprocess.DEVNULL, text=True
    )
    return done.stdout + done.stderr


def _spoilt(folder: Path, then: tuple[str, ...]) -> tuple[str, ...]:
    (folder / "model.safetensors").write_bytes(b"spoilt")
    return then


def _take(step: Step) -> dict[str, object]:
    name, act, expected = step
    try:
        got: Any = act()
        ok = not isinstance(expected, type) and got == expected
    except Exception as exc:
        got, ok = f"{type(exc).__name__}: {exc}", isinstance(expected, type) and isinstance(exc, expected)
    return {"step": name, "ok": ok, "got": str(got)[:300]}


def _main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--xet", action="store_true")
    xet = parser.parse_args().xet
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = HubServer(folder / "hub")
        server.start()
        server.xet = Xet(folder / "cas") if xet else None
        os.environ |= {
            "HF_ENDPOINT": server.endpoint,
            "HF_TOKEN": "hf_alice",
            "HF_HOME": str(folder / "home"),
            "HF_HUB_DISABLE_XET": "0" if xet else "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        }
        results = [_take(step) for step in make_steps(server, folder)]
        server.stop()
    for result in results:
        print(json.dumps(result))
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(_main())
