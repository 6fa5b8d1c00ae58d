"""Which function answers which request: method, path, handler."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import Response

from . import pulls, reading, writing, xet
from .call import Call

REPO = "/api/{kinds}/{ns}/{name}"
ENDPOINTS: list[tuple[str, str, Callable[[Call], Response]]] = [
    ("GET", "/api/whoami-v2", reading.whoami),
    ("POST", "/api/validate-yaml", writing.validate_yaml),
    ("POST", "/api/repos/create", writing.create_repo),
    ("PUT", REPO + "/settings", writing.change_settings),
    ("GET", REPO, reading.repo_info),
    ("GET", REPO + "/revision/{rev}", reading.repo_info),
    ("GET", REPO + "/tree/{rev}", reading.list_tree),
    ("GET", REPO + "/tree/{rev}/{path:path}", reading.list_tree),
    ("POST", REPO + "/paths-info/{rev}", reading.paths_info),
    ("GET", REPO + "/refs", reading.list_refs),
    ("GET", REPO + "/commits/{rev}", reading.list_commits),
    ("GET", "/{ns}/{name}/resolve/{rev}/{path:path}", reading.resolve_file),
    ("GET", "/{kinds}/{ns}/{name}/resolve/{rev}/{path:path}", reading.resolve_file),
    ("POST", REPO + "/preupload/{rev}", writing.preupload),
    ("POST", "/{ns}/{name}.git/info/lfs/objects/batch", writing.lfs_batch),
    ("POST", "/{ns}/{name}.git/info/lfs/verify", writing.lfs_verify),
    ("PUT", "/_lfs/{oid}", writing.lfs_object),
    ("POST", "/_lfs/{oid}", writing.lfs_object),
    ("GET", "/_lfs/{oid}", writing.lfs_object),
    ("PUT", "/_lfs/{oid}/{part}", writing.lfs_object),
    ("GET", REPO + "/xet-{use}-token/{rev}", xet.give_token),
    ("POST", REPO + "/lfs-files/duplicate", writing.duplicate_files),
    ("POST", REPO + "/commit/{rev}", writing.commit),
    ("POST", REPO + "/tag/{rev}", writing.create_tag),
    ("DELETE", REPO + "/tag/{rev}", writing.delete_tag),
    ("POST", REPO + "/branch/{rev}", writing.create_branch),
    ("DELETE", REPO + "/branch/{rev}", writing.delete_branch),
    ("GET", REPO + "/discussions", pulls.list_pulls),
    ("POST", REPO + "/discussions", pulls.open_pull),
    ("GET", REPO + "/discussions/{number}", pulls.show_pull),
    ("POST", REPO + "/discussions/{number}/status", pulls.change_status),
]
