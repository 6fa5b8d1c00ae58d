"""bundle.json: written and read without loss, and compared with the files beside it."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler import manifest
from bundler.errors import VerificationError
from bundler.findings import Finding, Severity
from bundler.manifest import (
    CalibrationEntry,
    FidelityEntry,
    FileEntry,
    LayerFidelity,
    Manifest,
    QuantizationEntry,
    SourceEntry,
    SourceFileEntry,
    compare,
    hash_file,
    list_files,
    load,
    make_entries,
    render,
    role_of,
    write,
)
from bundler.names import check_name, check_path

ZERO = "0" * 64
words = st.text(max_size=12).filter(lambda text: not check_name(text, ""))
sizes = st.integers(0, 2**63)
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)
objects = st.dictionaries(words, json_values, max_size=3)
paths = st.lists(st.text("abcxyz0-_", min_size=1, max_size=6), min_size=1, max_size=3).map("/".join)
paths = paths.filter(lambda path: not check_path(path))


def _entries(names: list[str]) -> st.SearchStrategy[tuple[FileEntry, ...]]:
    one = [
        st.builds(FileEntry, path=st.just(n), size_bytes=sizes, sha256=hashes, role=st.just(role_of(n))) for n in names
    ]
    return st.tuples(*one)


source_files = st.builds(SourceFileEntry, path=words, size_bytes=sizes, sha256=hashes)
sources = st.builds(
    SourceEntry,
    model=words,
    revision=st.none() | words,
    commit=st.none() | words,
    card=objects,
    files=st.lists(source_files, max_size=2).map(tuple),
)
numbers = st.floats(allow_nan=False, allow_infinity=False)
layers = st.builds(LayerFidelity, sqnr_db=st.none() | numbers, module=st.none() | words)
quantizations = st.builds(
    QuantizationEntry,
    scheme=words,
    format=words,
    ignore=st.lists(words, max_size=2).map(tuple),
    calibration=st.builds(
        CalibrationEntry,
        dataset=words,
        config=st.none() | words,
        split=words,
        commit=st.none() | words,
        sha256=st.none() | hashes,
    ),
    compute=objects,
    dropped_tensors=st.lists(words, max_size=2).map(tuple),
    q4_0_blocks=numbers,
    fidelity=st.builds(
        FidelityEntry,
        kl_divergence=numbers,
        top1_agreement=numbers,
        perplexity=numbers,
        perplexity_ratio=numbers,
        input_range=numbers,
        input_range_module=st.none() | words,
        layers=st.lists(layers, max_size=2).map(tuple),
    ),
)
findings = st.builds(
    Finding,
    severity=st.sampled_from(Severity),
    code=words,
    where=words,
    message=words,
    hint=st.none() | words,
    source=st.none() | words,
)
manifests = st.builds(
    Manifest,
    name=words,
    tool=st.dictionaries(words, words, max_size=2),
    recipe_sha256=hashes,
    body=sources,
    drafter=sources,
    quantization=quantizations,
    findings=st.lists(findings, max_size=2).map(tuple),
    files=st.lists(paths, max_size=4, unique=True).flatmap(_entries),
)


def _source(model: str = "a/b") -> SourceEntry:
    return SourceEntry(model=model, revision=None, commit=None, card={}, files=())


def _manifest(files: tuple[FileEntry, ...] = (), **changes: Any) -> Manifest:
    calibration = CalibrationEntry(
        dataset="d", config=None, split="train", commit=None, sha256=None,
        num_samples=1, max_seq_length=1, seed=1, num_tokens=1,
    )  # fmt: skip
    quantization = QuantizationEntry(
        scheme="NVFP4", format="f", ignore=(), weight_observer="w", input_observer="i", calibration=calibration,
        compute={}, quantized_modules=1, quantized_parameters=1, kept_parameters=1, dropped_tensors=(),
        q4_0_blocks=1.0, fidelity=FidelityEntry(
            num_samples=1, num_tokens=1, kl_divergence=0.0, top1_agreement=1.0, perplexity=1.0, perplexity_ratio=1.0,
            input_range=0.0, input_range_module=None, layers=(LayerFidelity(layer=0, sqnr_db=None, module=None),),
        ),
    )  # fmt: skip
    made = Manifest(
        name="x", tool={}, recipe_sha256=ZERO, body=_source(), drafter=_source(), quantization=quantization,
        findings=(), files=files,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


@settings(max_examples=60, deadline=None)
@given(manifests)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, made: Manifest) -> None:
    """Any manifest is read back as it was written, and written again as the same bytes."""
    root = tmp_path_factory.mktemp("bundle")
    write(root, made)
    assert load(root) == made
    assert render(load(root)) == (root / "bundle.json").read_text(encoding="ascii")
    assert [path.name for path in root.iterdir()] == ["bundle.json"]


def test_equal_manifests_are_equal_bytes() -> None:
    """The order in which mappings were filled does not show."""
    one, other = _manifest(tool={"a": "1", "b": "2"}), _manifest(tool={"b": "2", "a": "1"})
    assert render(one) == render(other)
    assert render(one).endswith("}\n")


def test_front_matter_that_json_has_no_word_for() -> None:
    """Cards are YAML: dates, non-finite numbers and keys that are no strings are written as text."""
    card = {"date": datetime.date(2026, 11, 30), 1: [True, (2.5, math.inf)]}
    made = _manifest(body=dataclasses.replace(_source(), card=card))
    assert json.loads(render(made))["body"]["card"] == {"date": "2026-11-30", "1": [True, [2.5, "inf"]]}


def _write_document(root: Path, change: Callable[[dict[str, Any]], None]) -> list[Finding]:
    entry = FileEntry(path="config.json", size_bytes=1, sha256=ZERO, role="body")
    document = json.loads(render(_manifest(files=(entry,))))
    change(document)
    (root / "bundle.json").write_text(json.dumps(document))
    with pytest.raises(VerificationError) as caught:
        load(root)
    return list(caught.value.findings)


def _put(*path: str | int, value: object) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        inner: Any = document
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = copy.deepcopy(value)

    return change


BROKEN = {
    "newer schema": (_put("schema", value=2), "manifest-schema", "bundle.json"),
    "schema that is none": (_put("schema", value="1"), "manifest-schema", "bundle.json"),
    "text for a number": (
        _put("quantization", "calibration", "seed", value="1"), "manifest-type",
        "bundle.json: quantization.calibration.seed",
    ),
    "true for a number": (
        _put("files", 0, "size_bytes", value=True), "manifest-type", "bundle.json: files[0].size_bytes",
    ),
    "number for a text": (_put("name", value=1), "manifest-type", "bundle.json: name"),
    "number for an optional text": (_put("body", "commit", value=1), "manifest-type", "bundle.json: body.commit"),
    "object for a list": (_put("files", value={}), "manifest-type", "bundle.json: files"),
    "list for an object": (_put("body", value=[]), "manifest-type", "bundle.json: body"),
    "number in a table of texts": (_put("tool", value={"a": 1}), "manifest-type", "bundle.json: tool.a"),
    "text for a card": (_put("body", "card", value="x"), "manifest-type", "bundle.json: body.card"),
    "unknown severity": (
        _put("findings", value=[{"severity": "fatal", "code": "c", "where": "w", "message": "m", "hint": None,
                                 "source": None}]),
        "manifest-type", "bundle.json: findings[0].severity",
    ),
    "unknown key": (_put("extra", value=1), "manifest-key", "bundle.json: extra"),
    "unknown key inside": (_put("body", "extra", value=1), "manifest-key", "bundle.json: body.extra"),
    "negative size": (_put("files", 0, "size_bytes", value=-1), "manifest-value", "bundle.json: files[0]"),
    "hash that is none": (_put("files", 0, "sha256", value="0" * 63), "manifest-value", "bundle.json: files[0]"),
    "role of another file": (_put("files", 0, "role", value="asset"), "manifest-value", "bundle.json: files[0]"),
    "parent path": (_put("files", 0, "path", value="../x"), "path-name", "../x"),
    "absolute path": (_put("files", 0, "path", value="/etc/passwd"), "path-name", "/etc/passwd"),
    "forbidden bundle name": (_put("name", value="my-EAGLE3-bundle"), "forbidden-name", "bundle.json: name"),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_every_fault_has_its_code_and_key_path(fault: str, tmp_path: Path) -> None:
    """A manifest that is not as it must be is refused with a code and the place."""
    change, code, where = BROKEN[fault]
    assert [(finding.code, finding.where) for finding in _write_document(tmp_path, change)] == [(code, where)]


def test_missing_keys(tmp_path: Path) -> None:
    """Every key is needed, at every depth."""
    faults = _write_document(tmp_path, lambda document: (document.pop("name"), document["body"].pop("card"), None)[2])
    assert sorted(finding.where for finding in faults) == ["bundle.json: body.card", "bundle.json: name"]


def test_all_faults_at_once(tmp_path: Path) -> None:
    """One reading reports everything."""

    def change(document: dict[str, Any]) -> None:
        document["name"], document["extra"], document["body"]["files"] = 1, 2, 3

    assert len(_write_document(tmp_path, change)) == 3


def test_twice_the_same_file(tmp_path: Path) -> None:
    """Two entries that one file system would keep in one file are refused."""

    def change(document: dict[str, Any]) -> None:
        document["files"].append({**document["files"][0], "path": "CONFIG.json"})

    assert [finding.code for finding in _write_document(tmp_path, change)] == ["path-name"]


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_manifest(content: bytes, tmp_path: Path) -> None:
    """Bytes that are no JSON object are refused as unreadable; no file at all as missing."""
    with pytest.raises(VerificationError) as caught:
        load(tmp_path)
    assert [finding.code for finding in caught.value.findings] == ["manifest-missing"]
    (tmp_path / "bundle.json").write_bytes(content)
    with pytest.raises(VerificationError) as caught:
        load(tmp_path)
    assert [finding.code for finding in caught.value.findings] == ["manifest-unreadable"]


def test_hash_file(tmp_path: Path) -> None:
    """Size and SHA-256 are those of the bytes, of an empty file too."""
    path = tmp_path / "x"
    for content in (b"", b"abc" * 1_000_000):
        path.write_bytes(content)
        assert hash_file(path) == (len(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("config.json", "body"),
        ("model-00001-of-00001.safetensors", "body"),
        ("assistant/config.json", "drafter"),
        ("assistant/README.md", "drafter"),
        ("assistant/LICENSE", "drafter"),
        ("README.md", "card"),
        ("LICENSE", "licence"),
        ("NOTICE.txt", "licence"),
        ("recipe.toml", "recipe"),
        ("measurements/a.json", "measurement"),
        ("evidence/vllm.json", "evidence"),
        ("assets/chart.svg", "asset"),
        ("assistants", "body"),
    ],
)
def test_roles(path: str, role: str) -> None:
    """A file's role follows from its path."""
    assert role_of(path) == role
    assert role in manifest.ROLES


