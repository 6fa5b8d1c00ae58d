"""A running engine: started, asked over its OpenAI-compatible API, stopped with everything that it started."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bundler.engines import guard
from bundler.errors import EngineError

HOST = "127.0.0.1"
_POLL_S = 0.5
_REQUEST_TIMEOUT_S = 600
_COUNTER = re.compile(r"^vllm:(spec_decode_num_\w+?)_total(\{[^}]*\})? (\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business on this machine


class ServerDied(EngineError):
    """The server ended, or never got healthy; its log says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    """A healthy server on this machine."""

    port: int
    ready_s: float

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """One JSON request; EngineError with what the server said if it refuses."""
        request = urllib.request.Request(
            f"http://{HOST}:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with _DIRECT.open(request, timeout=_REQUEST_TIMEOUT_S) as response:
                answer: dict[str, Any] = json.loads(response.read())
                return answer
        except urllib.error.HTTPError as exc:
            said = exc.read().decode(errors="replace")[:2000]
            raise EngineError(f"the engine answers {path} with HTTP {exc.code}: {said}") from exc
        except (OSError, ValueError) as exc:
            raise ServerDied(f"the engine gives no answer to {path}: {exc}") from exc

    def counters(self) -> dict[str, int | list[int]]:
        """The speculative decoding counters of /metrics; empty where the server drafts nothing."""
        try:
            with _DIRECT.open(f"http://{HOST}:{self.port}/metrics", timeout=60) as response:
                return parse_counters(response.read().decode())
        except OSError as exc:
            raise ServerDied(f"the engine gives no metrics: {exc}") from exc


def parse_counters(text: str) -> dict[str, int | list[int]]:
    """Prometheus text → drafts, draft_tokens, accepted_tokens, accepted_tokens_per_pos, summed over engines."""
    totals: dict[str, int] = {}
    by_position: dict[int, int] = {}
    for name, labels, value in _COUNTER.findall(text):
        key = name.removeprefix("spec_decode_num_")
        if (position := _POSITION.search(labels)) is not None:
            by_position[int(position[1])] = by_position.get(int(position[1]), 0) + int(float(value))
        else:
            totals[key] = totals.get(key, 0) + int(float(value))
    if not totals:
        return {}
    return {**totals, "accepted_tokens_per_pos": [by_position[key] for key in sorted(by_position)]}


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    command: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    *,
    port: int,
    timeout_s: float,
    grace_s: float = 30,
) -> Iterator[Server]:
    """Start a server and wait until it is healthy; on the way out it and every process that it started are gone.

    That holds after an exception, a Ctrl-C, and when this process is killed: a guard process outlives it for that
    (guard.py). ServerDied if it ends before it is healthy, or is not within `timeout_s`.
    """
    started = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-I", guard.__file__, str(grace_s), *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
    try:
        _wait_until_healthy(process, port, started + timeout_s)
        yield Server(port=port, ready_s=round(time.monotonic() - started, 1))
    finally:
        _stop(process, grace_s)


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, deadline: float) -> None:
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerDied(f"the engine ended with exit code {process.returncode} before it was ready")
        with suppress(OSError), _DIRECT.open(f"http://{HOST}:{port}/health", timeout=10):
            return
        time.sleep(_POLL_S)
    raise ServerDied("the engine was not ready in time", hint="give it more with --timeout")


def _stop(process: subprocess.Popen[bytes], grace_s: float) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(grace_s + 30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
