"""Whether weights sit on a q4_0 grid, as those of a QAT checkpoint do that was snapped to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 32
_SAMPLED_ROWS = 64


def count_on_grid(weight: Tensor) -> tuple[int, int]:
    """(blocks of 32 weights that lie on a q4_0 grid, blocks looked at) in the first rows of a weight [rows, columns].

    q4_0 (llama.cpp, ggml-quants.c): every weight of a block is d * q with q from -8 to 7, and d is the weight of the
    largest magnitude divided by -8. Equality is up to bf16's rounding of both; an all-zero block is on the grid.
    """
    import torch

    sample = weight[:_SAMPLED_ROWS, : weight.shape[1] // BLOCK * BLOCK].float()
    blocks = sample.reshape(-1, BLOCK)
    if not len(blocks):
        return 0, 0
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    level = torch.nan_to_num(blocks / (largest / -8)).round()
    near = (blocks - level * largest / -8).abs() <= blocks.abs() / 128
    return int((near & (level >= -8) & (level <= 7)).all(1).sum()), len(blocks)
