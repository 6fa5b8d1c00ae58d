"""A published bundle, seen as a stranger gets it: looked at without its weights, or downloaded whole and verified.

A repo is somebody else's word. No name from it becomes a path here before it is checked, and no more of a file is read
than its listing says.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bundler import hub
from bundler.errors import SourceError, VerificationError
from bundler.findings import Finding, Severity, error, warning
from bundler.hub import Client, Progress, RemoteFile
from bundler.manifest import NAME
from bundler.manifest import load as load_manifest
from bundler.names import check_name, check_path
from bundler.verify import verify

_LARGE_BYTES = 100_000_000
"""Side files above this size are not looked into without `full`."""
_FIRST_READ_BYTES = 100_000
_MAX_HEADER_BYTES = 100_000_000
_ADDRESS = re.compile(r"([A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(\S+))?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """A bundle on the Hub, as a user writes it: ORG/NAME, or ORG/NAME@revision."""

    repo_id: str
    revision: str | None


def parse_address(text: str) -> Address | None:
    """The address that a text is, or None where it can only be a path."""
    match = _ADDRESS.fullmatch(text)
    return Address(repo_id=match[1], revision=match[2]) if match else None


def verify_remote(
    address: Address,
    *,
    full: bool = False,
    also: Callable[[Path], list[Finding]] = lambda root: [],
    progress: Progress | None = None,
) -> tuple[str, list[Finding]]:
    """The commit that was looked at, and everything that is wrong with the bundle there.

    Without `full`: the tree against the bundle's own manifest, and what configs, tokenizers and the headers of the
    shards can show. With it: every byte, and what `also` says of the folder that it is downloaded to. Needs no token
    where the repo is public. SourceError if it cannot be seen.
    """
    client = hub.make_client(SourceError)
    commit = hub.find_commit(client, address.repo_id, address.revision)
    files = hub.list_files(client, address.repo_id, commit)
    findings = check_name(address.repo_id, address.repo_id)
    if full:
        found = download_and_verify(client, address.repo_id, commit, files, also=also, progress=progress)
    else:
        found = check_published(client, address.repo_id, commit, files, progress=progress)
    return commit, findings + found


def check_published(
    client: Client,
    repo_id: str,
    commit: str,
    files: Mapping[str, RemoteFile],
    *,
    progress: Progress | None = None,
    expect: Callable[[str, int], bytes] | None = None,
) -> list[Finding]:
    """What is wrong with a commit that holds a bundle, without reading its weights.

    All small files are fetched and hashed; of each shard, only its header. `expect(path, size)` gives the first bytes
    that a shard must begin with.
    """
    usable, findings = _check_names(files)
    with _folder(client) as root, ThreadPoolExecutor(8) as pool:
        tell = _counter(progress, len(usable))

        def fetch(file: RemoteFile) -> list[Finding]:
            faults = _fetch_head(client, repo_id, commit, file, root, expect)
            tell(file.path)
            return faults

        for faults in pool.map(fetch, usable.values()):
            findings += faults
        unread = {path for path, file in usable.items() if not _is_read_whole(file)}
        findings += _check_listed(root, usable, unread)
        found = verify(root, is_known=lambda entry, path: entry.path in unread, weights=False)
        return findings + _translate(found, root)


def download_and_verify(
    client: Client,
    repo_id: str,
    commit: str,
    files: Mapping[str, RemoteFile],
    *,
    also: Callable[[Path], list[Finding]] = lambda root: [],
    progress: Progress | None = None,
) -> list[Finding]:
    """What is wrong with every byte of a commit: downloads it whole into a temporary folder and verifies it there.

    `also` is asked about that folder too.
    """
    usable, findings = _check_names(files)
    done, told, total = 0, -1, sum(file.size_bytes for file in usable.values())

    def tell(path: str, reached: int) -> None:
        nonlocal told
        if progress is not None and reached > told:
            told = reached
            progress(path, reached, total)

    with _folder(client) as root:
        if (free := shutil.disk_usage(root).free) < total:
            raise client.error(
                f"{repo_id} has {total} bytes, and {root.parent} has room for {free}",
                hint="make room, or set TMPDIR to another disk",
            )
        for path, file in usable.items():
            hub.download(client, repo_id, commit, file, partial(_shift, tell, path, done), folder=root)
            done += file.size_bytes
            tell(path, done)
        return findings + _translate(verify(root) + also(root), root)


@contextmanager
def _folder(client: Client) -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(prefix="bundle-", ignore_cleanup_errors=True)
    except OSError as exc:
        message = f"cannot make a temporary folder to look at the bundle: {exc.strerror}"
        raise client.error(message, hint="make room, or set TMPDIR to another disk") from exc
    with made as name:
        yield Path(name)


def _check_names(files: Mapping[str, RemoteFile]) -> tuple[dict[str, RemoteFile], list[Finding]]:
    """The files whose names are safe to use as paths here, and a finding for each other one."""
    usable, findings, seen = {}, [], dict[str, str]()
    for path, file in sorted(files.items()):
        problems = check_path(path)
        if (other := seen.setdefault(path.casefold(), path)) != path:
            problems.append(
                error("path-name", path, f"and {other!r} are one file where case is ignored", "rename one")
            )
        if Path(path).is_absolute() or path.startswith("."):
            if path == ".gitattributes":
                continue
            problems.append(warning("remote-hidden", path, "is hidden, and no part of a bundle"))
        findings += problems
        if not problems or all(finding.code == "forbidden-name" for finding in problems):
            usable[path] = file
    return usable, findings


def _fetch_head(
    client: Client,
    repo_id: str,
    commit: str,
    file: RemoteFile,
    root: Path,
    expect: Callable[[str, int], bytes] | None,
) -> list[Finding]:
    """Put a file into the folder: whole if it is small, else its beginning, as long as it would be."""
    path, findings = root / file.path, []
    content = b""
    if _is_read_whole(file):
        content = hub.read_file(client, repo_id, commit, file)
    elif file.path.endswith(".safetensors"):
        content = _read_header(client, repo_id, commit, file)
        if expect is not None and content != expect(file.path, len(content)):
            findings.append(error("remote-differs", file.path, "begins with other bytes there than here"))
    else:
        message = f"has {file.size_bytes} bytes, so it was not looked into"
        return [error("remote-unread", file.path, message, "look at it with --full")]
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.write_bytes(content)
        os.truncate(path, file.size_bytes)  # the rest is a hole, which takes no room
    except OSError as exc:
        message = f"with its {file.size_bytes} bytes cannot lie in {root.parent}: {exc.strerror}"
        findings.append(error("remote-size", file.path, message, "make room, or set TMPDIR to another disk"))
    return findings


def _is_read_whole(file: RemoteFile) -> bool:
    weights = file.path.endswith(".safetensors") and file.sha256 is not None
    return not weights and file.size_bytes <= _LARGE_BYTES


def _check_listed(root: Path, files: Mapping[str, RemoteFile], unread: set[str]) -> list[Finding]:
    """Whether the Hub lists what was not read with the hash that the manifest has for it."""
    try:
        entries = load_manifest(root).files
    except VerificationError:
        return []  # verify says what is wrong with it
    findings = []
    for entry in entries:
        if entry.path in unread and files[entry.path].sha256 != entry.sha256:
            message = f"has SHA-256 {files[entry.path].sha256} on the Hub, {NAME} says {entry.sha256}"
            findings.append(error("file-hash", entry.path, message, "do not use this commit"))
    return findings


def _read_header(client: Client, repo_id: str, commit: str, file: RemoteFile) -> bytes:
    """The safetensors header of a shard; as much of it as there is, where it is broken."""
    size = file.size_bytes
    head = hub.read_bytes(client, repo_id, commit, file.path, 0, min(_FIRST_READ_BYTES, size))
    end = 8 + struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
    if len(head) < end <= min(_MAX_HEADER_BYTES, size):
        head += hub.read_bytes(client, repo_id, commit, file.path, len(head), end)
    return head


def _translate(findings: Iterable[Finding], root: Path) -> list[Finding]:
    """Findings about the folder as findings about the repo, where files of others may lie beside the bundle."""
    mine = [finding for finding in findings if finding.where != str(root)]
    return [
        replace(finding, severity=Severity.WARNING) if finding.code == "file-extra" else finding for finding in mine
    ]


def _shift(tell: Callable[[str, int], None], path: str, before: int, received: int) -> None:
    """Bytes of a file as bytes of all files."""
    tell(path, before + received)


def _counter(progress: Progress | None, total: int) -> Callable[[str], None]:
    done = 0

    def tell(path: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(path, done, total)

    return tell
