"""Measure engine releases: prove the twins of the four published kinds on each, and write what came out as rows.

    PYTHONPATH=tests:examples python tests/benchmarks/sweep_engines.py OUT --release 0.22.1 --kind per-layer

OUT keeps the twins and one evidence file a cell; a cell that has its file is not run again, so a sweep that was
stopped carries on. At the end OUT/measured.toml holds a row a cell: bundler/engines/measured.toml is such a file.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from make_tiny import write_pair
from twins import REPOS, bake_published

from bundler import evidence, prove
from bundler.engines import load_facts
from bundler.engines.environments import Release, find_device, install
from bundler.evidence import Evidence
from bundler.findings import errors
from bundler.recipe import load_bundled


def main() -> None:
    """Run what is missing, then write the rows."""
    releases = [release.version for release in load_facts().releases]
    parser = argparse.ArgumentParser(description="Prove the twins of all kinds on many engine releases.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--release", action="append", choices=releases, help="default: every release in vllm.toml")
    parser.add_argument("--kind", action="append", choices=list(REPOS), help="default: all four")
    parser.add_argument("--timeout", type=float, default=900)
    arguments = parser.parse_args()
    for version in arguments.release or releases:
        for kind in arguments.kind or REPOS:
            path = arguments.out / "cells" / f"{version}-{kind}.json"
            if not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                found = measure(kind, version, arguments.out, arguments.timeout)
                path.write_text(evidence.render(found), encoding="utf-8")
                print(f"{version} {kind}: {found.outcome}", flush=True)
    (arguments.out / "measured.toml").write_text(render_rows(arguments.out / "cells"), encoding="utf-8")


def measure(kind: str, version: str, out: Path, timeout_s: float) -> Evidence:
    """One cell: a kind's twin on one release, without and with the drafter."""
    tiny, folder = out / "tiny" / kind, out / "twins" / kind
    if not (tiny / "drafter" / "config.json").exists():
        write_pair(kind, tiny)
    if not (folder / "twin").exists():
        bake_published(kind, tiny, folder)
    environment = install(Release(engine="vllm", version=version, device=find_device()), load_facts(), print)
    subject = folder / "twin"
    with tempfile.TemporaryDirectory() as scratch:
        found = prove.examine(
            subject, load_bundled(subject), environment, Path(scratch), known_answer=True, timeout_s=timeout_s
        )
    return replace(found, subject="twin", date=prove.today())


def render_rows(cells: Path) -> str:
    """The evidence files of a folder as TOML rows."""
    lines = [HEAD]
    for path in sorted(cells.glob("*.json")):
        found, kind = evidence.load(path), path.stem.split("-", 1)[1]
        alone = next((run for run in found.runs if not run.drafter), None)
        drafted = next((run for run in found.runs if run.drafter), None)
        why = "; ".join(finding.message for finding in errors(found.findings))
        row = {
            "release": found.version,
            "kind": kind,
            "body": bool(alone and alone.answers),
            "drafter": bool(drafted and drafted.answers),
            "accepted": [drafted.counters.get(key, 0) for key in ("accepted_tokens", "draft_tokens")]
            if drafted
            else [],
            "outcome": str(found.outcome),
            "why": why[:300],
            "transformers": found.packages.get("transformers", ""),
            "device": found.device,
            "runner": (drafted or alone).runner if alone else "",
            "shims": sorted({name for run in found.runs for name in run.shims}),
        }
        lines.append("[[cell]]")
        lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in row.items()]
        lines += [f"date = {found.date}", ""]
    return "\n".join(lines)


HEAD = """\
# What tests/benchmarks/sweep_engines.py measured: the twin of a published kind (its config and head ratios, narrower
# and fewer layers, weights whose right answer is known), NVFP4, on the real engine, without and with the drafter.
# `body` and `drafter`: it started and answered. `outcome`: proven; engine-fault, which a GPU user should meet too;
# not-provable on this device; failed. On a processor this proves structure and loading, never a GPU's kernels.
"""

if __name__ == "__main__":
    main()
