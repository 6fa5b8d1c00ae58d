"""What must not be published with a bundle: access tokens, and paths that name a person's home folder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from bundler.findings import Finding, error

_TOKENS = {
    "a Hugging Face token": rb"\b(?:hf|api_org)_[A-Za-z0-9]{30,}\b",
    "a GitHub token": rb"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})",
    "a GitLab token": rb"\bglpat-[A-Za-z0-9_-]{20,}",
    "an AWS access key": rb"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a Google API key": rb"\bAIza[0-9A-Za-z_-]{35}",
    "an API key": rb"\bsk-(?:(?:proj|ant|or)-[\w-]{32,}|[A-Za-z0-9]{32,}\b)",
    "a Slack token": rb"\bxox[abprs]-[A-Za-z0-9-]{20,}",
    "a Weights & Biases key": rb"WANDB_API_KEY\W{1,4}[0-9a-f]{40}\b",
    "a private key": rb"-----BEGIN (?:[A-Z]+ )?PRIVATE KEY-----",
    "a password in an address": rb"\b[a-z][a-z0-9+.-]*://[^\s/:@]+:[^\s/:@]{6,}@[\w.-]+",
}
_TOKEN = re.compile(b"|".join(b"(?P<t%d>%b)" % item for item in enumerate(_TOKENS.values())))
_HOME = re.compile(rb"(?<![\w.-])(?:/(?:home|Users)/|[A-Za-z]:[\\/]{1,2}Users[\\/]{1,2})([\w.-]+)(?=[\\/])")
_NOBODY = {
    b"admin", b"default", b"jovyan", b"me", b"name", b"public", b"root", b"runner", b"shared", b"ubuntu", b"user",
    b"username", b"vscode", b"you", b"your-name", b"yourname",
}  # fmt: skip
_KINDS = list(_TOKENS)


def check_secrets(texts: Mapping[str, bytes]) -> list[Finding]:
    """Every line of these files, by path, that gives away a token or a person's home folder; tokens are not quoted."""
    return [finding for path, text in texts.items() if b"\0" not in text[:8192] for finding in _check(path, text)]


def _check(path: str, text: bytes) -> Iterator[Finding]:
    for match in _TOKEN.finditer(text):
        kind = next(_KINDS[int(name[1:])] for name, value in match.groupdict().items() if value is not None)
        message = f"holds {kind} ({match[0][:4].decode(errors='replace')}…)"
        yield error(
            "secret-token", _where(path, text, match.start()), message, "take it out, and revoke it where it was made"
        )
    homes = {match[1]: match.start() for match in reversed(list(_HOME.finditer(text)))}  # the first place of each
    for name, start in homes.items():
        if name.lower() not in _NOBODY:
            message = f"names the home folder of {name.decode(errors='replace')!r}"
            yield error("secret-home-path", _where(path, text, start), message, "write the path another way")


def _where(path: str, text: bytes, start: int) -> str:
    line = text.count(b"\n", 0, start) + 1
    return f"{path}: line {line}"
