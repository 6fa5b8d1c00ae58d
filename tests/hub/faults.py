"""Every fault at every endpoint that a push asks: what the user sees, what strangers see, and whether it ends well.

One push replaces a whole public bundle by another one. A fault strikes; then the repo must hold the whole old or the
whole new bundle, in at most one more commit; and running the push again without the fault must finish it. Some faults
strike once, some for good, and some are the end of the process: `kill -9` before a request is read and after it was
answered.

`python -m hub.faults BUNDLE [--xet]` runs all of it with the huggingface_hub that is installed, and prints one JSON
line a case.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .server import Fault, HubServer
from .store import Repo
from .xet import Xet

REPO = "acme/tiny-31b"
TAG = "v2"
_PAGE = b"<html>a proxy's page</html>"


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """A kind of request, and the push in which it is tried: over an old bundle, of a new repo, to a pull request."""

    method: str
    path: str
    push: str = "update"


ENDPOINTS = {
    "whoami": Endpoint(method="GET", path="/api/whoami-v2"),
    "card check": Endpoint(method="POST", path="/api/validate-yaml"),
    "repo": Endpoint(method="GET", path=f"/api/models/{REPO}$"),
    "tree": Endpoint(method="GET", path="/tree/"),
    "refs": Endpoint(method="GET", path="/refs$"),
    "preupload": Endpoint(method="POST", path="/preupload/"),
    "LFS batch": Endpoint(method="POST", path="/info/lfs/objects/batch"),
    "LFS put": Endpoint(method="PUT", path="/_lfs/"),
    "LFS verify": Endpoint(method="POST", path="/info/lfs/verify"),
    "xet token": Endpoint(method="GET", path="/xet-write-token/"),
    "commit": Endpoint(method="POST", path="/commit/"),
    "resolve": Endpoint(method="GET", path="/resolve/"),
    "storage": Endpoint(method="GET", path="/_lfs/"),
    "tag": Endpoint(method="POST", path="/tag/"),
    "settings": Endpoint(method="PUT", path="/settings$", push="new"),
    "other types": Endpoint(method="GET", path="/api/(datasets|spaces)/", push="new"),
    "create": Endpoint(method="POST", path="/api/repos/create", push="new"),
    "find pull request": Endpoint(method="GET", path="/discussions$", push="pull"),
    "open pull request": Endpoint(method="POST", path="/discussions$", push="pull"),
    "read pull request": Endpoint(method="GET", path="/discussions/", push="pull"),
    "show pull request": Endpoint(method="POST", path="/discussions/./status", push="pull"),
    "commit to pull request": Endpoint(method="POST", path="/commit/refs%2Fpr%2F1", push="pull"),
}
XET_ENDPOINTS = ("preupload", "xet token", "commit", "tree", "resolve")
"""Those that a push meets otherwise when contents go through xet."""

FAULTS: dict[str, dict[str, Any]] = {
    "429 with a wait": {"status": 429, "headers": {"Retry-After": "3"}},
    "429 without": {"status": 429},
    "500": {"status": 500},
    "502": {"status": 502},
    "503": {"status": 503},
    "504": {"status": 504},
    "reset": {"reset": True},
    "timeout": {"stall": True},
    "401": {"status": 401},
    "403": {"status": 403},
    "garbled": {"edit": lambda body: _PAGE},
    "answer lost (504)": {"after": True, "status": 504},
    "answer lost (reset)": {"after": True, "reset": True},
    "answer lost (timeout)": {"after": True, "stall": True},
}
LASTING = ("429 without", "503", "reset", "403")
"""Faults that are also tried for good."""
KILLED_AT = (
    "preupload",
    "LFS put",
    "LFS verify",
    "xet token",
    "commit",
    "tree",
    "storage",
    "tag",
    "settings",
    "create",
    "open pull request",
    "show pull request",
    "commit to pull request",
)
"""Where processes are killed."""


@dataclass(kw_only=True)
class Case:
    """One fault at one endpoint, and what came of it."""

    client: str
    mode: str
    endpoint: str
    fault: str
    lasting: bool
    result: str = ""
    """`published`, or the exit code and the message."""
    visible: str = ""
    """What strangers saw after it: `old`, `new` or `half`."""
    commits: int = 0
    """How many commits the push made, its second run included."""
    finished: bool = False
    """Whether in the end, after a second run if need be, the new bundle was there, tagged and public."""
    struck: bool = False
    pauses: list[float] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Nothing was seen half, no commit was made twice, and it ended well."""
        return self.visible in {"old", "new"} and self.commits == 1 and self.finished


