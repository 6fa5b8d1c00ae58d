"""Side by side with llm-compressor's own way: load the whole model, `oneshot` with its defaults, save it packed.

    python tests/benchmarks/against_oneshot.py FOLDER [--layers 16] [--samples 4] [--tokens 256]

A body of the 31B's real width with random weights, the same calibration samples for both, each in a process of its
own. Seconds are of the whole process but imports; memory is anonymous, the most that either process had.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from full_shape import RECIPE, make_source, peak_memory, write_conversations

from bundler import gemma4, quantize
from bundler.layout import make_layout
from bundler.quantize.journal import open_journal
from bundler.quantize.samples import load_samples
from bundler.quantize.stream import load_processor
from bundler.recipe import parse

BODY = "google/gemma-4-31B-it-qat-q4_0-unquantized"
IGNORE = ["lm_head", "re:.*vision_tower.*", "re:.*audio_tower.*", "re:.*embed_vision.*", "re:.*embed_audio.*"]
"""What the official Gemma 4 example leaves in bf16."""


def main() -> None:
    """Command line; with --side, one of the two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--side", choices=("oneshot", "bundler"))
    arguments = parser.parse_args()
    if arguments.side is None:
        compare(arguments.folder, sys.argv[1:])
        return
    source = make_source(BODY, arguments.folder / "body", arguments.layers, "cpu")
    write_conversations(arguments.folder / "calibration.jsonl", arguments.samples + 1, arguments.tokens)
    sizes = {"samples": arguments.samples, "tokens": arguments.tokens, "heldout": 1, "heldout_tokens": 32}
    recipe = parse(RECIPE.format(compute="fast", **sizes), arguments.folder)
    out = arguments.folder / arguments.side
    out.mkdir(exist_ok=True)
    with peak_memory() as peak:
        began = time.perf_counter()
        if arguments.side == "bundler":
            shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
            layout = make_layout(shapes, source.config, gemma4.make_ignore(gemma4.find_kind(source.config)))
            journal = open_journal(out / "journal.jsonl", "benchmark")
            (out / "bundle").mkdir(exist_ok=True)
            quantize.run(recipe, source, layout, out / "bundle", journal=journal, dataset_commit=None)
        else:
            run_oneshot(source.folder, recipe, out)
        seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "gb": peak["gb"]}))


def run_oneshot(folder: Path, recipe: object, out: Path) -> None:
    """The official example: whole model in memory, `oneshot`, `save_compressed`."""
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForImageTextToText

    processor = load_processor(folder)
    samples = load_samples(recipe, None, processor).inputs  # type: ignore[arg-type]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype="auto")
    oneshot(
        model=model,
        processor=processor,
        dataset=torch.utils.data.DataLoader(samples, batch_size=None),
        recipe=QuantizationModifier(targets="Linear", scheme="NVFP4", ignore=IGNORE),
    )
    model.save_pretrained(out, save_compressed=True)
    processor.save_pretrained(out)


def compare(folder: Path, options: list[str]) -> None:
    """Run both, one after the other, and print them."""
    found = {}
    for side in ("bundler", "oneshot"):
        command = [sys.executable, __file__, *options, "--side", side]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        found[side] = json.loads(said.splitlines()[-1])
    print("| | whole, s | anonymous memory, GB |")
    print("|---|---|---|")
    for side, values in found.items():
        print(f"| {side} | {values['seconds']:.1f} | {values['gb']:.2f} |")
    time_, memory = (found["bundler"][key] / found["oneshot"][key] for key in ("seconds", "gb"))
    print(f"| ratio | {time_:.3f} | {memory:.3f} |")


if __name__ == "__main__":
    main()
