"""A second environment with another huggingface_hub, made with uv once and kept in pytest's cache."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
OTHER = "2.4.0"
"""The newest client that is supported; the environment of the tests has the one that llm-compressor takes."""


def make_python(version: str = OTHER) -> Path:
    """The interpreter of an environment with the base dependencies and this client; skips where none can be made."""
    folder = ROOT / ".pytest_cache" / f"huggingface_hub-{version}"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        uv = shutil.which("uv")
        if uv is None:
            pytest.skip("uv is not installed")
        for command in (["venv", "--clear", folder], ["pip", "install", "--python", python, *_requirements(version)]):
            done = subprocess.run([uv, *map(str, command)], capture_output=True, text=True, cwd="/")
            if done.returncode:
                pytest.skip(f"no environment with huggingface_hub {version}: {done.stderr[-500:]}")
        (folder / "complete").touch()
    return python


def _requirements(version: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    wanted = [line for line in listed if not re.match(r"huggingface_hub|bundler|mypy|ruff|types-", line)]
    return [*wanted, f"huggingface_hub=={version}"]
