"""The lines that start an engine on a bundle, quoted so that they survive the shell they are pasted into."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bundler.engines.facts import Match
from bundler.recipe import Drafter, Serve

FOLDER = "{folder}"
"""In an argument: the folder that the bundle was downloaded into."""
_PLAIN = re.compile(r"[A-Za-z0-9_./:=,+@%-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeCommand:
    """One `vllm serve` line before it is quoted for a shell. `speculative` is None when the body serves alone."""

    env: Mapping[str, str]
    model: str
    args: tuple[str, ...]
    speculative: Mapping[str, str | int] | None


def make_serve_command(
    serve: Serve, drafter: Drafter | None, matches: Iterable[Match], *, model: str = FOLDER, name: str | None = None
) -> ServeCommand:
    """The line for this serve section: what the recipe asks for, then what the facts about it require.

    The drafter is always a path under the bundle's folder, and never gets a `quantization` key.
    """
    args = ["--served-model-name", name] if name else []
    if serve.tensor_parallel_size > 1:
        args += ["--tensor-parallel-size", str(serve.tensor_parallel_size)]
    if serve.kv_cache_dtype != "auto":
        args += ["--kv-cache-dtype", serve.kv_cache_dtype]
    if serve.max_model_len is not None:
        args += ["--max-model-len", str(serve.max_model_len)]
    env: dict[str, str] = {}
    for match in matches:
        if match.every and (drafter is not None or match.fact.when.drafter is not True):
            args += match.fact.flags
            env |= match.fact.env or {}
    speculative: dict[str, str | int] | None = None
    if drafter is not None:
        speculative = {
            "method": "mtp",
            "model": f"{FOLDER}/assistant",
            "num_speculative_tokens": drafter.num_speculative_tokens,
        }
    return ServeCommand(env=env, model=model, args=tuple(args), speculative=speculative)


def make_argv(command: ServeCommand, folder: str) -> list[str]:
    """The words after `vllm`, with the bundle's folder filled in."""
    words = ["serve", command.model, *command.args]
    if command.speculative is not None:
        words += ["--speculative-config", json.dumps(command.speculative, separators=(",", ":"))]
    return [word.replace(FOLDER, folder) for word in words]


def render_bash(command: ServeCommand, variable: str = "D") -> str:
    """The line for bash or zsh; the JSON is in single quotes, which step aside for "$D"."""

    def word(text: str) -> str:
        # 'left'"$D"'right': nothing inside single quotes is special, and a path with spaces stays one word.
        parts = ["'" + part.replace("'", "'\\''") + "'" for part in text.split(FOLDER)]
        return f'"${variable}"'.join(part for part in parts) if FOLDER in text else parts[0]

    def plain(text: str) -> str:
        return text if _PLAIN.fullmatch(text) else word(text).replace("''", "")

    lines = [" ".join([*(f"{key}={plain(value)}" for key, value in command.env.items()), "vllm serve"])]
    lines[0] += f" {plain(command.model)}"
    lines += [" ".join(plain(part) for part in pair) for pair in _pairs(command.args)]
    if command.speculative is not None:
        text = json.dumps(command.speculative, separators=(",", ":"))
        lines.append(f"--speculative-config {word(text)}")
    return " \\\n  ".join(lines)


def render_powershell(command: ServeCommand, variable: str = "D") -> str:
    """The line for Windows PowerShell 5.1 and PowerShell 7, without one double quote inside an argument.

    Windows PowerShell and PowerShell before 7.3 pass a double quote inside an argument unescaped, 7.3 escapes it
    (about_Parsing, PSNativeCommandArgumentPassing), so no spelling of JSON works in all of them. vLLM takes the same
    object as dotted arguments (its "JSON CLI Arguments"), and those need no quotes. They are put into single quotes as
    a whole, because an unquoted word that starts with a dash is split at its first dot (PowerShell#6291).
    """

    def word(text: str) -> str:
        if FOLDER in text:
            return '"' + re.sub(r'([`"$])', r"`\1", text).replace(FOLDER, f"${variable}") + '"'
        return "'" + text.replace("'", "''") + "'"

    def plain(text: str) -> str:
        # A comma builds a list, @ splats and % is an alias in PowerShell: fewer words are plain than in bash.
        return text if re.fullmatch(r"(--?[a-z][a-z0-9-]*|[A-Za-z0-9_/-]+)", text) else word(text)

    lines = [f"$env:{key} = {word(value)}" for key, value in command.env.items()]
    parts = [f"vllm serve {plain(command.model)}"]
    parts += [" ".join(plain(part) for part in pair) for pair in _pairs(command.args)]
    for key, value in (command.speculative or {}).items():
        parts.append(f"'--speculative-config.{key}' {plain(str(value))}")
    return "\n".join([*lines, " `\n  ".join(parts)])


def _pairs(args: Iterable[str]) -> list[list[str]]:
    """Flags with their values, a line each."""
    pairs: list[list[str]] = []
    for arg in args:
        if arg.startswith("--") or not pairs:
            pairs.append([arg])
        else:
            pairs[-1].append(arg)
    return pairs
