"""What a bake costs before it is started: memory, disk, arithmetic and time, and what would halve it.

The body is streamed: one decoder layer and every sample's hidden state are in memory, never the whole model; hidden
states too large for that go to a file (bundler/quantize). Samples are counted as full; shorter ones cost less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from bundler.checkpoint import Tensor
from bundler.figures import short_bytes
from bundler.findings import Finding, error, warning
from bundler.gemma4 import kv_geometry, layer_of
from bundler.layout import Layout
from bundler.machine import Machine
from bundler.recipe import Calibration, Recipe
from bundler.source import Source

_START_S = 10.0
_WEIGHT_S = 3e-9
_BF16_FACTOR = {True: 2.0, False: 1 / 4.5}
_GPU_SHARE = {"exact": 0.31, "fast": 0.45}
_ROOM_SHARE = 4

BASES = (
    ("10 s until the libraries are loaded and compiled", "measured with the tiny checkpoints"),
    ("observing and packing: 3 ns of one core for each weight", "the limit that the packer's benchmark holds it to"),
    (
        'bf16 products run at twice the float32 rate with AMX or AVX512-BF16, else at 1/4.5 of it; compute = "fast" '
        "takes the faster of the two",
        "measured at 31B widths: 2.4 to 2.7 with AVX512-BF16, 1/4.5 with AVX2",
    ),
    (
        'a GPU reaches 45 % of its dense bf16 figure, 31 % with compute = "exact"',
        "measured, 31B layers on one H200: 256 x 2048 tokens in 76 s, and in 105 s",
    ),
    (
        "hidden states and per-layer inputs of more than a quarter of the free memory go to a file",
        "quantize/memory.py",
    ),
)
"""What times and sizes rest on beside this machine's own measured rates, and where that is from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """The work of one bake, on any machine."""

    compute: str
    """The recipe's: exact or fast."""
    tokens: int
    """Through each decoder layer, at most."""
    flops: int
    packed_parameters: int
    activation_bytes: Mapping[str, int]
    """What grows with the number of samples, by what it is; in memory, or in a file where that is too small."""
    working_bytes: int
    """Memory of one layer at work."""
    libraries_bytes: int
    source_bytes: int
    """Files of body and drafter."""
    missing_bytes: int
    """Of those, what is still to be downloaded."""
    output_bytes: int
    hashed_bytes: int
    """Read to be hashed: the sources once, the output three times (journal, manifest, verification)."""

    def peak_bytes(self, room_bytes: int) -> int:
        """Memory in all, where any activations of at most `room_bytes` are held in memory."""
        held = sum(nbytes for nbytes in self.activation_bytes.values() if nbytes <= room_bytes)
        return self.libraries_bytes + self.working_bytes + held

    def spilled_bytes(self, room_bytes: int) -> int:
        """What goes to a file beside the bundle then."""
        return sum(nbytes for nbytes in self.activation_bytes.values() if nbytes > room_bytes)


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
    spilled_bytes: int
    seconds: float


def make_workload(
    recipe: Recipe,
    body: Source,
    layout: Layout,
    *,
    float32: bool,
    source_bytes: int,
    missing_bytes: int,
    output_bytes: int,
) -> Workload:
    """The work of baking a body as the recipe says, its layers computing in float32 or else in bf16."""
    from bundler.quantize import working_bytes
    from bundler.quantize.memory import LIBRARIES_BYTES

    text, calibration, heldout = body.config["text_config"], recipe.calibration, recipe.fidelity
    tokens = calibration.num_samples * calibration.max_seq_length
    compared = 2 * heldout.num_samples * heldout.max_seq_length
    per_layer = text.get("hidden_size_per_layer_input") or 0
    activations = {
        "hidden states": 2 * tokens * text["hidden_size"],
        "per-layer inputs": 2 * tokens * text["num_hidden_layers"] * per_layer,
    }
    attention = _attention_flops(text, calibration.num_samples, calibration.max_seq_length)
    return Workload(
        compute=recipe.quantization.compute,
        tokens=tokens,
        flops=2 * _linear_parameters(layout) * (tokens + compared) + attention,
        packed_parameters=layout.quantized_parameters,
        activation_bytes={what: nbytes for what, nbytes in activations.items() if nbytes},
        working_bytes=working_bytes(recipe, body, _units(layout), float32=float32),
        libraries_bytes=LIBRARIES_BYTES,
        source_bytes=source_bytes,
        missing_bytes=missing_bytes,
        output_bytes=output_bytes,
        hashed_bytes=source_bytes + 3 * output_bytes,
    )


def room_bytes(machine: Machine) -> int:
    """The most that one kind of activations takes of this machine's memory."""
    return machine.free_memory_bytes // _ROOM_SHARE


def in_float32(compute: str, machine: Machine) -> bool:
    """Whether layers compute in float32 on this machine's CPU: fast mode, where bf16 is the slower one."""
    return compute == "fast" and not machine.bf16_units


