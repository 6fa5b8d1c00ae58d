"""What the bundle's own weights answer, computed without an engine: dequantized, a decoder layer in memory at a time.

An engine's answer is fed back token by token (teacher forcing), so one forward judges every token of it, and a tie
that falls the other way once does not hide the rest.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from bundler.checkpoint import Tensor as Address
from bundler.checkpoint import load_json
from bundler.errors import VerificationError
from bundler.gemma4 import layer_of
from bundler.inventory import body_shapes
from bundler.layout import Layout, make_layout
from bundler.sidefiles import usable_ignore
from bundler.weights import check_inventory, check_shards

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """One prompt as an engine saw and answered it."""

    name: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    image: bytes | None = None
    messages: tuple[Mapping[str, Any], ...] = ()
    """The chat that an image stands in; the processor turns it into pixels and positions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How far an answer is what the bundle's weights mean."""

    name: str
    tokens: int
    """Tokens of the answer that were judged."""
    equal: int
    """Tokens that are the reference's own first choice."""
    worst_gap: float
    """The largest log-probability by which the reference prefers its own choice to the engine's."""
    mean_gap: float
    noise: float
    """The same between the reference in bf16 and in float32: what rounding alone does to these weights."""
    prompt_differs: bool = False
    """Whether the engine made other token ids of the prompt than the bundle's own processor does."""


def compare(bundle: Path, answers: Sequence[Answered], *, first: int = 16) -> list[Agreement]:
    """Judge the first tokens of every answer; VerificationError where the body's tensors are not all there.

    Weights are dequantized, and inputs of quantized Linears rounded to FP4 as at run time, all on the CPU; once in
    bf16 as engines compute, and once in float32. Rounding to FP4 turns a last bit into a quarter of a value, so bodies
    whose next token is anybody's guess differ by much; the distance of the two says by how much.
    """
    import torch

    from bundler.quantize.stream import quiet_libraries

    config, layout, addresses = _open(bundle)
    with torch.no_grad(), quiet_libraries():
        passes = []
        for dtype in (torch.bfloat16, torch.float32):
            model = _load(bundle, config, layout, addresses, dtype)
            passes.append([_gaps(model, *_make_sample(bundle, answer, first), answer, first) for answer in answers])
            del model
    return [_judge(*both) for both in zip(answers, *passes, strict=True)]


def _open(bundle: Path) -> tuple[Mapping[str, Any], Layout, Mapping[str, Address]]:
    """The bundle's config, layout and tensors, all of them there and of the right shape."""
    config = load_json(bundle / "config.json")
    layout = make_layout(body_shapes(config), config, usable_ignore(config))
    shards, findings = check_shards(bundle)
    findings += check_inventory(layout, shards)
    if findings:
        raise VerificationError(f"it cannot be dequantized: {len(findings)} faults in its tensors", findings=findings)
    return config, layout, shards.tensors


def _load(
    bundle: Path, config: Mapping[str, Any], layout: Layout, addresses: Mapping[str, Address], dtype: Any
) -> Any:
    """The body; each of its decoder layers is read when the forward comes to it, and freed behind it."""
    import importlib

    import torch
    from torch import nn
    from transformers import AutoConfig, AutoModelForImageTextToText

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    made = AutoConfig.for_model(**plain)
    made._attn_implementation = "eager"
    model_class = AutoModelForImageTextToText._model_mapping[type(made)]
    modeling = importlib.import_module(model_class.__module__)
    name = next(key for key in vars(modeling) if key.endswith("TextDecoderLayer"))
    layer_class = getattr(modeling, name)

    class OnDemand(nn.Module):
        def __init__(self, text_config: Any, layer_idx: int) -> None:
            super().__init__()
            self.text_config, self.layer_idx = text_config, layer_idx
            self.self_attn = SimpleNamespace(is_kv_shared_layer=False)  # all that the model asks of it when built
            self._is_hf_initialized = True

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with torch.device("meta"):
                layer = layer_class(self.text_config, self.layer_idx)
            _fill(layer, bundle, self.layer_idx, layout, addresses, dtype)
            return layer(*args, **kwargs)

    tensors = {name: _read(bundle, addresses[name]) for name in layout.kept if layer_of(name) is None}
    with _replaced(modeling, name, OnDemand):
        model, info = model_class.from_pretrained(
            None, config=made, state_dict=tensors, dtype=dtype, output_loading_info=True
        )
    if info["missing_keys"] or info["unexpected_keys"]:
        wrong = ", ".join(sorted([*info["missing_keys"], *info["unexpected_keys"]])[:5])
        raise VerificationError(f"transformers does not find its way in its tensors: {wrong}")
    return model.eval()


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _fill(layer: Any, bundle: Path, index: int, layout: Layout, addresses: Mapping[str, Address], dtype: Any) -> None:
    """Give a decoder layer its dequantized weights, and let its quantized Linears round their inputs."""

    from bundler.quantize.nvfp4 import dequantize, load_tensors, round_input

    prefix = f"model.language_model.layers.{index}."
    weights: dict[str, Tensor] = {}
    scales: dict[str, Tensor] = {}
    for name in (name for name in layout.kept if name.startswith(prefix)):
        weights[name.removeprefix(prefix)] = _read(bundle, addresses[name]).to(dtype)
    for name in (name for name in layout.quantized if name.startswith(prefix)):
        packed, own = load_tensors(bundle, addresses, name), name.removeprefix(prefix)
        weights[f"{own}.weight"] = dequantize(packed, name, dtype)
        scales[own] = packed[f"{name}.input_global_scale"]
    experts = {name: weights.pop(name) for name in list(weights) if name.startswith("experts.")}
    if experts:
        layer.experts = _make_experts(experts, scales, layer.experts.act_fn)
    layer.load_state_dict(weights, strict=True, assign=True)
    layer.eval()
    for name, scale in scales.items():
        if not name.startswith("experts."):
            layer.get_submodule(name).register_forward_pre_hook(
                lambda _, args, scale=scale: (round_input(args[0], scale), *args[1:])
            )


