"""Bake a body of a published shape with random weights, and say where the time went.

    python tests/benchmarks/full_shape.py google/gemma-4-31B-it-qat-q4_0-unquantized FOLDER --device cuda
    torchrun --nproc-per-node 2 tests/benchmarks/full_shape.py ...

FOLDER should be on memory-backed storage: the source's weights are written there first, at their real size and under
their real names. Calibration is 256 x 2048 tokens through a real processor unless told otherwise.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples")]

from published import config_of, shapes_of  # noqa: E402

from bundler import checkpoint, gemma4, quantize  # noqa: E402
from bundler.checkpoint import Shape  # noqa: E402
from bundler.layout import make_layout  # noqa: E402
from bundler.quantize import bake, fast, memory, parallel, stream, writer  # noqa: E402
from bundler.quantize.journal import open_journal  # noqa: E402
from bundler.recipe import parse  # noqa: E402
from bundler.source import Source  # noqa: E402

RECIPE = """
edition = 1
name = "benchmark"
[quantization]
compute = "{compute}"
[body]
model = "./body"
[calibration]
dataset = "./calibration.jsonl"
num_samples = {samples}
max_seq_length = {tokens}
[fidelity]
num_samples = {heldout}
max_seq_length = {heldout_tokens}
[drafter]
model = "./drafter"
"""


def make_source(repo: str, folder: Path, layers: int | None, device: str) -> Source:
    """A body of the published names, dtypes and shapes, with random weights, a real processor and tokenizer."""
    import make_tiny

    config, shapes = config_of(repo), shapes_of(repo)
    if layers is not None:
        shapes = keep_layers(config["text_config"], shapes, layers)
    tokenizer = make_tiny.make_tokenizer(2000)
    kind = {"gemma4_unified": "unified"}.get(config["model_type"], "dense")
    _, processor = make_tiny.make_body(kind, tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    processor.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    shards = checkpoint.make_shards([shapes], max_shard_bytes=10**12)
    if not (folder / shards[0].file).exists():
        writer.allocate(folder, shards)
        fill(folder, shards, device)
    (folder / checkpoint.INDEX).write_text(checkpoint.render_index(shards))
    return Source(
        model="./body", revision=None, commit=None, folder=folder, files=(), config=config, card={},
        tensors=checkpoint.load_tensors(folder),
    )  # fmt: skip


def keep_layers(text: dict[str, Any], shapes: Mapping[str, Shape], count: int) -> dict[str, Shape]:
    """The first `count` layers of a body, the last of them one with full attention, as every Gemma 4 ends."""
    types = text["layer_types"]
    chosen = [*range(count - 1), next(index for index in range(count - 1, len(types)) if types[index][0] == "f")]
    text["num_hidden_layers"], text["layer_types"] = count, [types[index] for index in chosen]
    kept = {name: shape for name, shape in shapes.items() if gemma4.layer_of(name) is None}
    for number, index in enumerate(chosen):
        prefix = f"{gemma4.LAYERS}.{index}."
        names = [name for name in shapes if name.startswith(prefix)]
        kept |= {f"{gemma4.LAYERS}.{number}.{name.removeprefix(prefix)}": shapes[name] for name in names}
    return kept


def fill(folder: Path, shards: list[checkpoint.Shard], device: str) -> None:
    """Random weights that keep activations in range: matrices with a deviation of 0.02, vectors of ones."""
    import torch

    def write(name: str, address: checkpoint.Tensor) -> None:
        generator = torch.Generator(device=device).manual_seed(hash(name) % 2**31)
        left, start = address.shape.numel, address.start
        while left:
            count = min(left, 1 << 27)
            data = torch.empty(count, dtype=torch.bfloat16, device=device)
            if len(address.shape.dims) > 1:
                data.normal_(0, 0.02, generator=generator)
            else:
                data.fill_(1.0)
            with (folder / address.file).open("r+b") as file:
                file.seek(start)
                file.write(memoryview(data.cpu().view(torch.uint8).numpy()))
            left, start = left - count, start + 2 * count

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda item: write(*item), [item for shard in shards for item in shard.tensors.items()]))


def write_conversations(path: Path, count: int, tokens: int) -> None:
    """Conversations that are longer than `tokens` tokens, all of them cut to one length."""
    words = [f"w{number}" for number in range(500)]
    generator = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            content = " ".join(generator.choices(words, k=tokens))
            file.write(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")


class Watch:
    """Seconds that functions took, by name, in whatever thread; on a GPU the device's work included."""

    def __init__(self, cuda: bool) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cuda = cuda
        self.lock = threading.Lock()

    def time(self, module: Any, name: str, label: str, *, wait: bool = False) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            import torch

            began = time.perf_counter()
            result = function(*args, **kwargs)
            if wait and self.cuda:
                torch.cuda.synchronize()
            with self.lock:
                self.seconds[label] += time.perf_counter() - began
            return result

        setattr(module, name, timed)


