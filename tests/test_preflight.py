"""Everything that can be wrong with a push is said at once, before its first byte is sent."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hub.server import HubServer
from hub.store import Token

from bundler import manifest
from bundler.card import write_bundle
from bundler.errors import BundlerError, PublishError, VerificationError
from bundler.manifest import FileEntry
from bundler.preflight import MAX_FILE_BYTES, check_limits, check_order
from bundler.push import push
from bundler.shipment import Order

REPO = "acme/tiny-31b"
SECRET = b"hf_" + b"aBcDeFgH" * 4


def seal(root: Path) -> None:
    """Write the manifest again after a file of the bundle was changed on purpose."""
    made = manifest.load(root)
    sha256 = hashlib.sha256((root / "recipe.toml").read_bytes()).hexdigest()
    manifest.write(root, replace(made, files=manifest.make_entries(root), recipe_sha256=sha256))


def add_line(path: Path, line: bytes) -> None:
    path.write_bytes(path.read_bytes() + line + b"\n")


def refused(server: HubServer, root: Path, repo_id: str = REPO, **options: object) -> BundlerError:
    """The error of a push that changes nothing on the Hub."""
    with pytest.raises((PublishError, VerificationError)) as caught:
        push(root, repo_id, **options)  # type: ignore[arg-type]
    assert server.writes() == []
    return caught.value


def codes(exc: BundlerError) -> set[str]:
    return {found.code for found in exc.findings}


# ------------------------------------------------------------------------------------------------------- all at once


def test_all_that_is_wrong_is_said_at_once(
    server: HubServer, ready_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token, namespace, card, secrets and files, each with its code; the bundle's own faults decide the exit code."""
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    server.store.tokens["hf_reader"] = Token(user="carol", role="read")
    card = ready_copy / "README.md"
    card.write_bytes(re.sub(rb"license: .*", b"license: wat", card.read_bytes(), count=1))
    add_line(card, SECRET)
    seal(ready_copy)
    (ready_copy / "notes.txt").write_text("mine")
    exc = refused(server, ready_copy)
    assert codes(exc) == {
        "token-read-only",
        "namespace-foreign",
        "card-licence-unlisted",
        "card-refused",
        "secret-token",
        "file-extra",
    }
    assert isinstance(exc, VerificationError)
    assert f"(and {len(exc.findings) - 1} more)" in str(exc)


