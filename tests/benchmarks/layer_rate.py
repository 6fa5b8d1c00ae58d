"""The rate of a decoder layer under observation beside that of its matrix products alone, at the same shapes.

    python tests/benchmarks/layer_rate.py google/gemma-4-31B-it-qat-q4_0-unquantized --device cuda

One layer of each attention type, random weights, a batch as a bake makes it; both ways take turns, so that clocks and
temperature are the same for both. Bodies with per-layer inputs (E2B, E4B) are not for this script.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from published import config_of  # noqa: E402

from bundler.quantize import fast  # noqa: E402
from bundler.recipe import Quantization  # noqa: E402


def make_layer(model: Any, index: int, device: torch.device, dtype: torch.dtype) -> Any:
    """A layer with weights, as a bake prepares it."""
    layer = model.model.language_model.layers[index].to(dtype).to_empty(device=device)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.dim() > 1:
            tensor.data.normal_(0, 0.02)
        else:
            tensor.data.fill_(1.0)
    fast.prepare(layer)
    return layer


def make_call(model: Any, layer: Any, index: int, hidden: torch.Tensor) -> Callable[[], Any]:
    """A forward of the layer, given what the model would give it for text without padding."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    text, decoder = model.config.get_text_config(), model.model.language_model
    kind = text.layer_types[index]
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    rotary = type(decoder.rotary_emb)(text).to(hidden.device)
    make = create_sliding_window_causal_mask if kind == "sliding_attention" else create_causal_mask
    mask = make(config=text, inputs_embeds=hidden, attention_mask=None, past_key_values=None, position_ids=positions)
    given = {"position_embeddings": rotary(hidden, positions, kind), "attention_mask": mask}
    return lambda: layer(hidden, shared_kv_states={}, **given)


def count_pairs(tokens: int, window: int) -> int:
    """Pairs of a token and one that it sees, itself included."""
    return sum(min(position + 1, window) for position in range(tokens))


def take_turns(ways: dict[str, Callable[[], None]], seconds: float, rounds: int) -> dict[str, float]:
    """Seconds of one call of each way, the first round left out."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    took = dict.fromkeys(ways, 0.0)
    for number in range(rounds + 1):
        for name, way in ways.items():
            wait()
            began, count = time.perf_counter(), 0
            while not count or time.perf_counter() - began < seconds:
                way()
                wait()
                count += 1
            if number:
                took[name] += (time.perf_counter() - began) / count / rounds
    return took


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sample")
    parser.add_argument("--batches", type=int, default=8, help="that pass the layer in one observation")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = dict(config_of(arguments.repo))
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    device = torch.device(arguments.device)
    dtype, peak = fast.choose_dtype(device)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, attn_implementation=fast.choose_attention(device))
    model.eval()
    samples = max(1, fast.batch_tokens(device) // arguments.tokens)
    hidden = torch.randn(samples, arguments.tokens, config.text_config.hidden_size, device=device, dtype=dtype)
    print(f"{arguments.repo}: {samples} x {arguments.tokens} tokens, {dtype}, {peak / 1e12:.3f} TFLOP/s at most")
    types = config.text_config.layer_types
    for index in sorted({types.index(kind) for kind in types}):
        with fast.forward_conditions(model):
            layer = make_layer(model, index, device, dtype)
            call = make_call(model, layer, index, hidden)
            linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
            rows = samples * arguments.tokens
            inputs = {
                m.in_features: torch.randn(rows, m.in_features, device=device, dtype=dtype) for m in linears.values()
            }

            def products(linears: Any = linears, inputs: Any = inputs) -> None:
                for _ in range(arguments.batches):
                    for linear in linears.values():
                        torch.matmul(inputs[linear.in_features], linear.weight.T)

            def observed(layer: Any = layer, index: int = index, linears: Any = linears, call: Any = call) -> None:
                def advance() -> None:
                    for _ in range(arguments.batches):
                        call()

                fast.observe_inputs(layer, index, linears, Quantization(), (), advance)

            took = take_turns({"products": products, "layer": observed}, arguments.seconds, arguments.rounds)
        in_linears = 2 * rows * sum(linear.weight.numel() for linear in linears.values())
        window = config.text_config.sliding_window if types[index] == "sliding_attention" else arguments.tokens
        in_attention = 4 * samples * layer.self_attn.q_proj.out_features * count_pairs(arguments.tokens, window)
        plain, linear, both = (
            arguments.batches * flops / took[way] / 1e12
            for flops, way in (
                (in_linears, "products"),
                (in_linears, "layer"),
                (in_linears + in_attention, "layer"),
            )
        )
        print(
            f"{types[index]}: products {plain:.3f} TFLOP/s; layer {linear:.3f} in Linears, {linear / plain:.0%}; "
            f"{both:.3f} with attention's own products, {both / plain:.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
