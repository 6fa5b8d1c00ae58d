"""Shards written in place: the layout is known before the first weight is read, so every tensor has its address."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from bundler.checkpoint import Shard, Tensor
from bundler.errors import QuantizationError

_CHUNK_BYTES = 1 << 20


def allocate(folder: Path, shards: Iterable[Shard]) -> None:
    """Give every shard its header and full size, keeping what an earlier run already wrote into it."""
    for shard in shards:
        reserve(folder / shard.file, shard.nbytes)
        with (folder / shard.file).open("r+b") as file:
            file.write(shard.header)


def reserve(path: Path, nbytes: int) -> None:
    """Have a file with that much room on its disk, keeping what it holds; OSError at once if there is none."""
    with path.open("ab") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
        file.truncate(nbytes)


def write_tensor(folder: Path, tensor: Tensor, data: memoryview) -> None:
    """Put a tensor's bytes at its address."""
    if data.nbytes != tensor.end - tensor.start:
        raise QuantizationError(f"{data.nbytes} bytes for a tensor of {tensor.end - tensor.start} in {tensor.file}")
    with (folder / tensor.file).open("r+b") as file:
        file.seek(tensor.start)
        file.write(data)


def copy_tensor(source: Path, start: int, folder: Path, tensor: Tensor) -> None:
    """Copy a tensor byte for byte from `start` in a source shard to its address."""
    nbytes = tensor.end - tensor.start
    with (folder / tensor.file).open("r+b") as file:
        file.seek(tensor.start)
        copied = sum(file.write(chunk) for chunk in _read(source, start, nbytes))
    if copied != nbytes:
        raise QuantizationError(f"{source} ended early while a tensor was copied")


def sync(folder: Path, files: Iterable[str]) -> None:
    """Make what was written to these shards survive a power cut."""
    for name in sorted(set(files)):
        with (folder / name).open("rb") as file:
            os.fsync(file.fileno())


def hash_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the bytes of these tensors in the order of their names, as they are on disk."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        for chunk in _read(folder / tensor.file, tensor.start, tensor.end - tensor.start):
            digest.update(chunk)
    return digest.hexdigest()


def _read(path: Path, start: int, nbytes: int) -> Iterator[memoryview]:
    """Part of a file, through one buffer that stays in the processor's cache."""
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while nbytes and (count := file.readinto(buffer[:nbytes])):
            yield buffer[:count]
            nbytes -= count
