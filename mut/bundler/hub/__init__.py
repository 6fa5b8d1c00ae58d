"""The Hub: where sources come from and bundles go to. The only package that opens a connection.

`client` is the line: one API object, patience, and plain words for every refusal. `sources` resolves and fetches
checkpoints, `datasets` loads what they are calibrated with; `repos` holds the calls that publishing is made of.
"""

from bundler.hub.client import WAITS_S, Client, Progress, RemoteFile, list_files, make_client, read_bytes
from bundler.hub.repos import (
    CommitUnanswered,
    RemoteRepo,
    check_account,
    commit,
    create_repo,
    find_repo,
    find_tag,
    make_public,
    set_tag,
    upload,
    validate_card,
)
from bundler.hub.sources import fetch, resolve, resolve_dataset

__all__ = [
    "WAITS_S",
    "Client",
    "CommitUnanswered",
    "Progress",
    "RemoteFile",
    "RemoteRepo",
    "check_account",
    "commit",
    "create_repo",
    "fetch",
    "find_repo",
    "find_tag",
    "list_files",
    "make_client",
    "make_public",
    "read_bytes",
    "resolve",
    "resolve_dataset",
    "set_tag",
    "upload",
    "validate_card",
]