@contextmanager
def peak_memory() -> Iterator[Mapping[str, float]]:
    """The largest anonymous memory of this process while the block runs, in GB, sampled."""
    seen = {"gb": 0.0}
    over = threading.Event()

    def sample() -> None:
        while not over.wait(0.02):
            seen["gb"] = max(seen["gb"], memory.anonymous_bytes() / 1e9)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repo")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="where the bundle's shards go; FOLDER/out by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compute", default="fast")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--heldout", type=int, default=8)
    parser.add_argument("--heldout-tokens", type=int, default=512)
    parser.add_argument("--memory-limit")
    arguments = parser.parse_args()
    device = quantize.open_device(arguments.device)
    with parallel.group(device):
        measure(arguments, device)


def measure(arguments: argparse.Namespace, device: Any) -> None:
    """Make the source, bake it, and print."""
    import torch

    began = time.perf_counter()
    if parallel.rank() > 0:
        parallel.barrier()
    source = make_source(arguments.repo, arguments.folder / "body", arguments.layers, arguments.device)
    if parallel.rank() == 0:
        count = arguments.samples + arguments.heldout
        write_conversations(arguments.folder / "calibration.jsonl", count, arguments.tokens)
        parallel.barrier()
        print(f"source: {time.perf_counter() - began:.1f} s to write", flush=True)
    recipe = parse(
        RECIPE.format(
            compute=arguments.compute,
            samples=arguments.samples,
            tokens=arguments.tokens,
            heldout=arguments.heldout,
            heldout_tokens=arguments.heldout_tokens,
        ),
        arguments.folder,
    )
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    layout = make_layout(shapes, source.config, gemma4.make_ignore(gemma4.find_kind(source.config)))
    out = arguments.out or arguments.folder / "out"
    (out / "bundle").mkdir(parents=True, exist_ok=True)

    cuda = arguments.device.startswith("cuda")
    watch = Watch(cuda)
    watch.time(bake, "_load", "reading, and copying to the device (beside the forward)")
    watch.time(stream, "advance", "forward", wait=True)
    watch.time(bake, "_pack", "packing, and copying back", wait=True)
    watch.time(bake, "_write", "writing and hashing (beside the forward)")
    watch.time(bake.fidelity, "advance", "held-out samples (of the forward)", wait=True)
    watch.time(stream, "start", "before the first layer", wait=True)
    rate = fast.choose_dtype(device)[1]
    with peak_memory() as peak:
        began = time.perf_counter()
        entry = quantize.run(
            recipe,
            source,
            layout,
            out / "bundle",
            journal=open_journal(out / "journal.jsonl", "benchmark"),
            dataset_commit=None,
            device=arguments.device,
            memory_limit_bytes=memory.parse_bytes(arguments.memory_limit) if arguments.memory_limit else None,
        )
        total = time.perf_counter() - began
    if entry is None:
        return
    tokens = entry.calibration.num_tokens
    floor = 2 * layout.quantized_parameters * tokens / rate
    print(f"{arguments.repo}, {tokens} tokens, {arguments.device}, {entry.compute}")
    print(f"whole bake: {total:.1f} s; floor of the matrix products at {rate / 1e12:.3f} TFLOP/s: {floor:.1f} s")
    for label, seconds in sorted(watch.seconds.items(), key=lambda item: -item[1]):
        print(f"  {seconds:8.1f} s  {label}")
    print(f"anonymous memory: {peak['gb']:.2f} GB at most")
    if cuda:
        print(f"device memory: {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB at most")
    print(f"fidelity: {entry.fidelity.kl_divergence}, {entry.fidelity.top1_agreement}", flush=True)


if __name__ == "__main__":
    main()
