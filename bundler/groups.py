"""The modules of a finished body in groups: how many weights become 4-bit, how many stay bf16, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass

from bundler.layout import QUANTIZED_PARTS, Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleGroup:
    """Modules of the finished body that are treated alike, for one reason."""

    name: str
    quantized: bool
    modules: int
    parameters: int
    size_bytes: int
    reason: str
    """Why they stay bf16; empty for the quantized."""


_GROUPS = (
    ("attention", r"\.language_model\.layers\.\d+\.self_attn\.[qkvo]_proj\.", ""),
    ("experts", r"\.experts\.", ""),
    ("mlp", r"\.language_model\.layers\.\d+\.mlp\.", ""),
    ("vision", r"\.(vision_tower|embed_vision|vision_embedder)\.", "engines keep it bf16"),
    ("audio", r"\.(audio_tower|embed_audio)\.", "engines keep it bf16"),
    ("per-layer table", r"embed_tokens_per_layer\.", "a lookup table"),
    ("per-layer", r"per_layer", "too lossy in 4 bit"),  # exllamav3 #253: twice the KL divergence for 1 % of size
    ("embeddings", r"(embed_tokens|lm_head)\.", "shared with the head"),
    ("router", r"\.router\.", "picks the experts"),
    ("norms, scalars", r"", "vectors"),
)
"""Name, which tensors, why they stay bf16; the first pattern that is found in a tensor's name decides."""


def group_of(tensor: str) -> str:
    """The group that a tensor, by its name in the finished body, belongs to."""
    return next(name for name, pattern, _ in _GROUPS if re.search(pattern, tensor))


def make_groups(layout: Layout) -> tuple[ModuleGroup, ...]:
    """Every tensor of the output in one group, quantized groups first."""
    sizes = {name: tensor.shape for shard in layout.shards for name, tensor in shard.tensors.items()}
    rows: dict[tuple[bool, str], list[tuple[str, int, int]]] = {}
    for module, (out_features, in_features) in layout.quantized.items():
        nbytes = sum(sizes[f"{module}.{part}"].nbytes for part in QUANTIZED_PARTS)
        rows.setdefault((True, group_of(f"{module}.")), []).append((module, out_features * in_features, nbytes))
    for name, shape in layout.kept.items():
        rows.setdefault((False, group_of(name)), []).append((name.rpartition(".")[0], shape.numel, shape.nbytes))
    reasons = {name: reason for name, _, reason in _GROUPS}
    return tuple(
        ModuleGroup(
            name=name,
            quantized=quantized,
            modules=len({module for module, _, _ in rows[quantized, name]}),
            parameters=sum(parameters for _, parameters, _ in rows[quantized, name]),
            size_bytes=sum(nbytes for _, _, nbytes in rows[quantized, name]),
            reason="" if quantized else reasons[name] or "quantization.ignore",
        )
        for quantized in (True, False)
        for name in reasons
        if (quantized, name) in rows
    )
