"""`bundle prove`: a real engine serves the bundle, answers, and what it did becomes evidence.

The bundle is verified first: evidence names its hashes. Then two starts of the server, alone and with the drafter, by
the card's own serve line (session); every answer is held against what the bundle's weights mean, every parameter
against the tensors that filled it (judgement); the record is written (evidence).
"""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from bundler import card, manifest, twin
from bundler.checkpoint import load_json
from bundler.engines import allowed_releases, load_facts
from bundler.engines.environments import Environment, Release, find_device, install, parse_release
from bundler.errors import CompatibilityError, VerificationError
from bundler.evidence import Evidence, Reference, Run, make_digest
from bundler.evidence import write as write_evidence
from bundler.findings import Finding, errors
from bundler.judgement import check_runs, find_outcome, refer
from bundler.manifest import FileEntry
from bundler.recipe import Recipe, load_bundled
from bundler.session import Watch, serve
from bundler.verify import verify


def prove(
    bundle: Path,
    *,
    engine: str | None = None,
    device: str | None = None,
    with_twin: bool = False,
    untrained: bool = False,
    timeout_s: float = 900,
    watch: Watch | None = None,
) -> Evidence:
    """Serve the bundle, or its twin, with one engine release; what happened, already written into the bundle.

    EngineError where the release cannot be installed; RecipeError or VerificationError where the folder is no bundle,
    or one that `verify` finds errors in, other than in evidence that is there already.
    What the engine itself does wrong is in the evidence, never raised. `untrained` says that the drafter's weights are
    random, so that it need not be right once.
    """
    watch = watch or Watch()
    recipe, made = load_bundled(bundle), manifest.load(bundle)
    watch.step("verifying the bundle")
    if wrong := [finding for finding in errors(verify(bundle)) if not finding.code.startswith("evidence-")]:
        raise VerificationError("nothing to prove: the bundle is not whole", findings=wrong)
    release = choose_release(engine, recipe, device or find_device())
    environment = install(release, load_facts(), watch.step)
    with tempfile.TemporaryDirectory(prefix="bundle-prove-") as scratch:
        subject, work = bundle, Path(scratch)
        if with_twin:
            watch.step("making a twin of the bundle's structure")
            subject = twin.make_twin(bundle, work / "twin")
        evidence = examine(
            subject,
            recipe,
            environment,
            work,
            known_answer=with_twin,
            untrained=untrained,
            timeout_s=timeout_s,
            watch=watch,
        )
    evidence = replace(
        evidence, subject="twin" if with_twin else "bundle", bundle_sha256=make_digest(made), date=today()
    )
    record(bundle, evidence)
    return evidence


def choose_release(engine: str | None, recipe: Recipe, device: str) -> Release:
    """`vllm==0.32.0` → a release; without one, the newest that was tried and that the recipe allows."""
    if engine is None:
        allowed = allowed_releases(load_facts(), recipe.serve)
        if not allowed:
            raise CompatibilityError(
                f"no {recipe.serve.engine} release that was tried is in {recipe.serve.version!r}",
                hint="name one: --engine vllm==0.32.0",
            )
        return Release(engine=recipe.serve.engine, version=allowed[-1], device=device)
    return parse_release(engine, device)


def record(bundle: Path, evidence: Evidence) -> None:
    """Put evidence into a bundle: the file, its entry in bundle.json, and the card's table."""
    path = write_evidence(bundle, evidence)
    size_bytes, sha256 = manifest.hash_file(path)
    entry = FileEntry(path=evidence.file, size_bytes=size_bytes, sha256=sha256, role="evidence")
    made = manifest.load(bundle)
    others = [file for file in made.files if file.path != entry.path]
    manifest.write(bundle, replace(made, files=tuple(sorted([*others, entry], key=lambda file: file.path))))
    card.write_bundle(bundle)


def examine(
    subject: Path,
    recipe: Recipe,
    environment: Environment,
    work: Path,
    *,
    known_answer: bool = False,
    untrained: bool = False,
    timeout_s: float = 900,
    watch: Watch | None = None,
) -> Evidence:
    """Serve `subject` twice with an installed engine and judge it; nothing is written into it."""
    watch = watch or Watch()
    config = load_json(subject / "config.json")
    runs: list[Run] = []
    findings: list[Finding] = []
    for drafted in (False, True):
        watch.step(
            f"starting {environment.release.engine} {environment.release.version}, "
            f"{'with' if drafted else 'without'} the drafter"
        )
        run, fault = serve(subject, recipe, config, environment, work, drafted, timeout_s, watch)
        runs.append(run)
        findings += fault
        if fault:
            break
    findings += check_runs(runs, config, known_answer=known_answer, untrained=untrained)
    judged: tuple[Reference, ...] = ()
    if runs[0].answers:
        watch.step("computing the same answers from the bundle's own weights")
        judged, wrong = refer(subject, runs[0].answers)
        findings += wrong
    release = environment.release
    return Evidence(
        date="",
        engine=release.engine,
        version=release.version,
        device=release.device,
        device_name=device_name(release.device),
        python=environment.python,
        packages=environment.packages,
        fixes=environment.fixes,
        bundle_sha256="",
        subject="bundle",
        outcome=find_outcome(findings),
        findings=tuple(findings),
        runs=tuple(runs),
        reference=judged,
    )


def device_name(device: str) -> str:
    """The GPU's name as its driver says it, or the processor's."""
    if device == "cuda":
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
        return asked.stdout.splitlines()[0].strip() if asked.returncode == 0 and asked.stdout else "GPU"
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return f"CPU ({platform.machine()})"
    match = re.search(r"model name\s*: (.+)", text)
    return f"CPU ({' '.join(match[1].split())})" if match else f"CPU ({platform.machine()})"


def today() -> str:
    """The date in UTC, as evidence records it."""
    return datetime.datetime.now(tz=datetime.UTC).date().isoformat()
