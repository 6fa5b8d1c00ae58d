"""The work itself: every decoder layer in turn is loaded, observed, packed, written and held against its source.

Reading the next layer and writing the last one go on beside the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bundler.checkpoint import Tensor as Address
from bundler.gemma4 import LAYERS, fused_groups, source_offset
from bundler.layout import Layout
from bundler.manifest import FidelityEntry
from bundler.quantize import exact, fast, fidelity, parallel, stream, writer
from bundler.quantize.grid import count_on_grid
from bundler.quantize.journal import Journal
from bundler.quantize.memory import Room, give_back
from bundler.quantize.nvfp4 import load_tensors
from bundler.quantize.pack import pack
from bundler.recipe import Quantization
from bundler.source import Source

if TYPE_CHECKING:
    from torch import Tensor

    from bundler.quantize.samples import Samples

MODES: Mapping[str, ModuleType] = {"exact": exact, "fast": fast}
OUTSIDE = "outside the layers"
Units = Mapping[str, Mapping[str, Address]]
"""What is written and journalled as one: each decoder layer, and all that lies outside them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a bake is."""

    layers: int
    """Decoder layers that are on disk."""
    num_layers: int
    tokens: int
    """Tokens that have passed a layer, over all layers, in this run and on this rank."""
    num_tokens: int
    flops: float
    """Operations of the quantized Linears for those tokens."""
    peak_flops: float
    """Operations a second that this machine's matrix products reach, measured; 0 where nobody measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bake:
    """Everything that the work on any layer needs to know."""

    quantization: Quantization
    body: Source
    layout: Layout
    bundle: Path
    units: Units
    journal: Journal
    done: set[str]
    mode: ModuleType
    place: tuple[Any, Any]
    """(device, dtype) that layers compute with."""
    attention: str
    """What transformers calls the way that attention is computed."""
    room: Room
    beside: Any
    """On a GPU, the stream that layers come and go on while others are computed; else None."""
    peak_flops: float
    tell: Callable[[Progress], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """A decoder layer with its weights where they are computed with."""

    index: int
    module: Any
    linears: Mapping[str, Any]
    """The Linears that are quantized, by full name."""
    weights: Mapping[str, Tensor]
    """Theirs, as the source has them."""
    on_grid: tuple[int, int]
    """Blocks of those weights that lie on a q4_0 grid, and blocks looked at."""

    @property
    def unit(self) -> str:
        """Its name in the journal."""
        return f"layer {self.index}"


def bake_layers(bake: Bake, samples: Samples) -> tuple[FidelityEntry, float] | None:
    """Copy what lies outside the layers; take every layer through calibration, packing and the held-out comparison.

    Returns how faithful the result is and the share of the source's blocks on a q4_0 grid; None on ranks other than 0.
    """
    import torch

    device = bake.place[0]
    model = stream.load_model(bake.body.folder, bake.attention)
    with ExitStack() as around:
        around.enter_context(stream.quiet_libraries())
        reading, writing, copying = (around.enter_context(ThreadPoolExecutor(1)) for _ in range(3))
        copied = copying.submit(_copy_outside, bake)
        written: Future[None] | None = None
        conditions = around.enter_context(ExitStack())
        conditions.enter_context(bake.mode.forward_conditions(model))
        modules = stream.take_layers(model)
        count = len(modules)
        left = [index for index in range(count) if f"layer {index}" not in bake.done]
        batches = stream.make_batches(parallel.share(samples.inputs), bake.mode.batch_tokens(device)) if left else []
        calibration = stream.start(model, count, batches, bake.room, "calibration")
        held_out = samples.heldout if parallel.rank() == 0 else []
        heldout = fidelity.start(
            model, count, stream.make_batches(held_out, bake.mode.batch_tokens(device)), bake.room
        )
        counter = _Counter(bake, count, sum(b["input_ids"].numel() for b in batches) * (left[-1] + 1 if left else 0))
        load = partial(_load, bake, modules)
        layers = _ahead(reading, load, count) if device.type == "cuda" else map(load, range(count))
        grid = [0, 0]
        for index, layer in enumerate(layers):
            with stream.moved(layer.module, *bake.place):
                go = partial(stream.advance, calibration, index, layer.module, bake.place, counter.passed(layer))
                packed = None
                if index in left:
                    scales = bake.mode.observe_inputs(
                        layer.module, index, layer.linears, bake.quantization, bake.layout.ignore, go
                    )
                    packed = _pack(bake, layer, scales)
                    if written is not None:
                        written.result()
                    if bake.beside is not None:
                        bake.beside.wait_stream(torch.cuda.current_stream(device))
                    written = writing.submit(_write, bake, layer.unit, packed)
                    if parallel.size() > 1:
                        written.result()
                elif left and index < left[-1]:
                    go()
                if parallel.rank() == 0:
                    if packed is None or parallel.size() > 1:
                        packed = _read(bake, layer)
                    grid = [grid[0] + layer.on_grid[0], grid[1] + layer.on_grid[1]]
                    fidelity.advance(heldout, index, layer.module, layer.linears, packed, bake.place)
            give_back()
            counter.layer_done(index)
        if written is not None:
            written.result()
        copied.result()
        conditions.close()
        if parallel.rank() != 0:
            return None
        return fidelity.finish(heldout, model, count, device), round(grid[0] / max(grid[1], 1), 4)


def _copy_outside(bake: Bake) -> None:
    if OUTSIDE not in bake.done and parallel.rank() == 0:
        _copy(bake, bake.units[OUTSIDE])
        _finish(bake, OUTSIDE)


def _ahead(pool: ThreadPoolExecutor, load: Callable[[int], Layer], count: int) -> Iterator[Layer]:
    """Every layer in turn, each loaded while the one before is worked on."""
    coming = pool.submit(load, 0)
    for index in range(1, count):
        layer = coming.result()
        coming = pool.submit(load, index)
        yield layer
    yield coming.result()


class _Counter:
    """Counts tokens and operations, and tells."""

    def __init__(self, bake: Bake, num_layers: int, num_tokens: int) -> None:
        self._bake, self._num_layers, self._num_tokens = bake, num_layers, num_tokens
        self._layers, self._tokens, self._flops = 0, 0, 0.0
        self._tell()

    def passed(self, layer: Layer) -> Callable[[int], None]:
        parameters = sum(weight.numel() for weight in layer.weights.values())

        def count(tokens: int) -> None:
            self._tokens += tokens
            self._flops += 2.0 * parameters * tokens
            self._tell()

        return count

    def layer_done(self, index: int) -> None:
        self._layers = index + 1
        self._tell()

    def _tell(self) -> None:
        self._bake.tell(
            Progress(
                layers=self._layers,
                num_layers=self._num_layers,
                tokens=self._tokens,
                num_tokens=self._num_tokens,
                flops=self._flops,
                peak_flops=self._bake.peak_flops,
            )
        )


def _load(bake: Bake, modules: list[Any], index: int) -> Layer:
    """Take a layer out of the list; on a GPU, copy its weights there."""
    import torch

    module, modules[index] = modules[index], None
    prefix = f"{LAYERS}.{index}."
    with torch.no_grad():
        bake.mode.prepare(module)
        linears = {
            name: module.get_submodule(name.removeprefix(prefix))
            for name in bake.layout.quantized
            if name.startswith(prefix)
        }
        with torch.cuda.stream(bake.beside):
            if bake.beside is not None:
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.data = tensor.data.to(bake.place[0])
                    tensor.data.record_stream(torch.cuda.default_stream(bake.place[0]))
            counts = [count_on_grid(linear.weight) for linear in linears.values()]
    weights = {name: linear.weight.data for name, linear in linears.items()}
    on_grid = sum(found for found, _ in counts), sum(looked for _, looked in counts)
    return Layer(index=index, module=module, linears=linears, weights=weights, on_grid=on_grid)


def _pack(bake: Bake, layer: Layer, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """This rank's part of a layer's quantized modules, by name.part."""
    if bake.quantization.weight_observer == "memoryless_minmax":
        fused = fused_groups(layer.weights)
        groups = [*fused, *((name,) for name in layer.weights if not any(name in group for group in fused))]
        mine = [name for group in parallel.share(groups) for name in group]
        tensors = pack({name: layer.weights[name] for name in mine})
    else:
        mine = list(layer.weights)
        tensors = exact.pack_observed(layer.linears)
    return dict(tensors) | {f"{name}.input_global_scale": scales[name] for name in mine}


def _write(bake: Bake, unit: str, packed: Mapping[str, Tensor]) -> None:
    import torch

    addresses = bake.units[unit]
    if bake.beside is not None:
        torch.cuda.set_stream(bake.beside)
    for name, tensor in packed.items():
        data: Any = tensor.cpu().contiguous().view(torch.uint8).numpy()
        writer.write_tensor(bake.bundle, addresses[name], memoryview(data).cast("B"))
    if parallel.rank() == 0:
        kept = bake.layout.kept
        _copy(bake, {name: address for name, address in addresses.items() if name in kept})
    parallel.barrier()
    if parallel.rank() == 0:
        _finish(bake, unit)
    parallel.barrier()


def _finish(bake: Bake, unit: str) -> None:
    writer.sync(bake.bundle, (address.file for address in bake.units[unit].values()))
    bake.journal.record(unit, writer.hash_tensors(bake.bundle, bake.units[unit]))


def _read(bake: Bake, layer: Layer) -> dict[str, Tensor]:
    addresses = bake.units[layer.unit]
    return {key: value for name in layer.linears for key, value in load_tensors(bake.bundle, addresses, name).items()}


def _copy(bake: Bake, addresses: Mapping[str, Address]) -> None:
    for name, address in addresses.items():
        file, start = source_offset(name, bake.body.tensors)
        writer.copy_tensor(bake.body.folder / file, start, bake.bundle, address)
