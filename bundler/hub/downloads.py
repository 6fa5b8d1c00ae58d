"""Whole files from the Hub, into the client's own cache or into a folder, each resumed where it broke off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from bundler.hub.client import Client, ask


class Listed(Protocol):
    """A file as some listing names it."""

    @property
    def path(self) -> str:
        """Its place in the repo."""

    @property
    def size_bytes(self) -> int:
        """Its size."""


def download(
    client: Client,
    repo_id: str,
    commit: str,
    file: Listed,
    tell: Callable[[int], None] = lambda received: None,
    *,
    folder: Path | None = None,
) -> Path:
    """Where a file of a commit lies once it is here: under `folder`, else in the cache that `hf download` has too.

    `tell` hears the bytes received so far; `client.error` if it cannot be had, or has another size than it is listed
    with.
    """
    from huggingface_hub import hf_hub_download

    def call() -> Path:
        path = hf_hub_download(
            repo_id,
            file.path,
            revision=commit,
            endpoint=client.endpoint,
            library_name=client.api.library_name,
            library_version=client.api.library_version,
            tqdm_class=_make_meter(file.size_bytes, tell),
            local_dir=folder,
        )
        return Path(path)

    path = ask(client, repo_id, call)
    if (size := path.stat().st_size) != file.size_bytes:
        hint = f"remove {path} and try again"
        raise client.error(f"{file.path} has {size} bytes here and {file.size_bytes} on the Hub", hint=hint)
    return path


def _make_meter(size_bytes: int, tell: Callable[[int], None]) -> Any:
    """A progress bar as the client wants one, that shows nothing and tells the bytes received so far."""
    from huggingface_hub.utils import tqdm

    class Meter(tqdm):
        received = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]
            self.update(kwargs.get("initial") or 0)

        def update(self, n: float | None = 1) -> None:
            Meter.received = min(Meter.received + int(n or 0), size_bytes)
            tell(Meter.received)

    return Meter
