"""A real vLLM serves the trained bundle, and does not get away with a broken one: pytest -m engine.

The engine is installed once into the user's cache. Where that cannot be done, these are skipped with the reason; with
CI set they fail.
"""

from __future__ import annotations

import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
from breaks import poke, repack, without
from test_server import check_contract

from bundler import evidence, prove, session
from bundler.checkpoint import load_json, load_tensors
from bundler.engines import environments, load_facts, server
from bundler.engines.environments import Environment, Release
from bundler.errors import EngineError
from bundler.evidence import Outcome, Run
from bundler.findings import Finding, errors
from bundler.judgement import check_drafts, check_runs, refer
from bundler.recipe import load_bundled
from bundler.verify import verify

RELEASE = Release(engine="vllm", version="0.32.0", device="cpu")
DOWN = "model.language_model.layers.{}.mlp.down_proj"
pytestmark = pytest.mark.timeout(1800)


def install() -> Environment:
    """The engine, installed; without a way to get it, a skip, or with CI a failure."""
    try:
        return environments.install(RELEASE, load_facts())
    except EngineError as exc:
        if os.environ.get("CI"):
            pytest.fail(f"{RELEASE.name} must be here in CI: {exc}")
        pytest.skip(f"{RELEASE.name} cannot be installed here: {exc}")


@pytest.mark.parametrize(("ci", "ends"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_without_the_engine(ci: str, ends: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that cannot get the engine skips and says why; CI fails instead."""

    def no_network(*_: object) -> Environment:
        raise EngineError("uv found no network")

    monkeypatch.setattr(environments, "install", no_network)
    monkeypatch.setenv("CI", ci)
    with pytest.raises(ends, match="uv found no network"):
        install()


@pytest.fixture(scope="module")
def real() -> Environment:
    return install()


@pytest.fixture
def broken(bundle: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that a test breaks."""
    return Path(shutil.copytree(bundle, tmp_path / "broken"))


@pytest.mark.engine
def test_a_real_engine_keeps_the_contract(real: Environment, bundle: Path, tmp_path: Path) -> None:
    """What the fake engine is held to, a real vLLM does."""
    recipe, config, port = load_bundled(bundle), load_json(bundle / "config.json"), server.free_port()
    _, argv, env, _ = session.make_command(recipe, config, real, bundle, drafted=True)
    command = [*argv, "--host", server.HOST, "--port", str(port)]
    env = {**env, "BUNDLER_REPORT": str(tmp_path / "report.jsonl")}
    with server.running(command, env, tmp_path / "log", port=port, timeout_s=600) as running:
        check_contract(running, drafting=True, model=session.served_name(recipe))


@pytest.mark.engine
def test_the_trained_bundle_is_proven(real: Environment, bundle_copy: Path) -> None:
    """The README's bundle, NVFP4 with its drafter, text and an image: equal answers, most first drafts right.

    Its answers are eight tokens long, so what is drafted behind their end is lost and says nothing.
    """
    found = prove.prove(bundle_copy, engine="vllm==0.32.0", device="cpu")
    assert found.outcome is Outcome.PROVEN, found.findings
    alone, drafted = found.runs
    assert [answer.image for answer in alone.answers] == [False, False, False, True]
    assert ["Tokyo" in alone.answers[1].text, "東京" in alone.answers[2].text] == [True, True]
    assert drafted.counters["accepted_tokens_per_pos"][0] > drafted.counters["drafts"] / 2
    assert evidence.kernel_words(alone) == "emulation"
    assert "### Tested with" in (bundle_copy / "README.md").read_text("utf-8")
    assert verify(bundle_copy) == []


def start(folder: Path, real: Environment, work: Path, *, drafted: bool) -> tuple[Run, list[Finding]]:
    config = load_json(folder / "config.json")
    run, found = session.serve(folder, load_bundled(folder), config, real, work, drafted, 900, session.Watch())
    return run, found + check_runs([run], config)


def codes(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in errors(findings)}


@pytest.mark.engine
def test_a_missing_scale_is_not_proven(real: Environment, broken: Path, tmp_path: Path) -> None:
    """vLLM starts without a scale and says nothing; the parameter that nothing filled is seen all the same."""
    without(f"{DOWN.format(0)}.input_global_scale")(broken)
    _, found = start(broken, real, tmp_path, drafted=False)
    assert codes(found) & {"weight-unfilled", "engine-rejects"}


@pytest.mark.engine
def test_mistaken_scales_are_not_proven(real: Environment, bundle: Path, broken: Path, tmp_path: Path) -> None:
    """An engine that takes the scales of other matrices answers otherwise than the bundle's weights mean."""
    for name in [name for name in load_tensors(broken) if name.endswith("proj.weight_global_scale")]:
        poke(name, lambda old: struct.pack("<f", struct.unpack("<f", old)[0] / 3))(broken)
    run, found = start(broken, real, tmp_path, drafted=False)
    assert "reference-differs" in codes(found + refer(bundle, run.answers)[1])


@pytest.mark.engine
def test_a_drafter_of_another_body_is_not_proven(real: Environment, broken: Path, tmp_path: Path) -> None:
    """Right names and shapes, but not trained for this body: nothing, or next to nothing, is accepted."""

    def other(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith("projection.weight")]:
            shape, data = tensors[name]
            tensors[name] = (shape, data[: len(data) // 2][::-1] + data[len(data) // 2 :])

    repack(other, "assistant")(broken)
    run, found = start(broken, real, tmp_path, drafted=True)
    assert "drafter-accepts-nothing" in codes([*found, *check_drafts(run)])
