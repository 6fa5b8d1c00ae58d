"""A recipe: TOML text, read once into frozen values, every problem reported with its key path."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

from bundler.errors import RecipeError
from bundler.findings import Finding, error
from bundler.recipe_rules import DATASET_SUFFIXES, check_refused_key, check_together, check_value, is_local

EDITION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRef:
    """A checkpoint as the recipe names it: a Hub id, or a folder relative to the recipe's own folder."""

    model: str
    revision: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantization:
    """What is done to the body. Names are llm-compressor's and compressed-tensors' own."""

    scheme: str = "NVFP4"
    ignore: tuple[str, ...] = ()
    """Further modules that stay as the source has them: names, or `re:` patterns matched from the start."""
    compute: str = "fast"
    """`exact`: llm-compressor's own forward, byte for byte; `fast`: at the speed of the matrix units."""
    weight_observer: str = "memoryless_minmax"
    input_observer: str = "static_minmax"


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """The text (and images) that set the activation ranges."""

    dataset: str
    """A Hub dataset id, or a .jsonl/.parquet file of `messages` relative to the recipe's folder."""
    config: str | None = None
    split: str = "train"
    revision: str | None = None
    num_samples: int = 256
    max_seq_length: int = 2048
    """Tokens; longer samples are cut."""
    seed: int = 42


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """How close the baked body must stay to its source, on held-out conversations; defaults catch collapse."""

    dataset: str | None = None
    """A .jsonl/.parquet file; left out, the calibration dataset's rows after those that calibrated."""
    num_samples: int = 8
    max_seq_length: int = 512
    max_kl_divergence: float = 1.0
    """Nats a token."""
    min_top1_agreement: float = 0.5
    max_perplexity_ratio: float = 2.0
    min_sqnr_db: float = 3.0
    """Of every quantized module; at 3 dB its error has half the power of its output."""
    accept: str | None = None
    """Why a worse result is accepted; the card shows it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Drafter:
    """The draft model that is copied into assistant/."""

    model: str
    revision: str | None = None
    num_speculative_tokens: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Serve:
    """How the publisher means the bundle to be served; engine facts and the serve line follow from it."""

    engine: str = "vllm"
    version: str = ">=0.21"
    """A PEP 440 specifier set of engine versions."""
    tensor_parallel_size: int = 1
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    """Tokens."""
    interconnect: str = "nvlink"
    """`nvlink` (or any link with peer-to-peer access) or `pcie` (without)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """What a person adds to the card beside what is recorded."""

    title: str | None = None
    summary: str | None = None
    languages: tuple[str, ...] = ()
    sections: tuple[Path, ...] = ()
    """Markdown files, in order, each a section of its own; relative to the recipe's folder."""
    warnings: tuple[str, ...] = ()
    measurements: tuple[Path, ...] = ()
    """Measurement files; relative to the recipe's folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Publish:
    """Where `bundle push` sends the bundle."""

    repo_id: str | None = None
    private: bool = True
    tag: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One bundle, as a person asked for it. `text` is the file's own text; it travels in the bundle."""

    text: str
    folder: Path
    """The folder that relative paths start from."""
    name: str
    body: SourceRef
    quantization: Quantization
    calibration: Calibration
    fidelity: Fidelity
    drafter: Drafter
    serve: Serve
    card: Card
    publish: Publish


_TABLES: Mapping[str, Any] = {name: hint for name, hint in get_type_hints(Recipe).items() if is_dataclass(hint)}
KEYS = ("name", *(f"{table}.{field.name}" for table, cls in _TABLES.items() for field in fields(cls)))
"""Every key path of a recipe, beside `edition`."""


def load(path: Path, changes: Iterable[str] = ()) -> Recipe:
    """Read a recipe file; RecipeError with every problem it has, files that it names and that are absent included.

    `changes` are tried on it: `calibration.num_samples=32`, or `serve.max_model_len=` to leave a key out. The
    recipe's `text` stays the file's own.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as exc:
        near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.toml")], n=1)
        hint = f"did you mean {path.with_name(near[0])}?" if near else None
        reason = exc.strerror if isinstance(exc, OSError) else "not UTF-8 text"
        raise RecipeError(f"cannot read the recipe {path}: {reason}", hint=hint) from exc
    values, findings = _read(text, changes)
    findings += _missing_files(values, path.parent)
    if findings:
        _refuse(str(path), findings)
    return _make(text, path.parent, values)


def parse(text: str, folder: Path) -> Recipe:
    """A recipe's text as a value, without a look at any file; RecipeError with every problem it has."""
    values, findings = _read(text)
    if findings:
        _refuse("the recipe", findings)
    return _make(text, folder, values)


def load_bundled(bundle: Path) -> Recipe:
    """The recipe that a finished bundle carries; files that it names lay beside the recipe, not in the bundle."""
    path = bundle / "recipe.toml"
    try:
        return parse(path.read_text(encoding="utf-8"), bundle)
    except (OSError, UnicodeDecodeError) as exc:
        raise RecipeError(f"cannot read {path}: {exc}", hint="is this a bundle?") from exc


def local_path(name: str, folder: Path) -> Path | None:
    """The path that a recipe in `folder` means by a model or dataset `name`; None where `name` is a Hub id."""
    return folder / Path(name).expanduser() if is_local(name) else None


def _refuse(what: str, findings: list[Finding]) -> NoReturn:
    count = "1 problem" if len(findings) == 1 else f"{len(findings)} problems"
    raise RecipeError(f"{what} has {count}", hint="recipes/README.md explains every key", findings=findings)


def _make(text: str, folder: Path, values: Mapping[str, Any]) -> Recipe:
    tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        if table:
            tables[table][name] = value
    made = {name: cls(**tables[name]) for name, cls in _TABLES.items()}
    return Recipe(text=text, folder=folder, name=values["name"], **made)


