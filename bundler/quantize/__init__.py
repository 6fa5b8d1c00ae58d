"""The deep room. Its door: `check` before the long work, `run` for it, `check_fidelity` after it.

Behind the door: `bake` (the order of the work), `samples` (calibration and held-out data), `stream` (the forward, a
layer at a time), `exact` and `fast` (two ways to calibrate a layer), `attention` (what `fast` does between matrix
products), `pack` (weights to 4 bit), `fidelity` (how close the result is), `memory` (where activations live),
`parallel` (several processes), `writer` (bytes to their place), `journal` (what survives a kill).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bundler import checkpoint
from bundler.errors import QuantizationError, RecipeError
from bundler.gemma4 import layer_of
from bundler.layout import Layout
from bundler.manifest import CalibrationEntry, QuantizationEntry
from bundler.quantize import environment, parallel, writer
from bundler.quantize.bake import MODES, OUTSIDE, Bake, Progress, Units, bake_layers
from bundler.quantize.environment import check
from bundler.quantize.fidelity import check_fidelity
from bundler.quantize.journal import Journal
from bundler.quantize.memory import make_room
from bundler.recipe import Quantization, Recipe
from bundler.source import Source

__all__ = ["FORMAT", "Progress", "check", "check_fidelity", "make_quantization_config", "open_device", "run"]

FORMAT = "nvfp4-pack-quantized"


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


def open_device(name: str) -> Any:
    """`cpu`, `cuda` or `cuda:N` as torch's device; RecipeError for anything else, several GPUs and `auto` included."""
    import torch

    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdigit()) or (kind == "cpu" and number):
        raise RecipeError(
            f"--device {name}: a body is calibrated on one device, cpu, cuda or cuda:N",
            hint="over several GPUs without peer-to-peer access Gemma 4's activations are corrupted silently",
        )
    if kind == "cpu":
        return torch.device(name)
    if number and parallel.size() > 1:
        raise RecipeError(f"--device {name}: each rank takes a GPU of its own", hint="use --device cuda")
    index = int(number) if number else parallel.local_rank()
    if index >= torch.cuda.device_count():
        hint = "start fewer ranks" if parallel.size() > 1 else "use --device cpu"
        raise RecipeError(f"--device {name}: there are {torch.cuda.device_count()} GPUs here", hint=hint)
    return torch.device("cuda", index)


def run(
    recipe: Recipe,
    body: Source,
    layout: Layout,
    bundle: Path,
    *,
    journal: Journal,
    dataset_commit: str | None,
    tell: Callable[[Progress], None] = lambda progress: None,
    device: str = "cpu",
    memory_limit_bytes: int | None = None,
) -> QuantizationEntry | None:
    """Write the body's shards and index into `bundle`, one decoder layer in memory at a time.

    What `journal` says is done, and still has the bytes it had, is not done again. Under torchrun every rank calls
    this with the same arguments; ranks other than 0 get None. SourceError for an unusable checkpoint or calibration
    set, QuantizationError for layers that cannot be quantized or a memory limit that is too low.
    """
    import torch

    from bundler.quantize.samples import load_samples
    from bundler.quantize.stream import load_processor

    where = open_device(device)
    mode, units = MODES[recipe.quantization.compute], _make_units(layout)
    dtype, peak_flops = _choose_dtype(recipe, where, journal)
    room = make_room(
        where,
        journal.path.parent,
        working_bytes=working_bytes(recipe, body, units, float32=dtype.itemsize == 4),
        memory_limit_bytes=memory_limit_bytes,
    )
    if parallel.rank() == 0:
        writer.allocate(bundle, layout.shards)
    parallel.barrier()
    bake = Bake(
        quantization=recipe.quantization,
        body=body,
        layout=layout,
        bundle=bundle,
        units=units,
        journal=journal,
        done={unit for unit, sha256 in journal.done.items() if writer.hash_tensors(bundle, units[unit]) == sha256},
        mode=mode,
        place=(where, dtype),
        attention=mode.choose_attention(where),
        room=room,
        beside=torch.cuda.Stream(where) if where.type == "cuda" else None,  # type: ignore[no-untyped-call]
        peak_flops=peak_flops,
        tell=tell,
    )
    samples = load_samples(recipe, dataset_commit, load_processor(body.folder))
    if parallel.size() > 1 and "imatrix" in recipe.quantization.weight_observer:
        raise QuantizationError(
            f"{recipe.quantization.weight_observer} weighs weights by what one process saw, and there are several",
            hint="run without torchrun, or take another quantization.weight_observer",
        )
    if len(samples.inputs) < parallel.size():
        raise QuantizationError(
            f"{len(samples.inputs)} calibration samples cannot be shared by {parallel.size()} ranks"
        )
    measured = bake_layers(bake, samples)
    if measured is None:
        return None
    fidelity, q4_0_blocks = measured
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
        compute={
            "mode": recipe.quantization.compute,
            "device": where.type,
            "dtype": str(dtype).removeprefix("torch."),
            "attention": bake.attention,
            "batch_tokens": bake.mode.batch_tokens(where),
            "ranks": parallel.size(),
        },
        quantized_modules=len(layout.quantized),
        quantized_parameters=layout.quantized_parameters,
        kept_parameters=layout.kept_parameters,
        dropped_tensors=layout.dropped,
        q4_0_blocks=q4_0_blocks,
        fidelity=fidelity,
    )


