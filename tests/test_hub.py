"""Sources from a folder and from a Hub: metadata without weights, files at one commit, plain words for refusals."""

from __future__ import annotations

import json
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hub.fixture import hf
from hub.server import Fault, HubServer

from bundler import hub
from bundler.checkpoint import load_tensors
from bundler.errors import SourceError
from bundler.recipe import SourceRef
from bundler.source import Source

BODY = Path(__file__).resolve().parent.parent / "examples" / "tiny-31b" / "drafter"
"""A checkpoint in one file; what it is for does not matter here."""
REPO = "acme/body"


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def resolve(model: str = REPO, revision: str | None = None) -> Source:
    return hub.resolve(SourceRef(model=model, revision=revision), Path("recipes"))


def failure(call: Callable[[], object]) -> SourceError:
    with pytest.raises(SourceError) as caught:
        call()
    return caught.value


def shard(**tensors: list[int]) -> bytes:
    """A safetensors file of zeros, BF16, from name → dimensions."""
    header, end = {}, 0
    for name, dims in tensors.items():
        start, end = end, end + 2 * dims[0] * dims[1]
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(end)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BODY, tmp_path / "recipes" / "body"))


# ----------------------------------------------------------------------------------------------------------- folders


def test_a_folder_is_read_in_place_relative_to_the_recipe(folder: Path) -> None:
    """A local source knows its files, config, card and tensors; it has no commit, and fetching it does nothing."""
    source = hub.resolve(SourceRef(model="./body"), folder.parent)
    assert (source.model, source.commit, source.folder) == ("./body", None, folder)
    assert {file.path: file.size_bytes for file in source.files} == {
        path: len(content) for path, content in files_of(folder).items()
    }
    assert source.config["model_type"] == "gemma4_assistant"
    assert source.card["license"] == "apache-2.0"
    assert source.tensors == load_tensors(folder)
    assert hub.fetch(source) is source


def test_code_pickles_and_folders_are_no_part_of_a_source(folder: Path) -> None:
    """Only what belongs to a checkpoint is listed: no code, no pickles, no hidden files, nothing in subfolders."""
    listed = [file.path for file in hub.resolve(SourceRef(model="./body"), folder.parent).files]
    for name in ("modeling.py", "training_args.bin", ".env", "extra.safetensors", "photo.png"):
        (folder / name).write_bytes(b"x")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    assert [file.path for file in hub.resolve(SourceRef(model="./body"), folder.parent).files] == listed


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda folder: shutil.rmtree(folder), "there is no folder"),
        (lambda folder: (folder / "config.json").unlink(), "there is no config.json"),
        (lambda folder: (folder / "config.json").write_text("[1]"), "is no JSON object"),
        (lambda folder: (folder / "README.md").write_text("---\na: [\n---\n"), "front matter of README.md is no YAML"),
        (lambda folder: (folder / "README.md").write_text("---\na: &a [x]\nb: *a\n---\n"), "it has aliases"),
        (lambda folder: (folder / "README.md").write_text(f"---\na: {'[' * 9999}\n---\n"), "is no YAML"),
        (lambda folder: (folder / "README.md").write_text(f"---\na: {'9' * 9999}\n---\n"), "is no YAML"),
        (lambda folder: (folder / "README.md").write_text("---\na: 2026-99-99\n---\n"), "is no YAML"),
        (lambda folder: (folder / "README.md").write_text("---\na: !!bool x\n---\n"), "is no YAML"),
        (lambda folder: (folder / "README.md").write_text("---\na: !!timestamp x\n---\n"), "is no YAML"),
        (lambda folder: (folder / "README.md").write_text("---\n- a\n---\n"), "is no mapping"),
        (lambda folder: (folder / "README.md").write_text(f"---\na: {'x ' * 999_999}\n---\n"), "characters"),
        (lambda folder: (folder / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (
            lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"),
            "only pickled weights here",
        ),
        (
            lambda folder: (folder / "model.safetensors").write_bytes((BODY / "model.safetensors").read_bytes()[:-2]),
            "truncated",
        ),
        (
            lambda folder: (folder / "tokenizer.json").write_text(
                "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
            ),
            "tokenizer.json is a Git LFS pointer",
        ),
    ],
)
def test_a_damaged_folder_is_refused_by_name(folder: Path, spoil: Callable[[Path], object], says: str) -> None:
    """Each damage is a SourceError that names the source and what is wrong in it."""
    spoil(folder)
    exc = failure(lambda: hub.resolve(SourceRef(model="./body"), folder.parent))
    assert str(exc).startswith("./body")
    assert says in str(exc)


