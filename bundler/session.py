"""One start of the server: the card's own line and what this release and device need beside it, asked and stopped."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bundler import card
from bundler.engines import FOLDER, Setting, load_facts, make_argv, make_serve_command, render_bash, select_facts
from bundler.engines.environments import Environment, Release, load_device, tracking_args
from bundler.engines.faults import find_fault, last_error
from bundler.engines.server import HOST, ServerDied, free_port, running
from bundler.errors import EngineError
from bundler.evidence import Answer, Run
from bundler.findings import Finding, error
from bundler.prompts import PROMPTS, ask
from bundler.recipe import Recipe

_LOG_LINES = 40
_QUIET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Watch:
    """Who is told what is going on; each defaults to nobody."""

    step: Callable[[str], None] = lambda what: None
    command: Callable[[str], None] = lambda line: None


def serve(
    subject: Path,
    recipe: Recipe,
    config: Mapping[str, Any],
    environment: Environment,
    work: Path,
    drafted: bool,
    timeout_s: float,
    watch: Watch,
) -> tuple[Run, list[Finding]]:
    """Start the server, ask every prompt, stop it: what was seen, and why it went no further if it did not."""
    stem = "drafted" if drafted else "alone"
    log, report = work / f"{stem}.log", work / f"{stem}.jsonl"
    card_line, argv, env, shown = make_command(recipe, config, environment, subject, drafted=drafted)
    watch.command(shown)
    port, ready_s = free_port(), 0.0
    answers: list[Answer] = []
    counters: dict[str, Any] = {}
    findings: list[Finding] = []
    try:
        command = [*argv, "--host", HOST, "--port", str(port)]
        with running(command, {**env, "BUNDLER_REPORT": str(report)}, log, port=port, timeout_s=timeout_s) as server:
            ready_s = server.ready_s
            watch.step(f"ready after {ready_s:g} s")
            for prompt in PROMPTS:
                if not prompt.image or "vision_config" in config:
                    answers.append(ask(server, prompt, served_name(recipe)))
            counters = server.counters()
    except ServerDied as exc:
        findings = _explain(log, str(exc), drafted)
    except EngineError as exc:
        findings = [error("engine-refuses", where_of(drafted), str(exc))]
    seen = read_report(report)
    run = Run(
        drafter=drafted,
        card_line=card_line,
        command=shown,
        env={key: value for key, value in env.items() if key not in _QUIET},
        ready_s=ready_s,
        answers=tuple(answers),
        counters=counters,
        log=last_lines(log, subject, environment),
        **seen,
    )
    return run, findings


def make_command(
    recipe: Recipe, config: Mapping[str, Any], environment: Environment, subject: Path, *, drafted: bool
) -> tuple[str, list[str], dict[str, str], str]:
    """The card's line; and for this release and device: the arguments, the environment variables, and the line.

    The line is the card's for a recipe that is pinned to this release. What is appended wins over it: the engine takes
    the last of two equal flags.
    """
    parts = card.Parts(body_config=config)
    setting = card.make_setting(recipe, parts)
    drafter = recipe.drafter if drafted else None
    printed = make_serve_command(recipe.serve, drafter, select_facts(load_facts(), setting), name=served_name(recipe))
    release = environment.release
    pinned = _pin(setting, release)
    exact = make_serve_command(pinned.serve, drafter, select_facts(load_facts(), pinned), name=served_name(recipe))
    device = load_device(release.device)
    shares = bool(config["text_config"].get("num_kv_shared_layers"))
    extra = [*device.args, *tracking_args(release, shared_kv=shares)]
    limit = recipe.serve.max_model_len
    if "--max-model-len" in extra and limit and limit < int(extra[extra.index("--max-model-len") + 1]):
        extra[extra.index("--max-model-len") + 1] = str(limit)
    exact = replace(exact, args=(*exact.args, *extra))
    env = {**exact.env, **environment.env, **(device.env or {})}
    env = {key: value for key, value in env.items() if key not in device.unset}
    argv = [str(environment.bin / "vllm"), *make_argv(exact, str(subject))]
    shown = " ".join(
        [
            *(f"{key}={shlex.quote(value)}" for key, value in env.items()),
            "vllm",
            *(shlex.quote(word) for word in make_argv(exact, FOLDER)),
        ]
    )
    return render_bash(printed), argv, {**env, **_QUIET}, shown


def served_name(recipe: Recipe) -> str:
    """The model's name in the card's serve line."""
    return recipe.publish.repo_id or recipe.name


def _pin(setting: Setting, release: Release) -> Setting:
    return replace(setting, serve=replace(setting.serve, engine=release.engine, version=f"=={release.version}"))


def read_report(path: Path) -> dict[str, Any]:
    """What the plugin wrote, as fields of a Run; nothing of it where the server never got that far."""
    seen: dict[str, Any] = {"runner": "", "kernels": {}, "attention": {}, "head_groups": (), "head_check": ""}
    seen |= {"unfilled": {}, "shims": {}}
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    for event in map(json.loads, lines):
        match event["event"]:
            case "shim":
                seen["shims"][event["name"]] = event["why"]
            case "weights":
                seen["unfilled"] |= {f"{event['model']}: {name}": value for name, value in event["unfilled"].items()}
            case "engine":
                seen |= {"runner": _runner(event["runner"]), "kernels": event["kernels"]}
                seen["attention"] = event["attention"]
            case "attention-groups":
                seen["head_groups"] = tuple(tuple(group) for group in event["heads"])
                seen["head_check"] = f"{event['check']} {event.get('error', '')}".strip()
    return seen


def _runner(path: str) -> str:
    return "V2 runner" if ".worker.gpu." in path else "V1 runner"


def _explain(log: Path, said: str, drafted: bool) -> list[Finding]:
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    fault = find_fault(text)
    if fault is None:
        return [
            error("engine-died", where_of(drafted), f"{said}: {last_error(text)}", "the log's end is in the evidence")
        ]
    code = {"device": "engine-not-provable", "bundle": "engine-rejects"}.get(fault.of, "engine-fault")
    return [error(code, where_of(drafted), f"{fault.title}: {last_error(text)}", source=", ".join(fault.link) or None)]


def where_of(drafted: bool) -> str:
    """The words for a start in a finding."""
    return "with the drafter" if drafted else "without the drafter"


def last_lines(log: Path, subject: Path, environment: Environment) -> tuple[str, ...]:
    """The end of a log, without this machine's paths."""
    if not log.is_file():
        return ()
    text = log.read_text(encoding="utf-8", errors="replace")
    for path, word in ((subject, FOLDER), (environment.root, "{engine}"), (log.parent, "{work}"), (Path.home(), "~")):
        for spelled in {str(path), str(path.resolve())}:
            text = text.replace(spelled, word)
    text = re.sub(r"(?<![\w.}~])/(?:[\w.+-]+/)+(?=[\w.+-])", ".../", text)
    return tuple(line[:400] for line in text.splitlines()[-_LOG_LINES:])
