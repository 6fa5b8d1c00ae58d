"""The deep room. Its door: `check` before the long work, `run` for it, `make_quantization_config` for what it made.

Behind the door: `samples` (calibration data), `stream` (the forward, a layer at a time), `layer` (what llm-compressor
does to one), `writer` (bytes to their place), `journal` (what survives a kill).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundler import checkpoint
from bundler.checkpoint import Tensor
from bundler.errors import QuantizationError
from bundler.gemma4 import layer_of, source_offset
from bundler.layout import Layout
from bundler.manifest import CalibrationEntry, QuantizationEntry
from bundler.quantize import environment, writer
from bundler.quantize.environment import check
from bundler.quantize.journal import Journal
from bundler.recipe import Quantization, Recipe
from bundler.source import Source

if TYPE_CHECKING:
    from bundler.quantize.samples import Samples

__all__ = ["FORMAT", "check", "make_quantization_config", "run"]

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
    samples = load_samples(recipe.calibration, recipe.folder, dataset_commit, load_processor(body.folder))
    if not units.keys() <= done | {_OUTSIDE}:
        quantize_layer = partial(_quantize_layer, recipe.quantization, body, layout, bundle)
        _stream(body.folder, samples, units, done, quantize_layer, finish, on_layer)
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
    )


def _make_units(layout: Layout) -> Units:
    units: dict[str, dict[str, Tensor]] = {_OUTSIDE: {}}
    for shard in layout.shards:
        for name, tensor in shard.tensors.items():
            index = layer_of(name)
            units.setdefault(_OUTSIDE if index is None else f"layer {index}", {})[name] = tensor
    return units


def _stream(
    folder: Path,
    samples: Samples,
    units: Units,
    done: set[str],
    quantize_layer: Callable[[int, Any, Mapping[str, Tensor], Callable[[int], None]], None],
    finish: Callable[[str], None],
    on_layer: OnLayer,
) -> None:
    from bundler.quantize.layer import linearize_experts
    from bundler.quantize.stream import LayerStream, calibration_forward, load_model

    model = load_model(folder)
    with calibration_forward(model):
        stream = LayerStream(model, samples.inputs)
        count = len(stream.layers)
        for index in range(count):
            unit = f"layer {index}"
            linearize_experts(stream.layers[index])
            if unit in done:
                stream.advance(index)
            else:
                quantize_layer(index, stream.layers[index], units[unit], stream.advance)
                finish(unit)
            stream.drop(index)
            on_layer(index + 1, count, samples.num_tokens)


def _quantize_layer(
    quantization: Quantization,
    body: Source,
    layout: Layout,
    bundle: Path,
    index: int,
    layer: Any,
    tensors: Mapping[str, Tensor],
    advance: Callable[[int], None],
) -> None:
    from bundler.quantize.layer import calibrating, pack

    with calibrating(layer, index, quantization, layout.ignore) as modules:
        _require_planned(modules, layout, index)
        advance(index)
    left = dict(tensors)
    for name, tensor in pack(modules):
        writer.write_tensor(bundle, left.pop(name), _bytes(tensor))
    _copy(left, body, bundle)


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
