"""`bundle push` against a Hub of real git objects; what strangers then download is checked with their own tools."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hub.fixture import hf
from hub.server import Fault, HubServer
from hub.store import Repo, Token

from bundler import manifest
from bundler.card import write_bundle
from bundler.errors import PublishError, VerificationError
from bundler.push import Status, push

REPO = "acme/tiny-31b"
COMMIT = f"/{REPO}/commit/"
REPORTED = Path(__file__).parent.parent / "recipes" / "31b-abliterated" / "reported-vllm-0.21.0.json"


def seal(root: Path) -> None:
    """Write the manifest again after a file of the bundle was changed on purpose."""
    manifest.write(root, replace(manifest.load(root), files=manifest.make_entries(root)))


def change_card(root: Path, line: str = "More to say.") -> None:
    card = root / "README.md"
    card.write_text(f"{card.read_text()}\n{line}\n")
    seal(root)


def repo_on(server: HubServer) -> Repo:
    return server.store.repos["model", REPO]


def titles(server: HubServer) -> list[str]:
    return [commit.title for commit in repo_on(server).git.log()]


def contents(server: HubServer, revision: str = "main") -> dict[str, bytes]:
    paths = repo_on(server).git.files(revision)
    return {path: server.store.read(REPO, path, revision) for path in paths if path != ".gitattributes"}


def local(root: Path) -> dict[str, bytes]:
    paths = [*manifest.list_files(root), Path(manifest.NAME)]
    return {path.as_posix(): (root / path).read_bytes() for path in paths}


# ------------------------------------------------------------------------------------------------- the plain path


def test_a_new_repo_gets_the_whole_bundle_in_one_commit(server: HubServer, ready: Path) -> None:
    """The first push creates a private repo and puts every file, byte for byte, into one commit that has the tag."""
    told: list[tuple[int, int]] = []
    outcome = push(ready, REPO, tag="v1", progress=lambda path, done, total: told.append((done, total)))
    assert (outcome.status, outcome.commit) == (Status.PUBLISHED, repo_on(server).head())
    assert titles(server) == ["Publish tiny-31b", "initial commit"]
    assert contents(server) == local(ready)
    assert repo_on(server).private
    assert repo_on(server).git.refs()["refs/tags/v1"] == outcome.commit
    assert outcome.url == f"{server.endpoint}/{REPO}"
    assert told[-1] == (outcome.plan.send_bytes, outcome.plan.send_bytes)
    assert told == sorted(told)


def test_weights_are_stored_as_lfs_and_large_ones_in_parts(server: HubServer, ready: Path) -> None:
    """Weights never become git blobs; beyond the Hub's limit for one request they travel in parts."""
    server.multipart_bytes = server.part_bytes = 400_000
    push(ready, REPO)
    files = repo_on(server).git.files("main")
    assert all(files[path].sha256 for path in files if path.endswith(".safetensors"))
    assert [entry for entry in server.log if entry.path.endswith("/2") and entry.method == "PUT"]
    assert contents(server) == local(ready)


def test_weights_go_through_xet_where_the_hub_has_it(xet_server: HubServer, ready: Path) -> None:
    """The same push through hf_xet: the same commit, checked the same way, and all of it can be downloaded again."""
    told: list[tuple[int, int]] = []
    outcome = push(ready, REPO, full=True, progress=lambda path, done, total: told.append((done, total)))
    assert contents(xet_server) == local(ready)
    assert titles(xet_server) == ["Publish tiny-31b", "initial commit"]
    assert xet_server.xet is not None
    weights = {entry.sha256 for entry in outcome.plan.add if entry.path.endswith(".safetensors")}
    assert set(xet_server.xet.hashes) == weights
    assert (outcome.plan.send_bytes, outcome.plan.send_bytes) in told
    assert push(ready, REPO).status is Status.UNCHANGED


def test_progress_is_told_byte_by_byte(server: HubServer, ready: Path) -> None:
    """Within a file, too: a shard takes an hour on a home line."""
    told: list[int] = []
    plan = push(ready, REPO, progress=lambda path, done, total: told.append(done)).plan
    shard = next(entry for entry in plan.add if entry.path.startswith("model-"))
    assert len([done for done in told if plan.send_bytes - shard.size_bytes < done < plan.send_bytes]) > 10
    assert told == sorted(told)


