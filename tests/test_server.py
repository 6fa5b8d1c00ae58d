"""An engine is started, asked and stopped; nothing of it is left, whatever happens to whoever started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from bundler.engines import guard
from bundler.engines.server import Server, ServerDied, free_port, parse_counters, running
from bundler.errors import EngineError

FAKE = Path(__file__).with_name("fake_engine.py")
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "logprobs": True, "top_logprobs": 3}
ASKED = {
    "temperature": 0,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "max_tokens": 8,
    "ignore_eos": True,
}


def check_contract(server: Server, *, drafting: bool, model: str = "m") -> None:
    """What `bundle prove` needs of an engine; the fake and the real one both pass."""
    done = server.post("/v1/completions", {**ASKED, "model": model, "prompt": "The quick brown fox", "logprobs": 3})
    choice = done["choices"][0]
    assert len(choice["token_ids"]) == 8
    assert choice["prompt_token_ids"]
    tops = choice["logprobs"]["top_logprobs"]
    assert [f"token_id:{token}" in top for token, top in zip(choice["token_ids"], tops, strict=True)] == [True] * 8
    chat = server.post("/v1/chat/completions", {**CHAT, **ASKED, "model": model})
    entries = chat["choices"][0]["logprobs"]["content"]
    assert chat["prompt_token_ids"]
    assert isinstance(chat["choices"][0]["message"]["content"], str)
    assert all(entry["top_logprobs"][0]["token"].startswith("token_id:") for entry in entries)
    assert len(entries) == len(chat["choices"][0]["token_ids"])
    counters = server.counters()
    assert bool(counters) == drafting
    if drafting:
        assert {"drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"} <= counters.keys()
    with pytest.raises(EngineError, match="HTTP 404"):
        server.post("/v1/nothing", {})


def start(
    tmp_path: Path, *, drafting: bool = False, timeout_s: float = 30, **mode: object
) -> AbstractContextManager[Server]:
    port = free_port()
    command = [sys.executable, "-u", str(FAKE), "serve", str(tmp_path), "--port", str(port)]
    if drafting:
        command += ["--speculative-config", json.dumps({"model": str(tmp_path), "num_speculative_tokens": 4})]
    env = {"FAKE_ENGINE": json.dumps(mode)}
    return running(command, env, tmp_path / "log", port=port, timeout_s=timeout_s, grace_s=0.5)


def fakes(marker: Path, *, guards: bool = True) -> list[int]:
    """Processes of a fake engine that serves this folder, and their guards."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        guarding = guard.__file__.encode() in words
        if str(FAKE).encode() in words and str(marker).encode() in words and (guards or not guarding):
            found.append(int(entry.name))
    return found


@pytest.mark.parametrize("drafting", [False, True])
def test_the_fake_engine_keeps_the_contract(tmp_path: Path, drafting: bool) -> None:
    """The fake that other tests stand on answers as a real engine does."""
    with start(tmp_path, drafting=drafting) as server:
        check_contract(server, drafting=drafting)
    assert fakes(tmp_path) == []
    assert "Application shutdown complete." in (tmp_path / "log").read_text()


def test_a_proxy_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine on this machine is reached directly, whatever proxy the environment names."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with start(tmp_path) as server:
        check_contract(server, drafting=False)


def test_a_server_that_ends_is_not_waited_for(tmp_path: Path) -> None:
    """A server that dies before it is healthy is an error with its exit code."""
    with pytest.raises(ServerDied, match="exit code 3"), start(tmp_path, dies=True):
        pass


def test_a_server_that_never_gets_healthy_is_stopped(tmp_path: Path) -> None:
    """After the time limit the server is gone and the user is told which option gives it more."""
    with pytest.raises(ServerDied, match="not ready") as caught, start(tmp_path, timeout_s=1, never_ready=True):
        pass
    assert "--timeout" in str(caught.value.hint)
    assert fakes(tmp_path) == []


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    """After a Ctrl-C no process of the engine is left."""
    with pytest.raises(KeyboardInterrupt), start(tmp_path):
        raise KeyboardInterrupt
    assert fakes(tmp_path) == []


def test_a_server_that_hears_no_signal_is_ended_with_its_children(tmp_path: Path) -> None:
    """Neither a server that ignores interrupts nor what it started outlives its time."""
    with start(tmp_path, deaf=True):
        (server,) = fakes(tmp_path, guards=False)
        assert len(guard.members(server)) == 2
    assert guard.members(server) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_server_goes_when_whoever_started_it_is_killed(tmp_path: Path, number: int) -> None:
    """Even after a kill -9 of bundler the engine stops by itself."""
    script = f"""
import sys, time
sys.path[:0] = [{str(FAKE.parent)!r}, {str(FAKE.parent.parent)!r}]
from pathlib import Path
from test_server import start
with start(Path({str(tmp_path)!r})):
    print("ready", flush=True)
    time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        (server,) = fakes(tmp_path, guards=False)
        os.kill(parent.pid, number)
    for _ in range(200):
        if not fakes(tmp_path):
            break
        time.sleep(0.05)
    assert fakes(tmp_path) == guard.members(server) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# HELP vllm:spec_decode_num_drafts_total Number of\nvllm:generation_tokens_total 5\n", {}),
        (
            'vllm:spec_decode_num_drafts_total{engine="0"} 3.0\nvllm:spec_decode_num_drafts_total{engine="1"} 4.0\n'
            'vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="10"} 1.0\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="2"} 5.0\n',
            {"drafts": 7, "accepted_tokens_per_pos": [5, 1]},
        ),
    ],
)
def test_counters_are_read_from_prometheus_text(text: str, expected: Mapping[str, object]) -> None:
    """Engines are summed, positions put in order, help texts and times of creation left out."""
    assert parse_counters(text) == expected
