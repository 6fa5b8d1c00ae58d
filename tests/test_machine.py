"""This machine, looked at without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bundler.machine import look, parse_gpus

SMI = """NVIDIA H200, 143771
NVIDIA GeForce RTX 5060 Ti, 16311
NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887
NVIDIA A100-SXM4-80GB, 81920
Quadro P400, [N/A]
"""


def test_this_machine_is_seen(tmp_path: Path) -> None:
    """Cores, memory, disk and rates are real figures; a folder that is not there yet lies on its parent's disk."""
    machine = look(tmp_path / "cache" / "hub", tmp_path / "dist")
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert 0 < machine.free_memory_bytes <= machine.memory_bytes
    assert machine.matmul_rate > 1e8
    assert machine.hash_rate > 1e6
    assert machine.cache.device == machine.output.device
    assert machine.output.free_bytes > 0
    assert machine.output.path == tmp_path / "dist"


def test_gpus_are_read_and_known_ones_have_a_rate() -> None:
    """nvidia-smi's lines become GPUs; a card that no row knows, or whose memory is not told, is shown all the same."""
    gpus = parse_gpus(SMI)
    assert [gpu.tflops for gpu in gpus] == [989, 47, 252, 312, None]
    assert [gpu.memory_bytes >> 20 for gpu in gpus] == [143771, 16311, 97887, 81920, 0]
    assert parse_gpus("") == ()


def test_looking_needs_no_torch(tmp_path: Path) -> None:
    """A machine is looked at without importing torch."""
    code = (
        "import sys; from pathlib import Path; from bundler.machine import look; "
        f"look(Path({str(tmp_path)!r}), Path({str(tmp_path)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
