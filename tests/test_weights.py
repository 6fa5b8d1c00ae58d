"""The inventory of quantized bodies of every published size, and what is said of one that differs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published import BODIES, config_of, shapes_of

from bundler.checkpoint import Shape, Tensor, make_header
from bundler.gemma4 import find_kind, make_ignore
from bundler.inventory import body_shapes
from bundler.layout import Layout, make_layout
from bundler.weights import Shards, check_inventory, check_shards

MOE, PER_LAYER = "google/gemma-4-26B-A4B-it", "google/gemma-4-E4B-it"
LAYER, THIRD = "model.language_model.layers.0", "model.language_model.layers.3"
PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
Tensors = dict[str, Tensor]


def small(repo: str) -> dict[str, Any]:
    """A published config, with fewer layers and experts where it has many."""
    config = config_of(repo)
    text = config["text_config"]
    if repo == MOE:
        text |= {"num_hidden_layers": 6, "layer_types": text["layer_types"][:6], "num_experts": 8}
    return config


def quantized(config: dict[str, Any], *ignore: str) -> tuple[Layout, Tensors]:
    """What NVFP4 makes of a body, and every tensor of it as its header."""
    layout = make_layout(body_shapes(config), config, make_ignore(find_kind(config), ignore))
    return layout, {name: tensor for shard in layout.shards for name, tensor in shard.tensors.items()}


def tensor(dtype: str, *dims: int) -> Tensor:
    shape = Shape(dtype=dtype, dims=dims)
    return Tensor(shape=shape, file="x.safetensors", start=0, end=shape.nbytes)


def check(layout: Layout, tensors: Tensors, lost: frozenset[str] = frozenset()) -> list[tuple[str, str]]:
    findings = check_inventory(layout, Shards(tensors=tensors, lost=lost, whole=True))
    return [(finding.code, finding.where) for finding in findings]


@pytest.mark.parametrize("repo", BODIES)
def test_every_published_size_passes(repo: str) -> None:
    """What NVFP4 makes of each published file is exactly what its config.json promises."""
    config = config_of(repo)
    ignore = make_ignore(find_kind(config))
    made = make_layout(shapes_of(repo), config, ignore)
    tensors = {name: tensor for shard in made.shards for name, tensor in shard.tensors.items()}
    assert check(make_layout(body_shapes(config), config, ignore), tensors) == []


def unpack(tensors: Tensors, module: str, rows: int, columns: int) -> None:
    for part in PARTS:
        del tensors[f"{module}.{part}"]
    tensors[f"{module}.weight"] = tensor("BF16", rows, columns)


def pack(tensors: Tensors, module: str, rows: int, columns: int) -> None:
    del tensors[f"{module}.weight"]
    dims = ((rows, columns // 2), (rows, columns // 16), (1,), (1,))
    for part, dtype, size in zip(PARTS, ("U8", "F8_E4M3", "F32", "F32"), dims, strict=True):
        tensors[f"{module}.{part}"] = tensor(dtype, *size)


FAULTS: dict[str, tuple[str, Callable[[Tensors], object], list[tuple[str, str]]]] = {
    "an expert's projection missing": (
        MOE, lambda t: [t.pop(f"{LAYER}.experts.7.up_proj.{part}") for part in PARTS],
        [("module-missing", f"{LAYER}.experts.7.up_proj")],
    ),
    "one expert in bf16": (
        MOE, lambda t: unpack(t, f"{LAYER}.experts.7.down_proj", 2816, 704),
        [("fused-group-split", f"{LAYER}.experts")],
    ),
    "an expert's scale missing": (
        MOE, lambda t: t.pop(f"{LAYER}.experts.7.down_proj.input_global_scale"),
        [("scale-missing", f"{LAYER}.experts.7.down_proj.input_global_scale")],
    ),
    "router packed": (
        MOE, lambda t: pack(t, f"{LAYER}.router.proj", 8, 2816), [("kept-quantized", f"{LAYER}.router.proj")],
    ),
    "per-layer projection packed": (
        PER_LAYER, lambda t: pack(t, "model.language_model.per_layer_model_projection", 10752, 2560),
        [("kept-quantized", "model.language_model.per_layer_model_projection")],
    ),
    "keys of a layer that shares them": (
        PER_LAYER, lambda t: t.update({"model.language_model.layers.41.self_attn.k_norm.weight": tensor("BF16", 512)}),
        [("tensor-unexpected", "x.safetensors: model.language_model.layers.41.self_attn.k_norm.weight")],
    ),
    "per-layer embeddings missing": (
        PER_LAYER, lambda t: t.pop("model.language_model.embed_tokens_per_layer.weight"),
        [("tensor-missing", "model.language_model.embed_tokens_per_layer.weight")],
    ),
    "two layers missing": (
        PER_LAYER, lambda t: [t.pop(name) for name in list(t) if name.startswith((f"{LAYER}.", f"{THIRD}."))],
        [("layer-missing", LAYER), ("layer-missing", THIRD)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_one_finding(fault: str) -> None:
    """What belongs to mixtures of experts and per-layer embeddings is checked as strictly, and said once."""
    repo, change, expected = FAULTS[fault]
    layout, tensors = quantized(small(repo))
    change(tensors)
    assert check(layout, tensors) == expected


def test_experts_that_were_never_split() -> None:
    """Experts that are still the source's fused parameters were not quantized: every one is missing."""
    layout, tensors = quantized(small(MOE))
    for name in [name for name in tensors if name.startswith(f"{LAYER}.experts.")]:
        del tensors[name]
    tensors[f"{LAYER}.experts.gate_up_proj"] = tensor("BF16", 8, 1408, 2816)
    tensors[f"{LAYER}.experts.down_proj"] = tensor("BF16", 8, 2816, 704)
    codes = [code for code, _ in check(layout, tensors)]
    assert codes.count("experts-fused") == 2
    assert codes.count("module-missing") == 3 * 8
    assert len(codes) == 2 + 3 * 8


