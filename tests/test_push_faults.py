"""What a push leaves behind when something goes wrong: the whole old bundle or the whole new one, and a way on.

A few cases run always; all of them, in both storage modes and with both clients, where slow tests do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub.clients import ROOT, make_python
from hub.faults import Arena, Case, kill, strike

from bundler.hub import client


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause takes time."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(client, "SILENCE_S", client.SILENCE_S)  # the arena changes it


@pytest.fixture(scope="module")
def arena(request: pytest.FixtureRequest, bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A Hub with an old bundle, for the whole module; huggingface_hub talks to it meanwhile."""
    from huggingface_hub import constants

    names = ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE", "HF_HUB_DISABLE_XET")
    before, environment = {name: getattr(constants, name) for name in names}, dict(os.environ)
    made = Arena(bundle, tmp_path_factory.mktemp("arena"), xet=request.param == "xet")
    yield made
    made.close()
    os.environ.clear()
    os.environ |= environment
    for name, value in before.items():
        setattr(constants, name, value)


def check(case: Case) -> None:
    assert case.struck, case
    assert case.good, case


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arena", "endpoint", "fault", "lasting"),
    [
        ("LFS", "commit", "timeout", False),
        ("LFS", "tree", "503", True),
        ("xet", "commit", "answer lost (504)", False),
    ],
    indirect=["arena"],
)
def test_a_fault_leaves_the_old_or_the_new_bundle(arena: Arena, endpoint: str, fault: str, lasting: bool) -> None:
    """Whatever fails, nothing is seen half, no commit is made twice, and the next push finishes the work."""
    check(strike(arena, endpoint, fault, lasting=lasting))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("arena", "endpoint", "after"),
    [
        ("LFS", "LFS put", False),
        ("LFS", "commit", True),
        ("xet", "preupload", True),
    ],
    indirect=["arena"],
)
def test_a_killed_push_is_finished_by_the_next(arena: Arena, endpoint: str, after: bool) -> None:
    """`kill -9` while contents are sent, before their commit, and when the commit has landed and nobody knows it."""
    check(kill(arena, endpoint, after=after))


# -------------------------------------------------------------------------------------------------------- everything


def start(python: Path | str, bundle: Path, output: Path, *options: str) -> subprocess.Popen[bytes]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    command = [str(python), "-W", "ignore", "-m", "hub.faults", str(bundle), *options]
    with output.open("wb") as file:
        return subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path}, stdout=file, stderr=subprocess.DEVNULL
        )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_fault_at_every_endpoint_in_both_modes_with_both_clients(bundle: Path, tmp_path: Path) -> None:
    """No fault leaves a repo half visible or a commit made twice; the table is printed."""
    cases: list[dict[str, object]] = []
    for mode in ("LFS", "xet"):
        options = ["--xet"] if mode == "xet" else []
        outputs = [tmp_path / f"{mode}{number}" for number in (1, 2)]
        pythons = (sys.executable, make_python())
        runs = [start(python, bundle, output, *options) for python, output in zip(pythons, outputs, strict=True)]
        assert [one.wait() for one in runs] == [0, 0]
        cases += [json.loads(line) for output in outputs for line in output.read_text().splitlines()]
    print(render_table(cases))
    assert {case["client"] for case in cases} >= {"2.4.0"}
    assert [case for case in cases if not case["struck"]] == []
    assert [case for case in cases if not case["good"]] == []


def render_table(cases: list[dict[str, object]]) -> str:
    """Per client and mode: faults tried, half-visible repos, double commits, pushes that did not end well."""
    lines = ["client   mode  faults  half visible  double commits  unfinished"]
    for kind in sorted({(str(case["client"]), str(case["mode"])) for case in cases}):
        of_kind = [case for case in cases if (case["client"], case["mode"]) == kind]
        half = sum(case["visible"] == "half" for case in of_kind)
        double = sum(int(str(case["commits"])) > 1 for case in of_kind)
        unfinished = sum(not case["finished"] for case in of_kind)
        lines.append(f"{kind[0]:<8} {kind[1]:<5} {len(of_kind):>6} {half:>13} {double:>15} {unfinished:>11}")
    return "\n".join(lines)
