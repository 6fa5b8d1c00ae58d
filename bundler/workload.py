"""What a bake costs before it is started: memory, disk, arithmetic and time, and what would halve it.

The body is streamed: one decoder layer and every sample's way through it are in memory, never the whole model
(bundler/quantize). Samples are counted as full; shorter ones cost less.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bundler.checkpoint import Shape
from bundler.findings import Finding, error, warning
from bundler.gemma4 import kv_geometry, layer_of
from bundler.layout import QUANTIZED_PARTS, Layout
from bundler.machine import Machine
from bundler.recipe import Calibration

_LIBRARIES_BYTES = 1_000_000_000
_PACKING_S = 1e-9
_BF16_FACTOR = {True: 2.0, False: 1 / 4.5}
_GPU_SHARE = 0.31

BASES = (
    ("torch, transformers and llm-compressor themselves: 1 GB", "measured with the tiny checkpoints"),
    ("packing: 1 ns of one core per weight", "measured, 5376 x 5376 on AVX2"),
    (
        "bf16 products run at twice the float32 rate with AMX or AVX512-BF16, else at 1/4.5 of it",
        "measured at 31B widths: 2.4 to 2.7 with AVX512-BF16, 1/4.5 with AVX2",
    ),
    (
        "a GPU reaches 31 % of its dense bf16 figure",
        "measured, 31B layers on one H200: 256 x 2048 tokens in 105 s",
    ),
)
"""What times and sizes rest on beside this machine's own measured rates, and where that is from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The work of one bake, on any machine."""

    tokens: int
    """Through each decoder layer, at most."""
    flops: int
    packed_parameters: int
    memory_bytes: Mapping[str, int]
    """Peak memory by what it is for, at most."""
    source_bytes: int
    """Files of body and drafter."""
    missing_bytes: int
    """Of those, what is still to be downloaded."""
    output_bytes: int
    hashed_bytes: int
    """Read to be hashed: the sources once, the output three times (journal, manifest, verification)."""

    @property
    def peak_bytes(self) -> int:
        """Memory in all."""
        return sum(self.memory_bytes.values())

    @property
    def activation_bytes(self) -> int:
        """What grows with the number of samples."""
        return sum(nbytes for what, nbytes in self.memory_bytes.items() if what in _PER_SAMPLE)


_PER_SAMPLE = ("hidden states", "attention masks", "rotary positions", "per-layer inputs")


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """How long a bake takes somewhere, and why."""

    device: str
    seconds: float
    basis: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Relief:
    """A change to the recipe that makes the bake smaller."""

    change: str
    """As `--set` takes it."""
    peak_bytes: int
    seconds: float


def make_workload(
    layout: Layout,
    source_shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
    calibration: Calibration,
    *,
    source_bytes: int,
    missing_bytes: int,
    output_bytes: int,
) -> Workload:
    """The work of baking a body with this calibration."""
    text = config["text_config"]
    samples, length = calibration.num_samples, calibration.max_seq_length
    tokens = samples * length
    per_layer = text.get("hidden_size_per_layer_input") or 0
    types = set(text["layer_types"])
    rotary = sum(2 * kv_geometry(text, layer_type)[1] for layer_type in types)
    layers = _layer_bytes(source_shapes)
    largest = max(layers, key=lambda index: layers[index])
    return Workload(
        tokens=tokens,
        flops=_linear_flops(layout, tokens) + _attention_flops(text, samples, length),
        packed_parameters=layout.quantized_parameters,
        memory_bytes={
            "hidden states": 2 * (samples + 1) * length * text["hidden_size"],
            "attention masks": 2 * samples * len(types) * length**2,
            "rotary positions": 2 * tokens * rotary,
            "per-layer inputs": 2 * tokens * text["num_hidden_layers"] * per_layer,
            "one layer": layers[largest] + _packed_bytes(layout, largest),
            "attention scores": 8 * text["num_attention_heads"] * length**2,
            "libraries": _LIBRARIES_BYTES,
        },
        source_bytes=source_bytes,
        missing_bytes=missing_bytes,
        output_bytes=output_bytes,
        hashed_bytes=source_bytes + 3 * output_bytes,
    )


