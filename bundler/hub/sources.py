"""Checkpoints as the Hub or a folder has them: metadata first, without a byte of the weights; the files when asked."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bundler import checkpoint
from bundler.checkpoint import Tensor
from bundler.errors import SourceError
from bundler.hub.client import Client, Progress, ask, list_files, make_client, read_bytes
from bundler.hub.downloads import download
from bundler.recipe import SourceRef
from bundler.recipe_rules import is_local
from bundler.source import Source, SourceFile, parse_front_matter

_SIDE_SUFFIXES = {".json", ".jinja", ".md", ".model", ".txt"}
_LEGAL = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)", re.IGNORECASE)
_SMALL_BYTES = 5_000_000
_FIRST_READ_BYTES = 100_000  # holds 97 % of all headers (huggingface_hub, parse_safetensors_file_metadata)
_MAX_HEADER_BYTES = 100_000_000  # the limit that the safetensors library itself sets


def resolve(ref: SourceRef, recipe_folder: Path) -> Source:
    """Everything about a checkpoint that its weights are not needed for; SourceError if it is absent or damaged.

    From the Hub: the commit that the revision means now, the file list, the small files (into the client's own cache)
    and the shards' headers, by range request. From a folder: the same, read in place. Only files that belong to a
    checkpoint are listed: safetensors shards, configs, tokenizer, templates, card and licence.
    """
    with _named(ref.model):
        return _resolve_folder(ref, recipe_folder) if is_local(ref.model) else _resolve_repo(ref)


def fetch(source: Source, *, progress: Progress | None = None) -> Source:
    """The same source with every file of it in `folder`; SourceError if one cannot be had whole."""
    if source.commit is None:
        return source
    client = make_client(SourceError)
    done, total = 0, sum(file.size_bytes for file in source.files)
    for file in source.files:  # one at a time, in this thread: the client is parallel within a file, and Ctrl-C works

        def tell(received: int, path: str = file.path, before: int = done) -> None:
            if progress is not None:
                progress(path, before + received, total)

        download(client, source.model, source.commit, file, tell)
        done += file.size_bytes
        tell(file.size_bytes)
    return source


def find_commit(client: Client, repo_id: str, revision: str | None) -> str:
    """The commit that a revision of a model repo means now; `client.error` if it cannot be seen."""
    call = partial(client.api.model_info, repo_id, revision=revision)
    return str(ask(client, repo_id, call, revision=revision).sha)


def resolve_dataset(repo_id: str, revision: str | None) -> str:
    """The commit that a revision of a Hub dataset means now; SourceError if it cannot be seen."""
    client = make_client(SourceError)
    info = ask(client, repo_id, partial(client.api.dataset_info, repo_id, revision=revision), revision=revision)
    return str(info.sha)


def is_there(repo_id: str) -> bool:
    """Whether a model repo exists and can be seen."""
    client = make_client(SourceError)
    return ask(client, repo_id, partial(client.api.repo_exists, repo_id))


def cache_folder() -> Path:
    """Where downloads go: HF_HOME's cache."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _resolve_folder(ref: SourceRef, recipe_folder: Path) -> Source:
    folder = (recipe_folder / Path(ref.model).expanduser()).resolve()
    if not folder.is_dir():
        raise SourceError(f"there is no folder {folder}", hint="a path starts from the recipe's own folder")
    if ref.revision is not None:
        raise SourceError("a folder has no revision", hint="leave `revision` out, or name a Hub id")
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    _check_config(sizes)
    for name in sizes:
        if checkpoint.is_lfs_pointer(folder / name):
            raise SourceError(f"{name} is a Git LFS pointer, not the file", hint=f"run `git lfs pull` in {folder}")
    return _make_source(ref, None, folder, sizes, {}, checkpoint.load_tensors(folder))


def _resolve_repo(ref: SourceRef) -> Source:
    client, repo_id = make_client(SourceError), ref.model
    call = partial(client.api.model_info, repo_id, revision=ref.revision)
    info = ask(client, repo_id, call, revision=ref.revision)
    commit = str(info.sha)
    listed = {path: file for path, file in list_files(client, repo_id, commit).items() if "/" not in path}
    sizes = {path: file.size_bytes for path, file in listed.items()}
    _check_config(sizes)
    small = [
        SourceFile(path=path, size_bytes=size, sha256=listed[path].sha256)
        for path, size in sizes.items()
        if path == checkpoint.INDEX or (size <= _SMALL_BYTES and _is_side_file(path))
    ]
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda file: download(client, repo_id, commit, file), small))
        folder = paths[0].parent
        names = checkpoint.weight_files(sizes, checkpoint.load_index(folder))
        headers = pool.map(lambda name: _read_header(client, repo_id, commit, name, sizes[name]), names)
        tensors: dict[str, Tensor] = {}
        for header in headers:
            if twice := sorted(tensors.keys() & header.keys()):
                raise SourceError(f"{twice[0]} is in {tensors[twice[0]].file} and in {header[twice[0]].file}")
            tensors |= header
    hashes = {path: file.sha256 for path, file in listed.items()}
    source = _make_source(ref, commit, folder, sizes, hashes, tensors)
    date = info.last_modified.date().isoformat() if info.last_modified else None
    return replace(source, date=date, gated=str(info.gated or "no"))