def _make(root: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_what_is_listed(tmp_path: Path) -> None:
    """Every file but bundle.json, what the Hub and its client add, and what lies behind a linked folder."""
    root, outside = tmp_path / "bundle", tmp_path / "outside"
    _make(outside, {"secret": b"", "blob": b"abc"})
    _make(root, {
        "bundle.json": b"", ".gitattributes": b"", ".cache/huggingface/x": b"", ".cache/other": b"", "b": b"",
        "a/b.txt": b"", "a/bundle.json": b"", "a-b": b"", "a/.cache/huggingface/x": b"",
    })  # fmt: skip
    (root / "linked-folder").symlink_to(outside)
    (root / "linked-file").symlink_to(outside / "blob")
    (root / "dead-link").symlink_to(root / "nothing")
    os.mkfifo(root / "pipe")
    assert [path.as_posix() for path in list_files(root)] == [
        ".cache/other", "a-b", "a/.cache/huggingface/x", "a/b.txt", "a/bundle.json", "b", "linked-file",
    ]  # fmt: skip
    assert [entry.size_bytes for entry in make_entries(root) if entry.path == "linked-file"] == [3]


contents = st.dictionaries(paths, st.binary(max_size=6), max_size=6).filter(
    lambda files: not any(a != b and b.startswith(f"{a}/") for a in files for b in files)
)


@settings(max_examples=60, deadline=None)
@given(contents, st.data())
def test_compare_finds_exactly_what_changed(
    tmp_path_factory: pytest.TempPathFactory, files: dict[str, bytes], data: st.DataObject
) -> None:
    """Files that vanish, appear, grow or change are each found under their own code, and nothing else is."""
    root = tmp_path_factory.mktemp("bundle")
    _make(root, files)
    made = _manifest(files=make_entries(root))
    assert compare(made, root) == []
    expected = []
    for name, content in files.items():
        match data.draw(st.sampled_from(["keep", "missing", "size", "hash"])):
            case "missing":
                (root / name).unlink()
                expected.append((name, "file-missing"))
            case "size":
                (root / name).write_bytes(content + b"x")
                expected.append((name, "file-size"))
            case "hash" if content:
                (root / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
                expected.append((name, "file-hash"))
    for name in data.draw(st.lists(st.text("ABC", min_size=1, max_size=3), max_size=2, unique=True)):
        _make(root, {name: b""})
        expected.append((name, "file-extra"))
    assert [(finding.where, finding.code) for finding in compare(made, root)] == sorted(expected)


def test_compare_never_looks_outside(tmp_path: Path) -> None:
    """A listed path that leaves the bundle is missing, whatever lies there."""
    root = tmp_path / "bundle"
    _make(tmp_path, {"secret": b"abc"})
    root.mkdir()
    size_bytes, sha256 = hash_file(tmp_path / "secret")
    for path in ("../secret", str(tmp_path / "secret")):
        entry = FileEntry(path=path, size_bytes=size_bytes, sha256=sha256, role="body")
        assert [finding.code for finding in compare(_manifest(files=(entry,)), root)] == ["file-missing"]


@pytest.mark.parametrize(
    "path",
    [
        "/a", "a//b", "../a", "a/../b", "./a", "", "a/", "a\\b", "a\nb", "a\x7fb", "a:b", "what?", "con",
        "sub/NUL.txt", "a.", "a /b", "e\u0301", "\ud800", "a" * 256,
    ],
)  # fmt: skip
def test_paths_that_do_not_travel(path: str) -> None:
    """A path that leaves the bundle, or that some system cannot hold, is an error."""
    assert {finding.code for finding in check_path(path)} == {"path-name"}


@pytest.mark.parametrize(
    "path", ["config.json", "assistant/README.md", "model-00001-of-00002.safetensors", "é", "日本", "a b"]
)
def test_paths_that_travel(path: str) -> None:
    """Plain names pass, in any script."""
    assert check_path(path) == []


@pytest.mark.parametrize("name", ["my-eagle-body", "Eagle3", "assistant-DFlash", "a/dspark/b"])
def test_names_that_mislead_vllm(name: str) -> None:
    """A path that holds another draft method's name would make vLLM load the drafter as that."""
    assert [finding.code for finding in check_name(name, "x")] == ["forbidden-name"]
    assert check_name("the-eagles", "x") == []
