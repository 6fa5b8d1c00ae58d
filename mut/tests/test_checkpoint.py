"""safetensors headers, indexes and shards, read and written as bytes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from bundler.checkpoint import (
    DTYPE_BYTES,
    INDEX,
    SINGLE,
    Shape,
    is_lfs_pointer,
    load_header,
    load_json,
    load_tensors,
    make_header,
    make_shards,
    parse_header,
    render_index,
    weight_files,
)
from bundler.errors import SourceError

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n"
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda n: n != "__metadata__"
)
numpy_shapes = st.builds(
    lambda dtype, dims: Shape(dtype=dtype, dims=tuple(dims)),
    st.sampled_from(["F32", "U8", "I64", "F16", "BOOL"]),
    st.lists(st.integers(0, 4), max_size=3),
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(names, numpy_shapes, min_size=1, max_size=6))
def test_written_headers_are_read_by_the_library(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, Shape]
) -> None:
    """What `make_header` lays out, the safetensors library opens with the same names and shapes; so do we."""
    shard = make_header(shapes, "x.safetensors")
    path = tmp_path_factory.mktemp("header") / shard.file
    path.write_bytes(shard.header + bytes(shard.nbytes - len(shard.header)))
    with safe_open(path, "numpy") as file:
        assert {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()} == {  # noqa: SIM118
            name: shape.dims for name, shape in shapes.items()
        }
        assert file.metadata() == {"format": "pt"}
    assert load_header(path) == (dict(shard.tensors), {"format": "pt"})
    assert len(shard.header) % 8 == 0


def test_headers_are_the_librarys_own_bytes(tmp_path: Path) -> None:
    """A header is byte for byte what the safetensors library writes for the same tensors."""
    arrays = {"b": np.zeros((2, 3), np.float32), "a": np.zeros(4, np.uint8), "c": np.zeros((), np.int64)}
    path = tmp_path / "x.safetensors"
    save_file(arrays, path, metadata={"format": "pt"})
    shapes = {
        "b": Shape(dtype="F32", dims=(2, 3)),
        "a": Shape(dtype="U8", dims=(4,)),
        "c": Shape(dtype="I64", dims=()),
    }
    shard = make_header(shapes, path.name)
    assert path.read_bytes().startswith(shard.header)
    assert path.stat().st_size == shard.nbytes


def _file(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(text)) + text + data


TENSOR = {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}
BROKEN = {
    "empty": (b"", "no safetensors file"),
    "pointer": (POINTER, "Git LFS pointer"),
    "length beyond the file": (struct.pack("<Q", 1 << 40) + b"{}", "truncated or no safetensors"),
    "no JSON": (_file(b"hello"), "no readable safetensors header"),
    "a list": (_file([1]), "no readable safetensors header"),
    "metadata that is none": (_file({"__metadata__": 3}), "no readable safetensors header"),
    "nested too deep": (_file(b"[" * 100_000), "no readable safetensors header"),
    "no dtype": (_file({"a": {"shape": [2], "data_offsets": [0, 2]}}, b"12"), "no readable safetensors header"),
    "unknown dtype": (_file({"a": {**TENSOR, "dtype": "F3"}}, b"12"), "no readable safetensors header"),
    "shape that is none": (_file({"a": {**TENSOR, "shape": ["x"]}}, b"12"), "no readable safetensors header"),
    "negative shape": (_file({"a": {**TENSOR, "shape": [-1, -2]}}, b"12"), "no readable safetensors header"),
    "range larger than the shape": (_file({"a": {**TENSOR, "shape": [1]}}, b"12"), "does not fit its shape"),
    "negative range": (_file({"a": {**TENSOR, "data_offsets": [-2, 0]}}, b"12"), "does not fit its shape"),
    "overlap": (_file({"a": TENSOR, "b": {**TENSOR, "data_offsets": [1, 3]}}, b"123"), "or its neighbours"),
    "hole": (_file({"a": {**TENSOR, "data_offsets": [1, 3]}}, b"123"), "or its neighbours"),
    "truncated": (_file({"a": TENSOR}, b"1"), "truncated"),
    "trailing bytes": (_file({"a": TENSOR}, b"123"), "truncated"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_damaged_file_is_refused(fault: str, tmp_path: Path) -> None:
    """Whatever is wrong with a file is a SourceError that names it, never another exception."""
    content, message = BROKEN[fault]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        load_header(path)
    assert "x.safetensors" in str(caught.value)


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reader_itself_fail(content: bytes) -> None:
    """Any bytes at all are either a header or a SourceError."""
    try:
        parse_header(content, "x.safetensors", len(content))
    except SourceError:
        return
    assert len(content) >= 8


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    """A file that cannot be opened is a SourceError."""
    with pytest.raises(SourceError, match="cannot read"):
        load_header(tmp_path / "x.safetensors")


def test_weights_of_a_folder() -> None:
    """An index names the files; without one there is a single file; a name that leaves the folder is not there."""
    assert weight_files([SINGLE, "other.safetensors"], None) == [SINGLE]
    assert weight_files(["b", "a"], {"weight_map": {"x": "b", "y": "a", "z": "b"}}) == ["a", "b"]
    for index in ({"weight_map": {"x": "../b"}}, {"weight_map": {}}, {"weight_map": 3}, {}):
        with pytest.raises(SourceError, match=INDEX):
            weight_files(["b"], index)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl", "last.ckpt"])
def test_pickles_are_refused(name: str) -> None:
    """A folder that holds its weights only as pickles is refused, and told why."""
    with pytest.raises(SourceError, match="never read"):
        weight_files(["config.json", name], None)


def test_tensors_of_a_sharded_folder(tmp_path: Path) -> None:
    """Tensors of all shards come together; the same name in two shards is refused."""
    save_file({"a": np.zeros(2, np.uint8)}, tmp_path / "1.safetensors")
    save_file({"b": np.zeros(3, np.uint8)}, tmp_path / "2.safetensors")
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    tensors = load_tensors(tmp_path)
    assert {name: (tensor.file, tensor.shape.dims) for name, tensor in tensors.items()} == {
        "a": ("1.safetensors", (2,)),
        "b": ("2.safetensors", (3,)),
    }
    save_file({"a": np.zeros(3, np.uint8)}, tmp_path / "2.safetensors")
    with pytest.raises(SourceError, match=r"1\.safetensors and in 2\.safetensors"):
        load_tensors(tmp_path)


def test_json_objects_only(tmp_path: Path) -> None:
    """A JSON object is read; a pointer, a list, broken or too deep JSON, bytes and nothing are SourceErrors."""
    path = tmp_path / "x.json"
    path.write_text('{"a": "é"}', encoding="utf-8")
    assert load_json(path) == {"a": "é"}
    for content in (POINTER, b"[1]", b"{", b"\xff", b"[" * 100_000):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"x\.json"):
            load_json(path)
    assert not is_lfs_pointer(tmp_path / "absent")
    with pytest.raises(SourceError, match="cannot read"):
        load_json(tmp_path / "absent")


def _sizes(*sizes: int) -> dict[str, Shape]:
    return {f"{size}-{number}": Shape(dtype="U8", dims=(size,)) for number, size in enumerate(sizes)}


@given(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=8))
def test_shards_keep_their_limit(groups: list[list[int]]) -> None:
    """No shard is over the limit unless it is one tensor, none is empty, every tensor is in exactly one, in order."""
    named = [
        {f"{number}.{name}": shape for name, shape in _sizes(*sizes).items()} for number, sizes in enumerate(groups)
    ]
    shards = make_shards(named, max_shard_bytes=10)
    filled = [sum(tensor.shape.nbytes for tensor in shard.tensors.values()) for shard in shards]
    assert all(size <= 10 or len(shard.tensors) == 1 for size, shard in zip(filled, shards, strict=True))
    assert all(filled)
    placed = [name for shard in shards for name in shard.tensors]
    assert sorted(placed) == sorted(name for group in named for name in group)
    order = [int(name.partition(".")[0]) for shard in shards for name in sorted(shard.tensors)]
    assert order == sorted(order)


def test_a_layer_stays_in_one_shard() -> None:
    """A group that fits into a shard is never split over two."""
    shards = make_shards(
        [_sizes(4, 4), {"x": Shape(dtype="U8", dims=(3,))}, {"y": Shape(dtype="U8", dims=(8,))}], max_shard_bytes=10
    )
    assert [sorted(shard.tensors) for shard in shards] == [["4-0", "4-1"], ["x"], ["y"]]
    assert [shard.file for shard in shards] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_index_counts_tensor_bytes() -> None:
    """total_size is the tensors' bytes without headers, and weight_map names each tensor's shard."""
    shards = make_shards([_sizes(6), {"x": Shape(dtype="F32", dims=(2,))}], max_shard_bytes=8)
    index = json.loads(render_index(shards))
    assert index["metadata"] == {"total_size": 14}
    assert index["weight_map"] == {"6-0": shards[0].file, "x": shards[1].file}


@pytest.mark.parametrize("dtype", sorted(DTYPE_BYTES))
def test_sizes_follow_from_dtypes(dtype: str) -> None:
    """A tensor has as many bytes as its dims and dtype say; a scalar has one element."""
    assert Shape(dtype=dtype, dims=(3, 5)).nbytes == 15 * DTYPE_BYTES[dtype]
    assert Shape(dtype=dtype, dims=()).numel == 1
