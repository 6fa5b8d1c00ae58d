"""A published bundle is looked at as a stranger gets it, and nothing that a repo says is believed unchecked."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hub.server import Fault, HubServer

from bundler import hub, manifest
from bundler.card import write_bundle
from bundler.cli import main
from bundler.errors import SourceError
from bundler.findings import Finding, errors
from bundler.remote import Address, parse_address, verify_remote

REPO = "acme/tiny-31b"
SHARD = "model-00001-of-00001.safetensors"
Files = dict[str, bytes]


def files_of(root: Path) -> Files:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def look(repo_id: str = REPO, *, revision: str | None = None, full: bool = False) -> list[Finding]:
    return verify_remote(Address(repo_id=repo_id, revision=revision), full=full)[1]


def codes(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in findings}


def spoil(files: Files, path: str, at: int = -1) -> Files:
    data = bytearray(files[path])
    data[at] ^= 1
    return files | {path: bytes(data)}


# ---------------------------------------------------------------------------------------------------- without weights


def test_a_good_bundle_is_seen_to_be_good_without_its_weights(server: HubServer, ready: Path) -> None:
    """The tree, its own manifest, configs and headers agree; of the weights, the headers travel."""
    commit = server.store.add(REPO, files_of(ready))
    told: list[int] = []
    seen, findings = verify_remote(
        Address(repo_id=REPO, revision=None), progress=lambda path, done, total: told.append(done)
    )
    assert (seen, findings) == (commit, [])
    assert told[-1] == len(files_of(ready))
    weights = [entry for entry in server.log if "_lfs" in entry.path]
    assert len(weights) == 2
    assert all(entry.range for entry in weights)
    assert server.writes() == []


def test_anybodys_public_bundle_needs_no_token(
    server: HubServer, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is logged in, and the bundle is somebody else's."""
    server.store.add("bob/theirs", files_of(ready))
    monkeypatch.delenv("HF_TOKEN")
    assert look("bob/theirs") == []
    assert look("bob/theirs", full=True) == []
    server.store.repos["model", "bob/theirs"].private = True
    with pytest.raises(SourceError, match="does not exist, or is private"):
        look("bob/theirs")


def test_a_revision_is_a_branch_a_tag_or_a_commit(server: HubServer, ready: Path) -> None:
    """What is looked at is the commit that the revision means."""
    first = server.store.add(REPO, files_of(ready))
    server.store.repos["model", REPO].git.set_ref("refs/tags/v1", first)
    server.store.add(REPO, {"config.json": b"{}"})
    assert look(revision="v1") == look(revision=first) == []
    assert "file-size" in codes(look())
    with pytest.raises(SourceError, match="has no revision v9"):
        look(revision="v9")


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda files: spoil(files, SHARD), "file-hash"),
        (lambda files: spoil(files, "config.json"), "file-hash"),
        (
            lambda files: {path: data for path, data in files.items() if path != "assistant/config.json"},
            "file-missing",
        ),
        (lambda files: files | {SHARD: files[SHARD][:200]}, "shard-unreadable"),
        (lambda files: files | {SHARD: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"}, "lfs-pointer"),
        (lambda files: files | {"bundle.json": b"{}"}, "manifest-schema"),
        (lambda files: {path: data for path, data in files.items() if path != "bundle.json"}, "manifest-missing"),
        (lambda files: files | {"extra.pt": b"\x80"}, "pickle-present"),
        (lambda files: files | {"model-00002-of-00002.safetensors": files[SHARD]}, "shard-orphan"),
    ],
)
def test_what_is_wrong_with_it_is_found(
    server: HubServer, ready: Path, change: Callable[[Files], Files], code: str
) -> None:
    """Changed, missing and broken files, and what does not belong there, as in a folder."""
    server.store.add(REPO, change(files_of(ready)))
    findings = look()
    assert code in codes(errors(findings))


