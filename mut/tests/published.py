"""What Google's gemma-4 repositories publish, from data/checkpoints.json: configs and the header of every tensor."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from bundler.checkpoint import Shape, Tensor

SIZES = ("31B", "26B-A4B", "12B", "E4B", "E2B")
QAT = "-qat-q4_0-unquantized"
BODIES = tuple(f"google/gemma-4-{size}-it{qat}" for size in SIZES for qat in ("", QAT))
DRAFTERS = tuple(f"{body}-assistant" for body in BODIES)
_LAYER_TYPES = {"S": "sliding_attention", "F": "full_attention"}


def config_of(repo: str) -> dict[str, Any]:
    """A fresh copy of a repository's config.json, without the keys that say nothing about the model."""
    config: dict[str, Any] = json.loads(_document())[repo]["config"]
    text = config["text_config"]
    text["layer_types"] = [_LAYER_TYPES[letter] for letter in text["layer_types"]]
    return config


@cache
def shapes_of(repo: str) -> dict[str, Shape]:
    """Every tensor of a repository."""
    entry = json.loads(_document())[repo]
    if "tensors_of" in entry:
        return shapes_of(entry["tensors_of"])
    shapes = {}
    for pattern, dtype, dims, *layers in entry["tensors"]:
        names = [pattern.replace("*", str(layer)) for layer in _layers(layers[0])] if layers else [pattern]
        shapes.update({name: Shape(dtype=dtype, dims=tuple(dims)) for name in names})
    return shapes


def tensors_of(repo: str) -> dict[str, Tensor]:
    """The same as tensors of one file, laid end to end."""
    tensors, start = {}, 0
    for name, shape in shapes_of(repo).items():
        tensors[name] = Tensor(shape=shape, file="model.safetensors", start=start, end=start + shape.nbytes)
        start += shape.nbytes
    return tensors


def _layers(ranges: str) -> list[int]:
    ends = [[int(end) for end in part.split("-")] for part in ranges.split(",")]
    return [layer for first, *last in ends for layer in range(first, (last or [first])[0] + 1)]


@cache
def _document() -> str:
    return (Path(__file__).parent / "data" / "checkpoints.json").read_text(encoding="utf-8")