class Arena:
    """A Hub with an old bundle on it, and the new bundle that is pushed over it."""

    def __init__(self, bundle: Path, folder: Path, *, xet: bool) -> None:
        from huggingface_hub import __version__, constants

        from bundler.card import write_bundle

        self.mode, self.client, self.folder, self._xet, self._rounds = (
            "xet" if xet else "LFS",
            __version__,
            folder,
            xet,
            0,
        )
        self.bundle = Path(shutil.copytree(bundle, folder / bundle.name))
        write_bundle(self.bundle, repo_id=REPO)
        self.new = {path.relative_to(self.bundle).as_posix(): path.read_bytes() for path in _files(self.bundle)}
        self.old = _make_old(self.new)
        self.server = HubServer(folder / "hub")
        self.server.start()
        os.environ |= {
            "HF_ENDPOINT": self.server.endpoint,
            "HF_TOKEN": "hf_alice",
            "HF_HOME": str(folder / "home"),
            "XDG_CACHE_HOME": str(folder / "cache"),
            "HF_XET_CLIENT_RETRY_BASE_DELAY": "10ms",  # hf_xet has patience of its own
            "HF_XET_CLIENT_READ_TIMEOUT": "500ms",
        }
        constants.ENDPOINT = self.server.endpoint
        constants.HUGGINGFACE_CO_URL_TEMPLATE = self.server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        constants.HF_HUB_DISABLE_XET = not xet
        os.environ["HF_HUB_DISABLE_XET"] = "0" if xet else "1"

    def close(self) -> None:
        """End the server."""
        from huggingface_hub.utils import close_session

        close_session()
        self.server.stop()

    def reset(self, push: str) -> None:
        """The Hub as it was before the push."""
        self._rounds += 1
        folder = self.folder / f"round{self._rounds}"
        self.server.reset(folder)
        self.server.xet = Xet(folder) if self._xet else None
        self.push = push
        if push != "new":
            self.server.store.add(REPO, self.old, title="the old bundle")

    @property
    def repo(self) -> Repo | None:
        """The repo, once there is one."""
        return self.server.store.repos.get(("model", REPO))

    def seen(self) -> str:
        """What the branch holds that is pushed to; a pull request must leave main as it is."""
        main = self._holds("main")
        if self.push != "pull":
            return main
        return self._holds("refs/pr/1") if main == "old" else "half"

    def _holds(self, revision: str) -> str:
        if self.repo is None:
            return "old"
        files = [path for path in self.repo.git.files(revision) if path != ".gitattributes"]
        held = {path: self.server.store.read(REPO, path, revision) for path in files}
        nothing = {} if self.push == "new" or revision != "main" else self.old
        return "new" if held == self.new else "old" if held in (self.old, nothing) else "half"

    def commits(self) -> int:
        """How many were made, and pull requests beyond the one."""
        if self.repo is None:
            return 0
        before, pulls = 1 if self.push == "new" else 2, len(self.repo.pulls)
        revisions = ["main", *(pull.ref for pull in self.repo.pulls.values())]
        return sum(len(self.repo.git.log(revision)) - before for revision in revisions) + max(0, pulls - 1)

    def done(self) -> bool:
        """Whether the new bundle is there, tagged and public; or in a pull request that waits for its reader."""
        if self.repo is None or self.seen() != "new":
            return False
        if self.push == "pull":
            return [pull.status for pull in self.repo.pulls.values()] == ["open"]
        return self.repo.git.refs().get(f"refs/tags/{TAG}") == self.repo.head() and not self.repo.private


def _files(root: Path) -> Iterator[Path]:
    return (path for path in sorted(root.rglob("*")) if path.is_file())


