"""How faithful the baked body is: held-out samples pass each layer twice, as in the source and as in the bundle.

The second time a layer has the packed weights, read back from the bundle and dequantized, and its inputs are rounded
to 4 bit as at run time. At the end there are two sets of logits; of the model, one layer was in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bundler.errors import QuantizationError
from bundler.findings import Finding, error, note, warning
from bundler.gemma4 import layer_of
from bundler.manifest import FidelityEntry, LayerFidelity, QuantizationEntry
from bundler.quantize import stream
from bundler.quantize.nvfp4 import dequantize, round_input
from bundler.recipe import Fidelity
from bundler.scales import RANGE

if TYPE_CHECKING:
    from torch import Tensor

    from bundler.quantize.memory import Room

    Place = tuple[Any, Any]

_QAT_BLOCKS = 0.5
_SEED = "card of the published 31B MTP bundle: the non-QAT 12B collapsed on the recipe that the QAT 31B takes cleanly"
_WIDE = 1.25
"""Held-out inputs this many times wider than the calibrated range are no accident of a few samples."""
_POSITIONS = 128
"""Positions whose logits are held at a time: Gemma's vocabulary has 262,144 entries."""
_CAPTURED = 512
"""Tokens over which a module's own error is measured."""


@dataclass(kw_only=True, slots=True)
class Twins:
    """The held-out samples on both their ways, and every quantized module's signal and noise power so far."""

    source: stream.Stream
    quantized: stream.Stream
    labels: Sequence[Tensor]
    """Token ids [tokens] a sample; -1 for what is no text."""
    measured: dict[str, Tensor] = field(default_factory=dict)
    """Of each quantized module: its output's power, that of its error, its inputs' range over the calibrated one."""
    space: Tensor | None = None
    """Where a layer's dequantized weights lie: fresh memory for each layer would cost more than filling it."""

    def reserve(self, count: int, place: Place) -> Tensor:
        """Room for `count` weights, the same for every layer while it is enough."""
        import torch

        if self.space is None or len(self.space) < count:
            self.space = None
            self.space = torch.empty(count, device=place[0], dtype=place[1])
        return self.space[:count]


