"""What a bake costs: activations as the real stream holds them, arithmetic, time and its basis, and this machine."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published import QAT, config_of, tensors_of

from bundler.checkpoint import load_json, load_tensors
from bundler.findings import Severity
from bundler.gemma4 import find_kind, make_ignore
from bundler.layout import make_layout
from bundler.machine import Gpu, Machine, Place
from bundler.recipe import Recipe, parse
from bundler.source import Source
from bundler.workload import Workload, check_machine, halve, make_estimates, make_workload, room_bytes

GB = 10**9
MACHINE = Machine(
    cores=2,
    memory_bytes=32 * GB,
    free_memory_bytes=30 * GB,
    matmul_rate=100e9,
    bf16_units=False,
    hash_rate=1e9,
    gpus=(),
    cache=Place(path=Path("cache"), free_bytes=10**12, device="1"),
    output=Place(path=Path("dist"), free_bytes=10**12, device="1"),
)


def recipe_for(samples: int = 256, length: int = 2048, compute: str = "fast") -> Recipe:
    text = f"""
    edition = 1
    name = "gemma"
    quantization.compute = "{compute}"
    calibration = {{ dataset = "some/thing", num_samples = {samples}, max_seq_length = {length} }}
    body.model = "some/body"
    drafter.model = "some/drafter"
    """
    return parse(text, Path())


def source_of(config: dict[str, Any], tensors: Any, folder: Path = Path()) -> Source:
    return Source(
        model="x", revision=None, commit=None, folder=folder, files=(), config=config, card={}, tensors=tensors
    )


def workload_of(body: Source, recipe: Recipe, missing_bytes: int = 0) -> Workload:
    shapes = {name: tensor.shape for name, tensor in body.tensors.items()}
    layout = make_layout(shapes, body.config, make_ignore(find_kind(body.config)))
    return make_workload(
        recipe, body, layout, float32=False, source_bytes=GB, missing_bytes=missing_bytes, output_bytes=layout.nbytes
    )


def published(size: str, samples: int = 256, length: int = 2048, compute: str = "fast") -> Workload:
    repo = f"google/gemma-4-{size}-it{QAT}"
    return workload_of(source_of(config_of(repo), tensors_of(repo)), recipe_for(samples, length, compute))


@pytest.mark.parametrize("kind", ["dense", "per-layer", "moe", "unified"])
def test_activations_are_what_the_stream_holds(kind: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Hidden states and per-layer inputs take what the stream makes room for, byte for byte."""
    import torch

    from bundler.quantize import stream
    from bundler.quantize.memory import Room

    folder, length = tiny(kind) / "body", 48
    body = source_of(load_json(folder / "config.json"), load_tensors(folder), folder)
    sample = {
        "input_ids": torch.randint(5, 200, (1, length)),
        "attention_mask": torch.ones(1, length, dtype=torch.long),
        "mm_token_type_ids": torch.zeros(1, length, dtype=torch.long),
    }
    model = stream.load_model(folder, "sdpa")
    count = len(stream.take_layers(model))
    room = Room(device=torch.device("cpu"), limit_bytes=GB, folder=tmp_path)
    with torch.no_grad():
        made = stream.start(model, count, [sample, sample], room, "calibration")
    held = [tensor.nbytes for tensor in (made.hidden, made.per_layer) if tensor is not None]
    assert held == list(workload_of(body, recipe_for(2, length)).activation_bytes.values())


def test_the_31b_at_its_usual_calibration() -> None:
    """256 x 2048 tokens: 524,288 tokens, 3.07e16 operations in Linears and 10 % more beside them.

    Beside the activations it takes what was measured, 2.5 GB (tests/benchmarks/README.md), and not more than 3 GB.
    """
    work = published("31B")
    assert work.tokens == 524_288
    linear = 2 * 29_286_727_680 * 524_288
    assert 1.05 * linear < work.flops < 1.15 * linear
    assert work.activation_bytes == {"hidden states": 2 * 524_288 * 5376}
    assert 2.5 * GB < work.peak_bytes(8 * GB) - 2 * 524_288 * 5376 < 3 * GB


def test_what_is_too_large_goes_to_a_file() -> None:
    """Activations above a quarter of the free memory are counted on disk, not in memory."""
    work = published("31B")
    assert work.peak_bytes(8 * GB) - work.peak_bytes(5 * GB) == work.activation_bytes["hidden states"]
    assert (work.spilled_bytes(8 * GB), work.spilled_bytes(5 * GB)) == (0, work.activation_bytes["hidden states"])
    assert room_bytes(MACHINE) == 7.5 * GB


def test_what_is_spilled_has_its_room_on_the_disk_before_it_is_used(tmp_path: Path) -> None:
    """Memory mapped from a sparse file would end the process where the disk is full; what a shard holds stays."""
    import torch

    from bundler.quantize.memory import Room
    from bundler.quantize.writer import reserve

    made = Room(device=torch.device("cpu"), limit_bytes=0, folder=tmp_path).make("hidden", 1000, 64, torch.bfloat16)
    assert made.shape == (1000, 64)
    assert (tmp_path / "hidden.bin").stat().st_blocks * 512 >= made.nbytes
    (tmp_path / "shard").write_bytes(b"kept")
    reserve(tmp_path / "shard", 1 << 20)
    assert (tmp_path / "shard").stat().st_size == 1 << 20
    assert (tmp_path / "shard").read_bytes()[:5] == b"kept\0"
    with pytest.raises(OSError, match=r"too large|space"):
        reserve(tmp_path / "shard", 1 << 50)


