"""The test Hub as pytest fixtures: one server a session, empty at the start of each test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import HubServer
from .xet import Xet


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """huggingface_hub 1.x hands files to httpx in a way that httpx does not like; that is between them."""
    noise = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
    for item in items:
        if not {"server", "arena"}.isdisjoint(getattr(item, "fixturenames", ())):
            item.add_marker(noise)


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", _running_hub.endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", _running_hub.endpoint + URL_TEMPLATE)
    monkeypatch.setattr(constants, "HF_HOME", str(home))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(constants, "HF_XET_CACHE", str(home / "xet"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    return _running_hub


@pytest.fixture
def xet_server(server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """The same Hub with xet storage, and a client that uses it."""
    from huggingface_hub import constants

    server.xet = Xet(tmp_path / "cas")
    monkeypatch.delenv("HF_HUB_DISABLE_XET")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    return server


@pytest.fixture(scope="session")
def ready(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished bundle with a card that names acme/tiny-31b; look, do not touch."""
    from bundler.card import write_bundle

    folder = Path(shutil.copytree(bundle, tmp_path_factory.mktemp("ready") / bundle.name))
    write_bundle(folder, repo_id="acme/tiny-31b")
    return folder


@pytest.fixture
def ready_copy(ready: Path, tmp_path: Path) -> Path:
    """A copy of that bundle that a test may break."""
    return Path(shutil.copytree(ready, tmp_path / ready.name))


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