def test_a_second_push_sends_and_commits_nothing(server: HubServer, ready: Path) -> None:
    """What is there already stays as it is; the outcome says so and names the commit."""
    first = push(ready, REPO, tag="v1")
    server.log.clear()
    again = push(ready, REPO, tag="v1")
    assert (again.status, again.commit, again.tag) == (Status.UNCHANGED, first.commit, "v1")
    assert server.writes() == []
    assert not [entry for entry in server.log if "/resolve/" in entry.path and "bundle.json" not in entry.path]


def test_only_what_changed_is_sent(server: HubServer, ready_copy: Path) -> None:
    """A new card is one small commit: no weights travel."""
    push(ready_copy, REPO)
    change_card(ready_copy)
    server.log.clear()
    outcome = push(ready_copy, REPO)
    assert [entry.path for entry in outcome.plan.replace] == ["README.md", "bundle.json"]
    assert not outcome.plan.add
    assert not [line for line in server.writes() if "_lfs" in line]
    assert contents(server) == local(ready_copy)


def test_a_new_measurement_is_sent_alone(server: HubServer, ready_copy: Path) -> None:
    """With the list that names it, and nothing else."""
    push(ready_copy, REPO)
    (ready_copy / "measurements").mkdir()
    shutil.copy(REPORTED, ready_copy / "measurements" / "reported.json")
    seal(ready_copy)
    server.log.clear()
    outcome = push(ready_copy, REPO)
    assert [entry.path for entry in outcome.plan.add] == ["measurements/reported.json"]
    assert [entry.path for entry in outcome.plan.replace] == ["bundle.json"]
    assert not [line for line in server.writes() if "_lfs" in line]


def test_a_dry_run_changes_nothing_and_needs_no_repo(server: HubServer, ready: Path) -> None:
    """Before there is a repo, the plan adds every file, and the Hub is only asked."""
    outcome = push(ready, REPO, tag="v1", dry_run=True)
    assert (outcome.status, outcome.commit, outcome.private) == (Status.PLANNED, None, True)
    assert {entry.path for entry in outcome.plan.add} == set(local(ready))
    assert outcome.plan.send_bytes == sum(len(content) for content in local(ready).values())
    assert server.writes() == []
    assert server.store.repos == {}


def test_a_dry_run_says_what_would_change(server: HubServer, ready_copy: Path) -> None:
    """Add, replace, keep, delete and what stays although it is not ours, as plain values for --json too."""
    (ready_copy / "assets").mkdir()
    (ready_copy / "assets" / "old.svg").write_text("<svg/>")
    seal(ready_copy)
    push(ready_copy, REPO)
    server.store.add(REPO, {"notes.txt": b"theirs"})
    (ready_copy / "assets" / "old.svg").rename(ready_copy / "assets" / "new.svg")
    change_card(ready_copy)
    server.log.clear()
    plan = json.loads(json.dumps(push(ready_copy, REPO, dry_run=True).to_dict()))["plan"]
    assert [file["path"] for file in plan["add"]] == ["assets/new.svg"]
    assert [file["path"] for file in plan["replace"]] == ["README.md", "bundle.json"]
    assert plan["delete"] == []
    assert [file["path"] for file in plan["leave"]] == [".gitattributes", "assets/old.svg", "notes.txt"]
    assert len(plan["keep"]) == len(local(ready_copy)) - 3
    assert [finding["code"] for finding in plan["findings"]] == ["push-foreign"]
    assert server.writes() == []


def with_chart(root: Path) -> Path:
    (root / "assets").mkdir()
    (root / "assets" / "chart.svg").write_text("<svg/>")
    seal(root)
    return root


def without_chart(root: Path) -> Path:
    shutil.rmtree(root / "assets")
    seal(root)
    return root


def test_what_left_the_bundle_leaves_the_repo_in_the_same_commit(server: HubServer, ready_copy: Path) -> None:
    """Where bundles put everything there, what only the previous one lists goes; --no-prune keeps it."""
    push(with_chart(ready_copy), REPO)
    without_chart(ready_copy)
    kept = push(ready_copy, REPO, prune=False, dry_run=True).plan
    assert [file.path for file in kept.leave] == [".gitattributes", "assets/chart.svg"]
    push(ready_copy, REPO)
    assert contents(server) == local(ready_copy)
    assert titles(server) == ["Publish tiny-31b", "Publish tiny-31b", "initial commit"]