def _make_source(
    ref: SourceRef,
    commit: str | None,
    folder: Path,
    sizes: Mapping[str, int],
    hashes: Mapping[str, str | None],
    tensors: Mapping[str, Tensor],
) -> Source:
    shards = {tensor.file for tensor in tensors.values()}
    return Source(
        model=ref.model,
        revision=ref.revision,
        commit=commit,
        folder=folder,
        files=tuple(
            SourceFile(path=path, size_bytes=sizes[path], sha256=hashes.get(path))
            for path in sorted(sizes)
            if path in shards or _is_side_file(path)
        ),
        config=checkpoint.load_json(folder / "config.json"),
        card=_load_front_matter(folder / "README.md"),
        tensors=tensors,
    )


def _check_config(names: Mapping[str, int]) -> None:
    if "config.json" not in names:
        hint = "name a transformers checkpoint: no GGUF, no adapter, no folder above one"
        raise SourceError("there is no config.json", hint=hint)


def _is_side_file(name: str) -> bool:
    """Configs, tokenizer, templates, card and licence; never code, archives or pickles."""
    return not name.startswith(".") and (Path(name).suffix in _SIDE_SUFFIXES or _LEGAL.match(name) is not None)


def _load_front_matter(card: Path) -> dict[str, Any]:
    """The YAML block at the head of a card; empty where there is none."""
    text = card.read_text(encoding="utf-8", errors="replace") if card.exists() else ""
    match = re.match(r"\ufeff?---[ \t]*\n(.*?)^---[ \t]*$", text, re.DOTALL | re.MULTILINE)
    try:
        return parse_front_matter(match[1]) if match else {}
    except ValueError as exc:
        raise SourceError(f"the front matter of {card.name} {exc}") from exc


def _read_header(client: Client, repo_id: str, commit: str, name: str, size_bytes: int) -> dict[str, Tensor]:
    head = read_bytes(client, repo_id, commit, name, 0, min(_FIRST_READ_BYTES, size_bytes))
    end = 8 + struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
    if len(head) < end <= min(_MAX_HEADER_BYTES, size_bytes):
        head += read_bytes(client, repo_id, commit, name, len(head), end)
    return checkpoint.parse_header(head, name, size_bytes)[0]


@contextmanager
def _named(model: str) -> Iterator[None]:
    """Puts a checkpoint's name before what is wrong with it, where it is not there yet."""
    try:
        yield
    except SourceError as exc:
        if str(exc).startswith(model):
            raise
        raise SourceError(f"{model}: {exc}", hint=exc.hint, findings=exc.findings) from exc