def test_files_of_others_beside_a_bundle_are_no_error(server: HubServer, ready: Path) -> None:
    """A repo may hold notes; they are pointed out."""
    server.store.add(REPO, files_of(ready) | {"notes.txt": b"x", ".gitignore": b"*.log\n"})
    assert [(found.code, found.where, found.severity) for found in look()] == [
        ("remote-hidden", ".gitignore", "warning"),
        ("file-extra", "notes.txt", "warning"),
    ]


# --------------------------------------------------------------------------------------------------------- every byte


def test_full_reads_what_hashes_cannot_show(server: HubServer, ready_copy: Path) -> None:
    """A scale that is infinite was hashed as it is: only who reads the weights finds it."""
    shard = ready_copy / SHARD
    data = shard.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    start = 8 + length + next(v["data_offsets"][0] for k, v in header.items() if k.endswith("weight_global_scale"))
    shard.write_bytes(data[:start] + b"\0\0\x80\x7f" + data[start + 4 :])
    made = manifest.load(ready_copy)
    manifest.write(ready_copy, replace(made, files=manifest.make_entries(ready_copy)))
    write_bundle(ready_copy, repo_id=REPO)
    server.store.add(REPO, files_of(ready_copy))
    assert look() == []
    assert any("scale" in code for code in codes(errors(look(full=True))))


def test_full_finds_what_storage_serves_wrongly(server: HubServer, ready: Path) -> None:
    """A right hash in the listing, and other bytes behind it."""
    server.store.add(REPO, files_of(ready))
    server.faults.append(Fault(method="GET", path="/_lfs/", edit=lambda body: body[:-1] + b"?", times=9))
    assert "file-hash" in codes(look(full=True))


# ------------------------------------------------------------------------------------------------------ hostile repos


def lie(server: HubServer, edit: Callable[[list[dict[str, object]]], object]) -> None:
    """Let the Hub's listing say something else than the truth."""

    def change(body: bytes) -> bytes:
        entries = json.loads(body)
        edit(entries)
        return json.dumps(entries).encode()

    server.faults.append(Fault(method="GET", path="/tree/", edit=change, times=99))


@pytest.mark.parametrize(
    "name",
    [
        "../../escape.json",
        "/etc/escape.json",
        "a\\..\\escape.json",
        "es\x00cape.json",
        "es\ncape.json",
        "NUL.json",
        "assistant/../../escape.json",
        "escape.",
        "README.MD",
    ],
)
def test_no_name_from_a_repo_leaves_the_folder(server: HubServer, ready: Path, tmp_path: Path, name: str) -> None:
    """Parents, absolute paths, backslashes, control characters, devices and names that differ by case are refused."""
    full = name.startswith("..")
    twin = {name: b"x"} if name == "README.MD" else {}
    server.store.add(REPO, files_of(ready) | twin)
    if not twin:
        entry = {"type": "file", "oid": "0" * 40, "size": 3, "path": name}
        lie(server, lambda entries: entries.append(entry))
    refused = [found for found in look(full=full) if found.code == "path-name"]
    assert {found.severity for found in refused} == {"error"}
    assert not [line for line in server.log if "escape" in line.path]
    assert not list(tmp_path.parent.rglob("escape*"))


@pytest.mark.parametrize(("path", "code"), [("config.json", "remote-unread"), (SHARD, "file-size")])
def test_a_size_that_cannot_be_is_not_believed(server: HubServer, ready: Path, path: str, code: str) -> None:
    """A small file that is said to have 100 GB is not waited for; a shard is measured against the manifest."""
    server.store.add(REPO, files_of(ready))
    lie(server, lambda entries: [e.update(size=10**11) for e in entries if e["path"] == path])
    assert code in codes(look())


