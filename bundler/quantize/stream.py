"""The calibration forward, one decoder layer at a time: every sample passes layer N before layer N+1 is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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


class LayerStream:
    """The samples on their way through the decoder.

    `advance(layer)` sends every sample through one layer and keeps only its output; nothing refers to a layer once it
    has been passed, so that its memory can be freed.
    """

    def __init__(self, model: Any, inputs: Sequence[Mapping[str, Any]]) -> None:
        decoder = model.model.language_model
        self.layers: list[Any] = list(decoder.layers)
        self._hidden: list[Any] = []
        self._calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []
        decoder.layers = _make_recorders(len(self.layers), self)
        for sample in inputs:
            self._calls.append([])
            model.model(**sample, use_cache=False)

    def record(self, index: int, hidden: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take down what the model passes to layer `index` for the current sample."""
        if index == 0:
            self._hidden.append(hidden)
        self._calls[-1].append((args, kwargs))

    def advance(self, index: int) -> None:
        """Send every sample through layer `index`; hidden states are [1, tokens, hidden_size]."""
        layer = self.layers[index]
        for number, calls in enumerate(self._calls):
            args, kwargs = calls[index]
            self._hidden[number] = layer(self._hidden[number], *args, **kwargs)

    def drop(self, index: int) -> None:
        """Forget a layer that has been passed."""
        self.layers[index] = None
        for calls in self._calls:
            calls[index] = ((), {})


@contextmanager
def calibration_forward(model: Any) -> Iterator[None]:
    """The conditions under which llm-compressor runs calibration: no gradients, no cache, eager attention."""
    with _quiet_libraries():
        from llmcompressor.utils.helpers import calibration_forward_context

        with calibration_forward_context(model):
            yield


def _make_recorders(count: int, stream: LayerStream) -> Any:
    from torch import nn

    class Recorder(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, hidden: Any, *args: Any, **kwargs: Any) -> Any:
            stream.record(self.index, hidden, args, kwargs)
            return hidden

    return nn.ModuleList(Recorder(index) for index in range(count))


@contextmanager
def _source_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise SourceError(f"transformers cannot load {folder}: {exc}") from exc


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keep transformers' and llm-compressor's own bars and warnings off stderr: what matters is a finding of ours."""
    import transformers
    from loguru import logger

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for library in ("llmcompressor", "compressed_tensors"):
        logger.disable(library)
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        for library in ("llmcompressor", "compressed_tensors"):
            logger.enable(library)
