"""This machine: cores, memory, disk, GPUs, and how fast it multiplies and hashes. Without torch, in half a second."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bundler.engines import load_cards

_SIZE = 1024
_HASHED_BYTES = 1 << 24
_MEASURE_S = 0.15


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A folder that is to be written to, there yet or not."""

    path: Path
    free_bytes: int
    device: str
    """Equal for places on one disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU that nvidia-smi shows."""

    name: str
    memory_bytes: int
    tflops: int | None
    """Dense bf16 by the vendor's sheet; None where the card is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What a bake may count on."""

    cores: int
    memory_bytes: int
    free_memory_bytes: int
    matmul_rate: float
    """Float32 operations a second, measured with numpy on all cores."""
    bf16_units: bool
    """Whether the processor multiplies bf16 in hardware (AMX or AVX512-BF16)."""
    hash_rate: float
    """Bytes of SHA-256 a second, measured."""
    gpus: tuple[Gpu, ...]
    cache: Place
    """Where downloads go."""
    output: Place
    """Where stage and bundle are."""


def look(cache: Path, output: Path) -> Machine:
    """Measure this machine; rates are what it reaches now, beside whatever else is running."""
    total, free = _memory()
    return Machine(
        cores=_cores(),
        memory_bytes=total,
        free_memory_bytes=free,
        matmul_rate=_matmul_rate(),
        bf16_units=bool(re.search(r"\b(amx_bf16|avx512_bf16)\b", _read("/proc/cpuinfo"))),
        hash_rate=_hash_rate(),
        gpus=_gpus(),
        cache=_place(cache),
        output=_place(output),
    )


def _cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = re.fullmatch(r"(\d+) (\d+)", _read("/sys/fs/cgroup/cpu.max").strip())
    return max(1, min(cores, int(quota[1]) // int(quota[2]))) if quota else cores


def _memory() -> tuple[int, int]:
    """(all, free) bytes, within what a container is allowed."""
    known = {key: int(kb) * 1024 for key, kb in re.findall(r"^(\w+):\s+(\d+) kB", _read("/proc/meminfo"), re.M)}
    if "MemTotal" not in known:  # not Linux
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return total, total
    total, free = known["MemTotal"], known.get("MemAvailable", known["MemTotal"])
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and int(limit) < total:
        total, free = int(limit), min(free, max(0, int(limit) - int(used or 0)))
    return total, free


def _matmul_rate() -> float:
    import numpy as np

    a = np.ones((_SIZE, _SIZE), np.float32)
    return 2 * _SIZE**3 / _fastest(lambda: a @ a)


def _hash_rate() -> float:
    data = bytes(_HASHED_BYTES)
    return _HASHED_BYTES / _fastest(lambda: hashlib.sha256(data))


def _fastest(work: Callable[[], object]) -> float:
    """Seconds of the fastest run: the first one warms up, and others may have been disturbed."""
    work()
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() - start < _MEASURE_S:
        before = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - before)
    return best


def _gpus() -> tuple[Gpu, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return parse_gpus(output)


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Lines of `name, MiB`, as nvidia-smi prints them, → GPUs; what is not known of a card stays unknown."""
    gpus = []
    for line in text.splitlines():
        name, _, memory = line.rpartition(",")
        mib = re.search(r"\d+", memory)
        words = set(re.split(r"[\s-]+", name.casefold()))
        known = [card for card in load_cards() if card.sm and set(card.name.casefold().split()) <= words]
        tflops = known[-1].tflops if known else None
        gpus.append(Gpu(name=name.strip(), memory_bytes=int(mib[0]) << 20 if mib else 0, tflops=tflops))
    return tuple(gpus)


def _place(path: Path) -> Place:
    there = path.expanduser().resolve()
    while not there.exists():
        there = there.parent
    return Place(path=path, free_bytes=shutil.disk_usage(there).free, device=str(there.stat().st_dev))


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