def test_every_expert_is_calibrated() -> None:
    """In the 26B-A4B every token passes all 128 experts, so all weights count, not the active ones."""
    assert published("26B-A4B").flops > 2 * 24_483_430_400 * 524_288


def test_per_layer_inputs_are_held() -> None:
    """E4B's per-layer embeddings of every sample are more than its hidden states; the 31B has none."""
    assert published("E4B").activation_bytes["per-layer inputs"] == 2 * 524_288 * 42 * 256
    assert "per-layer inputs" not in published("31B").activation_bytes


def test_exact_mode_needs_more() -> None:
    """Eager attention holds whole score matrices, and on a CPU without bf16 units it takes the slow bf16."""
    fast, exact = published("31B"), published("31B", compute="exact")
    assert exact.working_bytes > fast.working_bytes
    assert make_estimates(exact, MACHINE)[0].seconds > 4 * make_estimates(fast, MACHINE)[0].seconds


def test_time_has_a_basis() -> None:
    """Time is operations over the measured rate, bytes over the hash rate, and says so; twice the rate, half of it."""
    work = published("31B")
    (cpu,) = make_estimates(work, MACHINE)
    assert cpu.device == "CPU, 2 cores"
    weights = 29_286_727_680 * 3e-9 / 2
    assert cpu.seconds == pytest.approx(work.flops / 100e9 + work.hashed_bytes / 1e9 + weights + 10)
    assert "524,288 tokens" in cpu.basis
    assert "100 GFLOP/s measured in float32" in cpu.basis
    (fast,) = make_estimates(work, dataclasses.replace(MACHINE, bf16_units=True))
    assert fast.seconds < 0.6 * cpu.seconds


def test_a_gpu_is_estimated_when_it_is_known() -> None:
    """A known GPU gets an estimate, an H200 minutes for the 31B; one that nobody knows gets none."""
    h200 = Gpu(name="NVIDIA H200", memory_bytes=10**11, tflops=989)
    _, gpu = make_estimates(published("31B"), dataclasses.replace(MACHINE, gpus=(h200,)))
    assert gpu.device == "NVIDIA H200"
    assert 78 < gpu.seconds - published("31B").hashed_bytes / 1e9 < 160
    unknown = Gpu(name="Something", memory_bytes=10**10, tflops=None)
    assert len(make_estimates(published("31B"), dataclasses.replace(MACHINE, gpus=(unknown,)))) == 1


def test_what_halves_it() -> None:
    """Half the samples and half the length, as --set takes them; nothing below one."""
    assert [change for change, _ in halve(recipe_for())] == [
        "calibration.num_samples=128",
        "calibration.max_seq_length=1024",
    ]
    assert [change for change, _ in halve(recipe_for(samples=1))] == ["calibration.max_seq_length=1024"]


@pytest.mark.parametrize(
    ("machine", "codes"),
    [
        ({"memory_bytes": 2 * GB, "free_memory_bytes": 2 * GB}, ["memory-short", "calibration-large"]),
        ({"free_memory_bytes": 1 * GB}, ["memory-tight", "calibration-large"]),
        ({"free_memory_bytes": 20 * GB}, ["calibration-large"]),
        ({}, []),
    ],
)
def test_memory_of_this_machine(machine: dict[str, Any], codes: list[str]) -> None:
    """Too little memory, too little that is free, activations above a quarter of it: a finding and advice each."""
    findings = check_machine(published("31B"), dataclasses.replace(MACHINE, **machine), refuse=False)
    assert [finding.code for finding in findings] == codes
    assert all(finding.severity is Severity.WARNING and finding.hint for finding in findings)


def test_what_a_machine_lacks_is_an_error_only_where_the_bake_is_to_start() -> None:
    """A plan warns, for it may be made on another machine than the bake; a build refuses."""
    small = dataclasses.replace(MACHINE, memory_bytes=GB)
    assert [f.severity for f in check_machine(published("31B"), small, refuse=True)] == [Severity.ERROR]


@pytest.mark.parametrize(("device", "found"), [("1", ["disk-short"]), ("2", [])])
def test_disk_of_this_machine(device: str, found: list[str]) -> None:
    """What is downloaded and what is written share a disk, or they do not."""
    repo = f"google/gemma-4-E2B-it{QAT}"
    body = source_of(config_of(repo), tensors_of(repo))
    work = workload_of(body, recipe_for(8, 64), missing_bytes=10 * GB)
    cache = Place(path=Path("cache"), free_bytes=12 * GB, device="1")
    output = Place(path=Path("dist"), free_bytes=12 * GB, device=device)
    machine = dataclasses.replace(MACHINE, cache=cache, output=output)
    assert [finding.code for finding in check_machine(work, machine, refuse=True)] == found


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own allocator")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Blocks under 32 MB stay with the process when they are freed; a body of many layers would add them up."""
    import numpy as np

    from bundler.quantize.memory import anonymous_bytes, give_back

    np.ones(30 << 17)  # freeing a large block makes glibc take smaller ones from its heap from now on
    blocks = [np.ones(1 << 17) for _ in range(300)]
    kept = blocks[::50]
    del blocks
    held = anonymous_bytes()
    give_back()
    give_back()
    assert anonymous_bytes() < held - 150_000_000
    assert len(kept) == 6
