"""The drafter: whether it fits the body, and a copy of it byte for byte into assistant/.

A drafter has no K and V of its own: each of its layers reads those of the body's last layer of the same type. Engines
mostly do not check that the two fit; a wrong pair starts, answers, and accepts nothing. The rules are transformers'
(models/gemma4_assistant: configuration and modeling) and vLLM's (models/gemma4_mtp.py).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from bundler.checkpoint import Tensor, is_lfs_pointer, load_json
from bundler.errors import SourceError
from bundler.findings import Finding, error, note, warning
from bundler.gemma4 import kv_geometry, own_layer_types
from bundler.inventory import DTYPES, check_geometry, drafter_shapes
from bundler.source import Source, SourceFile

FOLDER = "assistant"
ARCHITECTURES = {
    "gemma4_assistant": "Gemma4AssistantForCausalLM",
    "gemma4_unified_assistant": "Gemma4UnifiedAssistantForCausalLM",
}
_MODEL_TYPE_FOR = {"gemma4": "gemma4_assistant", "gemma4_unified": "gemma4_unified_assistant"}
_CONFIG = f"{FOLDER}/config.json"
_COPIED = re.compile(
    r"README\.md|(LICEN[CS]E|NOTICE)([.-][\w.-]+)?|(config|generation_config|tokenizer|tokenizer_config|"
    r"special_tokens_map|added_tokens|vocab|processor_config|preprocessor_config)\.json|tokenizer\.model|merges\.txt|"
    r"chat_template\.(jinja|json)|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
)
_QAT = re.compile(r"(^|[-_.])qat([-_.]|$)", re.IGNORECASE)
_DEFAULT_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def check_pair(
    body_config: Mapping[str, Any], drafter_config: Mapping[str, Any], drafter_tensors: Mapping[str, Tensor]
) -> list[Finding]:
    """Every way in which a drafter does not fit a body, from both config.json and the drafter's tensor headers."""
    findings = list(_check_kind(body_config, drafter_config))
    if str(drafter_config.get("model_type")) not in ARCHITECTURES:
        return findings
    broken = check_geometry(body_config, "config.json") + check_geometry(drafter_config, _CONFIG)
    if broken:
        return findings + broken
    body, own = body_config["text_config"], drafter_config["text_config"]
    findings += _check_widths(body, own, drafter_config["backbone_hidden_size"])
    findings += _check_shared_kv(body, own)
    findings += _check_structure(drafter_config)
    return findings + check_tensors(drafter_config, drafter_tensors)


def _check_kind(body: Mapping[str, Any], drafter: Mapping[str, Any]) -> Iterator[Finding]:
    model_type, expected = str(drafter.get("model_type")), _MODEL_TYPE_FOR.get(str(body.get("model_type")))
    if model_type not in ARCHITECTURES or (expected and model_type != expected):
        message = (
            f"is {model_type!r}; a {body.get('model_type')} body takes a {expected or ' or '.join(ARCHITECTURES)}"
        )
        yield error(
            "drafter-model-type", f"{_CONFIG}: model_type", message, "name the body's own -assistant repository"
        )
    elif drafter.get("architectures") != [ARCHITECTURES[model_type]]:
        message = f"is {drafter.get('architectures')!r}, must be [{ARCHITECTURES[model_type]!r}]"
        yield error("drafter-architectures", f"{_CONFIG}: architectures", message, "use the drafter's own config.json")
    if "quantization_config" in drafter:
        message = "says that the weights are quantized; this drafter's are not read that way"
        yield error(
            "drafter-quantized", f"{_CONFIG}: quantization_config", message, "use the bf16 drafter", "vLLM #47091"
        )


def _check_widths(body: Mapping[str, Any], own: Mapping[str, Any], backbone: int) -> Iterator[Finding]:
    if backbone != body["hidden_size"]:
        message = f"is {backbone}, the body's hidden_size is {body['hidden_size']}"
        hint = "this drafter was trained for a body of another size"
        yield error("drafter-backbone", f"{_CONFIG}: backbone_hidden_size", message, hint)
    if own["vocab_size"] != body["vocab_size"]:
        message = f"is {own['vocab_size']}, the body's is {body['vocab_size']}: drafted ids mean other tokens"
        yield error("drafter-vocab", f"{_CONFIG}: text_config.vocab_size", message)


