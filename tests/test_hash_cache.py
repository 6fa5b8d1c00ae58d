"""A file is hashed once: as long as the file system says that it did not change, its hash is remembered."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hub.server import HubServer

from bundler import hash_cache, manifest
from bundler.errors import VerificationError
from bundler.hash_cache import FileState, load, look, read_state, remember_unless
from bundler.manifest import FileEntry
from bundler.push import push

REPO = "acme/tiny-31b"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, in which every size is worth remembering."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hash_cache, "WORTH_BYTES", 1)
    return tmp_path / "cache" / "bundler" / "hashes.jsonl"


def settle() -> None:
    """Let the file system's clock tick on, so that a later change shows."""
    time.sleep(0.11)


def entry_of(path: Path) -> FileEntry:
    size_bytes, sha256 = manifest.hash_file(path)
    return FileEntry(path=path.name, size_bytes=size_bytes, sha256=sha256, role="body")


def remembered(path: Path) -> str | None:
    state = read_state(path)
    assert state is not None
    return load().get(state)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.bin"
    path.write_bytes(b"a" * 100)
    settle()
    return path


def test_a_hash_is_remembered_until_the_file_changes(file: Path) -> None:
    """Same size and restored modification time do not hide a change: no program can set the time of the change."""
    entry, before = entry_of(file), file.stat()
    hash_cache.remember([entry], {file.name: read_state(file)}, file.parent)
    assert remembered(file) == entry.sha256
    file.write_bytes(b"b" * 100)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert remembered(file) is None


def test_a_renamed_folder_keeps_its_hashes(tmp_path: Path) -> None:
    """A build verifies in its stage and then renames: nothing is hashed again for that."""
    stage, target = tmp_path / "stage", tmp_path / "dist"
    stage.mkdir()
    (stage / "a.bin").write_bytes(b"a")
    settle()
    entry = entry_of(stage / "a.bin")
    hash_cache.remember([entry], {"a.bin": read_state(stage / "a.bin")}, stage)
    stage.rename(target)
    assert remembered(target / "a.bin") == entry.sha256


def test_a_file_that_changed_while_it_was_hashed_is_not_remembered(file: Path) -> None:
    """Only what was the same before and after can be what was hashed."""
    before = read_state(file)
    file.write_bytes(b"c" * 100)
    settle()
    hash_cache.remember([entry_of(file)], {file.name: before}, file.parent)
    assert remembered(file) is None


def test_a_file_that_has_just_been_written_is_not_remembered(tmp_path: Path) -> None:
    """Within one tick of the file system's clock a second change would not show."""
    file = tmp_path / "a.bin"
    file.write_bytes(b"a")
    hash_cache.remember([entry_of(file)], {file.name: read_state(file)}, tmp_path)
    assert remembered(file) is None


def test_a_clock_of_whole_seconds_is_not_trusted(file: Path, own_cache: Path) -> None:
    """Some file systems count in seconds: there, nothing is remembered."""
    state = read_state(file)
    assert state is not None
    coarse = FileState(state.size_bytes, state.mtime_ns, state.ctime_ns // 10**9 * 10**9, state.inode, state.device)
    hash_cache.remember([entry_of(file)], {file.name: coarse}, file.parent)
    assert not own_cache.exists()


@pytest.mark.parametrize("content", ["", "nonsense\n", "[1, 2]\n", '{"a": 1}\n', "[1,2,3,4,5,6,7,8]\n", "\x00"])
def test_a_damaged_memory_is_forgotten(own_cache: Path, content: str) -> None:
    """Whatever is in the file, the worst that happens is hashing again."""
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text(content)
    assert load() == {}


def test_a_memory_that_has_grown_large_starts_over(own_cache: Path, file: Path) -> None:
    """It is kept small by forgetting everything once in a while."""
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text('[1, 2, 3, 4, 5, "a"]\n' * 60_000)
    hash_cache.remember([entry_of(file)], {file.name: read_state(file)}, file.parent)
    assert len(own_cache.read_text().splitlines()) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no limit on the size of files")
def test_a_full_disk_is_no_error(file: Path) -> None:
    """A memory that cannot be written is done without."""
    code = (
        "import sys; from pathlib import Path; from bundler import hash_cache as h, manifest as m; h.WORTH_BYTES = 1; "
    )
    code += (
        "f = Path(sys.argv[1]); size, sha = m.hash_file(f); e = m.FileEntry(path=f.name, size_bytes=size, sha256=sha, "
    )
    code += "role='body'); h.remember([e], {f.name: h.read_state(f)}, f.parent)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert remembered(file) is None


def test_a_verified_bundle_is_not_hashed_again_by_a_push(server: HubServer, ready_copy: Path, own_cache: Path) -> None:
    """What `bundle verify` hashed, `bundle push` takes from the memory; a change is found all the same."""
    settle()
    remember_unless((), look(ready_copy))
    shard = next(ready_copy.glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    settle()
    with pytest.raises(VerificationError, match="has SHA-256"):
        push(ready_copy, REPO, dry_run=True)
    entry = next(entry for entry in manifest.load(ready_copy).files if entry.path == shard.name)
    state = read_state(shard)
    assert state is not None
    with own_cache.open("a") as memory:  # a lie: only who does not read the shard again can believe it
        line = [state.size_bytes, state.mtime_ns, state.ctime_ns, state.inode, state.device, entry.sha256]
        memory.write(json.dumps(line) + "\n")
    assert push(ready_copy, REPO, dry_run=True).plan.changes


def test_a_faulty_bundle_is_not_remembered(ready_copy: Path, own_cache: Path) -> None:
    """Hashes are kept only of what was found right."""
    settle()
    remember_unless(["a fault"], look(ready_copy))  # type: ignore[list-item]
    assert not own_cache.exists()
    assert look(ready_copy / "none").entries == ()
