"""Several processes at one bake, through torch's own launcher and process group; alone, all of this does nothing.

    torchrun --nproc-per-node 2 -m bundler build RECIPE

Each rank takes its share of the samples and of the packing; ranges are reduced by max after every layer.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from bundler.errors import QuantizationError

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
_PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others at the end of a layer."""


def size() -> int:
    """How many processes torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is; 0 writes what is written once."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """Which of the processes on this machine it is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


@contextmanager
def group(device: Any) -> Iterator[None]:
    """The process group around a bake: gloo on CPUs, nccl on GPUs. QuantizationError if another rank is lost."""
    if size() == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=_PATIENCE, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=_PATIENCE)
    try:
        yield
    except RuntimeError as exc:  # what the backends raise when a peer is gone
        raise QuantizationError(
            f"rank {rank()} of {size()} lost the others: {exc}", hint="run the same command again to carry on"
        ) from exc
    finally:
        dist.destroy_process_group()


def share(items: Sequence[T]) -> list[T]:
    """This rank's part of some work, dealt out in turn."""
    return list(items[rank() :: size()])


def agree(value: str) -> str:
    """Rank 0's value, on every rank."""
    if size() == 1:
        return value
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def barrier() -> None:
    """Wait until every rank is here."""
    if size() > 1:
        import torch.distributed as dist

        dist.barrier()


def widest(low: Tensor, high: Tensor) -> None:
    """Make a range, in place, the widest that any rank saw."""
    if size() > 1:
        import torch.distributed as dist

        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)


def widest_of(amax: Mapping[str, Tensor | None]) -> None:
    """Make every magnitude, in place, the largest that any rank saw, in one reduction."""
    if size() == 1:
        return
    import torch
    import torch.distributed as dist

    seen = [value for value in amax.values() if value is not None]
    if not seen:
        return
    together = torch.stack([value.float() for value in seen])
    dist.all_reduce(together, dist.ReduceOp.MAX)
    for value, largest in zip(seen, together, strict=True):
        value.copy_(largest)
