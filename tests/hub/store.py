"""What the test Hub holds (people, repos, LFS objects) and who may do what with it."""

from __future__ import annotations

import fnmatch
import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .git import GitRepo, make_pointer

GIT_ATTRIBUTES = "".join(
    f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n"
    for suffix in ("bin", "gguf", "h5", "npy", "npz", "onnx", "parquet", "pt", "pth", "safetensors", "tar", "zip")
)
MAX_PLAIN_BYTES = 10 * 1024 * 1024
"""Files above this size are LFS whatever their name, as on huggingface.co."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """An LFS file on disk, too large to be held or hashed: its hash is what it is said to be."""

    path: Path
    sha256: str

    def __len__(self) -> int:
        return self.path.stat().st_size

    def __getitem__(self, part: slice) -> bytes:
        start, stop, _ = part.indices(len(self))
        assert stop - start < MAX_PLAIN_BYTES, "nobody should want so much of it"
        with self.path.open("rb") as file:
            file.seek(start)
            return file.read(stop - start)


class HubError(Exception):
    """An answer of 400 or above, with the headers that the clients read their exceptions from."""

    def __init__(self, status: int, message: str, *, code: str | None = None, body: object = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.body = {"error": message} if body is None else body


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """A person's access token: `role` is read, write or fineGrained; `scopes` maps an entity to its permissions."""

    user: str
    role: str = "write"
    orgs: tuple[str, ...] = ()
    scopes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    expired: bool = False

    def owns(self, repo_id: str) -> bool:
        """Whether the repo is in this person's namespace or in one of their organizations."""
        return repo_id.split("/")[0] in (self.user, *self.orgs)

    def may_write(self, repo_id: str) -> bool:
        """Whether the token itself allows writing to a repo."""
        if self.role == "fineGrained":
            granted = (*self.scopes.get(repo_id, ()), *self.scopes.get(repo_id.split("/")[0], ()))
            return "repo.write" in granted
        return self.role == "write"


@dataclass(kw_only=True)
class Pull:
    """A pull request; its commits are on a ref of its own."""

    number: int
    author: str
    title: str
    status: str = "draft"

    @property
    def ref(self) -> str:
        """Where its commits are."""
        return f"refs/pr/{self.number}"


@dataclass(kw_only=True)
class Repo:
    """A model or dataset repo: visibility, gate, content and pull requests."""

    repo_id: str
    kind: str
    git: GitRepo
    private: bool = False
    gated: bool | str = False
    granted: set[str] = field(default_factory=set)
    """Users who accepted the gate."""
    disabled: bool = False
    used_bytes: int = 0
    """What its history takes; 0 stands for what its files have."""
    objects: set[str] = field(default_factory=set)
    """SHA-256 of the LFS contents that were given to this repo."""
    pulls: dict[int, Pull] = field(default_factory=dict)

    def head(self) -> str:
        """The commit at the end of main."""
        head = self.git.resolve("main")
        assert head is not None
        return head

    def commit_of(self, revision: str) -> str:
        """A revision's commit, or the answer that clients know as RevisionNotFoundError."""
        commit = self.git.resolve(revision)
        if commit is None:
            raise HubError(404, f"Invalid rev id: {revision}", code="RevisionNotFound")
        return commit

    def check_pull(self, ref: str, token: Token) -> None:
        """403 unless this person may commit to a pull request: whoever opened it, and who owns the repo."""
        pull = next((pull for pull in self.pulls.values() if pull.ref == ref), None)
        if pull is None or pull.status not in {"draft", "open"}:
            raise HubError(404, f"Invalid rev id: {ref}", code="RevisionNotFound")
        if token.user != pull.author and not token.owns(self.repo_id):
            raise HubError(403, f"{ref} is not yours")

    def uses_lfs(self, commit: str, path: str, size: int, sample: bytes) -> bool:
        """Whether a file would be stored as LFS: by .gitattributes, by size, or because it is binary."""
        attributes = self._text(commit, ".gitattributes")
        tracked = [line.split()[0] for line in attributes.splitlines() if "filter=lfs" in line.split()[1:]]
        return _matches(path, tracked) or size > MAX_PLAIN_BYTES or b"\0" in sample

    def ignores(self, commit: str, path: str, gitignore: str | None) -> bool:
        """Whether a .gitignore, the one sent along or else the one in the repo, drops a file from a commit."""
        text = self._text(commit, ".gitignore") if gitignore is None else gitignore
        return _matches(path, [line.strip() for line in text.splitlines() if line.strip() and line[0] != "#"])

    def _text(self, commit: str, path: str) -> str:
        return self.git.read(commit, path).decode() if path in self.git.files(commit) else ""


