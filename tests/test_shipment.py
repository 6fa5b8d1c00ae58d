"""A bundle on its way to one repo: the card names it, on disk as well, and a push that was stopped heals."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hub.server import HubServer

from bundler import manifest
from bundler.errors import PublishError, VerificationError
from bundler.hub import RemoteFile
from bundler.push import Outcome, Status, push
from bundler.shipment import make_shipment
from bundler.verify import verify

REPO, OTHER = "acme/tiny-31b", "acme/other"


def codes(outcome: Outcome) -> list[str]:
    return [found.code for found in outcome.plan.findings]


def published(server: HubServer, repo_id: str, path: str) -> bytes:
    return server.store.read(repo_id, path)


# ---------------------------------------------------------------------------------------------------------- the card


def test_the_card_names_the_repo_that_it_goes_to(server: HubServer, ready_copy: Path) -> None:
    """Pushed to another repo, card and manifest are made again, in the bundle's folder too, and stay in step."""
    outcome = push(ready_copy, OTHER)
    card = (ready_copy / "README.md").read_text()
    assert codes(outcome) == ["card-renamed"]
    assert f"hf download {OTHER} " in card
    assert REPO not in card
    assert published(server, OTHER, "README.md") == card.encode()
    assert published(server, OTHER, "bundle.json") == (ready_copy / "bundle.json").read_bytes()
    assert verify(ready_copy) == []
    assert codes(push(ready_copy, OTHER)) == []


def test_a_dry_run_says_what_the_card_would_be_and_leaves_it(server: HubServer, ready_copy: Path) -> None:
    """Sizes and changes are those of the card as it would be sent; not one file of the folder is touched."""
    before = {path: path.read_bytes() for path in ready_copy.rglob("*") if path.is_file()}
    planned = push(ready_copy, OTHER, dry_run=True)
    assert codes(planned) == ["card-renamed"]
    assert {path: path.read_bytes() for path in ready_copy.rglob("*") if path.is_file()} == before
    push(ready_copy, OTHER)
    assert {entry.path: entry.size_bytes for entry in planned.plan.add} == {
        path: len(published(server, OTHER, path)) for path in (entry.path for entry in planned.plan.add)
    }


def test_what_was_written_into_a_card_by_hand_is_not_lost_unseen(server: HubServer, ready_copy: Path) -> None:
    """A card that is rendered again loses what was never recorded; the plan warns of it."""
    card = ready_copy / "README.md"
    card.write_text(card.read_text() + "\nBy hand.\n")
    made = manifest.load(ready_copy)
    manifest.write(ready_copy, manifest.Manifest(**{**_fields(made), "files": manifest.make_entries(ready_copy)}))
    assert codes(push(ready_copy, OTHER, dry_run=True)) == ["card-renamed", "card-edited"]
    assert codes(push(ready_copy, REPO, dry_run=True)) == []


def _fields(made: manifest.Manifest) -> dict[str, object]:
    return {name: getattr(made, name) for name in made.__dataclass_fields__}


def test_a_push_that_was_killed_while_it_wrote_the_card_heals(server: HubServer, ready_copy: Path) -> None:
    """New card, old manifest and a half-written file are what such a push leaves; the next one makes them right."""
    shipment, _ = make_shipment(ready_copy, OTHER)
    (ready_copy / "README.md").write_bytes(shipment.rendered["README.md"])
    (ready_copy / "bundle.json.part").write_bytes(b"{")
    assert push(ready_copy, OTHER).status is Status.PUBLISHED
    assert verify(ready_copy) == []
    assert published(server, OTHER, "bundle.json") == (ready_copy / "bundle.json").read_bytes()


