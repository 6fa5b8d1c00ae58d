"""Random weights whose right answer is known: the body repeats the last token, and the drafter foresees that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bundler.checkpoint import Shape

if TYPE_CHECKING:
    from torch import Tensor

_QUIET_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm", "post_per_layer_input_norm")
"""Norms behind a layer's contributions: small, so that the last token's own embedding stays the loudest."""
_LOUDNESS = 0.1
_EMBEDDING = 0.08


def make_embedding(
    config: Mapping[str, Any], drafter: Mapping[str, Any], generator: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The shared directions of all tokens [vocab, hidden]; and for ordered embeddings the order and the centroids.

    A drafter with ordered embeddings looks only at the tokens of the nearest centroids (transformers,
    models/gemma4_assistant), so its tokens lie around theirs.
    """
    import torch

    size, hidden = config["text_config"]["vocab_size"], config["text_config"]["hidden_size"]
    own = torch.randn(size, hidden, generator=generator)
    if not drafter.get("use_ordered_embeddings"):
        return own, None, None
    count = drafter["num_centroids"]
    ordering = torch.randperm(size, generator=generator)
    centroids = torch.randn(count, hidden, generator=generator)
    cluster = torch.empty(size, dtype=torch.int64)
    cluster[ordering] = torch.arange(size) // (size // count)
    return (own + centroids[cluster.clamp(max=count - 1)]) / math.sqrt(2), ordering, centroids


def make_body_weights(shapes: Mapping[str, Shape], vocabulary: Tensor, generator: Any) -> dict[str, Tensor]:
    """A body that repeats the last token: what its layers add is random and quiet."""
    import torch

    tensors = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    tensors["model.language_model.embed_tokens.weight"] = (vocabulary * _EMBEDDING).to(torch.bfloat16)
    if "lm_head.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    return tensors


def make_drafter_weights(
    shapes: Mapping[str, Shape],
    vocabulary: Tensor,
    ordering: Tensor | None,
    centroids: Tensor | None,
    generator: Any,
) -> dict[str, Tensor]:
    """A drafter that repeats the token it is given: it sees its embedding through a random projection."""
    import torch

    tensors = {name: _random(name, shape, generator) for name, shape in shapes.items()}
    hidden, both = shapes["pre_projection.weight"].dims
    backbone = both // 2
    projection = torch.randn(hidden, backbone, generator=generator) / math.sqrt(backbone)
    tensors["pre_projection.weight"] = torch.cat([projection, torch.zeros_like(projection)], 1).to(torch.bfloat16)
    tensors["model.embed_tokens.weight"] = (vocabulary @ projection.T * _EMBEDDING).to(torch.bfloat16)
    if ordering is not None and centroids is not None:
        tensors["masked_embedding.token_ordering"] = ordering
        tensors["masked_embedding.centroids.weight"] = (centroids @ projection.T * _EMBEDDING).to(torch.bfloat16)
    return tensors


def _random(name: str, shape: Shape, generator: Any) -> Tensor:
    import torch

    dtype = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "I64": torch.int64}[shape.dtype]
    leaf = name.split(".")[-2] if name.endswith((".weight", ".bias")) else name.rpartition(".")[2]
    if shape.dtype == "I64":
        return torch.zeros(shape.dims, dtype=dtype)
    if leaf.startswith(_QUIET_NORMS) and "tower" not in name:
        return torch.full(shape.dims, _LOUDNESS, dtype=dtype)
    if name.endswith((".bias", "std_bias")):
        return torch.zeros(shape.dims, dtype=dtype)
    if leaf.startswith(("input_m", "output_m")):
        return torch.tensor(100.0 if leaf.endswith("max") else -100.0, dtype=dtype)
    if len(shape.dims) < 2:
        return torch.ones(shape.dims, dtype=dtype)
    spread = 1 / math.sqrt(shape.dims[-1]) if "embed_tokens_per_layer" not in name else 0.02
    return (torch.randn(shape.dims, generator=generator) * spread).to(dtype)
