"""What many tests stand on: tiny checkpoints of every kind, and one real bundle that was built from the real recipe."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_XET", "1")

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))


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

    return build(recipe.load(ROOT / "recipes" / "tiny-31b.toml"), tmp_path_factory.mktemp("dist")).folder


@pytest.fixture
def bundle_copy(bundle: Path, tmp_path: Path) -> Path:
    """A copy of that bundle that a test may break."""
    return Path(shutil.copytree(bundle, tmp_path / bundle.name))
