"""Where activations live: on the device, in memory, or in a file that is mapped, within a limit that is kept."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundler.errors import QuantizationError, RecipeError
from bundler.quantize.writer import reserve

if TYPE_CHECKING:
    from torch import Tensor

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
LIBRARIES_BYTES = 1_000_000_000
"""torch, transformers and llm-compressor themselves, as anonymous memory, before any weight is read."""
_SHARE = 4
"""Activations take at most this part of the free memory, of host or GPU, unless a limit says otherwise."""


def parse_bytes(text: str) -> int:
    """A size such as `8GiB` or `24 GB` in bytes; RecipeError if it is none."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", text.upper())
    if match is None or match[2] not in _UNITS:
        raise RecipeError(f"{text!r} is no size", hint="write it as 8GiB or 24GB")
    return int(float(match[1]) * _UNITS[match[2]])


def free_bytes() -> int:
    """Memory that can be used without swapping, in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def anonymous_bytes() -> int:
    """Memory of this process that is not a file's, in bytes; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    except (OSError, StopIteration):
        return 0


def give_back() -> None:
    """Return what was freed to the system: glibc keeps blocks under 32 MB, which a deep body would add up."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "malloc_trim"):
            libc.malloc_trim(0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """What activations may take, and where the file is when it is not enough."""

    device: Any
    limit_bytes: int
    folder: Path

    def make(self, name: str, rows: int, width: int, dtype: Any) -> Tensor:
        """Uninitialised activations [rows, width]: on a GPU or in memory while they fit, else mapped from a file."""
        import torch

        nbytes = rows * width * dtype.itemsize
        if self.device.type == "cuda":
            if nbytes <= torch.cuda.mem_get_info(self.device)[0] // _SHARE:
                return torch.empty(rows, width, dtype=dtype, device=self.device)
            if nbytes <= self.limit_bytes:
                return torch.empty(rows, width, dtype=dtype, pin_memory=True)
        elif nbytes <= self.limit_bytes:
            return torch.empty(rows, width, dtype=dtype)
        path = self.folder / f"{name}.bin"
        path.unlink(missing_ok=True)
        reserve(path, nbytes)  # a full disk would end a process that writes to mapped memory
        return torch.from_file(str(path), shared=True, size=rows * width, dtype=dtype).view(rows, width)


def make_room(device: Any, folder: Path, *, working_bytes: int, memory_limit_bytes: int | None) -> Room:
    """Room for activations beside `working_bytes` of layers and temporaries; QuantizationError if it is too little."""
    if memory_limit_bytes is None:
        return Room(device=device, limit_bytes=free_bytes() // _SHARE, folder=folder)
    needed = LIBRARIES_BYTES + working_bytes
    if memory_limit_bytes < needed:
        raise QuantizationError(
            f"--memory-limit {memory_limit_bytes / 2**30:.2f}GiB is too low: one layer of this body at work takes "
            f"{working_bytes / 2**30:.2f} GiB, the libraries {LIBRARIES_BYTES / 2**30:.2f} GiB",
            hint=f"the smallest limit that works is {needed / 2**30 + 0.005:.2f}GiB",
        )
    return Room(device=device, limit_bytes=memory_limit_bytes - needed, folder=folder)