def test_beside_files_of_others_nothing_is_deleted_unless_asked(server: HubServer, ready_copy: Path) -> None:
    """A repo that holds what no bundle put there is not cleaned; --prune cleans it, in one commit with the rest."""
    push(with_chart(ready_copy), REPO)
    server.store.add(REPO, {"notes.txt": b"theirs"}, title="notes")
    without_chart(ready_copy)
    outcome = push(ready_copy, REPO)
    assert contents(server) == local(ready_copy) | {"assets/chart.svg": b"<svg/>", "notes.txt": b"theirs"}
    assert [(found.code, found.severity) for found in outcome.plan.findings] == [("push-foreign", "warning")]
    assert [file.path for file in push(ready_copy, REPO, prune=True).plan.delete] == ["assets/chart.svg", "notes.txt"]
    assert contents(server) == local(ready_copy)
    assert ".gitattributes" in repo_on(server).git.files("main")
    assert len(titles(server)) == 5


def test_a_bundle_json_that_nobody_can_read_deletes_nothing(server: HubServer, ready: Path) -> None:
    """Where the repo's own list is broken, every file there counts as somebody else's."""
    server.store.add(REPO, {"bundle.json": b'{"files": [{"name": "x"}]}', "x.txt": b"x"})
    push(ready, REPO)
    assert contents(server) == local(ready) | {"x.txt": b"x"}


def test_the_repo_is_opened_last(server: HubServer, ready: Path) -> None:
    """Strangers see a repo only after its commit is verified and tagged."""
    outcome = push(ready, REPO, private=False, tag="v1")
    assert not outcome.private
    assert not repo_on(server).private
    assert server.writes()[-1] == f"PUT /api/models/{REPO}/settings"
    assert repo_on(server).git.refs()["refs/tags/v1"] == outcome.commit


def test_a_public_repo_is_pointed_out_and_never_hidden(server: HubServer, ready: Path) -> None:
    """A push does not change the visibility of a repo that strangers use; it warns beforehand."""
    server.store.create(REPO)
    outcome = push(ready, REPO, private=True)
    assert [finding.code for finding in outcome.plan.findings] == ["push-public"]
    assert not outcome.private
    assert not repo_on(server).private


def test_a_long_listing_is_read_to_its_end(server: HubServer, ready: Path) -> None:
    """The Hub lists a large repo page by page."""
    push(ready, REPO)
    server.page_size = 5
    assert push(ready, REPO).status is Status.UNCHANGED


# ------------------------------------------------------------------------------- refused before anything is sent


def refused(server: HubServer, ready: Path, **options: object) -> PublishError:
    """The error of a push that sends nothing and changes nothing."""
    with pytest.raises(PublishError) as caught:
        push(ready, REPO, **options)  # type: ignore[arg-type]
    assert not [line for line in server.writes() if "/preupload/" in line or "/commit/" in line or "_lfs" in line]
    return caught.value


