"""Measure engine releases: twins of the four published kinds on each, and write what came out as rows.

    PYTHONPATH=tests:examples:tests/benchmarks python tests/benchmarks/sweep_engines.py OUT --release 0.22.1

For every kind: bf16 and NVFP4, alone and with the drafter; for E4B also with the K and V of layers that share another
layer's, as Google's -it files hold them; for the 31B also as ModelOpt writes NVFP4. The cells of a release share one
process of its own environment (in_engine.py); with --served, the card's own line starts a server instead.

OUT keeps the twins and a file a cell; a cell that has its file is not run again, so a sweep that was stopped carries
on. At the end OUT/measured.toml holds a row a cell: bundler/engines/measured.toml is such a file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from make_tiny import write_pair
from packaging.version import Version
from safetensors.torch import load_file, save_file
from twins import REPOS, bake_published

from bundler import evidence, prove
from bundler.checkpoint import INDEX, load_json
from bundler.engines import guard, load_facts
from bundler.engines.environments import (
    Environment,
    Release,
    find_device,
    install,
    load_device,
    remove,
    tracking_args,
)
from bundler.engines.faults import find_fault, last_error
from bundler.evidence import Answer, Outcome, Run
from bundler.findings import Finding, errors
from bundler.judgement import check_drafts, check_runs, find_outcome
from bundler.prompts import PROMPTS, Prompt, make_messages
from bundler.recipe import load_bundled
from bundler.session import read_report

FORMATS = {
    "dense": ("nvfp4", "bf16", "modelopt"),
    "moe": ("nvfp4", "bf16"),
    "per-layer": ("nvfp4", "bf16", "bf16-full", "nvfp4-full"),
    "unified": ("nvfp4", "bf16"),
}
ASKED = (PROMPTS[0], PROMPTS[-1])
"""Text, and a chat with an image."""
TOKENS = 16
OPTIONS = {"max_model_len": 1024, "max_num_seqs": 4, "max_num_batched_tokens": 4096}
_HARNESS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One kind in one format, without or with the drafter."""

    kind: str
    format: str
    drafter: bool

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.format}-{'drafted' if self.drafter else 'alone'}"


CELLS = tuple(
    Cell(kind=kind, format=form, drafter=drafter)
    for kind, forms in FORMATS.items()
    for form in forms
    for drafter in (False, True)
)


def main() -> None:
    """Run what is missing, then write the rows."""
    releases = [release.version for release in load_facts().releases]
    parser = argparse.ArgumentParser(description="Prove the twins of all kinds on many engine releases.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--release", action="append", choices=releases, help="default: every release in vllm.toml")
    parser.add_argument("--kind", action="append", choices=list(REPOS), help="default: all four")
    parser.add_argument("--served", action="store_true", help="start servers, NVFP4 only: minutes a kind")
    parser.add_argument("--remove", action="store_true", help="remove an environment that this sweep installed")
    parser.add_argument("--timeout", type=float, default=900, help="seconds a cell")
    arguments = parser.parse_args()
    out, kinds = arguments.out, arguments.kind or list(REPOS)
    for version in arguments.release or releases:
        release = Release(engine="vllm", version=version, device=find_device())
        run = measure_served if arguments.served else measure
        run(release, kinds, out, arguments.timeout)
        if arguments.remove:
            remove(release)
        (out / "measured.toml").write_text(render_rows(out), encoding="utf-8")


def measure(release: Release, kinds: Sequence[str], out: Path, timeout_s: float) -> None:
    """Every cell of a release that has no file yet."""
    folder = out / "cells" / release.version
    folder.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in CELLS if cell.kind in kinds and not (folder / f"{cell.name}.json").exists()]
    if not missing:
        return
    environment = install(release, load_facts(), print)
    asked = [
        {
            "id": f"{release.version} {cell.name}",
            "model": str(subject := make_subject(cell.kind, cell.format, out)),
            "drafter": str(subject / "assistant") if cell.drafter else None,
            "options": _tracking(release, cell.kind),
            **{key: str(folder / f"{cell.name}.{end}") for key, end in _FILES.items()},
        }
        for cell in missing
    ]
    run_cells(environment, asked, timeout_s=timeout_s)
    (folder / "release.json").write_text(
        json.dumps({"packages": dict(environment.packages), "device": release.device, "date": prove.today()})
    )


_FILES = {"result": "json", "report": "report.jsonl", "log": "log"}


def _tracking(release: Release, kind: str) -> dict[str, Any]:
    words = tracking_args(release, shared_kv=kind == "per-layer")
    return {"model_loader_extra_config": json.loads(words[1])} if words else {}


