"""Ways to break a bundle: each makes a function that changes a folder in place."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from bundler.checkpoint import INDEX, Shape, load_tensors, make_shards, render_index
from bundler.manifest import make_entries

LAYERS = "model.language_model.layers"
MLP, ATTENTION = f"{LAYERS}.0.mlp", f"{LAYERS}.0.self_attn"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12\n"
Break = Callable[[Path], object]


def rehash(root: Path) -> None:
    """Write bundle.json anew as if the bundle, and the sources of its copied files, had always been like this."""
    document = json.loads((root / "bundle.json").read_text())
    entries = make_entries(root)
    document["files"] = [
        {"path": e.path, "size_bytes": e.size_bytes, "sha256": e.sha256, "role": e.role} for e in entries
    ]
    now = {entry.path: entry for entry in entries}
    for source, folder in (("body", ""), ("drafter", "assistant/")):
        for file in document[source]["files"]:
            if (entry := now.get(folder + file["path"])) is not None:
                file["sha256"], file["size_bytes"] = entry.sha256, entry.size_bytes
    document["recipe_sha256"] = now["recipe.toml"].sha256 if "recipe.toml" in now else document["recipe_sha256"]
    (root / "bundle.json").write_text(json.dumps(document))


def edit_json(name: str, change: Callable[[Any], object]) -> Break:
    def edit(root: Path) -> None:
        document = json.loads((root / name).read_text())
        change(document)
        (root / name).write_text(json.dumps(document))

    return edit


def put(name: str, *path: str | int, value: object) -> Break:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return edit_json(name, change)


def drop(name: str, *path: str | int) -> Break:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return edit_json(name, change)


def poke(tensor: str, content: bytes | Callable[[bytes], bytes], folder: str = "") -> Break:
    """Change a tensor's bytes in place."""

    def edit(root: Path) -> None:
        found = load_tensors(root / folder)[tensor]
        with (root / folder / found.file).open("r+b") as file:
            file.seek(found.start)
            old = file.read(found.end - found.start)
            file.seek(found.start)
            file.write(content(old) if callable(content) else content)

    return edit


def scale(value: float, *tensors: str) -> Break:
    return lambda root: [poke(tensor, struct.pack("<f", value))(root) for tensor in tensors]


Tensors = dict[str, tuple[Shape, bytes]]


def repack(change: Callable[[Tensors], object], folder: str = "", shards: int = 1) -> Break:
    """Write the weights of a folder anew, with other tensors, an index that fits and as many shards as asked."""

    def edit(root: Path) -> None:
        here = root / folder
        files = {path.name: path.read_bytes() for path in here.glob("*.safetensors")}
        tensors = {
            name: (tensor.shape, files[tensor.file][tensor.start : tensor.end])
            for name, tensor in load_tensors(here).items()
        }
        change(tensors)
        for path in here.glob("*.safetensors"):
            path.unlink()
        names = sorted(tensors)
        groups = [{name: tensors[name][0] for name in names[number::shards]} for number in range(shards)]
        limit = max(sum(shape.nbytes for shape in group.values()) for group in groups)
        made = make_shards(groups, max_shard_bytes=limit)
        for shard in made:
            name = "model.safetensors" if folder else shard.file
            (here / name).write_bytes(shard.header + b"".join(tensors[name][1] for name in shard.tensors))
        if not folder:
            (here / INDEX).write_text(render_index(made))

    return edit


def without(*names: str, folder: str = "") -> Break:
    return repack(lambda tensors: [tensors.pop(name) for name in names], folder)


def with_tensor(name: str, dtype: str, *dims: int, folder: str = "", drop: Iterable[str] = ()) -> Break:
    shape = Shape(dtype=dtype, dims=dims)

    def change(tensors: Tensors) -> None:
        for other in drop:
            del tensors[other]
        tensors[name] = (shape, b"\x38" * shape.nbytes)

    return repack(change, folder)


def parts(module: str, *suffixes: str) -> list[str]:
    suffixes = suffixes or ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    return [f"{module}.{suffix}" for suffix in suffixes]


def layer_names(root: Path, layer: int) -> list[str]:
    return [name for name in load_tensors(root) if name.startswith(f"{LAYERS}.{layer}.")]


def pack_kept(module: str, rows: int, columns: int) -> Break:
    """Replace a bf16 matrix by what a quantized one looks like."""

    def change(tensors: Tensors) -> None:
        del tensors[f"{module}.weight"]
        shapes = {
            "weight_packed": Shape(dtype="U8", dims=(rows, columns // 2)),
            "weight_scale": Shape(dtype="F8_E4M3", dims=(rows, columns // 16)),
        }
        tensors.update({f"{module}.{part}": (shape, b"\x38" * shape.nbytes) for part, shape in shapes.items()})
        one = (Shape(dtype="F32", dims=(1,)), struct.pack("<f", 300.0))
        tensors.update({name: one for name in parts(module, "weight_global_scale", "input_global_scale")})

    return repack(change)


def swap_shard(weight_map: dict[str, str]) -> dict[str, str]:
    """The first tensor of an index, placed in the other of two shards."""
    name, file = next(iter(weight_map.items()))
    return {name: next(other for other in weight_map.values() if other != file)}


def remove(name: str) -> Break:
    return lambda root: (root / name).unlink()


def write(name: str, content: bytes) -> Break:
    return lambda root: (root / name).write_bytes(content)


def change(name: str, how: Callable[[bytes], bytes]) -> Break:
    return lambda root: (root / name).write_bytes(how((root / name).read_bytes()))


def both(*breaks: Break) -> Break:
    return lambda root: [one(root) for one in breaks]


def truncate(name: str) -> Break:
    return lambda root: os.truncate(root / name, (root / name).stat().st_size - 1)
