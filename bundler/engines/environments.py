"""An engine release in an environment of its own, made with uv and kept under the user's cache.

Nothing here touches the environment that bundler itself runs in. What a release needs is data: environments.toml.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet

from bundler.engines.facts import Facts
from bundler.errors import CompatibilityError, EngineError

DEVICES = ("cpu", "cuda")
_RECORD = "environment.json"
_TIMEOUT_S = 1800
_REPORTED = ("torch", "torchvision", "transformers", "compressed-tensors", "triton", "flashinfer-python")


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """One engine release, on one kind of device."""

    engine: str
    version: str
    device: str
    """`cpu` or `cuda`."""

    @property
    def name(self) -> str:
        """The folder's name, and the stem of an evidence file."""
        return f"{self.engine}-{self.version}-{self.device}"


def parse_release(text: str, device: str) -> Release:
    """`vllm==0.32.0` → a release; CompatibilityError for anything else."""
    match = re.fullmatch(r"([a-z][a-z-]*)==(\d+(\.\d+)+\S*)", text.strip())
    if match is None:
        raise CompatibilityError(f"{text!r} names no engine release", hint="write it as vllm==0.32.0")
    return Release(engine=match[1], version=match[2], device=device)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """A release that is installed and ready to start."""

    release: Release
    root: Path
    python: str
    """Its Python's version."""
    packages: Mapping[str, str]
    """What decides how it computes: package → version, the engine's own distribution first."""
    fixes: tuple[str, ...]
    env: Mapping[str, str]
    """What this release needs in its environment variables."""

    @property
    def bin(self) -> Path:
        """The folder of its commands."""
        return self.root / ("Scripts" if os.name == "nt" else "bin")


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """How releases of one version range are installed."""

    engine: str
    device: str
    versions: str
    requirement: str
    overrides: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    fixes: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fix:
    """One file that is put right after the install."""

    id: str
    why: str
    text: str
    write: str = ""
    prepend: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a kind of device needs beside the card's serve line."""

    id: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    unset: tuple[str, ...] = ()
    """Environment variables that do not work there."""


def find_device() -> str:
    """`cuda` where an NVIDIA driver answers, else `cpu`."""
    return "cuda" if shutil.which("nvidia-smi") and _quiet(["nvidia-smi", "-L"]) else "cpu"


def folder() -> Path:
    """Where engine environments are kept: BUNDLER_CACHE, else the user's cache folder."""
    if explicit := os.environ.get("BUNDLER_CACHE"):
        return Path(explicit) / "engines"
    base = os.environ.get("LOCALAPPDATA") if os.name == "nt" else os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bundler" / "engines"


def load_rows() -> tuple[tuple[Row, ...], Mapping[str, Fix]]:
    """environments.toml: the rows in order, and the fixes by id."""
    document = _document()
    rows = tuple(Row(**{key: _frozen(value) for key, value in raw.items()}) for raw in document["environment"])
    return rows, {raw["id"]: Fix(**raw) for raw in document["fix"]}


