"""Calibration and held-out data: conversations, through the body's own processor, as the model will see them."""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bundler.errors import SourceError
from bundler.hub.datasets import load_dataset_rows
from bundler.manifest import hash_file
from bundler.recipe import Recipe, local_path

Inputs = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Processor outputs, one dict of tensors [1, tokens, ...] per sample, and where they came from."""

    inputs: Sequence[Inputs]
    heldout: Sequence[Inputs]
    """Samples that are none of `inputs`."""
    num_tokens: int
    """Of `inputs`."""
    commit: str | None
    sha256: str | None


def load_samples(recipe: Recipe, commit: str | None, processor: Any) -> Samples:
    """The first usable conversations of the shuffled calibration dataset, and the held-out ones.

    A local file is shuffled by its own seeded generator, a Hub dataset by `datasets` as llm-compressor's examples do.
    Text is cut at the recipe's length; a conversation whose images would be cut is passed over. SourceError if a
    dataset is unreadable, has no `messages`, or holds too few.
    """
    calibration, fidelity = recipe.calibration, recipe.fidelity
    path = local_path(calibration.dataset, recipe.folder)
    rows = _file_rows(path, calibration.seed) if path else load_dataset_rows(calibration, commit)
    encode = partial(_encode, processor=processor)
    seen: set[bytes] = set()
    inputs = _take(rows, calibration.num_samples, calibration.max_seq_length, encode, seen, "calibration")
    if fidelity.dataset is not None:
        rows = _file_rows(recipe.folder / fidelity.dataset, None)
    return Samples(
        inputs=inputs,
        heldout=_take(rows, fidelity.num_samples, fidelity.max_seq_length, encode, seen, "fidelity"),
        num_tokens=sum(int(sample["input_ids"].shape[1]) for sample in inputs),
        commit=commit,
        sha256=hash_file(path)[1] if path else None,
    )


def _take(
    rows: Iterator[tuple[Path, Any]],
    count: int,
    max_tokens: int,
    encode: Callable[[Sequence[Any], Path, int], Inputs | None],
    seen: set[bytes],
    table: str,
) -> list[Inputs]:
    """The next `count` samples that fit and were not taken before."""
    taken: list[Inputs] = []
    for folder, row in rows:
        messages = row.get("messages") if isinstance(row, Mapping) else None
        if not isinstance(messages, Sequence) or not messages:
            columns = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
            raise SourceError(
                f"a row of the {table} data has no `messages` (it has: {columns})",
                hint="the data is conversations: a list of {role, content} under `messages`",
            )
        sample = encode(messages, folder, max_tokens)
        if sample is None or (key := _key(messages)) in seen:
            continue
        seen.add(key)
        taken.append(sample)
        if len(taken) == count:
            return taken
    raise SourceError(
        f"{table}.num_samples asks for {count} samples, its data holds {len(taken)} usable ones that are not used yet",
        hint=f"lower {table}.num_samples, raise {table}.max_seq_length, or name more data",
    )


def _key(messages: Sequence[Any]) -> bytes:
    return hashlib.sha256(repr(messages).encode()).digest()


def _file_rows(path: Path, seed: int | None) -> Iterator[tuple[Path, Any]]:
    try:
        if path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
        else:
            from pyarrow import parquet

            rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as exc:
        raise SourceError(f"cannot read {path}: {exc}") from exc
    if seed is not None:
        random.Random(seed).shuffle(rows)
    return ((path.parent, row) for row in rows)


def _encode(messages: Sequence[Any], folder: Path, max_tokens: int, *, processor: Any) -> Inputs | None:
    try:
        conversation = [
            {"role": message["role"], "content": [_part(part, folder) for part in _parts(message["content"])]}
            for message in messages
        ]
    except (KeyError, TypeError) as exc:
        raise SourceError(f"a message is not {{role, content}}: {exc!r} in {messages!r:.200}") from exc
    encoded = dict(processor.apply_chat_template([conversation], tokenize=True, return_dict=True, return_tensors="pt"))
    length = encoded["input_ids"].shape[1]
    if length <= max_tokens:
        return encoded
    if any(part["type"] != "text" for message in conversation for part in message["content"]):
        return None
    return {
        name: tensor[:, :max_tokens] if tensor.ndim > 1 and tensor.shape[1] == length else tensor
        for name, tensor in encoded.items()
    }


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


def _part(part: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    if part["type"] == "text":
        return {"type": "text", "text": part["text"]}
    if part["type"] != "image":
        raise SourceError(f"calibration content of type {part['type']!r}; text and image are understood")
    from PIL import Image

    image = part.get("image") or part.get("path")
    try:
        if isinstance(image, Mapping):
            image = Image.open(io.BytesIO(image["bytes"]))
        elif not isinstance(image, Image.Image):
            image = Image.open(folder / str(image))
        return {"type": "image", "image": image.convert("RGB")}
    except (OSError, TypeError) as exc:
        raise SourceError(f"cannot read calibration image {image!r}: {exc}") from exc