def test_a_folder_has_no_revision(folder: Path) -> None:
    """A revision on a local path would be ignored, so it is refused."""
    exc = failure(lambda: hub.resolve(SourceRef(model="./body", revision="main"), folder.parent))
    assert "a folder has no revision" in str(exc)


# ------------------------------------------------------------------------------------------------------ from the Hub


def test_resolving_reads_headers_and_small_files_only(server: HubServer) -> None:
    """Everything that a plan needs is known before one tensor is downloaded."""
    commit = server.store.add(REPO, files_of(BODY) | {"training_args.bin": b"\x80pickle", "x/config.json": b"{}"})
    source = resolve()
    assert (source.model, source.revision, source.commit) == (REPO, None, commit)
    assert source.tensors == load_tensors(BODY)
    assert source.config == json.loads((BODY / "config.json").read_text())
    assert source.card["license"] == "apache-2.0"
    assert {file.path: file.size_bytes for file in source.files} == {
        path: len(content) for path, content in files_of(BODY).items()
    }
    assert [file.path for file in source.files if file.sha256] == ["model.safetensors"]
    assert sum(entry.sent_bytes for entry in server.log if "_lfs" in entry.path) <= 100_000
    assert all(entry.range for entry in server.log if "_lfs" in entry.path)
    assert not [entry for entry in server.log if entry.path.endswith(".bin")]
    assert not (source.folder / "model.safetensors").exists()


def test_fetching_brings_every_byte_of_that_commit(server: HubServer) -> None:
    """What is fetched is what was resolved, even if the branch has moved meanwhile."""
    server.store.add(REPO, files_of(BODY))
    source = resolve()
    server.store.add(REPO, {"config.json": b"{}", "model.safetensors": shard(a=[1, 1])})
    told: list[tuple[str, int, int]] = []
    fetched = hub.fetch(source, progress=lambda *step: told.append(step))
    assert files_of(fetched.folder) == files_of(BODY)
    total = sum(file.size_bytes for file in source.files)
    assert told[-1][1:] == (total, total)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    server.log.clear()
    hub.fetch(source)
    assert not [entry for entry in server.log if entry.method == "GET"]


def test_the_cache_is_the_clients_own(server: HubServer) -> None:
    """What `hf download` has fetched is not fetched again, and the other way round."""
    commit = server.store.add(REPO, files_of(BODY))
    done = hf("download", REPO, "--quiet")
    assert done.returncode == 0, done.stderr
    server.log.clear()
    source = hub.fetch(resolve())
    assert source.folder == Path(done.stdout.strip())
    assert source.folder.name == commit
    assert not [entry.path for entry in server.log if "/resolve/" in entry.path and entry.range is None]


def test_a_long_header_takes_a_second_request_and_no_more(server: HubServer) -> None:
    """A header beyond the first read is completed exactly; the data behind it stays where it is."""
    weights = shard(**{f"layer.{number:05d}": [16, 16] for number in range(3000)})
    server.store.add(REPO, {"config.json": b"{}", "model.safetensors": weights})
    assert len(resolve().tensors) == 3000
    (length,) = struct.unpack("<Q", weights[:8])
    asked = [entry for entry in server.log if "_lfs" in entry.path]
    assert len(asked) == 2
    assert sum(entry.sent_bytes for entry in asked) == 8 + length


