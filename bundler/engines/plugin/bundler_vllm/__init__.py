"""A vLLM plugin (entry point group `vllm.general_plugins`): what `bundle prove` has to see inside the server.

It is copied into an engine's environment and runs only where BUNDLER_REPORT names a file. To that file it appends one
JSON object a line: which kernels, runner and attention groups the server chose, which weights no tensor filled, and
every shim that a processor without a GPU needed. On a GPU it changes nothing.
"""

from __future__ import annotations

import os


def register() -> None:
    """vLLM calls this in each of its processes."""
    if not os.environ.get("BUNDLER_REPORT"):
        return
    from . import cpu, watch

    watch.install()
    if cpu.is_cpu():
        cpu.install()