def test_a_file_that_goes_on_beyond_its_size_is_not_read_to_its_end(server: HubServer, ready: Path) -> None:
    """What is listed with a few bytes and sends more is refused as soon as it does."""
    server.store.add(REPO, files_of(ready))
    path = "/resolve/[0-9a-f]+/config.json"
    server.faults.append(Fault(method="GET", path=path, edit=lambda body: body + b" " * 10_000_000))
    with pytest.raises(SourceError, match=r"config.json comes with more than \d+ bytes"):
        look()


def test_the_token_stays_at_home(server: HubServer, ready: Path) -> None:
    """Contents come from another host, which answers 400 to whoever brings a token along."""
    server.store.add(REPO, files_of(ready))
    assert look() == look(full=True) == []
    storage = [entry for entry in server.log if "_lfs" in entry.path]
    assert {entry.status for entry in storage} <= {200, 206}


def test_the_token_follows_no_answer_to_another_host(server: HubServer, ready: Path) -> None:
    """Where a listing goes on elsewhere, it stays; also in a session that the client began anew after a line broke."""
    from huggingface_hub.utils import close_session

    commit = server.store.add(REPO, files_of(ready))
    server.page_size, server.page_origin = 5, server.storage
    client = hub.make_client(SourceError)
    for _ in range(2):
        assert hub.list_files(client, REPO, commit).keys() >= files_of(ready).keys()
        close_session()
    elsewhere = [entry for entry in server.log if f"http://{entry.host}" != server.endpoint]
    assert [entry for entry in elsewhere if "/tree/" in entry.path]
    assert not [entry for entry in elsewhere if entry.has_token]
    assert [entry for entry in server.log if entry.has_token]


def test_a_json_bomb_is_a_finding(server: HubServer, ready: Path) -> None:
    """Nesting without end, in any JSON file of a bundle, is broken JSON and nothing worse."""
    names = [path for path in files_of(ready) if path.endswith(".json")]
    bombs = {name: b'{"a":' * 200_000 for name in (*names, "evidence/x.json", "measurements/x.json")}
    server.store.add(REPO, files_of(ready) | bombs)
    assert {"manifest-unreadable", "json-unreadable"} <= codes(look())
    server.store.add(REPO, {"bundle.json": (ready / "bundle.json").read_bytes()})
    assert {"json-unreadable", "evidence-unreadable"} <= codes(look())


# ------------------------------------------------------------------------------------------------------------ command


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("acme/x", Address(repo_id="acme/x", revision=None)),
        ("acme/x@v1.0", Address(repo_id="acme/x", revision="v1.0")),
        ("acme/x@refs/pr/3", Address(repo_id="acme/x", revision="refs/pr/3")),
        ("./acme/x", None),
        ("/acme/x", None),
        ("dist/a/b", None),
        ("x", None),
        ("acme/x@", None),
        ("../x", None),
    ],
)
def test_an_address_is_told_from_a_path(text: str, address: Address | None) -> None:
    """ORG/NAME and ORG/NAME@revision are on the Hub; whatever starts like a path is one."""
    assert parse_address(text) == address


def test_the_command_verifies_what_is_on_the_hub(server: HubServer, ready: Path) -> None:
    """`bundle verify ORG/NAME@revision`: exit 0 and the commit, or exit 7 and the findings; --json on stdout alone."""
    commit = server.store.add(REPO, files_of(ready))
    good = CliRunner().invoke(main, ["verify", f"{REPO}@main"])
    assert (good.exit_code, f"{REPO}@main is what its manifest says at {commit}" in good.stdout) == (0, True)
    server.store.add(REPO, spoil(files_of(ready), SHARD))
    bad = CliRunner().invoke(main, ["verify", REPO, "--json"])
    assert bad.exit_code == 7
    told = json.loads(bad.stdout)
    assert (told["ok"], [found["code"] for found in told["findings"]]) == (False, ["file-hash"])
    assert re.fullmatch(r"[0-9a-f]{40}", told["commit"])
    none = CliRunner().invoke(main, ["verify", "acme/none"])
    assert (none.exit_code, "acme/none does not exist" in none.stderr) == (4, True)
