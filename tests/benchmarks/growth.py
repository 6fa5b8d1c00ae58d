"""How time and memory grow with layers and with samples, at the 31B's real width.

    python tests/benchmarks/growth.py FOLDER [--layers 2 6 12] [--samples 4 8 16]

Each row is a bake of its own process (full_shape.py); FOLDER is emptied, and needs room for the largest source and its
bundle.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

BODY = "google/gemma-4-31B-it-qat-q4_0-unquantized"
SCRIPT = Path(__file__).with_name("full_shape.py")


def measure(folder: Path, layers: int, samples: int, tokens: int) -> tuple[float, float, float]:
    """(seconds of the whole bake, of its forward, anonymous GB at most)."""
    options = ["--layers", layers, "--samples", samples, "--tokens", tokens, "--heldout", 1, "--heldout-tokens", 16]
    shutil.rmtree(folder / "out", ignore_errors=True)
    command = [sys.executable, str(SCRIPT), BODY, str(folder), *map(str, options)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    patterns = (r"whole bake: ([\d.]+) s", r"([\d.]+) s  forward", r"anonymous memory: ([\d.]+) GB")
    whole, forward, memory = (float(re.search(pattern, said)[1]) for pattern in patterns)  # type: ignore[index]
    return whole, forward, memory


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 6, 12])
    parser.add_argument("--samples", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    fewest = arguments.samples[0]
    cells = [(layers, fewest) for layers in arguments.layers]
    cells[1:1] = [(arguments.layers[0], samples) for samples in arguments.samples[1:]]
    print(f"| layers | samples of {arguments.tokens} tokens | whole bake, s | forward, s | anonymous memory, GB |")
    print("|---|---|---|---|---|", flush=True)
    for layers, samples in cells:
        if not (folder := arguments.folder / str(layers)).exists():
            shutil.rmtree(arguments.folder, ignore_errors=True)
        whole, forward, memory = measure(folder, layers, samples, arguments.tokens)
        print(f"| {layers} | {samples} | {whole:.1f} | {forward:.1f} | {memory:.2f} |", flush=True)


if __name__ == "__main__":
    main()