def run_cells(
    environment: Environment,
    cells: Sequence[dict[str, Any]],
    *,
    timeout_s: float,
    asked: Sequence[Prompt] = ASKED,
    tokens: int = TOKENS,
) -> None:
    """Run cells in a release's environment, through the guard: when this process ends, so do they."""
    device = load_device(environment.release.device)
    prompts = [
        {"name": prompt.name, "text": prompt.text, "chat": prompt.chat, "messages": make_messages(prompt)}
        for prompt in asked
    ]
    for cell in cells:
        Path(cell["report"]).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        plan = Path(scratch) / "cells.json"
        document = {"cells": list(cells), "prompts": prompts, "options": OPTIONS, "tokens": tokens}
        plan.write_text(json.dumps({**document, "timeout_s": timeout_s, "parallel": 1}), encoding="utf-8")
        script = Path(__file__).with_name("in_engine.py")
        command = [sys.executable, "-I", guard.__file__, "2", str(environment.bin / "python"), str(script), str(plan)]
        env = {**os.environ, **_HARNESS, **(device.env or {}), **environment.env}
        env = {key: value for key, value in env.items() if key not in device.unset and not key.startswith("PYTHON")}
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env)
        try:
            process.wait()
        finally:
            if process.stdin is not None:
                process.stdin.close()
            process.wait()


def measure_served(release: Release, kinds: Sequence[str], out: Path, timeout_s: float) -> None:
    """The NVFP4 twins behind the card's own serve line: an evidence file a kind."""
    for kind in kinds:
        path = out / "served" / f"{release.version}-{kind}.json"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        subject, environment = make_subject(kind, "nvfp4", out), install(release, load_facts(), print)
        recipe = load_bundled(subject)
        with tempfile.TemporaryDirectory() as scratch:
            found = prove.examine(subject, recipe, environment, Path(scratch), known_answer=True, timeout_s=timeout_s)
        path.write_text(evidence.render(replace(found, subject="twin", date=prove.today())), encoding="utf-8")
        print(f"{release.version} {kind}: {found.outcome}", flush=True)


# ---- subjects -------------------------------------------------------------------------------------------------------


