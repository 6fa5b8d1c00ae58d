"""What many tests stand on: tiny checkpoints of every kind, one real bundle, and no way out but loopback."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

pytest_plugins = ["hub.fixture"]

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True, scope="session")
def _only_loopback() -> Iterator[None]:
    """Every connection that leaves this machine is an error of the test."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise AssertionError(f"a test wants to connect to {address[0]}")
        connect(self, address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", guarded)
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Kind → a folder with `body` and `drafter`, made once per session."""
    from make_tiny import write_pair

    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            write_pair(kind, made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished bundle, built once per session from recipes/tiny-31b.toml; look, do not touch."""
    from bundler import recipe
    from bundler.build import build

    built = build(recipe.load(ROOT / "recipes" / "tiny-31b.toml"), tmp_path_factory.mktemp("dist"))
    assert built is not None
    return built.folder


@pytest.fixture
def bundle_copy(bundle: Path, tmp_path: Path) -> Path:
    """A copy of that bundle that a test may break."""
    return Path(shutil.copytree(bundle, tmp_path / bundle.name))