@dataclass(kw_only=True, slots=True)
class Seen:
    """What went into a Linear on the source's way."""

    first: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Inputs [tokens, in] and outputs [tokens, out] of the first tokens."""
    widest: Tensor | None = None
    """The largest magnitude of all its inputs."""


def start(model: Any, num_layers: int, batches: Sequence[stream.Inputs], room: Room) -> Twins:
    """Both ways before the first layer, where they are still one."""
    return Twins(
        source=stream.start(model, num_layers, batches, room, "heldout-source"),
        quantized=stream.start(model, num_layers, batches, room, "heldout-quantized"),
        labels=[_text_tokens(batch, number) for batch in batches for number in range(len(batch["input_ids"]))],
    )


def advance(
    twins: Twins, index: int, layer: Any, modules: Mapping[str, Any], packed: Mapping[str, Tensor], place: Place
) -> None:
    """Send the samples through layer `index` on both ways.

    `modules` are its quantized Linears by full name, holding the source's weights; `packed` has their tensors as they
    are in the bundle, by name.part. Afterwards the Linears hold the bundle's weights.
    """
    import torch

    device, dtype = place
    packed = {name: tensor.to(device) for name, tensor in packed.items()}
    with ExitStack() as hooks:
        seen = {name: hooks.enter_context(_captured(module)) for name, module in modules.items()}
        stream.advance(twins.source, index, layer, place, _nobody)
    with ExitStack() as hooks:
        sizes = [module.weight.numel() for module in modules.values()]
        spaces = torch.split(twins.reserve(sum(sizes), place), sizes)
        for (name, module), space in zip(modules.items(), spaces, strict=True):
            module.weight.data = dequantize(packed, name, dtype, space)
            global_scale = packed[f"{name}.input_global_scale"]
            if seen[name].first:
                twins.measured[name] = _measure(module, seen.pop(name), global_scale)
            hooks.enter_context(_rounding(module, global_scale))
        stream.advance(twins.quantized, index, layer, place, _nobody)


def _nobody(tokens: int) -> None:
    """Held-out tokens are not counted as progress."""


def finish(twins: Twins, model: Any, num_layers: int, device: Any) -> FidelityEntry:
    """Compare the two sets of logits over every text token that the samples predict."""
    import torch

    source, quantized = twins.source.hidden, twins.quantized.hidden
    head = model.lm_head.weight
    divergence = nll = nll_quantized = 0.0
    agreed = count = 0
    with torch.no_grad(), stream.moved(_end(model), device):
        begin = 0
        for labels in twins.labels:
            for first in range(0, len(labels) - 1, _POSITIONS):
                targets = labels[first + 1 : first + 1 + _POSITIONS]
                text = targets >= 0
                at = torch.arange(len(targets))[text] + begin + first
                assert source is not None
                assert quantized is not None
                p, q = (_log_probabilities(model, hidden[at].to(device, head.dtype)) for hidden in (source, quantized))
                picked = targets[text][:, None].to(device)
                divergence += float((p.exp() * (p - q)).sum())
                agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
                nll -= float(p.gather(1, picked).sum())
                nll_quantized -= float(q.gather(1, picked).sum())
                count += int(text.sum())
            begin += len(labels)
    if not count or not math.isfinite(divergence):
        fault = "the quantized body's logits are not finite" if count else "no text token is held out"
        raise QuantizationError(fault, hint="look at the source checkpoint and at the held-out data")
    input_range, widest_module = max(((float(m[2]), name) for name, m in twins.measured.items()), default=(0.0, None))
    return FidelityEntry(
        num_samples=len(twins.labels),
        num_tokens=count,
        kl_divergence=_digits(divergence / count),
        top1_agreement=_digits(agreed / count),
        perplexity=_digits(math.exp(nll / count)),
        perplexity_ratio=_digits(math.exp((nll_quantized - nll) / count)),
        input_range=_digits(input_range),
        input_range_module=widest_module,
        layers=_worst_modules(twins.measured, num_layers),
    )


def check_fidelity(limits: Fidelity, baked: QuantizationEntry) -> list[Finding]:
    """Where the baked body falls short of the recipe's limits; what the recipe accepts with a reason is a warning."""
    measured = baked.fidelity
    faults = []
    if measured.kl_divergence > limits.max_kl_divergence:
        faults.append(("fidelity-kl", f"KL divergence {measured.kl_divergence:g} > {limits.max_kl_divergence:g}"))
    if measured.top1_agreement < limits.min_top1_agreement:
        faults.append(
            ("fidelity-top1", f"top-1 agreement {measured.top1_agreement:g} < {limits.min_top1_agreement:g}")
        )
    if measured.perplexity_ratio > limits.max_perplexity_ratio:
        words = f"perplexity is {measured.perplexity_ratio:g} times the source's, over {limits.max_perplexity_ratio:g}"
        faults.append(("fidelity-perplexity", words))
    for layer in measured.worst(1):
        if layer.sqnr_db is not None and layer.sqnr_db < limits.min_sqnr_db:
            words = f"{layer.module} of layer {layer.layer}: {layer.sqnr_db:g} dB < {limits.min_sqnr_db:g} dB"
            faults.append(("fidelity-sqnr", f"signal-to-quantization-noise ratio of {words}"))
    worst = ", ".join(f"layer {layer.layer} {layer.sqnr_db:g} dB ({layer.module})" for layer in measured.worst())
    findings = []
    for code, message in faults:
        if limits.accept:
            findings.append(warning(code, "body", f"{message}; accepted: {limits.accept}"))
            continue
        hint = (
            "start from a QAT checkpoint, leave attention in bf16 with quantization.ignore = ['re:.*self_attn.*'], or "
            "try quantization.weight_observer = 'memoryless_mse'; fidelity.accept = 'why' records an exception"
        )
        findings.append(error(code, "body", f"{message}; worst layers: {worst}", hint))
    if baked.q4_0_blocks < _QAT_BLOCKS:
        message = f"{baked.q4_0_blocks:.1%} of the source's blocks of 32 weights lie on a q4_0 grid"
        hint = "full W4A4 breaks Gemma 4 bodies without quantization-aware training; a QAT body may still be unsnapped"
        findings.append(note("body-off-grid", "body", message, hint, _SEED))
    if measured.input_range > _WIDE:
        where = str(measured.input_range_module)
        message = f"held-out inputs reach {measured.input_range:g} times what calibration saw, so they are clipped"
        findings.append(warning("calibration-narrow", where, message, "calibrate on more, or more varied, samples"))
    bare = sorted(layer.layer for layer in measured.layers if layer.module is None)
    if bare:
        message = f"nothing is quantized in layers {', '.join(map(str, bare))}"
        findings.append(note("fidelity-bare-layers", "body", message))
    return findings