@pytest.mark.parametrize(
    ("repo", "pattern", "split"),
    [
        (MOE, "re:.*self_attn.*", 0),
        (MOE, r"re:.*layers\.0\.experts.*", 0),
        (MOE, "re:.*down_proj", 6),
        (PER_LAYER, "re:.*down_proj", 0),
        (PER_LAYER, "re:.*q_proj", 24),
    ],
)
def test_a_recipe_may_keep_whole_groups(repo: str, pattern: str, split: int) -> None:
    """Attention, or all experts of a layer, may stay bf16; a part of a matrix that engines fuse may not."""
    assert [code for code, _ in check(*quantized(small(repo), pattern))] == ["fused-group-split"] * split


def test_what_a_lost_shard_held_is_not_missing_again() -> None:
    """Tensors that the index places in an unreadable file are explained by that file."""
    layout, tensors = quantized(small(PER_LAYER))
    gone = frozenset(name for name in tensors if ".layers.4." in name)
    assert check(layout, {name: tensors[name] for name in tensors.keys() - gone}, gone) == []


@pytest.mark.parametrize(("sizes", "expected"), [((2, 3), []), ((6,), []), ((2, 4), ["shard-too-large"])])
def test_shards_of_at_most_five_gigabytes(sizes: tuple[int, ...], expected: list[str], tmp_path: Path) -> None:
    """A shard holds at most 5 GB of tensors, unless it is one tensor that is larger."""
    shapes = {str(number): Shape(dtype="U8", dims=(size, 10**9)) for number, size in enumerate(sizes)}
    shard = make_header(shapes, "model.safetensors")
    path = tmp_path / shard.file
    path.write_bytes(shard.header)
    os.truncate(path, shard.nbytes)  # sparse: nothing is written, and nothing but the header is read
    shards, findings = check_shards(tmp_path, index_required=False)
    assert shards.tensors.keys() == shapes.keys()
    assert [finding.code for finding in findings] == expected