def test_what_cannot_be_pushed_is_not_hashed(
    server: HubServer, ready_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty gigabytes are not read for a token that may not write; a changed byte is found once the rest is right."""
    shard = next(ready_copy.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    monkeypatch.setenv("HF_TOKEN", "hf_alice_read")
    assert codes(refused(server, ready_copy)) == {"token-read-only"}
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    assert codes(refused(server, ready_copy)) == {"file-hash"}


def test_a_folder_that_is_no_bundle_is_refused(server: HubServer, tmp_path: Path) -> None:
    """No manifest, no push; the token is looked at all the same."""
    assert "manifest-missing" in codes(refused(server, tmp_path))
    assert "bundle-missing" in codes(refused(server, tmp_path / "none"))
    assert {entry.path for entry in server.log} == {"/api/whoami-v2"}


# ------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "repo_id", ["tiny", "a/b/c", "acme/-x", "acme/x..y", "acme/x--y", "acme/x.git", "acme/" + "x" * 97, "acme/ü", ""]
)
def test_a_name_that_is_no_repo_id_is_refused(repo_id: str) -> None:
    """The rules are huggingface_hub's own."""
    assert [found.code for found in check_order(Order(repo_id=repo_id))] == ["repo-name"]


def test_a_repo_that_cannot_be_is_not_asked_for(server: HubServer, ready: Path) -> None:
    """Of the Hub, only the token is asked about."""
    assert codes(refused(server, ready, "acme/b/c")) == {"repo-name"}
    assert {entry.path for entry in server.log} == {"/api/whoami-v2"}


def test_a_repo_name_that_hides_the_drafter_from_vllm_is_refused(server: HubServer, ready: Path) -> None:
    """A path with `eagle3` in it makes vLLM take the drafter for something else (vLLM config/speculative.py)."""
    assert codes(refused(server, ready, "acme/gemma-eagle3")) == {"forbidden-name"}


@pytest.mark.parametrize(
    "tag", ["", "a b", "a..b", "-a", "/a", "a/", "a.", "a.lock", "a~1", "a^", "a:b", "@", "refs/x"]
)
def test_a_tag_that_git_refuses_is_refused(tag: str) -> None:
    """Before anything is sent, not after the commit (git check-ref-format)."""
    assert [found.code for found in check_order(Order(repo_id=REPO, tag=tag))] == ["tag-name"]


@pytest.mark.parametrize("tag", ["v1", "v1.0.1", "2026-11-30", "release/1", "a-b_c"])
def test_a_usual_tag_is_fine(tag: str) -> None:
    """Versions, dates and paths are names."""
    assert check_order(Order(repo_id=REPO, tag=tag)) == []


# ----------------------------------------------------------------------------------------------------------- secrets


def test_no_secret_leaves_with_a_text_file(server: HubServer, ready_copy: Path) -> None:
    """A token in a text file, or a path through somebody's home folder, stops the push; the token is not repeated."""
    (ready_copy / "assets").mkdir()
    log = ready_copy / "assets" / "log.json"
    log.write_bytes(b'{"argv": ["/home/' + b"alice" + b'/venv/bin/vllm"], "token": "' + SECRET + b'"}')
    seal(ready_copy)
    exc = refused(server, ready_copy)
    assert [(found.code, found.where) for found in exc.findings] == [
        ("secret-token", "assets/log.json: line 1"),
        ("secret-home-path", "assets/log.json: line 1"),
    ]
    assert SECRET.decode() not in f"{exc} {exc.hint} {exc.findings}"


def test_what_a_public_source_says_itself_is_no_secret(server: HubServer, ready_copy: Path) -> None:
    """A file that strangers can read in the source's own repo, byte for byte, is not searched."""
    template = ready_copy / "chat_template.jinja"
    add_line(template, b"{# " + SECRET + b" #}")
    made = manifest.load(ready_copy)
    size_bytes, sha256 = manifest.hash_file(template)
    files = [
        replace(file, size_bytes=size_bytes, sha256=sha256) if file.path == template.name else file
        for file in made.body.files
    ]
    manifest.write(ready_copy, replace(made, body=replace(made.body, files=tuple(files))))
    write_bundle(ready_copy, repo_id=REPO)
    seal(ready_copy)
    assert codes(refused(server, ready_copy)) == {"secret-token"}
    made = manifest.load(ready_copy)
    manifest.write(ready_copy, replace(made, body=replace(made.body, model="acme/body", commit="a" * 40)))
    write_bundle(ready_copy, repo_id=REPO)
    assert push(ready_copy, REPO, dry_run=True).plan.changes


# ------------------------------------------------------------------------------------------------- repo and account


def test_an_expired_token_is_said_to_be(server: HubServer, ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expired is another thing than wrong."""
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    server.store.tokens["hf_old"] = Token(user="alice", orgs=("acme",), expired=True)
    exc = refused(server, ready)
    assert "which has expired" in str(exc)
    assert "hf auth login" in str(exc.hint)


def disable(server: HubServer) -> None:
    server.store.create(REPO, private=True).disabled = True


def gate(server: HubServer) -> None:
    server.store.create(REPO, private=True).gated = "manual"


def fill(server: HubServer) -> None:
    server.store.create(REPO, private=True).used_bytes = 100_000_000_000


def take_name(server: HubServer) -> None:
    server.store.create(REPO, kind="dataset")


def open_up(server: HubServer) -> None:
    server.store.create(REPO)


@pytest.mark.parametrize(
    ("state", "code"),
    [(gate, "repo-gated"), (fill, "push-quota"), (take_name, "repo-other-type"), (open_up, "push-public")],
)
def test_the_state_of_a_repo_is_pointed_out(
    server: HubServer, ready: Path, state: Callable[[HubServer], None], code: str
) -> None:
    """What a publisher may not have had in mind is a warning in the plan."""
    state(server)
    found = push(ready, REPO, dry_run=True).plan.findings
    assert [(one.code, one.severity) for one in found] == [(code, "warning")]


def test_a_disabled_repo_takes_no_push(server: HubServer, ready: Path) -> None:
    """What the Hub has closed is said before anything is sent."""
    disable(server)
    assert "repo-disabled" in codes(refused(server, ready))


def test_a_repo_of_the_same_name_that_nobody_may_see_is_not_created_over(
    server: HubServer, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A private repo of others and no repo look the same; the namespace decides."""
    server.store.create("bob/x", private=True)
    assert codes(refused(server, ready, "bob/x")) >= {"namespace-foreign"}


def test_limits_of_the_hub_are_known() -> None:
    """A file beyond 500 GB cannot be stored; more than 100 files in a commit are advised against."""
    small = [FileEntry(path=f"assets/{n}", size_bytes=1, sha256="0" * 64, role="asset") for n in range(101)]
    large = replace(small[0], path="model.safetensors", size_bytes=MAX_FILE_BYTES + 1)
    assert [found.code for found in check_limits(small)] == ["push-many-files"]
    assert [found.code for found in check_limits([large])] == ["push-file-size"]
    assert check_limits(small[:100]) == []


def test_what_is_known_of_the_engine_by_now_is_said(server: HubServer, ready_copy: Path) -> None:
    """The card tells people to use an engine: its verdicts are looked up again when the bundle is published."""
    recipe = ready_copy / "recipe.toml"
    recipe.write_text(re.sub(r'(?m)^version = ".*"', 'version = ">=99"', recipe.read_text()))
    seal(ready_copy)
    write_bundle(ready_copy, repo_id=REPO)
    assert [found.code for found in push(ready_copy, REPO, dry_run=True).plan.findings] == ["engine-untried"]