def test_a_token_that_may_only_read_is_refused_first(
    server: HubServer, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token's role is asked for first; the bundle is not hashed for a push that cannot be."""
    monkeypatch.setenv("HF_TOKEN", "hf_alice_read")
    exc = refused(server, ready)
    assert "may only read" in str(exc)
    assert f"{server.endpoint}/settings/tokens" in str(exc.hint)
    assert server.log[0].path == "/api/whoami-v2"


def test_a_token_that_the_hub_does_not_know_is_never_shown(
    server: HubServer, ready: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bad token ends the push with the way to log in; the token itself appears nowhere."""
    monkeypatch.setenv("HF_TOKEN", "hf_not_a_real_token")
    exc = refused(server, ready)
    assert "does not accept this token" in str(exc)
    assert "hf auth login" in str(exc.hint)
    assert "not_a_real" not in f"{exc} {exc.hint} {capsys.readouterr()}"


def test_without_a_token_the_way_to_log_in_is_said(
    server: HubServer, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody logged in is no server error."""
    monkeypatch.delenv("HF_TOKEN")
    exc = refused(server, ready)
    assert "nobody is logged in" in str(exc)
    assert "hf auth login" in str(exc.hint)
    assert server.log == []


def test_a_fine_grained_token_must_name_the_repo_or_its_owner(
    server: HubServer, ready: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scoped token is good where its scope says `repo.write`, and nowhere else."""
    monkeypatch.setenv("HF_TOKEN", "hf_fine")
    token = Token(user="alice", orgs=("acme",), role="fineGrained", scopes={"acme/other": ("repo.write",)})
    server.store.tokens["hf_fine"] = token
    assert "may not write to acme/tiny-31b" in str(refused(server, ready))
    server.store.tokens["hf_fine"] = replace(token, scopes={"acme": ("repo.write",)})
    assert push(ready, REPO).status is Status.PUBLISHED


def test_somebody_elses_namespace_is_refused(server: HubServer, ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A person who is no member of an organization cannot publish there."""
    monkeypatch.setenv("HF_TOKEN", "hf_bob")
    assert "bob does not belong to acme" in str(refused(server, ready))


def test_offline_is_said_plainly(server: HubServer, ready: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HF_HUB_OFFLINE means here what it means everywhere."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in str(refused(server, ready))


def test_a_bundle_that_changed_since_it_was_built_is_refused(server: HubServer, ready_copy: Path) -> None:
    """What is pushed is what was verified: one flipped byte stops the push with verify's findings."""
    shard = next(ready_copy.glob("model-*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(VerificationError) as caught:
        push(ready_copy, REPO)
    assert "file-hash" in {finding.code for finding in caught.value.findings}
    assert server.writes() == []


def test_a_card_that_the_hub_refuses_costs_no_upload(server: HubServer, ready: Path) -> None:
    """The Hub's own check of the front matter comes before the first byte."""
    says_no = json.dumps({"errors": [{"message": '"license" is unknown'}], "warnings": []}).encode()
    server.faults.append(Fault(method="POST", path="/validate-yaml", edit=lambda body: says_no, set_status=400))
    assert '"license" is unknown' in str(refused(server, ready))
    assert server.store.repos == {}


def test_a_tag_that_names_another_state_is_refused(server: HubServer, ready_copy: Path) -> None:
    """A tag that people rely on is not moved, and the push stops before it sends what the tag cannot name."""
    push(ready_copy, REPO, tag="v1")
    server.log.clear()
    change_card(ready_copy)
    exc = refused(server, ready_copy, tag="v1")
    assert "tag v1 of acme/tiny-31b is on" in str(exc)
    assert exc.hint == "choose another tag"


def test_a_gitignore_in_the_repo_is_no_silent_loss(server: HubServer, ready: Path) -> None:
    """The Hub would leave an ignored file out of the commit without a word; the push says so and commits nothing."""
    server.store.add(REPO, {".gitignore": b"*.jinja\n"})
    with pytest.raises(PublishError, match=r"chat_template.jinja would be dropped by the .gitignore"):
        push(ready, REPO)
    assert titles(server) == ["files", "initial commit"]


# ------------------------------------------------------------------------------------------------ around the commit


def test_403_stops_at_once(server: HubServer, ready: Path, sleeps: list[float]) -> None:
    """A refusal (quota, rights) is not asked for twice."""
    server.faults.append(Fault(method="POST", path=COMMIT, status=403))
    with pytest.raises(PublishError, match="the Hub refuses"):
        push(ready, REPO)
    assert len([line for line in server.writes() if COMMIT in line]) == 1
    assert sleeps == []


def test_a_busy_hub_is_asked_again(server: HubServer, ready: Path, sleeps: list[float]) -> None:
    """A commit that the Hub was too busy for is tried again, and lands once."""
    server.faults.append(Fault(method="POST", path=COMMIT, status=503, times=2))
    push(ready, REPO)
    assert titles(server) == ["Publish tiny-31b", "initial commit"]
    assert sleeps == [1.0, 2.0]


def test_a_hub_that_stays_busy_ends_the_push(server: HubServer, ready: Path, sleeps: list[float]) -> None:
    """The number of attempts is bounded; the repo is as it was, and a later push finishes the work."""
    server.faults.append(Fault(method="POST", path=COMMIT, status=503, times=99))
    with pytest.raises(PublishError, match="the Hub answers 503"):
        push(ready, REPO)
    assert titles(server) == ["initial commit"]
    server.faults.clear()
    server.log.clear()
    assert push(ready, REPO).status is Status.PUBLISHED
    assert not [line for line in server.writes() if line.startswith("PUT /_lfs")]


@pytest.mark.parametrize(
    "fault",
    [
        Fault(method="POST", path=COMMIT, after=True, status=504),
        Fault(method="POST", path=COMMIT, after=True, reset=True),
        Fault(method="POST", path=COMMIT, edit=lambda body: b"<html>a proxy's page</html>"),
    ],
    ids=["504", "reset", "garbled"],
)
def test_a_lost_answer_makes_no_second_commit(
    server: HubServer, ready: Path, sleeps: list[float], fault: Fault
) -> None:
    """Where the commit landed and only its answer was lost, the push notices and goes on."""
    server.faults.append(fault)
    outcome = push(ready, REPO, tag="v1")
    assert (outcome.status, outcome.commit) == (Status.PUBLISHED, repo_on(server).head())
    assert titles(server) == ["Publish tiny-31b", "initial commit"]
    assert contents(server) == local(ready)


@pytest.mark.parametrize("status", [None, 503], ids=["stale parent", "lost answer"])
def test_somebody_elses_commit_is_never_overwritten(
    server: HubServer, ready: Path, sleeps: list[float], status: int | None
) -> None:
    """Who commits between plan and commit keeps their commit; nothing of ours becomes visible."""
    server.store.add(REPO, {"notes.txt": b"old"})
    other = partial(server.store.add, REPO, {"notes.txt": b"new"}, title="theirs")
    server.faults.append(Fault(method="POST", path=COMMIT, meanwhile=other, status=status))
    with pytest.raises(PublishError, match="somebody else committed") as caught:
        push(ready, REPO)
    assert "push again" in str(caught.value.hint)
    assert contents(server) == {"notes.txt": b"new"}
    server.faults.clear()
    assert push(ready, REPO).status is Status.PUBLISHED
    assert contents(server) == local(ready) | {"notes.txt": b"new"}


def test_429_waits_as_told(server: HubServer, ready: Path, sleeps: list[float]) -> None:
    """The pause is the one that the Hub asks for, wherever it asks."""
    server.faults += [
        Fault(method="GET", path="/whoami-v2", status=429, headers={"Retry-After": "7"}),
        Fault(method="POST", path=COMMIT, status=429, headers={"RateLimit": '"api";r=0;t=11'}),
    ]
    push(ready, REPO)
    assert sleeps == [7.0, 11.0]
    assert titles(server) == ["Publish tiny-31b", "initial commit"]


def test_an_upload_that_breaks_off_is_repeated(server: HubServer, ready: Path, sleeps: list[float]) -> None:
    """A broken line during the upload costs a pause, not the push."""
    server.faults.append(Fault(method="PUT", path="/_lfs/", reset=True, times=2))
    push(ready, REPO)
    assert contents(server) == local(ready)


def test_a_hash_that_the_hub_reports_wrongly_is_an_error(server: HubServer, ready: Path) -> None:
    """After the commit the Hub's own listing is compared with the manifest; the commit gets no tag if they differ."""
    entry = next(file for file in manifest.load(ready).files if file.path.endswith(".safetensors"))
    server.faults.append(
        Fault(method="GET", path="/tree/", edit=lambda body: body.replace(entry.sha256.encode(), b"0" * 64), times=99)
    )
    with pytest.raises(PublishError, match="is not what was sent") as caught:
        push(ready, REPO, tag="v1")
    assert [(finding.code, finding.where) for finding in caught.value.findings] == [("remote-differs", entry.path)]
    assert "refs/tags/v1" not in repo_on(server).git.refs()


def test_a_file_that_changes_during_the_push_is_noticed(server: HubServer, ready_copy: Path) -> None:
    """What the Hub holds is compared with what was verified, not with whatever lies on disk by then."""
    card = ready_copy / "README.md"
    edit = partial(card.write_bytes, card.read_bytes().swapcase())
    server.faults.append(Fault(method="POST", path="/repos/create", meanwhile=edit))
    with pytest.raises(PublishError) as caught:
        push(ready_copy, REPO)
    assert "README.md" in str(caught.value)


def test_weights_that_change_during_the_push_are_not_committed(server: HubServer, ready_copy: Path) -> None:
    """Weights are sent from disk; if they are not any more what was verified, nothing becomes visible."""
    shard = next(ready_copy.glob("model-*.safetensors"))
    server.faults.append(Fault(method="PUT", path="/_lfs/", meanwhile=partial(flip, shard)))
    with pytest.raises(PublishError, match="was changed while it was being pushed"):
        push(ready_copy, REPO)
    assert titles(server) == ["initial commit"]
    flip(shard)
    assert push(ready_copy, REPO).status is Status.PUBLISHED


def flip(path: Path) -> None:
    """Change the last byte of a file, in place; twice is not at all."""
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))


def test_two_pushes_at_once_do_not_meet(server: HubServer, ready: Path) -> None:
    """A second push to the same repo from the same machine is turned away; the first goes on."""
    refusals: list[str] = []

    def second() -> None:
        try:
            push(ready, REPO)
        except PublishError as exc:
            refusals.append(str(exc))

    server.faults.append(Fault(method="POST", path="/preupload/", meanwhile=second))
    assert push(ready, REPO).status is Status.PUBLISHED
    assert len(refusals) == 1
    assert "is at work on this machine" in refusals[0]
    assert titles(server) == ["Publish tiny-31b", "initial commit"]


def test_a_tag_that_appears_meanwhile_is_noticed(server: HubServer, ready: Path) -> None:
    """The tag's target is read back: that it exists is not enough."""
    server.store.create(REPO)
    first = repo_on(server).head()
    take = partial(repo_on(server).git.set_ref, "refs/tags/v1", first)
    server.faults.append(Fault(method="POST", path="/tag/", meanwhile=take))
    with pytest.raises(PublishError, match=f"tag v1 of {REPO} is on {first}"):
        push(ready, REPO, tag="v1")


# ----------------------------------------------------------------------- what a downloader gets, before anyone sees it


def test_what_the_hub_serves_is_looked_at_before_tag_and_visibility(server: HubServer, ready: Path) -> None:
    """Right hashes in the listing are not enough: files are fetched back, and the repo stays closed if they differ."""
    spoilt = Fault(
        method="GET", path="/resolve/[0-9a-f]+/config.json", edit=lambda body: body.replace(b"gemma4", b"gemma5")
    )
    server.faults.append(spoilt)
    with pytest.raises(PublishError, match=r"is not what was sent: config.json has SHA-256"):
        push(ready, REPO, private=False, tag="v1")
    assert repo_on(server).private
    assert "refs/tags/v1" not in repo_on(server).git.refs()
    again = push(ready, REPO, private=False, tag="v1")
    assert (again.status, again.private) == (Status.UNCHANGED, False)
    assert titles(server) == ["Publish tiny-31b", "initial commit"]


def test_the_head_of_every_shard_is_compared(server: HubServer, ready: Path) -> None:
    """Of weights, the header comes back and must be the one that was sent."""
    server.faults.append(Fault(method="GET", path="/_lfs/", edit=lambda body: body[:20] + b"?" + body[21:]))
    with pytest.raises(PublishError, match="begins with other bytes there than here"):
        push(ready, REPO, private=False)
    assert repo_on(server).private


def test_full_downloads_everything_and_verifies_it(server: HubServer, ready: Path) -> None:
    """With `full`, one wrong byte in the middle of the weights keeps the repo closed."""
    server.faults.append(
        Fault(method="GET", path="/_lfs/", edit=lambda body: body[:-9] + bytes([body[-9] ^ 1]) + body[-8:], times=9)
    )
    with pytest.raises(PublishError, match="has SHA-256") as caught:
        push(ready, REPO, private=False, full=True)
    assert "file-hash" in {found.code for found in caught.value.findings}
    assert repo_on(server).private
    server.faults.clear()
    assert not push(ready, REPO, private=False, full=True).private


# ------------------------------------------------------------------------------------------------------ pull requests


def test_a_pull_request_leaves_main_alone_and_is_continued(
    server: HubServer, ready_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who may not write proposes a bundle; pushed again, the same pull request gets what changed."""
    server.store.add(REPO, {"notes.txt": b"theirs"})
    monkeypatch.setenv("HF_TOKEN", "hf_bob")
    first = push(ready_copy, REPO, pull_request=True, tag="v1", private=False)
    assert (first.status, first.tag) == (Status.PULL_REQUEST, None)
    assert first.url == f"{server.endpoint}/{REPO}/discussions/1"
    assert repo_on(server).git.refs()["refs/pr/1"] == first.commit
    assert [pull.status for pull in repo_on(server).pulls.values()] == ["open"]
    change_card(ready_copy)
    second = push(ready_copy, REPO, pull_request=True)
    assert second.url == first.url
    assert [entry.path for entry in second.plan.replace] == ["README.md", "bundle.json"]
    assert contents(server, "refs/pr/1") == local(ready_copy) | {"notes.txt": b"theirs"}
    assert contents(server) == {"notes.txt": b"theirs"}
    server.log.clear()
    assert push(ready_copy, REPO, pull_request=True).status is Status.UNCHANGED
    assert server.writes() == []
    repo_on(server).pulls[1].status = "closed"
    assert push(ready_copy, REPO, pull_request=True).url == f"{server.endpoint}/{REPO}/discussions/2"


def test_a_pull_request_needs_a_repo(server: HubServer, ready: Path) -> None:
    """There is nothing to open it in, and it is not created on the way."""
    exc = refused(server, ready, pull_request=True)
    assert [found.code for found in exc.findings] == ["repo-missing"]
    assert server.store.repos == {}


# --------------------------------------------------------------------------------------- from the drafter's own repo


DRAFTER = "acme/drafter"


def with_published_drafter(server: HubServer, root: Path) -> str:
    """The same bundle, with a drafter that came from the Hub; the SHA-256 of its weights."""
    files = {path.name: path.read_bytes() for path in (root / "assistant").iterdir()}
    commit = server.store.add(DRAFTER, files)
    made = manifest.load(root)
    drafter = replace(made.drafter, model=DRAFTER, revision=None, commit=commit)
    manifest.write(root, replace(made, drafter=drafter))
    write_bundle(root, repo_id=REPO)
    return next(file.sha256 for file in made.drafter.files if file.path == "model.safetensors")


def test_the_drafter_is_copied_on_the_server(server: HubServer, ready_copy: Path) -> None:
    """Where its own repo has it in xet storage, nobody sends it; the commit holds it all the same."""
    sha256 = with_published_drafter(server, ready_copy)
    server.store.xet_hashes[sha256] = "f" * 64
    plan = push(ready_copy, REPO).plan
    assert [(copy.path, copy.model) for copy in plan.copy] == [("assistant/model.safetensors", DRAFTER)]
    assert plan.send_bytes == sum(len(content) for content in local(ready_copy).values()) - len(
        (ready_copy / "assistant" / "model.safetensors").read_bytes()
    )
    assert f"PUT /_lfs/{sha256}" not in server.writes()
    assert f"POST /api/models/{DRAFTER}/lfs-files/duplicate" in server.writes()
    assert contents(server) == local(ready_copy)


@pytest.mark.parametrize("status", [403, 500])
def test_a_drafter_that_cannot_be_copied_is_sent(
    server: HubServer, ready_copy: Path, sleeps: list[float], status: int
) -> None:
    """Another storage region, a refusal, an outage: the push goes on, in one commit."""
    sha256 = with_published_drafter(server, ready_copy)
    server.store.xet_hashes[sha256] = "f" * 64
    server.faults.append(Fault(method="POST", path="/duplicate", status=status, times=99))
    push(ready_copy, REPO)
    assert f"PUT /_lfs/{sha256}" in server.writes()
    assert contents(server) == local(ready_copy)
    assert titles(server) == ["Publish tiny-31b", "initial commit"]


def test_a_drafter_that_moved_is_sent(server: HubServer, ready_copy: Path) -> None:
    """A source repo that is gone, or that keeps the file in older storage, is no reason to stop."""
    with_published_drafter(server, ready_copy)
    assert push(ready_copy, REPO, dry_run=True).plan.copy == ()
    del server.store.repos["model", DRAFTER]
    push(ready_copy, REPO)
    assert contents(server) == local(ready_copy)


# ---------------------------------------------------------------------------------------------- what strangers get


def test_hf_download_and_hf_cache_verify_agree(server: HubServer, ready: Path, tmp_path: Path) -> None:
    """Unmodified tools fetch every byte of a tag without a token, and find every hash right."""
    push(ready, REPO, private=False, tag="v1")
    whole = tmp_path / "whole"
    done = hf("download", REPO, "--revision", "v1", "--local-dir", str(whole), HF_TOKEN="")
    assert done.returncode == 0, done.stderr
    assert local(whole) == local(ready)
    assert hf("cache", "verify", REPO, "--revision", "v1", "--local-dir", str(whole)).returncode == 0