def load_device(name: str) -> Device:
    """What a kind of device needs: `cpu` or `cuda`."""
    raw = next(entry for entry in _document()["device"] if entry["id"] == name)
    threads = str(max(1, (os.cpu_count() or 2) // 2))
    env = {key: value.replace("{threads}", threads) for key, value in raw.get("env", {}).items()}
    return Device(**{**{key: _frozen(value) for key, value in raw.items()}, "env": env})


def tracking_args(release: Release, *, shared_kv: bool) -> tuple[str, ...]:
    """The arguments that turn the engine's own weight tracking on, where this release's is right about the body."""
    table = _document()["tracking"]
    versions = SpecifierSet(table["versions_with_shared_kv" if shared_kv else "versions"])
    return tuple(table["args"]) if versions.contains(release.version, prereleases=True) else ()


def _document() -> dict[str, Any]:
    return tomllib.loads((resources.files("bundler.engines") / "environments.toml").read_text(encoding="utf-8"))


def find_row(release: Release) -> Row:
    """The row of a release; EngineError where none speaks of it."""
    for row in load_rows()[0]:
        if (row.engine, row.device) == (release.engine, release.device) and SpecifierSet(row.versions).contains(
            release.version, prereleases=True
        ):
            return row
    raise EngineError(
        f"nothing is known about installing {release.engine} {release.version} for {release.device}",
        hint="bundler/engines/environments.toml holds one row per version range",
    )


def load_environment(release: Release) -> Environment | None:
    """A release that is installed whole, or None."""
    root = folder().absolute() / release.name
    try:
        record = json.loads((root / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Environment(
        release=release,
        root=root,
        python=record["python"],
        packages=record["packages"],
        fixes=tuple(record["fixes"]),
        env=record["env"],
    )


def install(release: Release, facts: Facts, step: Callable[[str], None] = lambda what: None) -> Environment:
    """Make the environment of a release, or take the one that is there.

    EngineError with the last lines of uv's output where it cannot be made; what is half made is made anew next time.
    """
    from filelock import FileLock

    folder().mkdir(parents=True, exist_ok=True)
    with FileLock(folder() / f"{release.name}.lock"):
        if (ready := load_environment(release)) is not None:
            _copy_plugin(_site_packages(ready.root))
            return ready
        row, root = find_row(release), folder().absolute() / release.name
        step(f"installing {release.engine} {release.version} for {release.device} into {root}")
        shutil.rmtree(root, ignore_errors=True)
        return _install(release, row, root, _transformers(facts, release))


def _install(release: Release, row: Row, root: Path, transformers: str | None) -> Environment:
    uv = _require_uv()
    interpreter = getattr(sys, "_base_executable", sys.executable)
    _run([uv, "venv", "--quiet", "--python", interpreter, str(root)], release)
    lines = [*row.overrides, *(f'{name}; sys_platform == "never"' for name in row.without)]
    if transformers:
        lines.append(f"transformers=={transformers}")
    overrides = root / "overrides.txt"
    overrides.write_text("\n".join(lines) + "\n", encoding="utf-8")
    requirement = row.requirement.format(version=release.version)
    python = str(root / ("Scripts/python.exe" if os.name == "nt" else "bin/python"))
    command = [uv, "pip", "install", "--quiet", "--python", python, "--override", str(overrides), requirement]
    _run(command, release)
    site, fixes = _site_packages(root), load_rows()[1]
    for name in row.fixes:
        apply_fix(fixes[name], site, release.version)
    _copy_plugin(site)
    packages = _packages(uv, python, requirement.partition("==")[0])
    record = {
        "release": asdict(release),
        "python": ".".join(map(str, sys.version_info[:3])),
        "packages": packages,
        "fixes": list(row.fixes),
        "env": dict(row.env or {}),
    }
    part = root / f"{_RECORD}.part"
    part.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    part.replace(root / _RECORD)  # written last: an environment without it is not whole
    environment = load_environment(release)
    assert environment is not None
    return environment


def apply_fix(fix: Fix, site: Path, version: str) -> None:
    """Put one file of an environment's site-packages right; doing it twice changes nothing more."""
    text = fix.text.lstrip("\n").replace("{version}", version) if fix.write else fix.text.lstrip("\n")
    path = site / (fix.write or fix.prepend).replace("{version}", version)
    if fix.write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return
    if path.is_file() and not (old := path.read_text(encoding="utf-8")).startswith(text):
        part = path.with_name(f"{path.name}.part")
        part.write_text(text + old, encoding="utf-8")
        part.replace(path)  # a new file: uv links what it installs to its cache, which must not change


def installed() -> Iterator[tuple[Environment, int, int]]:
    """Every environment that is whole, with its size in bytes and the bytes that removing it would free.

    uv links files from its own cache where it can, so several environments share most of theirs.
    """
    for record in sorted(folder().glob(f"*/{_RECORD}")):
        release = Release(**json.loads(record.read_text(encoding="utf-8"))["release"])
        environment = load_environment(release)
        if environment is not None:
            yield environment, *_size(environment.root)


def remove(release: Release) -> int:
    """Delete a release's environment; the bytes that this freed. EngineError if there is none."""
    root = folder() / release.name
    if not root.is_dir():
        raise EngineError(f"{release.name} is not installed", hint="bundle engines list shows what is")
    freed = _size(root)[1]
    shutil.rmtree(root)
    (folder() / f"{release.name}.lock").unlink(missing_ok=True)
    return freed


def _size(root: Path) -> tuple[int, int]:
    total = own = 0
    for directory, _, names in os.walk(root):
        for name in names:
            status = (Path(directory) / name).lstat()
            total += status.st_size
            own += status.st_size if status.st_nlink == 1 else 0
    return total, own


def _transformers(facts: Facts, release: Release) -> str | None:
    """The transformers that this release was measured beside; None leaves the choice to uv."""
    known = (row for row in facts.releases if (row.engine, row.version) == (release.engine, release.version))
    return next((row.transformers for row in known), None)


def _copy_plugin(site: Path) -> None:
    """Our plugin and its entry point, as two plain folders: nothing is built."""
    source = resources.files("bundler.engines") / "plugin" / "bundler_vllm"
    target = site / "bundler_vllm"
    target.mkdir(exist_ok=True)
    for file in source.iterdir():
        if file.name.endswith(".py"):
            (target / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    info = site / "bundler_vllm-1.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bundler-vllm\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nbundler = bundler_vllm:register\n", encoding="utf-8"
    )


def _site_packages(root: Path) -> Path:
    if os.name == "nt":
        return root / "Lib" / "site-packages"
    return next((root / "lib").glob("python3*/site-packages"))


def _packages(uv: str, python: str, distribution: str) -> dict[str, str]:
    listed = subprocess.run(
        [uv, "pip", "list", "--quiet", "--format", "json", "--python", python],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=folder(),
    )
    versions = {entry["name"]: entry["version"] for entry in json.loads(listed.stdout)}
    return {name: versions[name] for name in (distribution, *_REPORTED) if name in versions}


def _require_uv() -> str:
    if (uv := shutil.which("uv")) is None:
        raise EngineError("uv is not here", hint="install it: it makes the engines' environments")
    return uv


def _run(command: list[str], release: Release) -> None:
    try:  # in the cache folder, where no project's uv settings reach
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, cwd=folder())
    except subprocess.TimeoutExpired as exc:
        raise EngineError(f"installing {release.name} took more than {_TIMEOUT_S} s", hint="run it again") from exc
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-12:])
        raise EngineError(f"{release.engine} {release.version} cannot be installed for {release.device}:\n{tail}")


def _quiet(command: list[str]) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and bool(done.stdout.strip())


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
