"""Google's repositories as a Hub serves them, at their real size and without their weights.

Configs, file names, sizes and every tensor's name, dtype, shape and shard are as published (data/checkpoints.json).
The safetensors files are sparse: a true header, and holes where the weights would be. Small files hold the least that
makes sense of them.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path

from hub.store import Store, Stored
from published import QAT, config_of, shapes_of

from bundler.checkpoint import INDEX, SINGLE, Shape, make_header

ABLITERATED = "huihui-ai/Huihui-gemma-4-31B-it-qat-q4_0-unquantized-abliterated"
FILE_BYTES = {
    "google/gemma-4-31B-it": (49_784_788_364, 12_761_549_884),
    "google/gemma-4-26B-A4B-it": (49_907_246_508, 1_704_763_408),
    "google/gemma-4-12B-it": (23_919_549_408,),
    "google/gemma-4-E4B-it": (15_992_595_884,),
    "google/gemma-4-E2B-it": (10_246_621_918,),
    f"google/gemma-4-E4B-it{QAT}": (15_882_477_468,),
    f"google/gemma-4-E2B-it{QAT}": (10_208_852_878,),
    "google/gemma-4-31B-it-assistant": (939_042_560,),
    f"google/gemma-4-26B-A4B-it{QAT}-assistant": (839_427_840,),
    "google/gemma-4-12B-it-assistant": (845_719_296,),
    "google/gemma-4-E2B-it-assistant": (157_565_344,),
}
"""The sizes that are published for safetensors files; the other repositories' are their siblings'."""

_NO_METADATA = (f"google/gemma-4-E4B-it{QAT}", f"google/gemma-4-E2B-it{QAT}")
_FULL = r"layers\.(5|11|17|23|29|35|41|47|53|59)\."
_SECOND_SHARD = {
    "31B": rf"{_FULL}|layers\.(10|16|22|28|34|40|46|52|58)\.mlp\.down_proj|layers\.(4|10|16|22|28|34|40|46|52|58)\."
    r"(input|post_attention|pre_feedforward|post_feedforward)_layernorm",
    "26B-A4B": rf"{_FULL}(\w+_layernorm(_\d)?|mlp\.\w+|router\.proj)\.|layers\.(17|23|29)\.experts\.down_proj",
}
"""The tensors of model-00002-of-00002.safetensors, where a repository has two."""


def publish(store: Store, repo: str, folder: Path) -> str:
    """Put a repository's replica on a Hub; returns the commit."""
    return store.add(repo, make_files(repo, folder))


def make_files(repo: str, folder: Path) -> dict[str, bytes | Stored]:
    """Every file of a repository, weights and tokenizer as sparse files in `folder`."""
    origin = f"google/gemma-4-31B-it{QAT}" if repo == ABLITERATED else repo
    drafter = origin.endswith("-assistant")
    card = {"license": "apache-2.0", "license_link": "https://ai.google.dev/gemma/docs/gemma_4_license"}
    card |= {"library_name": "transformers", "base_model": origin if origin != repo else repo.removesuffix(QAT)}
    generation = {"bos_token_id": 2, "eos_token_id": [1, 106, 50], "pad_token_id": 0}
    small: dict[str, object] = {
        "config.json": config_of(origin),
        "generation_config.json": generation,
        "tokenizer_config.json": {"tokenizer_class": "GemmaTokenizer"},
    }
    files: dict[str, bytes | Stored] = {name: json.dumps(value).encode() for name, value in small.items()}
    files["README.md"] = "\n".join(["---", *(f"{key}: {value}" for key, value in card.items()), "---", ""]).encode()
    kind = "drafter" if drafter else "body"
    files["tokenizer.json"] = _sparse(folder / f"{kind}.tokenizer.json", b"{", 32_169_440 if drafter else 32_169_626)
    if not drafter:
        soft = config_of(origin)["vision_config"].get("default_output_length", 280)
        files["processor_config.json"] = json.dumps({"image_processor": {"max_soft_tokens": soft}}).encode()
        files["chat_template.jinja"] = b"{{ messages }}"
    shards = _shards(origin)
    if len(shards) > 1:
        weights = {name: file for file, shapes in shards.items() for name in shapes}
        files[INDEX] = json.dumps({"metadata": {}, "weight_map": weights}).encode()
    for file, shapes in shards.items():
        header, nbytes = _header(shapes, file, metadata=origin not in _NO_METADATA)
        files[file] = _sparse(folder / f"{repo.replace('/', '--')}--{file}", header, nbytes)
    return files


def _shards(repo: str) -> dict[str, dict[str, Shape]]:
    second = next((rule for size, rule in _SECOND_SHARD.items() if f"-{size}-" in repo), None)
    if second is None or repo.endswith("-assistant"):
        return {SINGLE: shapes_of(repo)}
    shards: dict[str, dict[str, Shape]] = {f"model-0000{number}-of-00002.safetensors": {} for number in (1, 2)}
    for name, shape in shapes_of(repo).items():
        inside = name.startswith("model.language_model.") and re.search(second, name)
        shards[f"model-0000{2 if inside else 1}-of-00002.safetensors"][name] = shape
    return shards


def _header(shapes: Mapping[str, Shape], file: str, *, metadata: bool) -> tuple[bytes, int]:
    """A file's header and size; two of Google's files have no `__metadata__`."""
    shard = make_header(shapes, file)
    if metadata:
        return shard.header, shard.nbytes
    text = shard.header[8:].replace(b'"__metadata__":{"format":"pt"},', b"").rstrip()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    return header, shard.nbytes - len(shard.header) + len(header)


def _sparse(path: Path, head: bytes, nbytes: int) -> Stored:
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.write(head)
            file.truncate(nbytes)
    return Stored(path=path, sha256=hashlib.sha256(path.name.encode()).hexdigest())
