"""A recipe: TOML text, read once into frozen values, every problem reported with its key path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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
    drafter: Drafter
    serve: Serve
    card: Card
    publish: Publish
