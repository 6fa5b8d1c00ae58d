"""The layout of a quantized body: every tensor that is written, its shard and address, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from bundler.checkpoint import MAX_SHARD_BYTES, Shape, Shard, make_shards
from bundler.gemma4 import dropped_tensors, layer_of, make_output_shapes

QUANTIZED_PARTS = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
"""The tensors that stand for one quantized module in format nvfp4-pack-quantized."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What a body becomes."""

    shards: tuple[Shard, ...]
    quantized: Mapping[str, tuple[int, int]]
    """Module → (out_features, in_features); four tensors of the output each."""
    kept: Mapping[str, Shape]
    """The output's other tensors, as the source has them (an ignored expert as its own 2-D slice)."""
    dropped: tuple[str, ...]
    """Source tensors that are not carried: K and V of layers that read another layer's."""
    ignore: tuple[str, ...]
    """quantization_config's list, that decided the above."""

    @property
    def nbytes(self) -> int:
        """Size of the shards in bytes, headers included."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def quantized_parameters(self) -> int:
        """Weights that become 4-bit."""
        return sum(rows * columns for rows, columns in self.quantized.values())

    @property
    def kept_parameters(self) -> int:
        """Weights and buffers that stay as they are."""
        return sum(shape.numel for shape in self.kept.values())


def make_layout(
    source_shapes: Mapping[str, Shape],
    config: Mapping[str, Any],
    ignore: Iterable[str],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Layout:
    """Lay a body out: what is outside the decoder layers first, then the layers in order, a layer in one shard."""
    ignore = tuple(ignore)
    output, quantized = make_output_shapes(source_shapes, config, ignore)
    groups: dict[int, dict[str, Shape]] = {}
    for name in sorted(output):
        layer = layer_of(name)
        groups.setdefault(-1 if layer is None else layer, {})[name] = output[name]
    parts = {f"{module}.{part}" for module in quantized for part in QUANTIZED_PARTS}
    return Layout(
        shards=tuple(make_shards((groups[layer] for layer in sorted(groups)), max_shard_bytes=max_shard_bytes)),
        quantized=quantized,
        kept={name: shape for name, shape in output.items() if name not in parts},
        dropped=tuple(dropped_tensors(source_shapes, config)),
        ignore=ignore,
    )