def _matches(path: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(path, p) or fnmatch.fnmatch(path.rsplit("/", 1)[-1], p) for p in patterns)


class Store:
    """All of it, in memory but for the git objects."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.tokens = {
            "hf_alice": Token(user="alice", orgs=("acme",)),
            "hf_alice_read": Token(user="alice", orgs=("acme",), role="read"),
            "hf_bob": Token(user="bob"),
        }
        self.repos: dict[tuple[str, str], Repo] = {}
        self.objects: dict[str, bytes | Stored] = {}
        """LFS content by sha256."""
        self.xet_hashes: dict[str, str] = {}
        """Of those that are in xet storage: sha256 → xet's own hash."""

    def create(self, repo_id: str, *, kind: str = "model", private: bool = False) -> Repo:
        """A new repo with the first commit that huggingface.co makes in it."""
        git = GitRepo(self.folder / f"{kind}s" / f"{repo_id}.git")
        repo = Repo(repo_id=repo_id, kind=kind, git=git, private=private)
        git.commit("refs/heads/main", {".gitattributes": GIT_ATTRIBUTES.encode()}, title="initial commit")
        self.repos[kind, repo_id] = repo
        return repo

    def add(
        self, repo_id: str, files: Mapping[str, bytes | Stored], *, kind: str = "model", title: str = "files"
    ) -> str:
        """Commit files to a repo from behind the server, LFS where the repo says so; returns the commit."""
        repo = self.repos.get((kind, repo_id)) or self.create(repo_id, kind=kind)
        head = repo.head()
        changes: dict[str, bytes | None] = {}
        for path, content in files.items():
            sha256 = content.sha256 if isinstance(content, Stored) else hashlib.sha256(content).hexdigest()
            if isinstance(content, Stored) or repo.uses_lfs(head, path, len(content), content[:512]):
                changes[path] = make_pointer(sha256, len(content))
                self.objects[sha256] = content
                repo.objects.add(sha256)
            else:
                changes[path] = content
        return repo.git.commit("refs/heads/main", changes, title=title)

    def read(self, repo_id: str, path: str, revision: str = "main", *, kind: str = "model") -> bytes:
        """A file's content, whether git or the LFS storage holds it."""
        git = self.repos[kind, repo_id].git
        entry = git.files(revision)[path]
        return git.read(revision, path) if entry.sha256 is None else self.objects[entry.sha256][:]

    def find(
        self,
        token: Token | None,
        kind: str,
        repo_id: str,
        *,
        write: bool = False,
        pull: bool = False,
        content: bool = False,
    ) -> Repo:
        """The repo, if the token may see it, write to it, to a pull request in it, or download from it (`content`)."""
        repo = self.repos.get((kind, repo_id))
        if repo is None or (repo.private and not (token and token.owns(repo_id))):
            raise HubError(404 if token else 401, "Repository not found", code="RepoNotFound")
        if repo.disabled and (write or pull or content):
            raise HubError(403, "Access to this resource is disabled.", code="DisabledRepo")
        if write:
            self.check_write(token, repo_id)
        if pull and (token is None or token.role == "read"):
            raise HubError(403 if token else 401, "You need a token that may write")
        if content and repo.gated and not (token and (token.owns(repo_id) or token.user in repo.granted)):
            raise HubError(403 if token else 401, f"Access to {repo_id} is restricted", code="GatedRepo")
        return repo

    def check_write(self, token: Token | None, repo_id: str) -> None:
        """401 without a token, 403 with one that may not write there."""
        if token is None:
            raise HubError(401, "Invalid username or password.")
        if not token.owns(repo_id) or not token.may_write(repo_id):
            raise HubError(403, f"You don't have the rights to write to {repo_id} with this token")
