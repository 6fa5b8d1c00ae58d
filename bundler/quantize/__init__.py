"""The deep room. Its door: `check` before the long work, `run` for it, `check_fidelity` after it.

Behind the door: `samples` (calibration and held-out data), `stream` (the forward, a layer at a time), `layer` (what
llm-compressor does to one), `pack` (its weights to 4 bit), `fidelity` (how close the result is), `writer` (bytes to
their place), `journal` (what survives a kill).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundler import checkpoint
from bundler.checkpoint import Tensor
from bundler.errors import QuantizationError
from bundler.gemma4 import layer_of, source_offset
from bundler.layout import Layout
from bundler.manifest import CalibrationEntry, FidelityEntry, QuantizationEntry
from bundler.quantize import environment, writer
from bundler.quantize.environment import check
from bundler.quantize.fidelity import check_fidelity
from bundler.quantize.journal import Journal
from bundler.recipe import Quantization, Recipe
from bundler.source import Source

if TYPE_CHECKING:
    from bundler.quantize.samples import Samples

__all__ = ["FORMAT", "check", "check_fidelity", "make_quantization_config", "run"]

FORMAT = "nvfp4-pack-quantized"
OnLayer = Callable[[int, int, int], None]
"""Called after each decoder layer with (layers done, layers in all, tokens sent through one layer)."""
Units = Mapping[str, Mapping[str, Tensor]]
"""What is written and journalled as one: each decoder layer, and all that lies outside them."""
_OUTSIDE = "outside the layers"


def make_quantization_config(quantization: Quantization, ignore: tuple[str, ...]) -> dict[str, Any]:
    """config.json's `quantization_config`, as llm-compressor writes it, but with the ignore patterns kept patterns."""
    shared = {
        **{"num_bits": 4, "type": "float", "symmetric": True, "group_size": 16, "strategy": "tensor_group"},
        **{"block_structure": None, "actorder": None, "observer_kwargs": {}},
        **{"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": None},
    }
    return {
        "config_groups": {
            "group_0": {
                "format": FORMAT,
                "input_activations": {**shared, "dynamic": "local", "observer": quantization.input_observer},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {**shared, "dynamic": False, "observer": quantization.weight_observer},
            }
        },
        "format": FORMAT,
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": environment.versions()["compressed-tensors"],
    }


def run(
    recipe: Recipe,
    body: Source,
    layout: Layout,
    bundle: Path,
    *,
    journal: Journal,
    dataset_commit: str | None,
    on_layer: OnLayer,
) -> QuantizationEntry:
    """Write the body's shards and index into `bundle`, one decoder layer in memory at a time.

    What `journal` says is done, and still has the bytes it had, is not done again. SourceError for an unusable
    checkpoint or calibration set, QuantizationError for layers that cannot be quantized.
    """
    from bundler.quantize.samples import load_samples
    from bundler.quantize.stream import load_processor

    writer.allocate(bundle, layout.shards)
    units = _make_units(layout)
    done = {unit for unit, sha256 in journal.done.items() if writer.hash_tensors(bundle, units[unit]) == sha256}

    def finish(unit: str) -> None:
        writer.sync(bundle, (tensor.file for tensor in units[unit].values()))
        journal.record(unit, writer.hash_tensors(bundle, units[unit]))

    if _OUTSIDE not in done:
        _copy(units[_OUTSIDE], body, bundle)
        finish(_OUTSIDE)
    samples = load_samples(recipe, dataset_commit, load_processor(body.folder))
    bake = Bake(recipe.quantization, body, layout, bundle, units, done, finish)
    fidelity, q4_0_blocks = _stream(bake, samples, on_layer)
    (bundle / checkpoint.INDEX).write_text(checkpoint.render_index(layout.shards), encoding="utf-8")
    calibration = recipe.calibration
    return QuantizationEntry(
        scheme=recipe.quantization.scheme,
        format=FORMAT,
        ignore=layout.ignore,
        weight_observer=recipe.quantization.weight_observer,
        input_observer=recipe.quantization.input_observer,
        calibration=CalibrationEntry(
            dataset=calibration.dataset,
            config=calibration.config,
            split=calibration.split,
            commit=samples.commit,
            sha256=samples.sha256,
            num_samples=calibration.num_samples,
            max_seq_length=calibration.max_seq_length,
            seed=calibration.seed,
            num_tokens=samples.num_tokens,
        ),
        compute={"device": "cpu", "dtype": "bfloat16", "attention": "eager", "batch_size": 1},
        quantized_modules=len(layout.quantized),
        quantized_parameters=layout.quantized_parameters,
        kept_parameters=layout.kept_parameters,
        dropped_tensors=layout.dropped,
        q4_0_blocks=q4_0_blocks,
        fidelity=fidelity,
    )