def working_bytes(recipe: Recipe, body: Source, units: Units, *, float32: bool) -> int:
    """Anonymous memory that one layer at work takes beside the activations: its weights where they are not the mapped
    source's, and dequantized; its packed form, which is written during the next forward; and the temporaries of that
    forward, or the next packed form."""
    text = body.config["text_config"]
    source = {name: tensor.shape.nbytes for name, tensor in body.tensors.items() if layer_of(name) is not None}
    by_layer: Counter[int | None] = Counter()
    for name, nbytes in source.items():
        by_layer[layer_of(name)] += nbytes
    layer = max(by_layer.values())
    packed = max(sum(a.shape.nbytes for a in unit.values()) for name, unit in units.items() if name != OUTSIDE)
    exact = recipe.quantization.compute == "exact"
    copied = 2 * layer if float32 else layer if exact and text.get("enable_moe_block") else 0
    tokens = max(recipe.calibration.max_seq_length, 1 if exact else 2048)
    wide = max(int(text["intermediate_size"]), 2 * int(text["hidden_size"]))
    itemsize = 4 if float32 else 2
    scores = text["num_attention_heads"] * recipe.calibration.max_seq_length**2 * 6 if exact else 0
    forward = tokens * (3 * wide + 8 * text["hidden_size"]) * itemsize + scores
    dequantized = layer * itemsize // 2
    total: int = copied + dequantized + packed + max(packed, forward)
    return total


def _choose_dtype(recipe: Recipe, device: Any, journal: Journal) -> tuple[Any, float]:
    """The dtype that layers compute in, the same for all ranks and runs of one bake, and its measured peak rate."""
    import torch

    if recipe.quantization.compute == "exact":
        return torch.bfloat16, 0.0
    from bundler.quantize.fast import choose_dtype

    dtype, peak_flops = choose_dtype(device)
    if parallel.rank() == 0:
        journal.choose("device", device.type)
        journal.choose("dtype", str(dtype).removeprefix("torch."))
    begun = parallel.agree(journal.choices.get("device", ""))
    if begun != device.type:
        raise QuantizationError(
            f"{journal.path.parent} was begun on {begun}, this run computes on {device.type}",
            hint=f"carry on with --device {begun}, or remove {journal.path.parent}",
        )
    return getattr(torch, parallel.agree(journal.choices.get("dtype", ""))), peak_flops


def _make_units(layout: Layout) -> Units:
    units: dict[str, dict[str, checkpoint.Tensor]] = {OUTSIDE: {}}
    for shard in layout.shards:
        for name, tensor in shard.tensors.items():
            index = layer_of(name)
            units.setdefault(OUTSIDE if index is None else f"layer {index}", {})[name] = tensor
    return units