def _make_old(new: dict[str, bytes]) -> dict[str, bytes]:
    """A bundle before: other weights, another card, and one file more, all of it listed in its bundle.json."""
    old = {path: content for path, content in new.items() if path != "bundle.json"} | {"assets/old.svg": b"<svg/>"}
    for path in old:
        if path.endswith((".safetensors", "README.md")):
            old[path] = old[path][:-1] + bytes([old[path][-1] ^ 1])
    manifest = json.loads(new["bundle.json"])
    roles = {entry["path"]: entry["role"] for entry in manifest["files"]} | {"assets/old.svg": "asset"}
    manifest["files"] = [
        {
            "path": path,
            "size_bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "role": roles[path],
        }
        for path, content in sorted(old.items())
    ]
    return old | {"bundle.json": json.dumps(manifest, indent=2, sort_keys=True).encode()}


def push(arena: Arena) -> str:
    """The outcome of one push, or the exit code and message that a user would see."""
    from bundler.errors import BundlerError
    from bundler.hub import client
    from bundler.push import push as run

    client.SILENCE_S = 0.5 if any(fault.stall for fault in arena.server.faults) else 30.0
    try:
        return str(run(arena.bundle, REPO, private=False, tag=TAG, pull_request=arena.push == "pull").status)
    except BundlerError as exc:
        return f"{exc.exit_code}: {exc}"


def strike(arena: Arena, endpoint: str, fault: str, *, lasting: bool) -> Case:
    """Push while one endpoint fails in one way, once or for good; then once more without it, if need be."""
    case = Case(client=arena.client, mode=arena.mode, endpoint=endpoint, fault=fault, lasting=lasting)
    target, times = ENDPOINTS[endpoint], 999 if lasting else 1
    arena.reset(target.push)
    arena.server.faults.append(planted := Fault(method=target.method, path=target.path, times=times, **FAULTS[fault]))
    case.result = push(arena)
    return _finish(arena, case, struck=planted.times < times)


def kill(arena: Arena, endpoint: str, *, after: bool) -> Case:
    """`kill -9` to a pushing process when a request comes in (`after`: when it was carried out); then push again."""
    name = "kill -9 after" if after else "kill -9 before"
    case = Case(client=arena.client, mode=arena.mode, endpoint=endpoint, fault=name, lasting=False)
    target = ENDPOINTS[endpoint]
    arena.reset(target.push)
    code = "import sys; from pathlib import Path; from bundler.push import push; "
    code += f"push(Path(sys.argv[1]), {REPO!r}, private=False, tag={TAG!r}, pull_request={target.push == 'pull'})"
    command = [sys.executable, "-c", code, str(arena.bundle)]
    victim: list[subprocess.Popen[bytes]] = []
    shot = Fault(method=target.method, path=target.path, after=after, reset=True, meanwhile=lambda: _shoot(victim[0]))
    arena.server.faults.append(shot)
    victim.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    case.result = f"exit {victim[0].wait()}"
    return _finish(arena, case, struck=case.result == "exit -9")


def _shoot(victim: subprocess.Popen[bytes]) -> None:
    victim.send_signal(signal.SIGKILL)
    victim.wait()


def _finish(arena: Arena, case: Case, *, struck: bool) -> Case:
    arena.server.faults.clear()
    case.struck, case.visible = struck, arena.seen()
    if not arena.done():
        push(arena)
    case.commits, case.finished = arena.commits(), arena.done()
    return case


def run_all(arena: Arena) -> Iterator[Case]:
    """Every case that the mode has."""
    for endpoint in XET_ENDPOINTS if arena.mode == "xet" else ENDPOINTS:
        if endpoint == "xet token" and arena.mode == "LFS":
            continue
        for fault in FAULTS:
            yield strike(arena, endpoint, fault, lasting=False)
        for fault in LASTING:
            yield strike(arena, endpoint, fault, lasting=True)
        if endpoint in KILLED_AT:
            yield kill(arena, endpoint, after=False)
            yield kill(arena, endpoint, after=True)


def _main() -> None:
    import time

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--xet", action="store_true")
    asked = parser.parse_args()
    time.sleep = lambda seconds: None
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena(asked.bundle, Path(folder), xet=asked.xet)
        for case in run_all(arena):
            print(json.dumps(asdict(case) | {"good": case.good}), flush=True)
        arena.close()


if __name__ == "__main__":
    _main()