def _read(text: str, changes: Iterable[str] = ()) -> tuple[dict[str, Any], list[Finding]]:
    """Every well-typed value that the text gives, by key path (`calibration.seed`), and what is wrong with others."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as exc:  # int() and the parser give up on absurd numbers and nesting
        place = re.search(r" \(at (.*)\)$", str(exc))
        message = str(exc)[: place.start()] if place else str(exc)
        return {}, [error("not-toml", place[1] if place else "the text", f"not TOML: {message}")]
    edition = document.pop("edition", None)
    if edition is None:
        return {}, [error("missing-key", "edition", "missing", f"write `edition = {EDITION}` in the first line")]
    if type(edition) is not int or edition != EDITION:
        hint = "upgrade bundler" if type(edition) is int and edition > EDITION else f"write `edition = {EDITION}`"
        return {}, [
            error("unknown-edition", "edition", f"this bundler reads edition {EDITION}, not {edition!r}", hint)
        ]

    values: dict[str, Any] = {}
    findings = [finding for change in changes if (finding := _change(document, change)) is not None]
    findings += _read_table("", {"name": str}, {"name"}, document, values)
    for name, cls in _TABLES.items():
        table = document.get(name, {})
        if isinstance(table, dict):
            required = {field.name for field in fields(cls) if field.default is MISSING}
            findings += _read_table(f"{name}.", get_type_hints(cls), required, table, values)
        else:
            findings.append(error("wrong-type", name, f"must be a table, is {_kind(table)}", f"write [{name}]"))
    for key, value in values.items():
        findings += check_value(key, value)
    findings += check_together(values)
    return values, findings


def _change(document: dict[str, Any], change: str) -> Finding | None:
    """Put one `key=value` into a recipe's document, or say why that cannot be."""
    key, equals, text = (part.strip() for part in change.partition("="))
    if key not in KEYS or not equals:
        near = difflib.get_close_matches(key, KEYS, n=1)
        hint = f"did you mean `{near[0]}=…`?" if near else "write it as `calibration.num_samples=32`"
        return error("unknown-key", f"--set {change}", "no such key" if equals else "has no `=`", hint)
    table, _, name = key.rpartition(".")
    holder = document.setdefault(table, {}) if table else document
    if isinstance(holder, dict):  # else the table itself is reported
        wanted = get_type_hints(_TABLES[table])[name] if table else str
        holder[name] = _typed(text, as_text=str in (wanted, *get_args(wanted)) and get_origin(wanted) is not tuple)
        if not text:
            del holder[name]
    return None


def _typed(text: str, *, as_text: bool) -> object:
    """A value as TOML would have it; text that is no TOML, or is meant to be a string, stays text."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
    return text if as_text and not isinstance(value, str) else value


def _read_table(
    prefix: str, hints: Mapping[str, Any], required: set[str], table: Mapping[str, object], values: dict[str, Any]
) -> Iterator[Finding]:
    """Put the well-typed values of one table into `values`; yield what is wrong with the others."""
    for name, value in table.items():
        if name in hints:
            try:
                values[prefix + name] = _convert(hints[name], value)
            except TypeError as exc:
                yield error("wrong-type", prefix + name, str(exc))
        elif prefix or name not in _TABLES:
            yield check_refused_key(prefix + name) or _unknown_key(prefix, name)
    for name in sorted(required - set(table)):
        yield error("missing-key", prefix + name, "missing", "every recipe says this")


def _convert(hint: Any, value: object) -> Any:
    """A TOML value as a field of type `hint` holds it; TypeError if TOML holds something else there."""
    if get_origin(hint) is tuple:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise TypeError(f"must be a list of strings, is {_kind(value)}")
        return tuple(get_args(hint)[0](item) for item in value)
    wanted = next(iter(get_args(hint)), hint)  # `str | None`: None stands for a key that is left out
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise TypeError(f"must be {_KINDS[wanted]}, is {_kind(value)}")
    return value


_KINDS = {
    str: "a string",
    int: "an integer",
    bool: "true or false",
    float: "a number",
    list: "a list",
    dict: "a table",
}


def _kind(value: object) -> str:
    odd = [item for item in value if not isinstance(item, str)] if isinstance(value, list) else []
    return f"a list that holds {_kind(odd[0])}" if odd else _KINDS.get(type(value), "a date or time")


def _unknown_key(prefix: str, name: str) -> Finding:
    here = [key for key in KEYS if key.startswith(prefix)] if prefix else ["name", *_TABLES]
    bare = {key.rpartition(".")[2]: key for key in (*KEYS, *here)}  # the last one wins: a namesake in this table
    near = difflib.get_close_matches(name, [key.removeprefix(prefix) for key in here], n=1)
    near = near or difflib.get_close_matches(name, bare, n=1)
    hint = f"did you mean `{bare[near[0]]}`?" if near else f"keys here: {', '.join(here)}"
    return error("unknown-key", prefix + name, "no such key", hint)


def _missing_files(values: Mapping[str, Any], folder: Path) -> Iterator[Finding]:
    paths = [(key, folder / path) for key in ("card.sections", "card.measurements") for path in values.get(key, ())]
    for key in ("calibration.dataset", "fidelity.dataset"):
        dataset = local_path(values.get(key, ""), folder)
        if dataset is not None and dataset.suffix in DATASET_SUFFIXES:
            paths.append((key, dataset))
    for key, path in paths:
        try:
            present = path.is_file()
        except OSError:  # a name longer than the file system takes
            present = False
        if not present:
            yield error("missing-file", key, f"{path} is not there", "paths start at the recipe's own folder")
