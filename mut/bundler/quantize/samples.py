"""Calibration data: conversations from a dataset, through the body's own processor, as the model will see them."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundler.errors import SourceError
from bundler.manifest import hash_file
from bundler.recipe import Calibration


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Processor outputs, one dict of tensors [1, tokens, ...] per sample, and where they came from."""

    inputs: Sequence[Mapping[str, Any]]
    num_tokens: int
    commit: str | None
    sha256: str | None


def load_samples(calibration: Calibration, folder: Path, commit: str | None, processor: Any) -> Samples:
    """The first `num_samples` usable conversations of the shuffled dataset.

    A local file is shuffled by its own seeded generator, a Hub dataset by `datasets` as llm-compressor's examples do.
    Text is cut at `max_seq_length`; a conversation whose images would be cut is passed over.
    SourceError if the dataset is unreadable, has no `messages`, or holds too few.
    """
    from bundler.hub.datasets import load_dataset_rows

    path = folder / calibration.dataset
    local = path.suffix in {".jsonl", ".parquet"}
    rows = _local_rows(path, calibration.seed) if local else load_dataset_rows(calibration, commit)
    inputs: list[Mapping[str, Any]] = []
    for number, row in enumerate(rows):
        if len(inputs) == calibration.num_samples:
            break
        messages = row.get("messages") if isinstance(row, Mapping) else None
        if not isinstance(messages, Sequence) or not messages:
            raise SourceError(
                f"{calibration.dataset}: row {number} has no `messages` (columns: {', '.join(map(str, row))})",
                hint="calibration data is conversations: a list of {role, content} under `messages`",
            )
        encoded = _encode(messages, path.parent, processor, calibration.max_seq_length)
        if encoded is not None:
            inputs.append(encoded)
    if len(inputs) < calibration.num_samples:
        raise SourceError(
            f"{calibration.dataset} holds {len(inputs)} usable samples, calibration.num_samples asks for "
            f"{calibration.num_samples}",
            hint="lower calibration.num_samples or raise calibration.max_seq_length",
        )
    return Samples(
        inputs=inputs,
        num_tokens=sum(int(sample["input_ids"].shape[1]) for sample in inputs),
        commit=commit,
        sha256=hash_file(path)[1] if local else None,
    )


def _local_rows(path: Path, seed: int) -> Iterator[Any]:
    try:
        if path.suffix == ".jsonl":
            lines = path.read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines if line.strip()]
        else:
            from pyarrow import parquet

            rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as exc:
        raise SourceError(f"cannot read calibration data {path}: {exc}") from exc
    random.Random(seed).shuffle(rows)
    return iter(rows)


def _encode(messages: Sequence[Any], folder: Path, processor: Any, max_tokens: int) -> Mapping[str, Any] | None:
    conversation = [
        {"role": message["role"], "content": [_part(part, folder) for part in _parts(message["content"])]}
        for message in messages
    ]
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
    opened = io.BytesIO(image["bytes"]) if isinstance(image, Mapping) else folder / str(image)
    try:
        return {"type": "image", "image": Image.open(opened).convert("RGB")}
    except (OSError, TypeError) as exc:
        raise SourceError(f"cannot read calibration image {image!r}: {exc}") from exc
