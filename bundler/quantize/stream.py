"""The forward, one decoder layer at a time: every sample passes layer N before layer N+1 is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundler.errors import SourceError


def load_processor(folder: Path) -> Any:
    """The body's own multimodal processor; SourceError if transformers cannot make it."""
    from transformers import AutoProcessor

    with _quiet_libraries(), _source_errors(folder):
        return AutoProcessor.from_pretrained(folder)


def load_model(folder: Path) -> Any:
    """The body. Its weights stay in the source's files, mapped into memory and read when used.

    SourceError if tensors that the model class builds are missing.
    """
    from transformers import AutoModelForImageTextToText

    with _quiet_libraries(), _source_errors(folder):
        model, info = AutoModelForImageTextToText.from_pretrained(
            folder, dtype="auto", attn_implementation="eager", output_loading_info=True
        )
    if info["missing_keys"]:
        raise SourceError(f"{folder} lacks tensors of its own architecture: {', '.join(sorted(info['missing_keys']))}")
    return model.eval()


def take_layers(model: Any) -> list[Any]:
    """Take the decoder layers out of the model, so that each can be freed once it has been passed."""
    from torch import nn

    layers = list(model.model.language_model.layers)
    model.model.language_model.layers = nn.ModuleList()
    return layers


@dataclass(frozen=True, kw_only=True, slots=True)
class Stream:
    """Samples on their way through the decoder: their hidden states, and what the model passes to each layer."""

    hidden: list[Any]
    """[1, tokens, hidden_size] a sample, after the layers passed so far."""
    calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]]


def start(model: Any, num_layers: int, inputs: Sequence[Mapping[str, Any]]) -> Stream:
    """Run everything before the first decoder layer, and note what the model would pass to each."""
    from torch import nn

    stream = Stream(hidden=[], calls=[])

    class Recorder(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
            if self.index == 0:
                stream.hidden.append(hidden)
            stream.calls[-1].append((args, kwargs))
            return hidden

    decoder = model.model.language_model
    decoder.layers = nn.ModuleList(Recorder(index) for index in range(num_layers))
    for sample in inputs:
        stream.calls.append([])
        model.model(**sample, use_cache=False)
    decoder.layers = nn.ModuleList()
    return stream


def advance(stream: Stream, index: int, layer: Any) -> None:
    """Send every sample through layer `index`, and forget what it was passed."""
    for number, calls in enumerate(stream.calls):
        args, kwargs = calls[index]
        stream.hidden[number] = layer(stream.hidden[number], *args, **kwargs)
        calls[index] = ((), {})


@contextmanager
def calibration_forward(model: Any) -> Iterator[None]:
    """The conditions under which llm-compressor runs calibration: no gradients, no cache, eager attention."""
    with _quiet_libraries():
        from llmcompressor.utils.helpers import calibration_forward_context

        with calibration_forward_context(model):
            yield


@contextmanager
def _source_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise SourceError(f"transformers cannot load {folder}: {exc}") from exc


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep transformers' and llm-compressor's own bars and warnings off stderr: what matters is a finding of ours."""
    import llmcompressor  # noqa: F401  (switches its logger on when imported)
    import transformers
    from loguru import logger

    libraries = ("llmcompressor", "compressed_tensors")
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for library in libraries:
        logger.disable(library)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        for library in libraries:
            logger.enable(library)