def _check_shared_kv(body: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Finding]:
    """Each drafter layer reads the cache of the last body layer of its type that keeps one: the two must agree."""
    at = f"{_CONFIG}: text_config"
    types = own_layer_types(body)
    last = {layer_type: index for index, layer_type in enumerate(types)}
    for layer_type in sorted(set(own["layer_types"])):
        if layer_type not in last:
            message = f"has {layer_type}, none of the body's layers that keep a KV cache does"
            yield error("drafter-layer-types", f"{at}.layer_types", message)
            continue
        body_layer = f"body layer {last[layer_type]} ({layer_type})"
        (heads, head_dim), (body_heads, body_head_dim) = kv_geometry(own, layer_type), kv_geometry(body, layer_type)
        full = layer_type == "full_attention"
        if head_dim != body_head_dim:
            key, message = (
                "global_head_dim" if full else "head_dim",
                f"is {head_dim}, {body_layer} has {body_head_dim}",
            )
            yield error("drafter-head-dim", f"{at}.{key}", message)
        if heads != body_heads:
            key = "num_global_key_value_heads" if full and own.get("attention_k_eq_v") else "num_key_value_heads"
            yield error(
                "drafter-kv-heads", f"{at}.{key}", f"is {heads} for {layer_type}, {body_layer} has {body_heads}"
            )
        rope, body_rope = _rope(own, layer_type), _rope(body, layer_type)
        if rope != body_rope:
            message = f"is {rope}, {body_layer} has {body_rope}: keys are rotated otherwise than queries"
            yield error("drafter-rope", f"{at}.rope_parameters.{layer_type}", message)
    if "sliding_attention" in own["layer_types"] and own["sliding_window"] != body["sliding_window"]:
        message = f"is {own['sliding_window']}, the body's is {body['sliding_window']}"
        yield error("drafter-sliding-window", f"{at}.sliding_window", message)


def _rope(text: Mapping[str, Any], layer_type: str) -> object:
    rope = text.get("rope_parameters") or _DEFAULT_ROPE
    return rope.get(layer_type) if isinstance(rope, Mapping) else rope


def _check_structure(config: Mapping[str, Any]) -> Iterator[Finding]:
    text, at = config["text_config"], f"{_CONFIG}: text_config"
    layers, shared = text["num_hidden_layers"], text.get("num_kv_shared_layers") or 0
    if shared not in (0, layers):
        message = f"is {shared}; all {layers} layers of a drafter read the body's K and V"
        yield error("drafter-kv-shared", f"{at}.num_kv_shared_layers", message)
    unified = config["model_type"] == "gemma4_unified_assistant"
    for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
        if text.get(key) if unified else text.get(key) != 0:  # gemma4_text has defaults that are not 0
            yield error("drafter-per-layer", f"{at}.{key}", f"is {text.get(key)!r}, must be 0 in a drafter")
    if text.get("enable_moe_block"):
        yield error("drafter-moe", f"{at}.enable_moe_block", "a drafter has no mixture of experts")
    if text.get("use_double_wide_mlp"):
        yield error("drafter-double-wide", f"{at}.use_double_wide_mlp", "a drafter has no double-wide mlp")
    if config.get("use_ordered_embeddings") and text["vocab_size"] % config["num_centroids"]:
        message = f"is {config['num_centroids']}, which does not divide vocab_size {text['vocab_size']}"
        yield error("drafter-centroids", f"{_CONFIG}: num_centroids", message)