@contextmanager
def _captured(module: Any) -> Iterator[Seen]:
    """What goes into a Linear: how wide it is and, for the first tokens that pass, what comes out."""
    import torch

    seen = Seen()

    def capture(_: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        value, output = args[0].flatten(0, -2), output.flatten(0, -2)
        if not len(value):
            return
        low, high = torch.aminmax(value)
        widest = torch.maximum(-low, high).float()
        seen.widest = widest if seen.widest is None else torch.maximum(seen.widest, widest)
        left = _CAPTURED - sum(len(inputs) for inputs, _ in seen.first)
        if left > 0:
            seen.first.append((value[:left].clone(), output[:left].clone()))

    handle = module.register_forward_hook(capture)
    yield seen
    handle.remove()


def _measure(module: Any, seen: Seen, global_scale: Tensor) -> Tensor:
    """[power of a Linear's output, power of its error as the bundle computes it, range of its inputs over the one that
    calibration saw], float64."""
    import torch
    from torch.nn.functional import linear

    measured = torch.zeros(3, dtype=torch.float64, device=global_scale.device)
    for value, output in seen.first:
        noise = linear(round_input(value, global_scale), module.weight).float() - output.float()
        measured[:2] += torch.stack([output.float().square().sum(), noise.square().sum()])
    assert seen.widest is not None
    measured[2] = seen.widest * global_scale.squeeze() / RANGE
    return measured


@contextmanager
def _rounding(module: Any, global_scale: Tensor) -> Iterator[None]:
    """Round a Linear's inputs as they are at run time."""
    handle = module.register_forward_pre_hook(lambda _, args: (round_input(args[0], global_scale), *args[1:]))
    yield
    handle.remove()


def _text_tokens(batch: Mapping[str, Any], number: int) -> Tensor:
    labels: Tensor = batch["input_ids"][number].clone()
    if (kinds := batch.get("mm_token_type_ids")) is not None:
        labels[kinds[number] != 0] = -1
    return labels


def _end(model: Any) -> Any:
    from torch import nn

    return nn.ModuleList([model.model.language_model.norm, model.lm_head])


def _log_probabilities(model: Any, hidden: Tensor) -> Tensor:
    """float32 [positions, vocabulary], through the body's own last norm, head and soft cap."""
    logits = model.lm_head(model.model.language_model.norm(hidden)).float()
    cap = model.config.get_text_config().final_logit_softcapping
    if cap is not None:
        logits = (logits / cap).tanh() * cap
    result: Tensor = logits.log_softmax(-1)
    return result


def _worst_modules(measured: Mapping[str, Tensor], num_layers: int) -> tuple[LayerFidelity, ...]:
    worst: dict[int, tuple[float, str]] = {}
    for name, values in measured.items():
        signal, noise, _ = values.tolist()
        index = layer_of(name)
        if index is not None and signal > 0:
            sqnr_db = 10 * math.log10(signal / max(noise, signal * 1e-20))
            worst[index] = min(worst.get(index, (math.inf, "")), (sqnr_db, name.split(".", 4)[4]))
    return tuple(
        LayerFidelity(layer=index, sqnr_db=round(worst[index][0], 2), module=worst[index][1])
        if index in worst
        else LayerFidelity(layer=index, sqnr_db=None, module=None)
        for index in range(num_layers)
    )


def _digits(value: float) -> float:
    """Four significant digits: what a rerun on another processor gives too."""
    return float(f"{value:.4g}")