def _make_units(layout: Layout) -> Units:
    units: dict[str, dict[str, Tensor]] = {_OUTSIDE: {}}
    for shard in layout.shards:
        for name, tensor in shard.tensors.items():
            index = layer_of(name)
            units.setdefault(_OUTSIDE if index is None else f"layer {index}", {})[name] = tensor
    return units


@dataclass(frozen=True, slots=True)
class Bake:
    """What every layer's work needs to know."""

    quantization: Quantization
    body: Source
    layout: Layout
    bundle: Path
    units: Units
    done: set[str]
    finish: Callable[[str], None]


def _stream(bake: Bake, samples: Samples, on_layer: OnLayer) -> tuple[FidelityEntry, float]:
    """Take every layer in turn through calibration, packing and the held-out comparison, and let go of it."""
    from bundler.quantize import fidelity, stream
    from bundler.quantize.layer import linearize_experts, on_q4_0_grid

    model = stream.load_model(bake.body.folder)
    with stream.calibration_forward(model):
        layers = stream.take_layers(model)
        count = len(layers)
        left = [index for index in range(count) if f"layer {index}" not in bake.done]
        calibration = stream.start(model, count, samples.inputs if left else [])
        heldout = fidelity.start(model, count, samples.heldout)
        grid = [0, 0]
        for index in range(count):
            layer, layers[index] = layers[index], None
            linearize_experts(layer)
            modules = _find_modules(layer, bake.layout, index)
            if index in left:
                _quantize_layer(bake, index, layer, partial(stream.advance, calibration, index, layer))
            elif left and index < left[-1]:
                stream.advance(calibration, index, layer)
            grid = [total + part for total, part in zip(grid, on_q4_0_grid(modules.values()), strict=True)]
            fidelity.advance(heldout, index, layer, modules, bake.bundle, bake.units[f"layer {index}"])
            on_layer(index + 1, count, samples.num_tokens)
    return fidelity.finish(heldout, model, count), round(grid[0] / max(grid[1], 1), 4)


def _quantize_layer(bake: Bake, index: int, layer: Any, advance: Callable[[], None]) -> None:
    from bundler.quantize.layer import calibrating, pack

    unit = f"layer {index}"
    with calibrating(layer, index, bake.quantization, bake.layout.ignore) as modules:
        _require_planned(modules, bake.layout, index)
        advance()
    left = dict(bake.units[unit])
    for name, tensor in pack(modules):
        writer.write_tensor(bake.bundle, left.pop(name), _bytes(tensor))
    _copy(left, bake.body, bake.bundle)
    bake.finish(unit)


def _find_modules(layer: Any, layout: Layout, index: int) -> dict[str, Any]:
    prefix = f"model.language_model.layers.{index}."
    return {
        name: layer.get_submodule(name.removeprefix(prefix)) for name in layout.quantized if name.startswith(prefix)
    }


def _require_planned(modules: Mapping[str, Any], layout: Layout, index: int) -> None:
    planned = {name for name in layout.quantized if layer_of(f"{name}.") == index}
    if planned != modules.keys():
        difference = ", ".join(sorted(planned ^ modules.keys())[:8])
        raise QuantizationError(
            f"layer {index}: llm-compressor quantizes other modules than the plan: {difference}",
            hint="this is a bug of bundler or a change in llm-compressor; please report it with the recipe",
        )


def _copy(tensors: Mapping[str, Tensor], body: Source, bundle: Path) -> None:
    for name, tensor in tensors.items():
        file, start = source_offset(name, body.tensors)
        writer.copy_tensor(body.folder / file, start, bundle, tensor)


def _bytes(tensor: Any) -> memoryview:
    import torch

    return memoryview(tensor.contiguous().view(torch.uint8).numpy()).cast("B")
