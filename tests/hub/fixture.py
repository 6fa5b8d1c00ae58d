"""The test Hub as pytest fixtures: one server a session, empty at the start of each test."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import HubServer

URL_TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"


@pytest.fixture(scope="session")
def _running_hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    from huggingface_hub.utils import close_session

    server = HubServer(tmp_path_factory.mktemp("hub"))
    server.start()
    yield server
    close_session()
    server.stop()


@pytest.fixture
def server(_running_hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """A Hub of this test's own, which huggingface_hub in this process and its children talks to as alice.

    The environment speaks to children; huggingface_hub read it at import, so here its constants are set as well.
    """
    from huggingface_hub import constants

    _running_hub.reset(tmp_path / "hub")
    home = tmp_path / "hf"
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", _running_hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_UPDATE_CHECK", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(constants, "ENDPOINT", _running_hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", _running_hub.endpoint + URL_TEMPLATE)
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_XET_CACHE", str(home / "xet"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return _running_hub


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Every pause that is taken between attempts, in seconds; none of them takes time."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    return pauses


def hf(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the unmodified `hf` command, as a user would, against the Hub of the `server` fixture."""
    command = [str(Path(sys.executable).with_name("hf")), *arguments]
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
