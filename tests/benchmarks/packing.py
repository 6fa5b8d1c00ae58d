"""Observing and packing one weight: compressed-tensors beside the compiled loops, in CPU-ns a weight.

python tests/benchmarks/packing.py [SIZE]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
from test_pack import library, raw  # noqa: E402

from bundler.quantize.pack import pack  # noqa: E402


def cpu_ns(function: Callable[[], object], count: int) -> float:
    """CPU time of all threads for one call, in ns a weight."""
    began = time.process_time_ns()
    function()
    return (time.process_time_ns() - began) / count


def main() -> None:
    """Print both, and their ratio."""
    size = int(sys.argv[1]) if len(sys.argv) > 1 else 5376
    weights = {"w": (torch.randn(size, size) * 0.02).bfloat16()}
    assert raw(dict(pack(weights))) == raw(library(weights))  # also compiles
    ours = min(cpu_ns(lambda: dict(pack(weights)), size * size) for _ in range(3))
    theirs = cpu_ns(lambda: library(weights), size * size)
    print(
        f"{size} x {size}: compressed-tensors {theirs:.1f} ns, bundler {ours:.2f} ns, {theirs / ours:.0f} times less"
    )


if __name__ == "__main__":
    main()