def make_estimates(workload: Workload, machine: Machine) -> tuple[Estimate, ...]:
    """How long the bake takes on the CPU and on each GPU whose speed is known."""
    hashing = workload.hashed_bytes / machine.hash_rate
    packing = workload.packed_parameters * _PACKING_S / machine.cores
    factor = _BF16_FACTOR[machine.bf16_units]
    rate = machine.matmul_rate * factor
    work = f"{workload.flops:.1e} operations for {workload.tokens:,} tokens"
    measured = (
        f"{rate / 1e9:,.0f} GFLOP/s in bf16 ({factor:.2g} x the {machine.matmul_rate / 1e9:,.0f} measured in float32)"
    )
    hashed = f"{workload.hashed_bytes / 1e9:,.0f} GB hashed at {machine.hash_rate / 1e9:.1f} GB/s"
    estimates = [
        Estimate(
            device=f"CPU, {machine.cores} cores",
            seconds=workload.flops / rate + packing + hashing,
            basis=f"{work} at {measured}; {hashed}",
        )
    ]
    for gpu in machine.gpus:
        if gpu.tflops:
            rate = gpu.tflops * 1e12 * _GPU_SHARE
            basis = f"{work} at {rate / 1e12:,.0f} TFLOP/s, {_GPU_SHARE:.0%} of {gpu.tflops}; {hashed}"
            estimates.append(Estimate(device=gpu.name, seconds=workload.flops / rate + packing + hashing, basis=basis))
    return tuple(estimates)


def halve(calibration: Calibration) -> Iterable[tuple[str, Calibration]]:
    """The changes that halve the calibration, as `--set` takes them."""
    for key in ("num_samples", "max_seq_length"):
        value = getattr(calibration, key) // 2
        if value:
            yield f"calibration.{key}={value}", dataclasses.replace(calibration, **{key: value})


def check_machine(workload: Workload, machine: Machine, *, refuse: bool) -> list[Finding]:
    """Whether memory and disk of this machine suffice; what does not is an error where the bake is about to start."""
    say = error if refuse else warning
    findings = []
    peak, where = workload.peak_bytes, "this machine"
    smaller = "lower calibration.num_samples or calibration.max_seq_length, or bake on another machine"
    source = "llm-compressor #1119, #1369"
    if peak > machine.memory_bytes:
        message = f"the bake needs up to {_gb(peak)} of memory, there are {_gb(machine.memory_bytes)}"
        findings.append(say("memory-short", where, message, smaller, source))
    elif peak > machine.free_memory_bytes:
        message = f"the bake needs up to {_gb(peak)} of memory, {_gb(machine.free_memory_bytes)} are free now"
        findings.append(warning("memory-tight", where, message, "close what else is running", source))
    elif workload.activation_bytes > machine.memory_bytes / 4:
        message = (
            f"activations of the samples take up to {_gb(workload.activation_bytes)}, more than a quarter of "
            f"{_gb(machine.memory_bytes)}"
        )
        findings.append(warning("calibration-large", "calibration.num_samples", message, smaller, source))
    needs: dict[str, int] = {}
    for place, nbytes in ((machine.cache, workload.missing_bytes), (machine.output, workload.output_bytes)):
        if nbytes:
            needs[place.device] = needs.get(place.device, 0) + nbytes
    for place in {place.device: place for place in (machine.cache, machine.output)}.values():
        if (need := needs.get(place.device, 0)) > place.free_bytes:
            message = f"{_gb(need)} are to be written to the disk of {place.path}, {_gb(place.free_bytes)} are free"
            hint = "make room, or move it: HF_HOME for the sources, --out for the bundle"
            findings.append(say("disk-short", where, message, hint))
    return findings


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB"


def _layer_bytes(shapes: Mapping[str, Shape]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for name, shape in shapes.items():
        if (layer := layer_of(name)) is not None:
            sizes[layer] = sizes.get(layer, 0) + shape.nbytes
    return sizes


def _packed_bytes(layout: Layout, layer: int) -> int:
    sizes = [
        tensor.shape.nbytes
        for shard in layout.shards
        for name, tensor in shard.tensors.items()
        if layer_of(name) == layer and name.rpartition(".")[2] in QUANTIZED_PARTS
    ]
    return sum(sizes)


def _linear_flops(layout: Layout, tokens: int) -> int:
    """Every expert sees every token, as llm-compressor calibrates them; vectors cost nothing to speak of."""
    kept = sum(
        shape.numel
        for name, shape in layout.kept.items()
        if layer_of(name) is not None and len(shape.dims) == 2 and not re.search(r"router\.", name)
    )
    return 2 * (layout.quantized_parameters + kept) * tokens


def _attention_flops(text: Mapping[str, Any], samples: int, length: int) -> int:
    """Scores and values over the whole square: eager attention computes what its mask then hides."""
    heads = int(text["num_attention_heads"])
    widths = [heads * kv_geometry(text, layer_type)[1] for layer_type in text["layer_types"]]
    return 4 * samples * length**2 * sum(widths)
