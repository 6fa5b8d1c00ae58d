"""safetensors files as bytes: headers, shards and indexes, without torch and without unpickling anything.

Format: 8 bytes little-endian header length, a JSON header padded with spaces to a multiple of 8, then the tensors
back to back (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundler.errors import SourceError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 5_000_000_000
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F8_E8M0": 1,
}  # fmt: skip
_MAX_HEADER_BYTES = 100_000_000  # the limit that the safetensors library itself sets
_LFS_MARK = b"version https://git-lfs.github.com/spec/"
PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".dill"})
"""Suffixes of files that run code when they are opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A tensor's dtype (safetensors' name for it) and dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def nbytes(self) -> int:
        """Size of the tensor's data in bytes."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """One tensor in a file: its shape and where its bytes are. `start` and `end` count from the file's beginning."""

    shape: Shape
    file: str
    start: int
    end: int


def parse_header(head: bytes, file: str, file_bytes: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and `__metadata__` of one file, given at least its header; SourceError if it is not safetensors."""
    if head.startswith(_LFS_MARK):
        raise SourceError(f"{file} is a Git LFS pointer, not the weights", hint="download the real file")
    if len(head) < 8:
        raise SourceError(f"{file} is no safetensors file: only {len(head)} bytes")
    (length,) = struct.unpack("<Q", head[:8])
    if length > min(_MAX_HEADER_BYTES, file_bytes - 8) or len(head) < 8 + length:
        raise SourceError(f"{file} is truncated or no safetensors file: header of {length} bytes in {file_bytes}")
    try:
        header = json.loads(head[8 : 8 + length])
        metadata = dict(header.pop("__metadata__", {}))
        tensors = {
            name: Tensor(
                shape=Shape(dtype=entry["dtype"], dims=_dims(entry["shape"])),
                file=file,
                start=8 + length + entry["data_offsets"][0],
                end=8 + length + entry["data_offsets"][1],
            )
            for name, entry in header.items()
        }
        expected = 8 + length
        for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
            if tensor.start != expected or tensor.end - tensor.start != tensor.shape.nbytes:
                raise SourceError(f"{file}: the data range of {name} does not fit its shape or its neighbours")
            expected = tensor.end
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as exc:
        raise SourceError(f"{file} has no readable safetensors header: {exc}") from exc
    if expected != file_bytes:
        raise SourceError(f"{file} is {file_bytes} bytes, its header describes {expected}: truncated?")
    return tensors, metadata


def _dims(shape: list[int]) -> tuple[int, ...]:
    if any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"{shape} is no shape")
    return tuple(shape)


def load_header(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and `__metadata__` of one local file; `Tensor.file` is the file's name."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            rest = file.read(min(length, _MAX_HEADER_BYTES))
    except OSError as exc:
        raise SourceError(f"cannot read {path}: {exc.strerror}") from exc
    return parse_header(prefix + rest, path.name, path.stat().st_size)


def weight_files(names: Iterable[str], index: Mapping[str, object] | None) -> list[str]:
    """The safetensors files of a checkpoint folder that lists `names`; SourceError if it has none or only pickles."""
    present = set(names)
    if index is not None:
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise SourceError(f"{INDEX} has no weight_map")
        files = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in files if name not in present]
        if missing:
            raise SourceError(f"{INDEX} names files that are not there: {', '.join(missing)}")
        return files
    if SINGLE in present:
        return [SINGLE]
    pickles = sorted(name for name in present if Path(name).suffix.lower() in PICKLES)
    if pickles:
        raise SourceError(
            f"only pickled weights here ({pickles[0]}); pickles run code when opened and are never read",
            hint="use a safetensors copy of this checkpoint",
        )
    raise SourceError(f"neither {SINGLE} nor {INDEX} is here")


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is what git leaves in place of a large file that was not downloaded."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS_MARK)) == _LFS_MARK
    except OSError:
        return False


def load_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; SourceError if it is anything else."""
    if is_lfs_pointer(path):
        raise SourceError(f"{path.name} is a Git LFS pointer, not the file", hint="download the real file")
    try:
        document = json.loads(path.read_bytes())
    except OSError as exc:
        raise SourceError(f"cannot read {path}: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise SourceError(f"{path.name} is no readable JSON: {exc}") from exc
    if not isinstance(document, dict):
        raise SourceError(f"{path.name} is no JSON object")
    return document


def load_index(folder: Path) -> dict[str, Any] | None:
    """model.safetensors.index.json as it stands, or None where there is none."""
    return load_json(folder / INDEX) if (folder / INDEX).exists() else None


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a local checkpoint folder, by name."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    tensors: dict[str, Tensor] = {}
    for name in weight_files(names, load_index(folder)):
        for tensor_name, tensor in load_header(folder / name)[0].items():
            if tensor_name in tensors:
                raise SourceError(f"{tensor_name} is in {tensors[tensor_name].file} and in {name}")
            tensors[tensor_name] = tensor
    return tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file to be written: its name, its whole header, and where each tensor goes."""

    file: str
    header: bytes
    tensors: Mapping[str, Tensor]
    nbytes: int


def make_header(shapes: Mapping[str, Shape], file: str) -> Shard:
    """The header that the safetensors library writes for these tensors: widest dtype first, then by name."""
    names = sorted(shapes, key=lambda name: (-DTYPE_BYTES[shapes[name].dtype], name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset, offsets = 0, {}
    for name in names:
        end = offset + shapes[name].nbytes
        entries[name] = {
            "dtype": shapes[name].dtype,
            "shape": list(shapes[name].dims),
            "data_offsets": [offset, end],
        }
        offsets[name] = (offset, end)
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    tensors = {
        name: Tensor(shape=shapes[name], file=file, start=base + start, end=base + end)
        for name, (start, end) in offsets.items()
    }
    return Shard(file=file, header=struct.pack("<Q", len(text)) + text, tensors=tensors, nbytes=base + offset)


def make_shards(groups: Iterable[Mapping[str, Shape]], *, max_shard_bytes: int = MAX_SHARD_BYTES) -> list[Shard]:
    """Lay tensors out in shards of at most `max_shard_bytes`, a group (a layer) never split unless it must be.

    A single tensor that is larger than the limit gets a shard of its own, as transformers does.
    """
    shards: list[dict[str, Shape]] = [{}]
    filled = 0
    for group in groups:
        size = sum(shape.nbytes for shape in group.values())
        pieces = [group] if size <= max_shard_bytes else [{name: shape} for name, shape in group.items()]
        for piece in pieces:
            size = sum(shape.nbytes for shape in piece.values())
            if shards[-1] and filled + size > max_shard_bytes:
                shards.append({})
                filled = 0
            shards[-1].update(piece)
            filled += size
    count = len(shards)
    return [
        make_header(shapes, f"model-{number:05d}-of-{count:05d}.safetensors")
        for number, shapes in enumerate(shards, start=1)
    ]


def render_index(shards: Iterable[Shard]) -> str:
    """model.safetensors.index.json for these shards; `total_size` counts the tensors' bytes, as transformers does."""
    shards = list(shards)
    weight_map = {name: shard.file for shard in shards for name in shard.tensors}
    total = sum(tensor.shape.nbytes for shard in shards for tensor in shard.tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2) + "\n"