def _make_experts(weights: Mapping[str, Tensor], scales: Mapping[str, Tensor], act: Any) -> Any:
    """The experts of a layer from their own Linears: what Gemma4TextExperts computes from its 3-D parameters."""
    import torch
    from torch import nn
    from torch.nn.functional import linear

    from bundler.quantize.nvfp4 import round_input

    def project(name: str, value: Tensor) -> Tensor:
        scale = scales.get(name)
        return linear(value if scale is None else round_input(value, scale), weights[f"{name}.weight"])

    class Experts(nn.Module):
        def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
            out = torch.zeros_like(hidden)
            for expert in sorted(set(chosen.flatten().tolist())):
                token, slot = (chosen == expert).nonzero(as_tuple=True)
                value, at = hidden[token], f"experts.{expert}"
                value = act(project(f"{at}.gate_proj", value)) * project(f"{at}.up_proj", value)
                value = project(f"{at}.down_proj", value) * shares[token, slot, None]
                out.index_add_(0, token, value.to(out.dtype))
            return out

    return Experts()


def _make_sample(bundle: Path, answer: Answered, first: int) -> tuple[dict[str, Any], bool]:
    """The model's inputs for prompt and answer; whether the engine's prompt is not what the processor makes."""
    import torch

    chosen = torch.tensor([answer.answer_ids[:first]])
    if answer.image is None:
        ids = torch.cat([torch.tensor([answer.prompt_ids]), chosen], dim=1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, False
    sample = _process(bundle, answer.messages, answer.image)
    differs = sample["input_ids"][0].tolist() != list(answer.prompt_ids)
    for key, filler in (("input_ids", chosen), ("attention_mask", torch.ones_like(chosen))):
        sample[key] = torch.cat([sample[key], filler], dim=1)
    for key in {"mm_token_type_ids", "token_type_ids"} & sample.keys():
        sample[key] = torch.cat([sample[key], torch.zeros_like(chosen)], dim=1)
    return sample, differs


def prompt_ids(bundle: Path, messages: Sequence[Mapping[str, Any]], image: bytes) -> list[int]:
    """The tokens that the bundle's own processor makes of a chat with one image."""
    ids: list[int] = _process(bundle, messages, image)["input_ids"][0].tolist()
    return ids


def _process(bundle: Path, messages: Sequence[Mapping[str, Any]], image: bytes) -> dict[str, Any]:
    from PIL import Image

    from bundler.quantize.stream import load_processor

    picture = Image.open(io.BytesIO(image)).convert("RGB")
    made = load_processor(bundle).apply_chat_template(
        [_with_picture(message, picture) for message in messages],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    return dict(made)


def _with_picture(message: Mapping[str, Any], picture: Any) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, str):
        return dict(message)
    parts = [{"type": "image", "image": picture} if part["type"] == "image_url" else part for part in content]
    return {**message, "content": parts}


@dataclass(frozen=True, slots=True)
class _Gaps:
    """By how much the reference prefers its own choice at each token, and whether that is the engine's."""

    gaps: tuple[float, ...]
    equal: tuple[bool, ...]
    prompt_differs: bool


def _gaps(model: Any, sample: Mapping[str, Any], differs: bool, answer: Answered, first: int) -> _Gaps:
    chosen = answer.answer_ids[:first]
    hidden = model.model(**sample, use_cache=False).last_hidden_state  # behind the last norm
    start = hidden.shape[1] - len(chosen) - 1
    logits = model.lm_head(hidden[0, start:-1]).float()
    cap = model.config.get_text_config().final_logit_softcapping
    if cap is not None:
        logits = (logits / cap).tanh() * cap
    best = logits.max(-1)
    return _Gaps(
        tuple(float(best.values[at] - logits[at, token]) for at, token in enumerate(chosen)),
        tuple(int(best.indices[at]) == token for at, token in enumerate(chosen)),
        differs,
    )


def _judge(answer: Answered, coarse: _Gaps, fine: _Gaps) -> Agreement:
    apart = [abs(one - other) for one, other in zip(coarse.gaps, fine.gaps, strict=True)]
    return Agreement(
        name=answer.name,
        tokens=len(coarse.gaps),
        equal=sum(coarse.equal),
        worst_gap=round(max(coarse.gaps, default=0.0), 3),
        mean_gap=round(sum(coarse.gaps) / max(1, len(coarse.gaps)), 3),
        noise=round(max(apart, default=0.0), 3),
        prompt_differs=coarse.prompt_differs,
    )


def _read(bundle: Path, address: Address) -> Tensor:
    import torch

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F16": torch.float16, "I64": torch.int64}
    with (bundle / address.file).open("rb") as file:
        file.seek(address.start)
        data = bytearray(file.read(address.end - address.start))
    return torch.frombuffer(data, dtype=dtypes[address.shape.dtype]).reshape(address.shape.dims)
