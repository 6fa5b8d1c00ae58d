"""Run a server for as long as standard input stays open, then stop it and everything that it started.

    python guard.py GRACE_S COMMAND...

A script of its own, with nothing but the standard library: whoever started it may be killed at any moment, and then
the operating system closes that pipe. The server gets an interrupt and GRACE_S seconds to leave. Exit code: its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_POLL_S = 0.1


def main(command: list[str], grace_s: float) -> int:
    """Start `command` in a session of its own; return when it ended or standard input did."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the pipe decides; a Ctrl-C reaches whoever holds it
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=_default_signals,
    )
    let_go = threading.Event()
    threading.Thread(target=_wait_for_end, args=(let_go,), daemon=True).start()
    while server.poll() is None and not let_go.is_set():
        time.sleep(_POLL_S)
    if server.poll() is None:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(grace_s)
        except subprocess.TimeoutExpired:
            server.kill()
    _sweep(server.pid)
    return server.wait()


def _default_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _wait_for_end(let_go: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    let_go.set()


def _sweep(session: int) -> None:
    """End what is left of the server's session; members are looked up each time, so no other process is meant."""
    for number, patience_s in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + patience_s
        while (left := members(session)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(_POLL_S)
    if not Path("/proc").is_dir():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(session, signal.SIGKILL)


def members(session: int) -> list[int]:
    """Live processes of a session, by /proc; an empty list where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue
        state, *numbers = text.rpartition(")")[2].split()[:4]  # state, ppid, pgrp, session
        if int(numbers[2]) == session and state not in "ZX":
            found.append(int(entry.name))
    return found


if __name__ == "__main__":
    code = main(sys.argv[2:], float(sys.argv[1]))
    sys.exit(code if code >= 0 else 128 - code)