def check_tensors(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Finding]:
    """Whether a drafter holds exactly the tensors that its config.json promises."""
    expected = drafter_shapes(config)
    tied = config.get("tie_word_embeddings", True)
    head = expected["model.embed_tokens.weight"]
    findings = []
    if not tied and "lm_head.weight" not in tensors:
        message = "is false, but there is no lm_head.weight: every draft would be random"
        findings.append(error("drafter-untied", f"{_CONFIG}: tie_word_embeddings", message))
    if not tied or "lm_head.weight" in tensors:
        expected["lm_head.weight"] = head
    for name in sorted(expected.keys() - tensors.keys() - {"lm_head.weight"}):
        message = "is not in the drafter: an engine would leave it random"
        findings.append(error("drafter-tensor-missing", f"{FOLDER}: {name}", message))
    for name in sorted(tensors.keys() - expected.keys()):
        message = f"(in {tensors[name].file}) belongs to no module that config.json describes"
        findings.append(error("drafter-tensor-unexpected", f"{FOLDER}: {name}", message))
    for name in sorted(expected.keys() & tensors.keys()):
        have, want = tensors[name].shape, expected[name]
        where = f"{FOLDER}/{tensors[name].file}: {name}"
        if have.dims != want.dims:
            message = f"has shape {list(have.dims)}, config.json means {list(want.dims)}"
            findings.append(error("drafter-tensor-shape", where, message))
        message = f"is {have.dtype}, config.json means {want.dtype}"
        if have.dtype != want.dtype and {have.dtype, want.dtype} <= set(DTYPES.values()):
            findings.append(warning("drafter-tensor-dtype", where, message))
        elif have.dtype != want.dtype:
            findings.append(error("drafter-tensor-dtype", where, message))
    return findings


def check_token_ordering(folder: Path, tensors: Mapping[str, Tensor]) -> list[Finding]:
    """Whether a drafter with ordered embeddings lists every token once; any other order drafts wrong tokens."""
    import numpy as np

    name = "masked_embedding.token_ordering"
    tensor = tensors.get(name)
    if tensor is None or tensor.shape.dtype != "I64":
        return []
    data = np.memmap(folder / tensor.file, dtype=np.uint8, mode="r")[tensor.start : tensor.end].view("<i8")
    if np.array_equal(np.sort(data), np.arange(len(data))):
        return []
    where = f"{FOLDER}/{tensor.file}: {name}"
    return [error("drafter-token-ordering", where, "does not list every token exactly once", "download it again")]


def check_tokenizers(body_folder: Path, drafter_folder: Path) -> list[Finding]:
    """Whether two tokenizer.json give every token the same id. Engines use the body's for both models."""
    body, drafter = body_folder / "tokenizer.json", drafter_folder / "tokenizer.json"
    where = f"{FOLDER}/tokenizer.json"
    if not drafter.is_file() or not body.is_file():
        lacking = where if body.is_file() else "tokenizer.json"
        message = "is not here, so the two vocabularies cannot be compared"
        return [warning("drafter-tokenizer-missing", lacking, message)]
    try:
        if body.read_bytes() == drafter.read_bytes():
            return []
        ids, drafter_ids = make_vocabulary(load_json(body)), make_vocabulary(load_json(drafter))
    except (SourceError, OSError) as exc:
        return [error("drafter-tokenizer", where, f"cannot be compared with the body's: {exc}")]
    if ids == drafter_ids:
        message = "differs from the body's in bytes; every token has the same id"
        return [note("drafter-tokenizer-bytes", where, message)]
    differing = sorted(token for token in ids.keys() | drafter_ids.keys() if ids.get(token) != drafter_ids.get(token))
    shown = ", ".join(f"{token!r} ({ids.get(token)} in the body, {drafter_ids.get(token)})" for token in differing[:3])
    message = f"{len(differing)} tokens differ from the body's: {shown}"
    hint = "a drafter works only with the vocabulary that it was trained with"
    return [error("drafter-tokenizer", where, message, hint)]


