"""Sources that have moved on since a bundle was built are named, with what changed in them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from hub.server import HubServer

from bundler import manifest
from bundler.cli import main
from bundler.errors import SourceError
from bundler.manifest import Manifest
from bundler.outdated import check_outdated, load_recorded
from bundler.recipe import Recipe, SourceRef, load

BODY, DRAFTER, REPO = "acme/body", "acme/drafter", "acme/tiny-31b"
RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "tiny-31b.toml"
FILES = {"config.json": b"{}", "model.safetensors": b"1" * 9, "chat_template.jinja": b"a", "README.md": b"r"}


@pytest.fixture
def recipe() -> Recipe:
    """A recipe whose sources are on the Hub."""
    made = load(RECIPE)
    drafter = replace(made.drafter, model=DRAFTER)
    return replace(made, body=SourceRef(model=BODY), drafter=drafter)


@pytest.fixture
def recorded(server: HubServer, ready: Path) -> Manifest:
    """What a bundle of it recorded when it was built."""
    made = manifest.load(ready)
    body = replace(made.body, model=BODY, commit=server.store.add(BODY, FILES))
    drafter = replace(made.drafter, model=DRAFTER, commit=server.store.add(DRAFTER, FILES))
    return replace(made, body=body, drafter=drafter)


def told(recipe: Recipe, recorded: Manifest) -> list[tuple[str, str, str]]:
    return [(found.code, found.where, str(found.severity)) for found in check_outdated(recipe, recorded)]


def test_sources_that_stand_still_are_no_news(server: HubServer, recipe: Recipe, recorded: Manifest) -> None:
    """Nothing moved, nothing to say; and nothing is downloaded for that."""
    assert told(recipe, recorded) == []
    assert not [entry for entry in server.log if "/resolve/" in entry.path or "/tree/" in entry.path]


@pytest.mark.parametrize(
    ("files", "code", "severity"),
    [
        ({"model.safetensors": b"2" * 9}, "source-moved", "warning"),
        ({"config.json": b"[]"}, "source-moved", "warning"),
        ({"tokenizer.json": b"{}"}, "source-moved", "warning"),
        ({"chat_template.jinja": b"b"}, "template-moved", "warning"),
        ({"README.md": b"s", "photo.png": b"p"}, "source-touched", "note"),
    ],
)
def test_what_moved_is_told_by_what_changed(
    server: HubServer, recipe: Recipe, recorded: Manifest, files: dict[str, bytes], code: str, severity: str
) -> None:
    """Weights, configs and tokenizer make a bundle old; a chat template has its own code; a new card is a note."""
    server.store.add(BODY, files)
    assert told(recipe, recorded) == [(code, "body.model", severity)]
    server.store.add(DRAFTER, files)
    assert told(recipe, recorded)[1] == (code, "drafter.model", severity)


def test_a_finding_names_both_commits_and_the_kinds_of_files(
    server: HubServer, recipe: Recipe, recorded: Manifest
) -> None:
    """Enough to look it up: where the source is, where the bundle is, and what is between them."""
    head = server.store.add(BODY, {"model.safetensors": b"2" * 9, "config.json": b"[]"})
    (found,) = check_outdated(recipe, recorded)
    assert head in found.message
    assert str(recorded.body.commit) in found.message
    assert "changed: weights, config" in found.message


def test_a_branch_is_followed_and_a_pinned_commit_is_compared_with_main(
    server: HubServer, recipe: Recipe, recorded: Manifest
) -> None:
    """The recorded revision says what to follow; a commit cannot move, so main is what may be newer."""
    git = server.store.repos["model", BODY].git
    git.set_ref("refs/heads/stable", str(recorded.body.commit))
    server.store.add(BODY, {"model.safetensors": b"2" * 9})
    stable = replace(recorded, body=replace(recorded.body, revision="stable"))
    pinned = replace(recorded, body=replace(recorded.body, revision=recorded.body.commit))
    assert told(recipe, stable) == []
    assert told(recipe, pinned) == [("source-moved", "body.model", "warning")]


def test_another_source_a_folder_and_a_lost_commit_are_told_apart(
    server: HubServer, recipe: Recipe, recorded: Manifest
) -> None:
    """The recipe may have changed, a folder has no commits, and a commit may be gone from the Hub."""
    other = replace(recipe, body=SourceRef(model="acme/other"))
    assert told(other, recorded) == [("source-other", "body.model", "warning")]
    folder = replace(recorded, body=replace(recorded.body, commit=None))
    assert told(recipe, folder) == [("source-local", "body.model", "note")]
    gone = replace(recorded, body=replace(recorded.body, commit="f" * 40))
    assert told(recipe, gone) == [("source-gone", "body.model", "warning")]


def test_the_bundle_is_found_in_dist_or_where_it_is_published(
    server: HubServer, recipe: Recipe, ready: Path, tmp_path: Path
) -> None:
    """A folder, a Hub id, dist/<name> or publish.repo_id; without any of them, the way to name one."""
    published = replace(recipe, publish=replace(recipe.publish, repo_id=REPO))
    server.store.add(REPO, {"bundle.json": (ready / "bundle.json").read_bytes()})
    made = manifest.load(ready)
    assert load_recorded(recipe, str(ready), tmp_path) == made
    assert load_recorded(recipe, f"{REPO}@main", tmp_path) == made
    assert load_recorded(recipe, None, ready.parent) == made
    assert load_recorded(published, None, tmp_path) == made
    with pytest.raises(SourceError, match="there is no bundle of tiny-31b") as caught:
        load_recorded(recipe, None, tmp_path)
    assert "--bundle" in str(caught.value.hint)
    server.store.add("acme/none", {"config.json": b"{}"})
    with pytest.raises(SourceError, match="holds no bundle"):
        load_recorded(recipe, "acme/none", tmp_path)


def test_the_command_prints_what_it_found(server: HubServer, ready: Path) -> None:
    """`bundle outdated RECIPE`: exit 0, the findings for people or as JSON."""
    done = CliRunner().invoke(main, ["outdated", str(RECIPE), "--bundle", str(ready), "--json"])
    assert done.exit_code == 0, done.stderr
    assert {found["code"] for found in json.loads(done.stdout)["findings"]} == {"source-local"}
    assert "source-local" in CliRunner().invoke(main, ["outdated", str(RECIPE), "--bundle", str(ready)]).stdout
