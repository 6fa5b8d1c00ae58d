"""What a recipe's values may be: a check per key, then checks of keys against each other. No file is looked at."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from bundler.findings import Finding, error
from bundler.names import check_name

Check = Callable[[str, Any], Finding | None]
"""(key path, well-typed value) → what is wrong with it."""

DATASET_SUFFIXES = (".jsonl", ".parquet")
_SEGMENT = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_MAX_ID_LENGTH = 96  # this and the segment: huggingface_hub's validate_repo_id
_WEIGHT_OBSERVERS = (
    *("memoryless_minmax", "memoryless_mse", "imatrix_mse"),
    *("nvfp4_expanded_mse", "nvfp4_expanded_imatrix"),
)
_INPUT_OBSERVERS = ("static_minmax", "minmax")


def is_local(name: str) -> bool:
    """Whether a recipe means a local path by `name`, and not a Hub id."""
    return name in (".", "..", "~") or name.startswith(("./", "../", "/", "~/")) or name.endswith(DATASET_SUFFIXES)


def check_value(key: str, value: Any) -> Iterator[Finding]:
    """What is wrong with one well-typed value, entry by entry where it is a list (`card.languages[1]`)."""
    entries = {f"{key}[{n}]": item for n, item in enumerate(value)} if isinstance(value, tuple) else {key: value}
    if len(set(entries.values())) < len(entries):
        yield error("repeated-value", key, "holds the same entry twice")
    for where, entry in entries.items():
        if isinstance(entry, str) and not entry.strip():
            yield error("empty-value", where, "is empty", "leave it out instead")
        elif key in _CHECKS and (finding := _CHECKS[key](where, entry)) is not None:
            yield finding


def check_together(values: Mapping[str, Any]) -> Iterator[Finding]:
    """Keys that contradict each other."""
    for name, keys in (
        ("body.model", ["body.revision"]),
        ("drafter.model", ["drafter.revision"]),
        ("calibration.dataset", ["calibration.config", "calibration.split", "calibration.revision"]),
    ):
        for key in keys:
            if key in values and name in values and is_local(values[name]):
                message = f"goes with a Hub repo, and {name} is the local {values[name]!r}"
                yield error("hub-only-key", key, message, "leave it out")
    for key, observers in (("weight_observer", _WEIGHT_OBSERVERS), ("input_observer", _INPUT_OBSERVERS)):
        chosen = values.get(f"quantization.{key}", observers[0])
        if chosen in observers[1:] and values.get("quantization.compute", "fast") == "fast":
            message = f"{chosen!r} is llm-compressor's own, which only exact calibration runs"
            yield error("exact-only", f"quantization.{key}", message, 'add `compute = "exact"` to [quantization]')
    if "body.model" in values and values["body.model"] == values.get("drafter.model"):
        yield error("same-source", "drafter.model", "is the body itself", "name the assistant checkpoint")
    for key in ("card.sections", "card.measurements"):
        names = [path.name for path in dict.fromkeys(values.get(key, ()))]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield error(
                "same-name", key, f"two files are called {twice[0]}; a bundle holds them in one folder", "rename one"
            )


def check_refused_key(where: str) -> Finding | None:
    """An error for a key that looks sensible and cannot be had, or None."""
    name = where.rpartition(".")[2]
    if name in ("device_map", "device", "devices", "gpus", "num_gpus", "max_memory"):
        return error(
            "one-device",
            where,
            "calibration runs on one device: spread over GPUs without peer-to-peer access, Gemma 4's activations are "
            "corrupted silently",
            "leave it out; layers are streamed, so the model need not fit in memory",
            "accelerate #4036, transformers #47942",
        )
    if name in ("targets", "include"):
        return error(
            "fixed-targets",
            where,
            "what is quantized is fixed: every Linear of the decoder layers; embeddings, lm_head, towers and routers "
            "stay bf16, because quantizing the tied head also changes the input of layer 0",
            "use quantization.ignore to keep more in bf16",
            "llm-compressor #1306, vLLM #45535",
        )
    if name in ("token", "hf_token"):
        return error("token-in-recipe", where, "a recipe is published, so it holds no token", "set HF_TOKEN instead")
    if name == "subfolder":
        return error(
            "no-subfolder", where, "a checkpoint is a whole repo or folder", "give its own repo or local folder"
        )
    return None


def _between(low: int, high: int | None = None, why: str = "") -> Check:
    bounds = f"at least {low}" if high is None else f"from {low} to {high}"

    def check(where: str, value: int) -> Finding | None:
        if low <= value and (high is None or value <= high):
            return None
        return error("out-of-range", where, f"must be {bounds}, is {value}{why and f': {why}'}")

    return check


def _number(low: float, high: float | None = None) -> Check:
    bounds = f"at least {low:g}" if high is None else f"from {low:g} to {high:g}"

    def check(where: str, value: float) -> Finding | None:
        if low <= value and (high is None or value <= high):
            return None
        return error("out-of-range", where, f"must be {bounds}, is {value}")

    return check


def _heldout(where: str, value: str) -> Finding | None:
    if value.endswith(DATASET_SUFFIXES):
        return None
    return error("bad-dataset", where, f"{value!r} is no .jsonl or .parquet file", "rows of `messages`")


def _one_of(choices: Sequence[str], reasons: Mapping[str, str] | None = None) -> Check:
    def check(where: str, value: str) -> Finding | None:
        if value in choices:
            return None
        reason = (reasons or {}).get(value.lower(), "")
        near = difflib.get_close_matches(value.lower(), [choice.lower() for choice in choices], n=1)
        meant = [choice for choice in choices if near == [choice.lower()]]
        hint = f"did you mean {meant[0]!r}?" if meant else f"one of: {', '.join(choices)}"
        return error("unknown-value", where, f"cannot be {value!r}{reason and f': {reason}'}", hint)

    return check


def _name(where: str, value: str) -> Finding | None:
    if not re.fullmatch(_SEGMENT, value) or "--" in value or ".." in value or value.endswith(".git"):
        hint = "letters, digits, `-`, `_` and `.`, as in a Hub repo's name"
        return error("bad-name", where, f"{value!r} is no name for a folder and a repo", hint)
    if len(value) > _MAX_ID_LENGTH:
        return error("bad-name", where, f"is {len(value)} characters long, at most {_MAX_ID_LENGTH} work")
    return _draft_method(where, value)


def _draft_method(where: str, value: str) -> Finding | None:
    return next(iter(check_name(value, where)), None)


def _hub_id(where: str, value: str) -> Finding | None:
    if url := re.match(r"(?:https?://)?(?:huggingface\.co|hf\.co)/(?:datasets/)?([^/]+/[^/]+)", value):
        return error("bad-hub-id", where, f"{value!r} is an address, not a Hub id", f"write {url[1]!r}")
    parts = value.split("/")
    if len(parts) > 2 and all(re.fullmatch(_SEGMENT, part) for part in parts):
        message = f"{value!r} has more than one slash: a Hub id is ORG/NAME, and engines have no subfolder option"
        return error(
            "bad-hub-id", where, message, "give the repo itself, or a local folder as ./FOLDER", "vLLM #52940"
        )
    if len(parts) == 1:
        return error(
            "bad-hub-id", where, f"{value!r} names no owner", f"write ORG/{value}, or ./{value} if it is local"
        )
    legal = all(re.fullmatch(_SEGMENT, part) and "--" not in part and ".." not in part for part in parts)
    if not legal or len(value) > _MAX_ID_LENGTH or value.endswith(".git"):
        return error("bad-hub-id", where, f"{value!r} is no Hub id", "ORG/NAME, or a local path that starts with ./")
    return None


def _model(where: str, value: str) -> Finding | None:
    if value.endswith(DATASET_SUFFIXES):
        return error("bad-hub-id", where, f"{value!r} is a dataset file, not a checkpoint")
    return None if is_local(value) else _hub_id(where, value)


def _dataset(where: str, value: str) -> Finding | None:
    if is_local(value) and not value.endswith(DATASET_SUFFIXES):
        return error("bad-dataset", where, f"{value!r} is no .jsonl or .parquet file", "rows of `messages`")
    if value.endswith((".json", ".csv", ".txt")):
        return error("bad-dataset", where, f"{value!r} is no .jsonl or .parquet file", "rows of `messages`")
    return None if is_local(value) else _hub_id(where, value)


def _repo_id(where: str, value: str) -> Finding | None:
    return _hub_id(where, value) or _draft_method(where, value)


def _ignore(where: str, value: str) -> Finding | None:
    if not value.startswith("re:"):
        if re.fullmatch(r"[a-z]\w*(\.\w+)*", value):
            return None
        hint = f"write {'re:' + value!r}" if re.search(r"[*+?\\^$|()\[\]]", value) else "use lower-case module names"
        return error("bad-pattern", where, f"{value!r} is no module name; it would match nothing", hint, "vLLM #31623")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            re.compile(value[3:])
    except (re.error, Warning, RecursionError, OverflowError) as exc:
        return error("bad-pattern", where, f"{value!r} is no regular expression: {exc}")
    return None if value[3:] else error("bad-pattern", where, "matches every module", "name what is to stay bf16")


def _version(where: str, value: str) -> Finding | None:
    try:
        wanted = SpecifierSet(value)
    except InvalidSpecifier:
        hint = "as in `>=0.23` or `>=0.21,!=0.22.*`"
        return error("bad-version", where, f"{value!r} is no set of version specifiers", hint, "PEP 440")
    mentioned = [part.version.removesuffix(".*") for part in wanted]
    tries = ["0", "99999", *mentioned, *(f"{version}.1" for version in mentioned if re.fullmatch(r"[\d.]+", version))]
    if not any(wanted.contains(version, prereleases=True) for version in tries):
        return error("bad-version", where, f"no version can satisfy {value!r}")
    return None


def _language(where: str, value: str) -> Finding | None:
    if re.fullmatch(r"[a-z]{2,3}(-[A-Za-z0-9]{2,8})*", value):
        return None
    return error("bad-language", where, f"{value!r} is no language code", "as in `ja`, `en` or `zh-Hant` (BCP 47)")


def _title(where: str, value: str) -> Finding | None:
    return error("bad-title", where, "must be one line") if len(value.splitlines()) > 1 else None


def _section(where: str, value: Path) -> Finding | None:
    return None if value.suffix == ".md" else error("bad-section", where, f"{value} is no .md file")


def _tag(where: str, value: str) -> Finding | None:
    illegal = re.search(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|/\.|\.lock(/|$)|^[./-]|[./]$|^@$", value)
    if illegal is None:
        return None
    return error("bad-tag", where, f"{value!r} is no legal git tag", "as in `v1.0`", "git-check-ref-format")


_CHECKS: Mapping[str, Check] = {
    "name": _name,
    "body.model": _model,
    "quantization.scheme": _one_of(
        ("NVFP4",),
        {
            "nvfp4a16": "bundler bakes W4A4, weights and activations",
            "fp8": "bundler bakes 4-bit bodies only",
            "mxfp4": "its groups of 32 and power-of-two scales are another format",
        },
    ),
    "quantization.ignore": _ignore,
    "quantization.compute": _one_of(("exact", "fast")),
    "quantization.weight_observer": _one_of(_WEIGHT_OBSERVERS),
    "quantization.input_observer": _one_of(_INPUT_OBSERVERS),
    "calibration.dataset": _dataset,
    "calibration.num_samples": _between(1, why="the activations' global scales come from samples"),
    "calibration.max_seq_length": _between(1),
    "calibration.seed": _between(0, 2**32 - 1),
    "fidelity.dataset": _heldout,
    "fidelity.num_samples": _between(1),
    "fidelity.max_seq_length": _between(2),
    "fidelity.max_kl_divergence": _number(0),
    "fidelity.min_top1_agreement": _number(0, 1),
    "fidelity.max_perplexity_ratio": _number(0),
    "fidelity.min_sqnr_db": _number(-100, 100),
    "drafter.model": _model,
    "drafter.num_speculative_tokens": _between(1, 16),
    "serve.engine": _one_of(("vllm",)),
    "serve.version": _version,
    "serve.tensor_parallel_size": _between(1),
    "serve.kv_cache_dtype": _one_of(
        ("auto", "bfloat16", "fp8"), {"nvfp4": "vLLM has no such cache for Gemma 4 on SM12x before #46329"}
    ),
    "serve.max_model_len": _between(1),
    "serve.interconnect": _one_of(("nvlink", "pcie")),
    "card.title": _title,
    "card.languages": _language,
    "card.sections": _section,
    "publish.repo_id": _repo_id,
    "publish.tag": _tag,
}
