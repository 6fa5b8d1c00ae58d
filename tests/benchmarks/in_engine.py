"""Cells of a sweep, inside an engine's own environment: vLLM is imported once, each cell is a forked in-process `LLM`.

    ENGINE/bin/python in_engine.py CELLS.json

CELLS.json is what `sweep_engines.run_cells` writes. Every cell's result is a JSON file of its own, written last. A
fork of a process that has vLLM is ready in seconds, where a server takes half a minute to import it; the eager V1
runner, the loaders and the model code are the same. Nothing of bundler is imported here but its plugin.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_STAGES = (
    ("answer", {"generate", "chat"}),
    ("start", {"initialize_kv_cache", "initialize_from_config", "profile_run", "determine_available_memory"}),
    ("load", {"load_model", "load_weights"}),
)
_MODELS = ("gemma4", "gemma4_mm", "gemma4_mtp", "gemma4_unified")


def main() -> None:
    """Run every cell, as many beside each other as asked."""
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    failed = _import_engine()
    waiting, running = list(asked["cells"]), dict[int, tuple[dict[str, Any], float]]()
    while waiting or running:
        while waiting and len(running) < asked["parallel"]:
            cell = waiting.pop(0)
            sys.stdout.flush()
            pid = os.fork()
            if not pid:
                _child(cell, asked, failed)
            running[pid] = (cell, time.monotonic())
        time.sleep(0.2)
        for pid, (cell, began) in list(running.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            late = time.monotonic() - began > asked["timeout_s"]
            if not ended and (late or Path(cell["result"]).exists()):
                time.sleep(0.3)
                _end(pid)
                ended, status = os.waitpid(pid, 0)
            if ended:
                del running[pid]
                if not Path(cell["result"]).exists():
                    why = "it was not done in time" if late else f"the process ended with status {status}"
                    _write(cell, {"stage": "crash", "error": why, "answers": [], "counters": {}, "ready_s": 0.0})
                print(cell["id"], flush=True)


def _end(pid: int) -> None:
    """End a child and what it started: it leads a group of its own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _import_engine() -> str:
    """Import what every cell needs; why it failed, or nothing."""
    try:
        importlib.import_module("vllm").LLM  # noqa: B018 - it is loaded when it is first asked for
        registry = importlib.import_module("vllm.model_executor.models.registry")
        registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
            self.load_model_cls()  # here, not in a process that would import vLLM again
        )
        for name in _MODELS:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(f"vllm.model_executor.models.{name}")
    except Exception:
        return traceback.format_exc()
    return ""


def _child(cell: dict[str, Any], asked: dict[str, Any], failed: str) -> None:
    os.setpgid(0, 0)
    log = os.open(cell["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"BUNDLER_REPORT": cell["report"], "VLLM_HOST_IP": "127.0.0.1"}
    result: dict[str, Any] = {"stage": "import", "error": failed, "answers": [], "counters": {}, "ready_s": 0.0}
    if failed:
        print(failed)
    else:
        try:
            _serve(cell, asked, result)
        except BaseException as exc:
            traceback.print_exc()
            result |= {"stage": _stage(exc), "error": _root(exc)}
    _write(cell, result)
    sys.stdout.flush()
    os._exit(0)


def _serve(cell: dict[str, Any], asked: dict[str, Any], result: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams

    _one_process(result)
    began = time.monotonic()
    options = {**asked["options"], **cell["options"]}
    if cell["drafter"]:
        options["speculative_config"] = {"method": "mtp", "model": cell["drafter"], "num_speculative_tokens": 4}
    llm = LLM(model=cell["model"], enforce_eager=True, disable_log_stats=False, seed=0, **options)
    result["ready_s"] = round(time.monotonic() - began, 1)
    greedy = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True)
    for prompt in asked["prompts"]:
        ask = llm.chat if prompt["chat"] else llm.generate
        (out,) = ask(prompt["messages"] if prompt["chat"] else [prompt["text"]], greedy, use_tqdm=False)
        result["answers"].append(
            {
                "prompt": prompt["name"],
                "text": out.outputs[0].text,
                "prompt_ids": list(out.prompt_token_ids),
                "token_ids": list(out.outputs[0].token_ids),
            }
        )
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num_"):
            name = metric.name.removeprefix("vllm:spec_decode_num_")
            result["counters"][name] = list(metric.values) if hasattr(metric, "values") else metric.value
    result |= {"stage": "done", "error": ""}


def _one_process(result: dict[str, Any]) -> None:
    """The worker in this very process; and which runner a GPU would get, by this release's own configuration."""
    platform = importlib.import_module("vllm.platforms.cpu").CpuPlatform
    original = platform.check_and_update_config.__func__

    def check(cls: type, config: Any) -> None:
        original(cls, config)
        if config.model_config is not None and "gpu_runner" not in result:
            with contextlib.suppress(Exception):
                result["gpu_runner"] = "V2 runner" if _prefers_v2(config) else "V1 runner"
        config.parallel_config.distributed_executor_backend = "uni"

    platform.check_and_update_config = classmethod(check)


def _prefers_v2(config: Any) -> bool:
    """What `VllmConfig.use_v2_model_runner` answers where there is Triton."""
    if not hasattr(type(config), "use_v2_model_runner"):
        return False
    default = getattr(config, "_is_default_v2_model_runner_model", lambda: True)
    lacks = getattr(config, "_get_v2_model_runner_unsupported_features", lambda: [])
    return bool(default()) and not lacks()


def _stage(exc: BaseException) -> str:
    names = {frame.name for frame in traceback.extract_tb(exc.__traceback__)}
    return next((stage for stage, inside in _STAGES if names & inside), "config")


def _root(exc: BaseException) -> str:
    while exc.__cause__ is not None:
        exc = exc.__cause__
    return f"{type(exc).__name__}: {exc}"[:1000]


def _write(cell: dict[str, Any], result: dict[str, Any]) -> None:
    path = Path(cell["result"])
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
