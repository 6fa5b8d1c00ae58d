"""`bundle init`: a recipe for any Gemma 4 body, on the Hub or in a folder, that plans without errors."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import replicas
from hub.server import HubServer
from published import QAT

from bundler.build import resolve
from bundler.errors import BundlerError, CompatibilityError, RecipeError, SourceError
from bundler.findings import errors
from bundler.init import init
from bundler.recipe import load

DATASET = {"README.md": b"---\nlicense: mit\n---\n"}


def publish(server: HubServer, folder: Path, *repos: str) -> None:
    for repo in repos:
        replicas.publish(server.store, repo, folder / "sparse")
    server.store.add("HuggingFaceH4/ultrachat_200k", DATASET, kind="dataset")


@pytest.mark.parametrize(
    ("size", "version", "tokens", "context"),
    [
        ("31B", ">=0.21", 4, 32_768),
        ("26B-A4B", ">=0.21", 4, 32_768),
        ("12B", ">=0.23", 4, 32_768),
        ("E4B", ">=0.23", 4, 32_768),
        ("E2B", ">=0.23", 2, 32_768),
    ],
)
def test_every_kind_gets_a_recipe_that_plans(
    size: str, version: str, tokens: int, context: int, server: HubServer, tmp_path: Path
) -> None:
    """A QAT body of each size gets its QAT drafter, a release that runs it, and a plan without an error."""
    body = f"google/gemma-4-{size}-it{QAT}"
    publish(server, tmp_path, body, f"{body}-assistant", f"google/gemma-4-{size}-it-assistant")
    written = init(body, tmp_path / "new.toml")
    recipe = load(written.path)
    assert recipe.drafter.model == f"{body}-assistant"
    assert (recipe.serve.version, recipe.drafter.num_speculative_tokens) == (version, tokens)
    assert (recipe.serve.max_model_len, recipe.quantization.ignore) == (context, ())
    assert recipe.name == f"gemma-4-{size}-it-qat-NVFP4-MTP"
    assert errors(written.plan.findings) == []
    assert "Licence: apache-2.0, https://ai.google.dev/gemma/docs/gemma_4_license" in recipe.text


def test_a_finetune_gets_its_parents_drafter(server: HubServer, tmp_path: Path) -> None:
    """A body whose own name has no drafter is given that of the model its card says it comes from."""
    publish(server, tmp_path, replicas.ABLITERATED, f"google/gemma-4-31B-it{QAT}-assistant")
    written = init(replicas.ABLITERATED, tmp_path / "new.toml")
    recipe = load(written.path)
    assert recipe.drafter.model == f"google/gemma-4-31B-it{QAT}-assistant"
    assert errors(resolve(recipe).findings) == []


def test_a_body_without_qat_keeps_its_attention(server: HubServer, tmp_path: Path) -> None:
    """A body that was not trained for 4 bit gets attention in bf16, and the reason beside it."""
    body = "google/gemma-4-E2B-it"
    publish(server, tmp_path, body, f"{body}-assistant")
    recipe = load(init(body, tmp_path / "new.toml").path)
    assert recipe.quantization.ignore == ("re:.*self_attn.*",)
    assert "QAT" in recipe.text


def test_no_drafter_that_fits(server: HubServer, tmp_path: Path) -> None:
    """Where no candidate is there, all that were looked for are named, and how to give one."""
    body = f"google/gemma-4-12B-it{QAT}"
    publish(server, tmp_path, body)
    with pytest.raises(SourceError, match=f"looked for {body}-assistant") as caught:
        init(body, tmp_path / "new.toml")
    assert "--drafter" in str(caught.value.hint)
    assert not (tmp_path / "new.toml").exists()


def test_a_drafter_of_another_size_is_refused(server: HubServer, tmp_path: Path) -> None:
    """A drafter that is named and does not fit is an error with every reason."""
    body, drafter = f"google/gemma-4-12B-it{QAT}", "google/gemma-4-31B-it-assistant"
    publish(server, tmp_path, body, drafter)
    with pytest.raises(CompatibilityError) as caught:
        init(body, tmp_path / "new.toml", drafter=drafter)
    assert "drafter-model-type" in {finding.code for finding in caught.value.findings}


@pytest.mark.parametrize("kind", ["dense", "moe", "per-layer", "unified"])
def test_a_local_body(kind: str, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder gets the drafter and the data that lie beside it, by paths from the recipe; all without a Hub."""
    pair = tmp_path / "models" / "small"
    shutil.copytree(tiny(kind), pair)
    rows = '{"messages": [{"role": "user", "content": "hi"}]}\n' * 7
    (pair / "calibration.jsonl").write_text(rows + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    written = init("models/small/body")
    recipe = load(written.path)
    assert written.path == Path("small-NVFP4-MTP.toml")
    assert recipe.body.model == "./models/small/body"
    assert recipe.drafter.model == "./models/small/drafter"
    assert (recipe.calibration.dataset, recipe.calibration.num_samples) == ("./models/small/calibration.jsonl", 7)
    assert errors(resolve(recipe).findings) == []


def test_an_existing_file_is_kept(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A recipe that is there already is not written over."""
    path = tmp_path / "mine.toml"
    path.write_text("mine")
    with pytest.raises(RecipeError, match="exists"):
        init(str(tiny("dense") / "body"), path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("body", ["nowhere/at-all", "./nowhere", "drafter"])
def test_what_is_no_body(body: str, server: HubServer, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A repo or folder that is not there, or is a drafter, is refused in plain words."""
    name = str(tiny("dense") / "drafter") if body == "drafter" else body
    with pytest.raises(BundlerError) as caught:
        init(name, tmp_path / "new.toml")
    assert caught.value.exit_code in (4, 5)
