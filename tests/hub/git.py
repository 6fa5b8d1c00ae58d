"""One repo's content as real git objects, written and read through git's own plumbing."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

_POINTER = re.compile(rb"version https://git-lfs\.github\.com/spec/v1\noid sha256:([0-9a-f]{64})\nsize (\d+)\n")
_MAX_POINTER_BYTES = 200
_ENVIRONMENT = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file or folder of a tree. An LFS file's `size` is that of its content, `pointer_size` that of its blob."""

    path: str
    oid: str
    size: int
    is_folder: bool = False
    sha256: str | None = None
    pointer_size: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """One line of the history."""

    oid: str
    author: str
    title: str


def make_pointer(sha256: str, size: int) -> bytes:
    """The blob that stands for an LFS file (https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md)."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


def _is_commit(revision: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", revision) is not None


class GitRepo:
    """A bare repository. Every write is one `git fast-import`, so a commit is there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._trees: dict[tuple[str, str, bool], list[Entry]] = {}  # a commit never changes
        self._blobs: dict[str, bytes] = {}  # nor does a blob, which is known by its content
        folder.mkdir(parents=True)
        self._git("init", "--quiet", "--bare", "--initial-branch=main", ".")

    def resolve(self, revision: str) -> str | None:
        """The commit that a commit id, (full) ref, branch or tag means."""
        if (revision, "", True) in self._trees:
            return revision
        is_name = revision.startswith("refs/") or _is_commit(revision)
        for name in [revision] if is_name else [f"refs/heads/{revision}", f"refs/tags/{revision}"]:
            if oid := self._git("rev-parse", "--verify", "--quiet", name + "^{commit}", may_fail=True).strip():
                return oid.decode()
        return None

    def commit(
        self, ref: str, changes: Mapping[str, bytes | None], *, title: str, body: str = "", author: str = "someone"
    ) -> str:
        """Put one commit on `ref`: path → new content, or None to delete; returns its id."""
        message = f"{title}\n\n{body}".strip().encode()
        stream = [f"commit {ref}\ncommitter {author} <{author}@example.org> 1767225600 +0000\n".encode()]
        stream += [b"data %d\n" % len(message), message, b"\n"]
        if parent := self.resolve(ref):
            stream.append(f"from {parent}\n".encode())
        for path, content in changes.items():
            quoted = '"' + path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
            if content is None:
                stream.append(f"D {quoted}\n".encode())
            else:
                stream += [f"M 100644 inline {quoted}\n".encode(), b"data %d\n" % len(content), content, b"\n"]
                self._blobs[hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()] = content
        self._git("fast-import", "--quiet", stdin=b"".join(stream))
        oid = self.resolve(ref)
        assert oid is not None
        return oid

    def tree(self, commit: str, folder: str = "", *, recursive: bool = True) -> list[Entry]:
        """What is in a commit, folders included, sorted as git sorts."""
        key = (commit, folder.rstrip("/"), recursive)
        if key not in self._trees:
            self._trees[key] = self._read_tree(*key)
        return self._trees[key]

    def files(self, revision: str) -> dict[str, Entry]:
        """The files of a revision, by path."""
        commit = self.resolve(revision)
        return {entry.path: entry for entry in self.tree(commit) if not entry.is_folder} if commit else {}

    def read(self, revision: str, path: str) -> bytes:
        """A blob as git holds it: the pointer of an LFS file, the content of any other."""
        oid = self.files(revision)[path].oid
        if oid not in self._blobs:
            self._blobs[oid] = self._git("cat-file", "blob", oid)
        return self._blobs[oid]

    def log(self, revision: str = "main") -> list[Commit]:
        """The history, newest first."""
        lines = self._git("log", "--format=%H%x09%an%x09%s", revision).decode().splitlines()
        return [Commit(oid=oid, author=author, title=title) for oid, author, title in (x.split("\t") for x in lines)]

    def refs(self) -> dict[str, str]:
        """Full name of every ref → the commit it leads to."""
        fields = "--format=%(refname)%09%(objectname)%09%(*objectname)"
        lines = [line.split("\t") for line in self._git("for-each-ref", fields).decode().splitlines()]
        return {name: peeled or oid for name, oid, peeled in lines}

    def set_ref(self, name: str, oid: str) -> None:
        """Create or move a ref."""
        self._git("update-ref", name, oid)

    def delete_ref(self, name: str) -> None:
        """Remove a ref."""
        self._git("update-ref", "-d", name)

    def _read_tree(self, commit: str, folder: str, recursive: bool) -> list[Entry]:
        options = ["-r", "-t"] if recursive else []
        inside = [f"{folder}/"] if folder else []
        entries = []
        for line in self._git("ls-tree", "-l", "-z", *options, commit, "--", *inside).decode().split("\0")[:-1]:
            meta, path = line.split("\t", 1)
            _, kind, oid, size = meta.split()
            if path != folder:
                is_folder = kind == "tree"
                entries.append(Entry(path=path, oid=oid, size=0 if is_folder else int(size), is_folder=is_folder))
        pointers = self._pointers(e.oid for e in entries if not e.is_folder and e.size <= _MAX_POINTER_BYTES)
        for number, entry in enumerate(entries):
            if entry.oid in pointers:
                sha256, size = pointers[entry.oid]
                entries[number] = replace(entry, size=size, sha256=sha256, pointer_size=entry.size)
        return entries

    def _pointers(self, oids: Iterable[str]) -> dict[str, tuple[str, int]]:
        wanted = sorted(set(oids))
        output = self._git("cat-file", "--batch", stdin="".join(f"{oid}\n" for oid in wanted).encode())
        pointers = {}
        for oid in wanted:
            head, _, output = output.partition(b"\n")
            size = int(head.split()[2])
            if match := _POINTER.fullmatch(output[:size]):
                pointers[oid] = (match[1].decode(), int(match[2]))
            output = output[size + 1 :]
        return pointers

    def _git(self, *arguments: str, stdin: bytes | None = None, may_fail: bool = False) -> bytes:
        result = subprocess.run(
            ["git", *arguments],
            cwd=self._folder,
            env={**os.environ, **_ENVIRONMENT},
            input=stdin,
            capture_output=True,
            check=False,
        )
        if result.returncode and not may_fail:
            raise RuntimeError(f"git {arguments[0]}: {result.stderr.decode()}")
        return result.stdout
