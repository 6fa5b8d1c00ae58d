"""Xet storage of the test Hub: hf_xet's own store in a folder, which clients write to through hf_xet itself.

The client learns the folder from the token that it asks for (`local://…` instead of a server's address). Which file of
an upload became what is read from the shards that hf_xet leaves there (format: xet-core, mdb_shard).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path

from starlette.responses import JSONResponse, Response

from .call import Call
from .store import HubError

_SHARD_HEADER_BYTES = 48
_ENTRY_BYTES = 48
_END = b"\xff" * 32


def give_token(call: Call) -> Response:
    pull = "create_pr" in call.request.query_params or call["rev"].startswith("refs/pr/")
    call.repo(write=call["use"] == "write", pull=pull, content=call["use"] == "read")
    xet = call.server.xet
    if xet is None:
        raise HubError(404, "no xet here")
    expires = int(time.time()) + 3600
    headers = {
        "X-Xet-Cas-Url": xet.url,
        "X-Xet-Access-Token": "xet",
        "X-Xet-Token-Expiration": str(expires),
    }
    return JSONResponse({"accessToken": "xet", "exp": expires, "casUrl": xet.url}, headers=headers)


class Xet:
    """The store, and what of it is known by SHA-256."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "xet"
        self.folder.mkdir(parents=True)
        self.hashes: dict[str, str] = {}
        """SHA-256 → xet's own hash of every file that was uploaded here."""

    @property
    def url(self) -> str:
        """The store's address, as tokens name it."""
        return f"local://{self.folder}"

    def read(self, sha256: str, size: int) -> bytes | None:
        """A file's content, if it was uploaded whole and is what it is said to be."""
        import hf_xet

        self._scan()
        if sha256 not in self.hashes:
            return None
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as scratch:
            copy, target = Path(scratch) / "store", Path(scratch) / "file"
            shutil.copytree(
                self.folder, copy, copy_function=_link
            )  # the uploading client holds a lock on the original
            session = hf_xet.XetSession()
            with session.new_file_download_group(endpoint=f"local://{copy}") as group:
                group.start_download_file(hf_xet.XetFileInfo(self.hashes[sha256], size), str(target))
            content = target.read_bytes()
        return content if hashlib.sha256(content).hexdigest() == sha256 else None

    def _scan(self) -> None:
        for shard in self.folder.rglob("*.mdb"):
            data, at = shard.read_bytes(), _SHARD_HEADER_BYTES
            while at + _ENTRY_BYTES <= len(data) and data[at : at + 32] != _END:
                file_hash, flags, count, _ = struct.unpack_from("<32sIIQ", data, at)
                at += _ENTRY_BYTES * (1 + count + (count if flags >> 31 & 1 else 0))
                if flags >> 30 & 1:
                    self.hashes[_hex(data[at : at + 32])] = _hex(file_hash)
                    at += _ENTRY_BYTES


def _hex(raw: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def _link(source: str, target: str) -> None:
    if source.endswith(".redb"):
        shutil.copyfile(source, target)
    else:
        os.link(source, target)
