"""What vLLM by itself does with every planted fault: each in a copy of a twin, loaded with the drafter.

    PYTHONPATH=tests:examples:tests/benchmarks python tests/benchmarks/planted_engine.py OUT --kind dense

OUT is a sweep's folder (sweep_engines.py): it lends the twins. A fault that has its file is not run again. At the end
tests/data/planted.toml and tests/PLANTED.md are written anew.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import planted
from sweep_engines import make_subject, run_cells

from bundler.checkpoint import load_json
from bundler.engines import load_facts
from bundler.engines.environments import Release, find_device, install


def main() -> None:
    """Run what is missing, then write the table."""
    parser = argparse.ArgumentParser(description="Load every planted fault with a real vLLM.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", action="append", choices=planted.KINDS, help="default: all four")
    parser.add_argument("--own", action="store_true", help="only the faults that not every kind can have")
    parser.add_argument("--release", default="0.32.0")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a fault")
    arguments = parser.parse_args()
    release = Release(engine="vllm", version=arguments.release, device=find_device())
    for kind in arguments.kind or planted.KINDS:
        faults = [fault for fault in planted.faults_of(kind) if not arguments.own or fault.kinds != planted.KINDS]
        measure(kind, faults, release, arguments.out, arguments.timeout)
    planted.DATA.write_text(render_data(arguments.out, release.version), encoding="utf-8")
    Path(planted.__file__).with_name("PLANTED.md").write_text(planted.render(), encoding="utf-8")


def measure(kind: str, faults: Sequence[planted.Fault], release: Release, out: Path, timeout_s: float) -> None:
    """Faults in a kind's twin, and the good twin before them."""
    folder, copies = out / "planted" / kind, out / "planted" / f"{kind}.copies"
    folder.mkdir(parents=True, exist_ok=True)
    cells: list[dict[str, Any]] = []
    for name, plant in [("", None), *((fault.name, fault.plant) for fault in faults)]:
        stem = name.replace(" ", "-").replace("/", "-") or "good"
        if (folder / f"{stem}.json").exists():
            continue
        subject = copies / stem
        shutil.copytree(make_subject(kind, "nvfp4", out), subject, dirs_exist_ok=True)
        if plant is not None:
            plant(subject)
        ends = {"result": "json", "report": "report.jsonl", "log": "log"}
        files = {key: str(folder / f"{stem}.{end}") for key, end in ends.items()}
        drafter = str(subject / "assistant")
        cells.append({"id": f"{kind}: {stem}", "model": str(subject), "drafter": drafter, "options": {}, **files})
    if cells:
        run_cells(install(release, load_facts(), print), cells, timeout_s=timeout_s, tokens=12)
    shutil.rmtree(copies, ignore_errors=True)


def render_data(out: Path, version: str) -> str:
    """The results as TOML: fault → kind → what vLLM did. The good twins must have been right."""
    lines = ["# Written by benchmarks/planted_engine.py: what vLLM did with each fault of planted.py, by kind.", ""]
    lines += [f'release = "{version}"', "", "[fault]"]
    for kind in planted.KINDS:
        good = out / "planted" / kind / "good.json"
        if good.exists() and (said := classify(load_json(good))) != "silent same":
            raise SystemExit(f"the good twin of {kind} is not right itself: {said}")
    for fault in planted.FAULTS.values():
        stem = fault.name.replace(" ", "-").replace("/", "-")
        seen = {
            kind: classify(load_json(path))
            for kind in fault.kinds
            if (path := out / "planted" / kind / f"{stem}.json").exists()
        }
        if seen:
            inline = ", ".join(f"{json.dumps(kind)} = {json.dumps(words)}" for kind, words in seen.items())
            lines.append(f"{json.dumps(fault.name)} = {{ {inline} }}")
    return "\n".join(lines) + "\n"


def classify(result: dict[str, Any]) -> str:
    """config, load, start or answer where vLLM stops; else silent, and what shows in its answers."""
    if result["stage"] != "done":
        return str(result["stage"])
    wrong = any(
        token != answer["prompt_ids"][-1] for answer in result["answers"] for token in answer["token_ids"] or [-1]
    )
    accepted = result["counters"].get("accepted_tokens", 0)
    return "silent " + ("wrong" if wrong else "same" if accepted else "no drafts")


if __name__ == "__main__":
    main()