def test_sharded_weights_are_those_of_the_index(server: HubServer) -> None:
    """The index says which shards there are; other safetensors files beside it do not count."""
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    server.store.add(
        REPO,
        {
            "config.json": b"{}",
            "model.safetensors.index.json": json.dumps(index).encode(),
            "model-1.safetensors": shard(a=[2, 2]),
            "model-2.safetensors": shard(b=[2, 2]),
            "consolidated.safetensors": shard(c=[2, 2]),
        },
    )
    source = resolve()
    assert {name: tensor.file for name, tensor in source.tensors.items()} == index["weight_map"]
    assert "consolidated.safetensors" not in {file.path for file in source.files}


def test_a_revision_is_a_branch_a_tag_or_a_commit(server: HubServer) -> None:
    """Whatever is asked for, the commit is recorded."""
    first = server.store.add(REPO, files_of(BODY))
    server.store.repos["model", REPO].git.set_ref("refs/tags/v1", first)
    server.store.add(REPO, {"NOTICE": b"later"})
    assert [resolve(revision=name).commit for name in ("v1", first)] == [first, first]
    assert resolve(revision="main").commit != first


def test_a_dataset_is_known_by_its_commit(server: HubServer) -> None:
    """A calibration dataset's revision becomes a commit before anything long begins."""
    commit = server.store.add("acme/chats", {"data.jsonl": b"{}\n"}, kind="dataset")
    assert hub.resolve_dataset("acme/chats", None) == commit
    assert "acme/none does not exist" in str(failure(lambda: hub.resolve_dataset("acme/none", None)))


def test_requests_say_who_asks(server: HubServer) -> None:
    """The Hub sees this tool's name and version in every request for a source."""
    server.store.add(REPO, files_of(BODY))
    resolve()
    asked = [entry for entry in server.log if not entry.path.startswith("/_lfs")]
    assert all(entry.user_agent.startswith("bundler/") for entry in asked)


# ---------------------------------------------------------------------------------------------------------- refusals


def test_a_repo_that_is_missing_or_private_cannot_be_told_apart(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either way the message says both and how to log in."""
    server.store.add(REPO, files_of(BODY))
    server.store.repos["model", REPO].private = True
    assert resolve().commit
    monkeypatch.setenv("HF_TOKEN", "hf_bob")
    for model in (REPO, "acme/none"):
        exc = failure(lambda model=model: resolve(model))
        assert str(exc) == f"{model} does not exist, or is private and closed to this token"
        assert "hf auth login" in str(exc.hint)
    monkeypatch.delenv("HF_TOKEN")
    assert "is private and closed" in str(failure(resolve))


def test_a_gated_repo_says_where_to_accept_its_terms(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gated is found out while planning, not after hours; whoever accepted comes in."""
    server.store.add(REPO, files_of(BODY))
    server.store.repos["model", REPO].gated = "manual"
    monkeypatch.setenv("HF_TOKEN", "hf_bob")
    exc = failure(resolve)
    assert str(exc) == f"{REPO} is gated"
    assert f"accept its terms at {server.endpoint}/{REPO}" in str(exc.hint)
    server.store.repos["model", REPO].granted.add("bob")
    assert resolve().tensors


def test_an_unknown_revision_is_named(server: HubServer) -> None:
    """A revision that does not exist is not taken for a repo that does not exist."""
    server.store.add(REPO, files_of(BODY))
    assert str(failure(lambda: resolve(revision="v9"))) == f"{REPO} has no revision v9"


def test_a_bad_token_is_said_and_never_shown(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that the Hub does not accept is no missing repo."""
    server.store.add(REPO, files_of(BODY))
    monkeypatch.setenv("HF_TOKEN", "hf_not_a_real_token")
    exc = failure(resolve)
    assert "does not accept this token" in str(exc)
    assert "not_a_real" not in f"{exc} {exc.hint}"


def test_a_token_that_cannot_be_sent_is_not_quoted(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, sleeps: list[float]
) -> None:
    """The HTTP library quotes a header that it refuses; the message does not."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret\x0bpart")
    exc = failure(resolve)
    assert "secret" not in f"{exc} {exc.hint}"
    assert "part" not in f"{exc}"


def test_offline_says_what_to_unset(server: HubServer, monkeypatch: pytest.MonkeyPatch, sleeps: list[float]) -> None:
    """HF_HUB_OFFLINE is an answer, not a fault to wait for."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    exc = failure(resolve)
    assert "HF_HUB_OFFLINE is set" in str(exc)
    assert sleeps == []


def test_no_network_names_the_endpoint(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, sleeps: list[float]
) -> None:
    """Where nothing answers, the address that was tried is in the message."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        endpoint = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", endpoint)
    assert f"cannot reach {endpoint}" in str(failure(resolve))
    assert sleeps == list(hub.WAITS_S)


