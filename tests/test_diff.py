"""`bundle diff`: two recipes, bundles, checkpoints or repos, and everything in which they are not alike."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import replicas
from hub.server import HubServer
from published import QAT

from bundler import printing
from bundler.diff import Difference, compare, gather, look
from bundler.errors import SourceError

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "tiny-31b.toml"
BODY = ROOT / "examples" / "tiny-31b" / "body"


def differences(left: Path | str, right: Path | str) -> list[Difference]:
    return compare(look(str(left)), look(str(right)))


def changed(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The newcomer's recipe, with another title, fewer samples, and attention kept in bf16."""
    text = RECIPE.read_text(encoding="utf-8").replace("../examples", str(ROOT / "examples"))
    text = changed(text, "num_samples = 42", "num_samples = 8")
    text = changed(text, "[quantization]", "[quantization]\nignore = ['re:.*self_attn.*']")
    path = tmp_path / "other.toml"
    path.write_text(changed(text, 'title = "Tiny 31B, NVFP4 + MTP"', 'title = "Other"'), encoding="utf-8")
    return path


def test_a_thing_does_not_differ_from_itself() -> None:
    """A recipe and a checkpoint are equal to themselves."""
    assert differences(RECIPE, RECIPE) == []
    assert differences(BODY, BODY) == []


def test_two_recipes(other: Path) -> None:
    """Recipes differ in what they say and in what becomes of it: modules, tensors, config and card."""
    found = differences(RECIPE, other)
    said = {d.where: (d.left, d.right) for d in found if d.section == "recipe"}
    assert said["calibration.num_samples"] == ("42", "8")
    assert said["quantization.ignore"] == ("[]", '["re:.*self_attn.*"]')
    modules = [d for d in found if d.section == "modules"]
    assert {(d.left, d.right) for d in modules} == {("NVFP4", "BF16")}
    assert all(".self_attn." in d.where for d in modules)
    assert any(d.section == "tensors" and d.right is None and d.where.endswith("weight_packed") for d in found)
    assert any(d.section == "config" and d.where == "quantization_config.ignore" for d in found)
    assert any(d.section == "card" and "Other" in str(d.right) for d in found)


def test_layers_are_gathered(other: Path) -> None:
    """What differs in every layer alike is shown once, with how often; nothing is lost in the counting."""
    found = differences(RECIPE, other)
    short = gather(found)
    assert sum(difference.count for difference in short) == len(found)
    assert len(short) < len(found)
    assert "model.language_model.layers.*.self_attn.q_proj" in {d.where for d in short}


def test_a_recipe_and_its_bundle(bundle: Path) -> None:
    """A bundle has the modules, tensors, config and sources that its recipe plans; only the card knows more."""
    assert {difference.section for difference in differences(RECIPE, bundle)} <= {"card"}


def test_two_folders(tmp_path: Path) -> None:
    """Checkpoints without recipe or manifest are compared by config, tensors and card."""
    copy = Path(shutil.copytree(BODY, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["sliding_window"] = 7
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n")
    found = differences(BODY, copy)
    assert ("config", "text_config.sliding_window") in {(d.section, d.where) for d in found}
    assert ("card", "front matter: license") in {(d.section, d.where) for d in found}
    assert not {d.section for d in found} & {"recipe", "sources"}


def test_two_repos_without_their_weights(server: HubServer, tmp_path: Path) -> None:
    """Repos are compared at real size from headers: E4B and its QAT sibling differ in K/V of shared layers."""
    for repo in ("google/gemma-4-E4B-it", f"google/gemma-4-E4B-it{QAT}"):
        replicas.publish(server.store, repo, tmp_path / "sparse")
    found = differences("google/gemma-4-E4B-it@main", f"google/gemma-4-E4B-it{QAT}")
    tensors = [d for d in found if d.section == "tensors"]
    assert len(tensors) == 54
    assert all(d.right is None for d in tensors)
    assert sum(entry.sent_bytes for entry in server.log) < 2_000_000


def test_a_published_bundle(bundle: Path, server: HubServer) -> None:
    """A bundle and the repo it was published to do not differ, recipe and sources included."""
    files = {path.name: path.read_bytes() for path in bundle.iterdir() if path.is_file()}
    server.store.add("alice/tiny", files)
    assert differences(bundle, "alice/tiny") == []
    assert {"recipe", "sources"} <= look("alice/tiny").sections.keys()


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "no/where"])
def test_what_cannot_be_looked_at(name: str, server: HubServer) -> None:
    """A name that is no recipe, folder or repo is a SourceError."""
    with pytest.raises(SourceError):
        look(name)


def test_differences_are_printed(other: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each difference shows its place and both sides; a long text from the line where the two part."""
    printing.print_differences("a", "b", gather(differences(RECIPE, other)))
    out = capsys.readouterr().out
    assert "calibration.num_samples\n    - 42\n    + 8" in out
    assert "layers.*.self_attn.q_proj (6 times)\n    - NVFP4\n    + BF16" in out
    assert out.splitlines()[0] == "- a"
    printing.print_differences("a", "a", [])
    assert "do not differ" in capsys.readouterr().out