def make_subject(kind: str, form: str, out: Path) -> Path:
    """A kind's twin in one format, made once."""
    tiny, made = out / "tiny" / kind, out / "twins" / kind
    if not (made / "twin" / "assistant" / "config.json").exists():
        write_pair(kind, tiny)
        bake_published(kind, tiny, made)
    folder = out / "formats" / f"{kind}-{form}"
    if form == "nvfp4":
        return made / "twin"
    if not folder.exists():
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        body = made / ("body" if form.startswith("bf16") else "twin")
        shutil.copytree(body, part, ignore=shutil.ignore_patterns("*.safetensors", INDEX, "assistant"))
        shutil.copytree(made / "drafter", part / "assistant")
        tensors = {
            name: value for path in sorted(body.glob("*.safetensors")) for name, value in load_file(path).items()
        }
        config = load_json(part / "config.json")
        if form.endswith("-full"):
            tensors |= _shared_kv(tensors, config["text_config"])
        if form == "modelopt":
            tensors = _as_modelopt(tensors)
            config["quantization_config"] = _MODELOPT
            (part / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        save_file(
            {name: value.contiguous() for name, value in tensors.items()}, part / "model.safetensors", {"format": "pt"}
        )
        part.replace(folder)
    return folder


def _shared_kv(tensors: dict[str, Any], text: dict[str, Any]) -> dict[str, Any]:
    """K, V and their norm for layers that read another layer's, copied from it: Google's -it files hold such."""
    types, count = text["layer_types"], text["num_hidden_layers"]
    own = count - text["num_kv_shared_layers"]
    added = {}
    for layer in range(own, count):
        source = max(index for index in range(own) if types[index] == types[layer])
        at = f"model.language_model.layers.{source}.self_attn."
        for name, value in tensors.items():
            if not name.startswith((f"{at}k_", f"{at}v_")):
                continue
            to = f"model.language_model.layers.{layer}.self_attn."
            if name.endswith("_global_scale"):  # one matrix with this layer's own q_proj
                value = tensors[f"{to}q_proj.{name.rpartition('.')[2]}"]
            added[name.replace(at, to)] = value.clone()
    return added


def _as_modelopt(tensors: dict[str, Any]) -> dict[str, Any]:
    renamed = {}
    for name, value in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            renamed[f"{module}.weight"] = value
        elif part == "weight_global_scale":
            renamed[f"{module}.weight_scale_2"] = (1 / value.float()).reshape(())
        elif part == "input_global_scale":
            renamed[f"{module}.input_scale"] = (1 / value.float()).reshape(())
        else:
            renamed[name] = value
    return renamed


_FOUR_BITS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
_MODELOPT = {
    "config_groups": {"group_0": {"input_activations": _FOUR_BITS, "weights": _FOUR_BITS, "targets": ["Linear"]}},
    "ignore": ["lm_head", "model.vision_tower*", "model.audio_tower*", "model.embed_vision*", "model.embed_audio*"],
    "quant_algo": "NVFP4",
    "producer": {"name": "modelopt", "version": "0.40.0"},
    "quant_method": "modelopt",
}


# ---- rows -----------------------------------------------------------------------------------------------------------


def judge(cell: Cell, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """A cell's row: outcome, the known fault or the reason, drafts, shims."""
    files = {key: folder / f"{cell.name}.{end}" for key, end in _FILES.items()}
    result, seen = load_json(files["result"]), read_report(files["report"])
    run = _make_run(cell, result, seen)
    row: dict[str, Any] = {"kind": cell.kind, "format": cell.format, "drafter": cell.drafter}
    if result["stage"] != "done":
        log = files["log"].read_text(encoding="utf-8", errors="replace") if files["log"].is_file() else ""
        fault = find_fault(f"{log}\n{result['error']}")
        of = {"device": Outcome.NOT_PROVABLE, "bundle": Outcome.FAILED, None: Outcome.FAILED}
        row["outcome"] = str(of.get(fault.of if fault else None, Outcome.ENGINE_FAULT))
        row |= {"fault": fault.id} if fault else {"why": (result["error"] or last_error(log))[:200]}
    else:
        found: list[Finding] = check_runs([run], config, known_answer=True)
        found += check_drafts(run) if cell.drafter else []
        wrong = errors(found)
        row["outcome"] = str(find_outcome(found))
        if wrong:
            fault = find_fault(" ".join(finding.message for finding in wrong))
            row |= {"fault": fault.id} if fault else {"why": f"{wrong[0].code}: {wrong[0].message}"[:200]}
    if cell.drafter and result["counters"]:
        counters = {key: int(value) for key, value in result["counters"].items() if not isinstance(value, list)}
        row["accepted"] = [counters.get(key, 0) for key in ("accepted_tokens", "draft_tokens")]
    if seen["shims"]:
        row["shims"] = sorted(seen["shims"])
    return row


def _make_run(cell: Cell, result: dict[str, Any], seen: dict[str, Any]) -> Run:
    answers = tuple(
        Answer(
            prompt=answer["prompt"],
            asked=answer["prompt"],
            image=answer["prompt"] == "image",
            prompt_ids=tuple(answer["prompt_ids"]),
            text=answer["text"],
            token_ids=tuple(answer["token_ids"]),
            tops=(),
        )
        for answer in result["answers"]
    )
    counters = {key: int(value) for key, value in result["counters"].items() if not isinstance(value, list)}
    rest = {"card_line": "", "command": "", "env": {}, "log": (), "ready_s": result["ready_s"]}
    return Run(drafter=cell.drafter, answers=answers, counters=counters, **rest, **seen)


def render_rows(out: Path) -> str:
    """The files of a sweep as TOML: a table a release, a line a cell."""
    lines = [HEAD]
    for folder in sorted((out / "cells").iterdir(), key=lambda path: Version(path.name)):
        if not (folder / "release.json").is_file():
            continue
        about = load_json(folder / "release.json")
        served = {path.stem.split("-", 1)[1]: path for path in (out / "served").glob(f"{folder.name}-*.json")}
        runners: dict[str, set[str]] = {}
        rows = []
        for cell in CELLS:
            if not (folder / f"{cell.name}.json").is_file():
                continue
            config = load_json(make_subject(cell.kind, cell.format, out) / "config.json")
            if cell.format == "modelopt":  # other classes, and another ignore list
                del config["quantization_config"]
            row = judge(cell, folder, config)
            if cell.format == "nvfp4" and cell.drafter and cell.kind in served:
                row["served"] = str(evidence.load(served[cell.kind]).outcome)
            if runner := load_json(folder / f"{cell.name}.json").get("gpu_runner"):
                runners.setdefault(runner, set()).add(cell.kind)
            rows.append(f"  {{ {_inline(row)} }},")
        lines += [
            "[[release]]",
            f'version = "{folder.name}"',
            f"packages = {{ {_inline({key: about['packages'][key] for key in about['packages']})} }}",
            f'device = "{about["device"]}"',
            f"gpu_runner = {{ {_inline({key: sorted(value) for key, value in sorted(runners.items())})} }}",
            f"date = {about['date']}",
            "cell = [",
            *rows,
            "]",
            "",
        ]
    return "\n".join(lines)


def _inline(row: dict[str, Any]) -> str:
    return ", ".join(f"{_key(key)} = {json.dumps(value, ensure_ascii=False)}" for key, value in row.items())


def _key(key: str) -> str:
    return key if key.replace("-", "").replace("_", "").isalnum() else json.dumps(key)


HEAD = """\
# What tests/benchmarks/sweep_engines.py measured: twins of the published kinds (their config and head ratios, narrower
# and fewer layers, weights whose right answer is known) on real releases, in one process with the eager V1 runner.
#   format   nvfp4 and bf16; -full: with the K and V of layers that share another layer's; modelopt: ModelOpt's NVFP4
#   outcome  proven: it started and every token of every answer, one with an image, is right; engine-fault: a GPU user
#            should meet it too; not-provable: only this device has it; failed: neither is known
#   fault    the row of faults.toml; `why` where there is none. accepted: of how many drafted tokens
#   served   the outcome behind the card's own `vllm serve` line, where that was run too
#   gpu_runner  which runner this release's own configuration chooses on a GPU
# On a processor this proves structure and loading, never a GPU's kernels.
"""

if __name__ == "__main__":
    main()