def make_vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Token → id of a tokenizer.json, added tokens included; SourceError if it has no such table."""
    try:
        vocabulary = tokenizer["model"]["vocab"]
        pairs = vocabulary.items() if isinstance(vocabulary, dict) else ((v[0], i) for i, v in enumerate(vocabulary))
        ids = {str(token): int(index) for token, index in pairs}
        ids.update({str(token["content"]): int(token["id"]) for token in tokenizer.get("added_tokens") or ()})
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as exc:
        raise SourceError(f"there is no vocabulary in tokenizer.json: {exc!r}") from exc
    return ids


def check_source_names(body_model: str, drafter_model: str, companion: bool | None = None) -> list[Finding]:
    """Whether a QAT body is paired with the drafter of the QAT checkpoint, as far as repository names tell.

    `companion` says whether `companion_of` exists; None where nobody looked.
    """
    name = companion_of(body_model, drafter_model)
    if name is None or companion is False:
        return []
    message = f"{drafter_model} is the drafter of the plain body, and {body_model} comes from a QAT checkpoint"
    hint = f"{name} is trained for it; measure both"
    return [warning("drafter-not-qat", "drafter.model", message, hint)]


def companion_of(body_model: str, drafter_model: str) -> str | None:
    """The QAT drafter that belongs to a QAT body, by Google's names, where the drafter given is the plain one."""
    name = drafter_model.rpartition("/")[2]
    if not _QAT.search(body_model.rpartition("/")[2]) or _QAT.search(name) or not name.endswith("-it-assistant"):
        return None
    return drafter_model.removesuffix("-assistant") + "-qat-q4_0-unquantized-assistant"


def check_source_files(body: Source, drafter: Source) -> list[Finding]:
    """What a drafter's list of files lacks, and whether its tokenizer can be told from the body's by its hash."""
    hashes = [{file.path: file.sha256 for file in source.files} for source in (body, drafter)]
    findings = []
    for path, code, why in (
        ("README.md", "drafter-card-missing", "the bundle cannot carry the drafter's own card"),
        ("generation_config.json", "drafter-generation-missing", "engines that read it fall back to their defaults"),
    ):
        if path not in hashes[1]:
            message = f"{drafter.model} does not have it: {why}"
            findings.append(warning(code, f"{FOLDER}/{path}", message))
    ids, drafter_ids = (files.get("tokenizer.json") for files in hashes)
    if ids and drafter_ids and ids != drafter_ids:
        message = "is another file than the body's; the vocabularies are compared once both are here"
        findings.append(note("drafter-tokenizer-unseen", f"{FOLDER}/tokenizer.json", message))
    return findings


def copy(source_folder: Path, files: Iterable[SourceFile], destination: Path) -> list[SourceFile]:
    """Copy a drafter's own files byte for byte, and return them with the SHA-256 of what was copied.

    Weights, configs, tokenizer, chat template, card and licence come along; pickles and repository files do not.
    SourceError if a file is absent, a Git LFS pointer, or not the size and hash that `files` says.
    """
    destination.mkdir(parents=True, exist_ok=True)
    copied = [_copy_file(source_folder, file, destination) for file in files if _COPIED.fullmatch(file.path)]
    return sorted(copied, key=lambda file: file.path)


def _copy_file(source_folder: Path, file: SourceFile, destination: Path) -> SourceFile:
    source, part = source_folder / file.path, destination / f"{file.path}.part"
    if is_lfs_pointer(source):
        raise SourceError(f"{source} is a Git LFS pointer, not the file", hint="download the real file")
    digest, size = hashlib.sha256(), 0
    try:
        with source.open("rb") as reader, part.open("wb") as writer:
            while chunk := reader.read(1 << 22):
                digest.update(chunk)
                size += writer.write(chunk)
    except OSError as exc:
        raise SourceError(f"cannot copy {source} to {destination}: {exc.strerror}") from exc
    sha256 = digest.hexdigest()
    if size != file.size_bytes or file.sha256 not in (None, sha256):
        part.unlink()
        raise SourceError(
            f"{source} is {size} bytes with SHA-256 {sha256}, its repository says {file.size_bytes} and {file.sha256}",
            hint="download it again",
        )
    part.replace(destination / file.path)
    return SourceFile(path=file.path, size_bytes=size, sha256=sha256)