def test_a_card_that_was_changed_without_its_manifest_is_refused(server: HubServer, ready_copy: Path) -> None:
    """Healing is for our own writing only: any other text in the card is a fault of the bundle."""
    card = ready_copy / "README.md"
    card.write_text(card.read_text() + "\nBy hand.\n")
    with pytest.raises(VerificationError, match=r"README.md has \d+ bytes"):
        push(ready_copy, REPO)


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
def test_a_full_disk_changes_nothing(server: HubServer, ready_copy: Path) -> None:
    """Where the card cannot be written, the push ends before it sends anything, and the bundle is as it was."""
    before = {path: path.read_bytes() for path in ready_copy.rglob("*") if path.is_file()}
    code = "import sys; from pathlib import Path; from bundler.push import push; push(Path(sys.argv[1]), sys.argv[2])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(ready_copy), OTHER],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
    )
    assert "PublishError" in done.stderr
    assert "cannot write README.md and bundle.json" in done.stderr
    assert {path: path.read_bytes() for path in ready_copy.rglob("*") if path.is_file()} == before
    assert not [line for line in server.writes() if "/commit/" in line or "_lfs" in line]
    assert push(ready_copy, OTHER).status is Status.PUBLISHED


def test_a_commit_that_cannot_be_checked_is_not_announced(
    server: HubServer, ready: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder to fetch back into, tag and visibility wait; the next push catches up without a commit."""
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(tmp_path / "none"))
        with pytest.raises(PublishError, match="temporary folder") as caught:
            push(ready, REPO, private=False, tag="v1")
    assert "TMPDIR" in str(caught.value.hint)
    assert server.store.repos["model", REPO].private
    again = push(ready, REPO, private=False, tag="v1")
    assert (again.status, again.private) == (Status.UNCHANGED, False)


# --------------------------------------------------------------------------------------------------- the Hub's files


def test_a_file_on_the_hub_is_known_by_its_hash(ready: Path) -> None:
    """LFS files by SHA-256, plain ones by git's id; another size or hash, or an absurd plain size, is another file."""
    shipment, _ = make_shipment(ready, REPO)
    config = next(entry for entry in shipment.entries if entry.path == "config.json")
    weights = next(entry for entry in shipment.entries if entry.path.startswith("model-"))
    oid = subprocess.run(
        ["git", "hash-object", ready / "config.json"], capture_output=True, text=True, env={**os.environ}
    ).stdout.strip()

    def remote(entry: manifest.FileEntry, **values: object) -> RemoteFile:
        known = {"path": entry.path, "size_bytes": entry.size_bytes, "sha256": None, "blob_id": oid}
        return RemoteFile(**{**known, **values})  # type: ignore[arg-type]

    assert shipment.holds(config, remote(config))
    assert shipment.holds(weights, remote(weights, sha256=weights.sha256))
    assert not shipment.holds(config, remote(config, blob_id="0" * 40))
    assert not shipment.holds(config, remote(config, size_bytes=1))
    assert not shipment.holds(weights, remote(weights, sha256="0" * 64))


def test_every_file_that_is_sent_is_listed_once(ready: Path) -> None:
    """The manifest's files and the manifest itself, sorted."""
    shipment, _ = make_shipment(ready, REPO)
    paths = [entry.path for entry in shipment.entries]
    listed = [entry["path"] for entry in json.loads((ready / "bundle.json").read_text())["files"]]
    assert paths == sorted([*listed, "bundle.json"])


def test_a_bundle_whose_card_cannot_be_made_again_is_refused(server: HubServer, ready_copy: Path) -> None:
    """A config nested without end stops the card for another repo with verify's findings, not with a traceback."""
    (ready_copy / "config.json").write_text("[" * 200_000)
    with pytest.raises(VerificationError):
        push(ready_copy, "acme/other", dry_run=True)


def test_a_dry_run_of_a_broken_card_is_refused_too(server: HubServer, ready_copy: Path) -> None:
    """What a push would refuse, its dry run refuses."""
    card = ready_copy / "README.md"
    card.write_text(card.read_text().replace("license: apache-2.0", "license: wat"))
    with pytest.raises((PublishError, VerificationError)):
        push(ready_copy, REPO, dry_run=True)
