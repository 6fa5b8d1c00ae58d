"""Nothing is lost: builds that are killed, and builds that several processes share, end in the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from bundler import manifest
from bundler.verify import verify

ROOT = Path(__file__).resolve().parent.parent
RECIPE = ROOT / "recipes" / "tiny-31b.toml"
pytestmark = pytest.mark.slow


def environment() -> dict[str, str]:
    """This process's own, quiet and offline."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def same_files(ours: Path, theirs: Path, *, but: Iterable[str] = ()) -> None:
    """Two bundles hold the same files, byte for byte."""
    files = manifest.list_files(theirs)
    assert manifest.list_files(ours) == files
    for path in files:
        if path.as_posix() not in but:
            assert (ours / path).read_bytes() == (theirs / path).read_bytes(), path


def test_a_build_that_is_killed_again_and_again(bundle: Path, tmp_path: Path) -> None:
    """Kill -9 at any point: no dist/<name> appears, the next run carries on, the final bytes are the same."""
    generator = random.Random(7)
    command = [sys.executable, "-m", "bundler", "build", str(RECIPE), "--out", str(tmp_path)]
    for _ in range(6):
        process = subprocess.Popen(
            command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        journal = tmp_path / ".tiny-31b.stage" / "journal.jsonl"
        done = len(journal.read_text().splitlines()) if journal.exists() else 0
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if journal.exists() and len(journal.read_text().splitlines()) > done:
                time.sleep(generator.random() * 0.5)
                break
            time.sleep(0.05)
        finished = process.poll() is not None
        if not finished:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert (tmp_path / "tiny-31b").exists() == finished
        if finished:
            break
    else:
        subprocess.run(command, env=environment(), check=True, capture_output=True)
    same_files(tmp_path / "tiny-31b", bundle)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny-31b"]


def test_two_processes_make_the_same_bundle(bundle: Path, tmp_path: Path) -> None:
    """Under torchrun each rank takes its share of samples and packing, and the bytes are those of one process."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run = subprocess.run(
        [*launch, "-m", "bundler", "build", str(RECIPE), "--out", str(tmp_path)],
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    same_files(tmp_path / "tiny-31b", bundle, but=["README.md"])  # it says how many processes there were
    assert verify(tmp_path / "tiny-31b") == []


def child_of_rank(parent: int, rank: int) -> int:
    """The process id of a rank that a launcher started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            wanted = f"RANK={rank}".encode() in (folder / "environ").read_bytes().split(b"\0")
            if wanted and (folder / "stat").read_text().rsplit(")", 1)[1].split()[1] == str(parent):
                return int(folder.name)
        except OSError:
            continue
    raise LookupError(f"no rank {rank} under {parent}")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_that_dies_ends_the_run_and_the_next_carries_on(bundle: Path, tmp_path: Path) -> None:
    """The launcher says which rank it was; one process alone finishes what both began, in the same bytes."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = ["-m", "bundler", "build", str(RECIPE), "--out", str(tmp_path)]
    process = subprocess.Popen(
        [*launch, *command], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    journal = tmp_path / ".tiny-31b.stage" / "journal.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and '"layer 0"' in journal.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child_of_rank(process.pid, 1), signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "rank      : 1" in said
    assert not (tmp_path / "tiny-31b").exists()
    subprocess.run([sys.executable, *command], env=environment(), check=True, capture_output=True)
    same_files(tmp_path / "tiny-31b", bundle)


def test_a_full_disk_loses_nothing(bundle: Path, tmp_path: Path, tiny: Callable[[str], Path]) -> None:
    """A build that may write no more ends with an error; with room again it carries on and ends in the same bytes."""
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, 3_000_000));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"sys.argv = ['bundle', 'build', {str(RECIPE)!r}, '--out', {str(tmp_path)!r}];"
        "from bundler.cli import main; main()"
    )
    run = subprocess.run([sys.executable, "-c", limited], env=environment(), capture_output=True, text=True)
    assert run.returncode == 6, run.stderr[-3000:]
    assert "kept in" in run.stderr
    assert not (tmp_path / "tiny-31b").exists()
    command = [sys.executable, "-m", "bundler", "build", str(RECIPE), "--out", str(tmp_path)]
    subprocess.run(command, env=environment(), check=True, capture_output=True)
    same_files(tmp_path / "tiny-31b", bundle)