def make_estimates(workload: Workload, machine: Machine) -> tuple[Estimate, ...]:
    """How long the bake takes on the CPU and on each GPU whose speed is known."""
    beside = workload.hashed_bytes / machine.hash_rate + workload.packed_parameters * _WEIGHT_S / machine.cores
    beside += _START_S
    factor = 1.0 if in_float32(workload.compute, machine) else _BF16_FACTOR[machine.bf16_units]
    rate = machine.matmul_rate * factor
    work = f"{workload.flops:.1e} operations for {workload.tokens:,} tokens".replace("e+", "e")
    measured = f"{machine.matmul_rate / 1e9:,.0f} GFLOP/s measured in float32"
    if factor != 1:
        measured = f"{rate / 1e9:,.0f} GFLOP/s in bf16 ({factor:.2g} x the {measured})"
    hashed = f"{short_bytes(workload.hashed_bytes)} hashed at {machine.hash_rate / 1e9:.1f} GB/s"
    estimates = [
        Estimate(
            device=f"CPU, {machine.cores} cores",
            seconds=workload.flops / rate + beside,
            basis=f"{work} at {measured}; {hashed}",
        )
    ]
    share = _GPU_SHARE[workload.compute]
    for gpu in machine.gpus:
        if gpu.tflops:
            rate = gpu.tflops * 1e12 * share
            basis = f"{work} at {rate / 1e12:,.0f} TFLOP/s, {share:.0%} of {gpu.tflops}; {hashed}"
            estimates.append(Estimate(device=gpu.name, seconds=workload.flops / rate + beside, basis=basis))
    return tuple(estimates)


def halve(recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """The changes that halve the calibration, as `--set` takes them."""
    calibration: Calibration = recipe.calibration
    for key in ("num_samples", "max_seq_length"):
        if value := getattr(calibration, key) // 2:
            smaller = dataclasses.replace(calibration, **{key: value})
            yield f"calibration.{key}={value}", dataclasses.replace(recipe, calibration=smaller)


def check_machine(workload: Workload, machine: Machine, *, refuse: bool) -> list[Finding]:
    """Whether memory and disk of this machine suffice; what does not is an error where the bake is about to start."""
    say = error if refuse else warning
    findings = []
    room, where = room_bytes(machine), "this machine"
    peak, spilled = workload.peak_bytes(room), workload.spilled_bytes(room)
    smaller = "lower calibration.num_samples or calibration.max_seq_length, or bake on another machine"
    source = "llm-compressor #1119, #1369"
    if peak > machine.memory_bytes:
        message = f"the bake needs up to {_gb(peak)} of memory, there are {_gb(machine.memory_bytes)}"
        findings.append(say("memory-short", where, message, smaller, source))
    elif peak > machine.free_memory_bytes:
        message = f"the bake needs up to {_gb(peak)} of memory, {_gb(machine.free_memory_bytes)} are free now"
        findings.append(warning("memory-tight", where, message, "close what else is running", source))
    if spilled:
        message = f"up to {_gb(spilled)} of activations are more than {_gb(room)}, a quarter of the free memory"
        hint = f"they go to a file beside the bundle, which is slower; {smaller}"
        findings.append(warning("calibration-large", "calibration.num_samples", message, hint, source))
    return findings + _check_disk(workload.missing_bytes, workload.output_bytes + spilled, machine, say)


def _check_disk(
    missing_bytes: int, written_bytes: int, machine: Machine, say: Callable[..., Finding]
) -> list[Finding]:
    needs: dict[str, int] = {}
    for place, nbytes in ((machine.cache, missing_bytes), (machine.output, written_bytes)):
        needs[place.device] = needs.get(place.device, 0) + nbytes
    findings = []
    for place in {place.device: place for place in (machine.cache, machine.output)}.values():
        if needs[place.device] > place.free_bytes:
            message = f"{_gb(needs[place.device])} are to be written to the disk of {place.path}, "
            message += f"{_gb(place.free_bytes)} are free"
            hint = "make room, or move it: HF_HOME for the sources, --out for the bundle"
            findings.append(say("disk-short", "this machine", message, hint))
    return findings


def _gb(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.1f} GB"


def _units(layout: Layout) -> Mapping[str, Mapping[str, Tensor]]:
    units: dict[str, dict[str, Tensor]] = {}
    for shard in layout.shards:
        for name, tensor in shard.tensors.items():
            if (layer := layer_of(name)) is not None:
                units.setdefault(f"layer {layer}", {})[name] = tensor
    return units


def _linear_parameters(layout: Layout) -> int:
    """Weights of the layers' Linears; every expert counts, for every expert sees every token."""
    kept = [shape.numel for name, shape in layout.kept.items() if layer_of(name) is not None and len(shape.dims) == 2]
    return layout.quantized_parameters + sum(kept)


def _attention_flops(text: Mapping[str, Any], samples: int, length: int) -> int:
    """Scores and values over the whole square, what a mask hides included."""
    heads = int(text["num_attention_heads"])
    widths = [heads * kv_geometry(text, layer_type)[1] for layer_type in text["layer_types"]]
    return 4 * samples * length**2 * sum(widths)