def test_a_name_that_is_no_repo_id_is_refused_without_asking(server: HubServer) -> None:
    """`ORG/NAME/assistant` is no Hub id."""
    assert str(failure(lambda: resolve("acme/body/assistant"))) == "acme/body/assistant is no repo id"
    assert server.log == []


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"README.md": b"# empty\n"}, "there is no config.json"),
        ({"config.json": b"{}", "pytorch_model.bin": b"\x80"}, "only pickled weights here"),
        ({"config.json": b"{}", "model.gguf": b"GGUF"}, "neither model.safetensors nor"),
        ({"config.json": b"{}", "model.safetensors": shard(a=[4, 4])[:-2]}, "truncated"),
        ({"config.json": b"{}", "model.safetensors": struct.pack("<Q", 1 << 60) + b"{}"}, "truncated"),
        ({"config.json": b"{}", "model.safetensors": b""}, "only 0 bytes"),
    ],
)
def test_a_repo_without_a_whole_checkpoint_is_refused(server: HubServer, files: dict[str, bytes], says: str) -> None:
    """What is missing or broken is said with the repo's name, before anything large is downloaded."""
    server.store.add(REPO, files)
    exc = failure(resolve)
    assert str(exc).startswith(REPO)
    assert says in str(exc)


def test_a_server_that_ignores_ranges_is_not_drunk_from(server: HubServer) -> None:
    """A mirror that answers a range with the whole file is refused, not read to its end."""
    server.store.add(REPO, files_of(BODY))
    server.faults.append(Fault(method="GET", path="/_lfs/", edit=lambda body: body, set_status=200, times=9))
    assert "does not serve parts of files" in str(failure(resolve))


def test_a_busy_hub_is_waited_for(server: HubServer, sleeps: list[float]) -> None:
    """A fault that passes costs a pause, at every step of resolving."""
    server.store.add(REPO, files_of(BODY))
    server.faults += [
        Fault(method="GET", path=f"/api/models/{REPO}$", status=503),
        Fault(method="GET", path="/tree/", status=502),
        Fault(method="GET", path="/_lfs/", reset=True, status=206),
    ]
    assert resolve().tensors == load_tensors(BODY)
    assert sleeps == [1.0, 1.0, 1.0]


def test_a_file_that_came_short_is_refused(server: HubServer) -> None:
    """A cached file whose size is not the Hub's is named, with what to do."""
    server.store.add(REPO, files_of(BODY))
    source = hub.fetch(resolve())
    blob = (source.folder / "model.safetensors").resolve()
    blob.write_bytes(blob.read_bytes()[:100])
    exc = failure(lambda: hub.fetch(source))
    assert "model.safetensors has 100 bytes here" in str(exc)
    assert "remove" in str(exc.hint)
