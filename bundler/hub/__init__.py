"""The Hub: where sources come from and bundles go to. The only package that opens a connection.

`client` is the line: one API object, patience, and plain words for every refusal. `sources` resolves and fetches
checkpoints, `datasets` loads what they are calibrated with, `downloads` brings whole files. `repos`, `uploads` and
`pulls` hold the calls that publishing is made of.
"""

from bundler.hub.client import (
    WAITS_S,
    Client,
    Progress,
    RemoteFile,
    list_files,
    make_client,
    read_bytes,
    read_file,
)
from bundler.hub.downloads import download
from bundler.hub.pulls import PullRequest, find_pull_request, open_pull_request, show_pull_request
from bundler.hub.repos import (
    SAMPLE_BYTES,
    Account,
    CommitUnanswered,
    Copy,
    Overtaken,
    RemoteRepo,
    check_account,
    check_card,
    check_uploads,
    commit,
    create_repo,
    find_account,
    find_repo,
    find_tag,
    make_public,
    other_types,
    set_tag,
)
from bundler.hub.sources import cache_folder, fetch, find_commit, is_there, resolve, resolve_dataset
from bundler.hub.uploads import Upload, upload

__all__ = [
    "SAMPLE_BYTES",
    "WAITS_S",
    "Account",
    "Client",
    "CommitUnanswered",
    "Copy",
    "Overtaken",
    "Progress",
    "PullRequest",
    "RemoteFile",
    "RemoteRepo",
    "Upload",
    "cache_folder",
    "check_account",
    "check_card",
    "check_uploads",
    "commit",
    "create_repo",
    "download",
    "fetch",
    "find_account",
    "find_commit",
    "find_pull_request",
    "find_repo",
    "find_tag",
    "is_there",
    "list_files",
    "make_client",
    "make_public",
    "open_pull_request",
    "other_types",
    "read_bytes",
    "read_file",
    "resolve",
    "resolve_dataset",
    "set_tag",
    "show_pull_request",
    "upload",
]
