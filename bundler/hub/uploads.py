"""Contents on their way to the Hub, ahead of the commit that will show them."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bundler.hub.client import Client, ask, is_transient, status_of

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """A file to send: its place in the repo, what it holds (read again or kept in memory), and its known SHA-256."""

    path: str
    content: Path | bytes
    sha256: str


def upload(
    client: Client, repo_id: str, revision: str, files: Iterable[Upload], tell: Callable[[int], None]
) -> list[CommitOperationAdd]:
    """Send contents; nothing of them is visible yet, and what the Hub has already is not sent again.

    `tell` hears how many bytes of these files are done. Small files that git keeps travel with the commit itself.
    """
    files = list(files)
    meter = _Meter((file.path for file in files), tell)
    operations = [_make_operation(file, meter) for file in files]

    def call() -> None:
        meter.start()
        with _watch_xet(meter):
            client.api.preupload_lfs_files(repo_id, operations, revision=revision, free_memory=False)

    ask(client, repo_id, call, may_repeat=lambda exc: is_transient(exc) or _is_broken_xet(exc))
    return operations


class _Meter:
    """Adds up the bytes of the files of one call, each counted as far as it was read."""

    def __init__(self, paths: Iterable[str], tell: Callable[[int], None]) -> None:
        self._paths, self._tell = ("", *paths), tell
        self.start()

    def start(self) -> None:
        """Forget an attempt that broke off."""
        self._done = dict.fromkeys(self._paths, 0)

    def reach(self, path: str, position: int) -> None:
        """A file was read up to here; the path "" stands for all of them."""
        self._done[path] = position
        self._tell(sum(self._done.values()))


class _Reader(io.BufferedReader):
    """A file that says how far it was read."""

    def __init__(self, file: Path, reach: Callable[[int], None]) -> None:
        super().__init__(io.FileIO(str(file)))
        self._reach = reach

    def read(self, size: int | None = -1, /) -> bytes:
        chunk = super().read(size)
        self._reach(self.tell())
        return chunk


def _make_operation(file: Upload, meter: _Meter) -> CommitOperationAdd:
    from huggingface_hub import CommitOperationAdd

    class Watched(CommitOperationAdd):
        @contextmanager
        def as_file(self, with_tqdm: bool = False) -> Iterator[Any]:
            if isinstance(file.content, bytes):
                yield io.BytesIO(file.content)
            else:
                with _Reader(file.content, lambda position: meter.reach(file.path, position)) as reader:
                    yield reader

    operation = Watched(file.path, file.content)
    operation.upload_info.sha256 = bytes.fromhex(file.sha256)  # else the client reads the whole file to compute it
    return operation


@contextmanager
def _watch_xet(meter: _Meter) -> Iterator[None]:
    """Hears of every byte that goes through xet, which reads files itself and tells only the client's own bars."""
    from huggingface_hub import constants
    from huggingface_hub.utils import disable_progress_bars, enable_progress_bars

    if (
        constants.HF_HUB_DISABLE_XET
        or importlib.util.find_spec("hf_xet") is None
        or constants.HF_HUB_DISABLE_PROGRESS_BARS is not None
    ):
        yield
        return
    from huggingface_hub.utils import _xet_progress_reporting as reporting  # known under no public name

    class Reporter:
        def update_progress(self, group: Any, items: Any) -> None:
            meter.reach("", int(group.total_bytes_completed))

        def close(self) -> None:
            pass

    theirs = reporting.XetUploadProgressReporter
    reporting.XetUploadProgressReporter = Reporter  # type: ignore[assignment, misc]
    enable_progress_bars()  # the only way to have a reporter called; this one draws nothing
    try:
        yield
    finally:
        reporting.XetUploadProgressReporter = theirs  # type: ignore[misc]
        disable_progress_bars()


def _is_broken_xet(exc: BaseException) -> bool:
    """hf_xet raises RuntimeError for whatever its own HTTP client could not do."""
    return type(exc) is RuntimeError and status_of(exc) is None
