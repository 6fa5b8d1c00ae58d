"""Tokens and home folders in text files are found, and nothing else is taken for one."""

from __future__ import annotations

import pytest

from bundler.secrets import check_secrets

LONG = "aB3dE6gH9" * 6


def found(text: str) -> list[tuple[str, str]]:
    return [(finding.code, finding.where) for finding in check_secrets({"a.md": text.encode()})]


@pytest.mark.parametrize(
    "secret",
    [
        f"hf_{LONG[:34]}",
        f"api_org_{LONG[:34]}",
        f"ghp_{LONG[:36]}",
        f"github_pat_{LONG}{LONG}"[:80],
        f"glpat-{LONG[:20]}",
        "AKIA" + "ABCD1234EFGH5678",
        f"AIza{LONG[:35]}",
        f"sk-{LONG[:48]}",
        f"sk-ant-{LONG[:40]}",
        f"xoxb-{LONG[:24]}",
        "-----BEGIN " + "PRIVATE KEY-----",
        "-----BEGIN RSA " + "PRIVATE KEY-----",
        "https://alice:" + "correct-horse@example.org/x",
    ],
)
def test_a_token_is_found_and_not_repeated(secret: str) -> None:
    """Each kind of token, in the middle of a line; the finding names the line and shows four characters at most."""
    findings = check_secrets({"a.md": f"one\ntwo ({secret}) three".encode()})
    assert [(finding.code, finding.where) for finding in findings] == [("secret-token", "a.md: line 2")]
    assert secret not in str(findings)


@pytest.mark.parametrize(
    "path", ["/home/%s/x", "/Users/%s/x", r"C:\Users\%s\x", r"D:\\Users\\%s\\x", "file:///home/%s/x"]
)
def test_a_home_folder_is_found_once_a_file(path: str) -> None:
    """A path through a person's home folder, on any system, escaped or not; each person once, at the first place."""
    text = f"\n{path % 'alice'}\n{path % 'alice'}\n{path % 'bob'}"
    assert sorted(found(text)) == [("secret-home-path", "a.md: line 2"), ("secret-home-path", "a.md: line 4")]


@pytest.mark.parametrize(
    "text",
    [
        "hf_transfer, hf_xet and HF_TOKEN=hf_...",
        "/home/user/models, /home/ubuntu/x and C:\\Users\\you\\x",
        "https://example.org/home/alice/page",
        "/home/",
        "task-force sk-learn-contrib",
        "https://huggingface.co:443/a@b",
        "0123456789abcdef" * 4,
    ],
)
def test_what_is_no_secret_is_left_alone(text: str) -> None:
    """Names of tools, placeholders, hashes and addresses are no secrets."""
    assert found(text) == []


def test_binary_files_are_not_searched() -> None:
    """What holds a zero byte in its beginning is no text."""
    assert check_secrets({"a.png": b"\x89PNG\0" + f"hf_{LONG[:34]}".encode()}) == []
