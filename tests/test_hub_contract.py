"""The test Hub is good enough to be believed: unmodified clients do with it what they do with the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hub.clients import ROOT, make_python


def run(python: str, *options: str) -> list[dict[str, object]]:
    """Every step of the contract that went otherwise than it must."""
    done = subprocess.run(
        [python, "-W", "ignore", "-m", "hub.contract", *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
    )
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(steps) > 40, done.stderr
    return [step for step in steps if not step["ok"]]


@pytest.mark.slow
def test_the_client_of_this_environment_is_content() -> None:
    """People, repos, commits, tags, pull requests, downloads and the command line, in plain LFS."""
    assert run(sys.executable) == []


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--xet"]], ids=["LFS", "xet"])
def test_the_newest_client_is_content_too(options: list[str]) -> None:
    """The same steps with the newest huggingface_hub that is supported."""
    assert run(str(make_python()), *options) == []


@pytest.mark.slow
def test_xet_is_what_clients_take_it_for() -> None:
    """The same steps where weights go through hf_xet."""
    assert run(sys.executable, "--xet") == []
