"""The forward, one decoder layer at a time: every sample passes layer N before layer N+1 is touched."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundler.errors import SourceError

if TYPE_CHECKING:
    from torch import Tensor

    from bundler.quantize.memory import Room

Inputs = Mapping[str, Any]


def load_processor(folder: Path) -> Any:
    """The body's own multimodal processor; SourceError if transformers cannot make it."""
    from transformers import AutoProcessor

    with quiet_libraries(), _source_errors(folder):
        return AutoProcessor.from_pretrained(folder)


def load_model(folder: Path, attention: str) -> Any:
    """The body. Its weights stay in the source's files, mapped into memory and read when used.

    SourceError if tensors that the model class builds are missing.
    """
    from transformers import AutoModelForImageTextToText

    with quiet_libraries(), _source_errors(folder):
        model, info = AutoModelForImageTextToText.from_pretrained(
            folder, dtype="auto", attn_implementation=attention, output_loading_info=True
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


def make_batches(inputs: Sequence[Inputs], batch_tokens: int) -> list[Inputs]:
    """Put text samples of one length together, up to `batch_tokens` tokens; one with an image stays alone.

    With one token a batch nothing is put together and the order is kept, which some observers depend on.
    """
    import torch

    if batch_tokens == 1:
        return list(inputs)
    alone: list[Inputs] = []
    by_length: dict[int, list[Inputs]] = {}
    for sample in inputs:
        shape = sample["input_ids"].shape
        if all(tensor.shape == shape for tensor in sample.values()):
            # without image tokens a causal mask is all there is, and attention need not be given one
            sample = {key: value for key, value in sample.items() if key != "mm_token_type_ids" or value.any()}
            by_length.setdefault(shape[1], []).append(sample)
        else:
            alone.append(sample)
    batches = []
    for length, samples in sorted(by_length.items()):
        step = max(1, batch_tokens // length)
        for first in range(0, len(samples), step):
            part = samples[first : first + step]
            batches.append({key: torch.cat([sample[key] for sample in part]) for key in part[0]})
    return batches + alone


@dataclass(kw_only=True, slots=True)
class Stream:
    """Samples on their way through the decoder: their hidden states, and what the model passes to each layer."""

    hidden: Tensor | None = None
    """[tokens of all batches, hidden_size] after the layers passed so far, in the source's dtype."""
    per_layer: Tensor | None = None
    """[tokens, layers * width] of per-layer inputs (E2B/E4B)."""
    shapes: list[tuple[int, int]] = field(default_factory=list)
    """(samples, tokens) of each batch."""
    calls: list[list[tuple[bool, dict[str, Any]]]] = field(default_factory=list)
    """Batch → layer → whether it takes per-layer inputs, and its other arguments."""
    shares_kv: bool = False
    """Whether later layers read the keys and values of earlier ones (E2B/E4B)."""

    def rows(self, batch: int) -> slice:
        """Where a batch is in `hidden`."""
        first = sum(samples * tokens for samples, tokens in self.shapes[:batch])
        samples, tokens = self.shapes[batch]
        return slice(first, first + samples * tokens)


def start(model: Any, num_layers: int, batches: Sequence[Inputs], room: Room, name: str) -> Stream:
    """Run everything before the first decoder layer, and note what the model would pass to each."""
    from torch import nn

    total = sum(batch["input_ids"].numel() for batch in batches)
    stream, pool = Stream(shares_kv=model.config.get_text_config().num_kv_shared_layers > 0), _Pool()

    class Recorder(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index = index

        def forward(self, hidden: Tensor, per_layer: Tensor | None = None, **kwargs: Any) -> Tensor:
            batch = len(stream.shapes) - 1
            if stream.hidden is None:
                stream.hidden = room.make(f"{name}-hidden", total, hidden.shape[-1], hidden.dtype)
            if self.index == 0:
                stream.hidden[stream.rows(batch)] = hidden.flatten(0, 1)
            if per_layer is not None:
                width = per_layer.shape[-1]
                if stream.per_layer is None:
                    stream.per_layer = room.make(f"{name}-per-layer", total, num_layers * width, hidden.dtype)
                at = slice(self.index * width, (self.index + 1) * width)
                stream.per_layer[stream.rows(batch), at] = per_layer.flatten(0, 1)
            stream.calls[batch].append((per_layer is not None, pool.intern(kwargs)))
            return hidden

    decoder = model.model.language_model
    decoder.layers = nn.ModuleList(Recorder(index) for index in range(num_layers))
    with moved(model, room.device):
        for batch in batches:
            stream.shapes.append(tuple(batch["input_ids"].shape))
            stream.calls.append([])
            model.model(**{key: value.to(room.device) for key, value in batch.items()}, use_cache=False)
    decoder.layers = nn.ModuleList()
    return stream


def advance(stream: Stream, index: int, layer: Any, place: tuple[Any, Any], tell: Callable[[int], None]) -> None:
    """Send every batch through layer `index`, which computes on `place` (device, dtype); `tell` gets tokens passed."""
    hidden = stream.hidden
    for batch, (samples, tokens) in enumerate(stream.shapes):
        assert hidden is not None
        rows = stream.rows(batch)
        takes_per_layer, kwargs = stream.calls[batch][index]
        stream.calls[batch][index] = (False, {})
        arguments = [hidden[rows].view(samples, tokens, -1)]
        if takes_per_layer and stream.per_layer is not None:
            width = stream.per_layer.shape[1] // len(stream.calls[batch])
            part = stream.per_layer[rows, index * width : (index + 1) * width]
            arguments.append(part.view(samples, tokens, -1))
        out = layer(*_to(arguments, place), **_to(kwargs, place))
        hidden[rows] = out.flatten(0, 1).to(hidden.dtype)
        if not stream.shares_kv:
            kwargs["shared_kv_states"].clear()  # the last layers leave theirs there for nobody
        tell(samples * tokens)


@contextmanager
def moved(module: Any, device: Any, dtype: Any = None) -> Iterator[None]:
    """Have a module's weights on a device, in a dtype, for a while; afterwards they are the source's own again."""
    tensors = [*module.parameters(), *module.buffers()]
    originals = [tensor.data for tensor in tensors]
    for tensor in tensors:
        wanted = dtype if tensor.is_floating_point() else None
        tensor.data = tensor.data.to(device=device, dtype=wanted)
    try:
        yield
    finally:
        for tensor, original in zip(tensors, originals, strict=True):
            tensor.data = original


class _Pool:
    """Equal tensors kept once: masks and rotary positions of samples of one length are the same."""

    def __init__(self) -> None:
        self._kept: dict[Any, list[Tensor]] = {}
        self._by_id: dict[int, tuple[Any, Any]] = {}

    def intern(self, value: Any) -> Any:
        import torch

        if isinstance(value, tuple):
            return tuple(self.intern(item) for item in value)
        if type(value) is dict:
            return {key: self.intern(item) for key, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self._by_id:
            return self._by_id[id(value)][1]
        alike = self._kept.setdefault((value.shape, value.dtype), [])
        kept = next((other for other in alike if torch.equal(other, value)), None)
        if kept is None:
            kept = value
            alike.append(value)
        self._by_id = {id(value): (value, kept), **dict(list(self._by_id.items())[:_REMEMBERED])}
        return kept


_REMEMBERED = 16


def _to(value: Any, place: tuple[Any, Any]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(place[0], place[1] if value.is_floating_point() else value.dtype, non_blocking=True)
    if isinstance(value, tuple | list):
        return type(value)(_to(item, place) for item in value)
    if type(value) is dict:
        return {key: _to(item, place) for key, item in value.items()}
    return value


@contextmanager
def _source_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise SourceError(f"transformers cannot load {folder}: {exc}") from exc


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Keep transformers' and llm-compressor's own bars and warnings off stderr: what matters is a finding of ours."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with _quiet_loguru():
            yield
    finally:
        transformers.logging.set_verbosity(verbosity)


@contextmanager
def _quiet_loguru() -> Iterator[None]:
    os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")  # else it speaks on stdout while it is imported
    try:
        import llmcompressor  # noqa: F401
        from loguru import logger
    except ImportError:
        yield
        return
    libraries = ("llmcompressor", "compressed_tensors")
    for library in libraries:
        logger.disable(library)
    try:
        yield
    finally:
        for library in libraries:
            logger.enable(library)
