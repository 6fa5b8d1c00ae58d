"""What the scales of a quantized body may be, and which of them have to be equal."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bundler.checkpoint import Shape, Shard, make_header
from bundler.scales import check_scales

EXPERTS = "model.language_model.layers.0.experts"
MODULE = "model.language_model.layers.0.mlp.down_proj"
Arrays = dict[str, npt.NDArray[np.generic]]
DTYPES = {"weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32", "input_global_scale": "F32"}


def module(name: str, *, weight: float = 300.0, inputs: float = 20.0) -> Arrays:
    """The four tensors of one healthy module."""
    return {
        f"{name}.weight_packed": np.full((4, 16), 0x21, np.uint8),
        f"{name}.weight_scale": np.full((4, 2), 0x7E, np.uint8),
        f"{name}.weight_global_scale": np.array([weight], np.float32),
        f"{name}.input_global_scale": np.array([inputs], np.float32),
    }


def write(folder: Path, arrays: Arrays) -> Shard:
    shapes = {
        name: Shape(dtype=DTYPES[name.rpartition(".")[2]], dims=tuple(array.shape)) for name, array in arrays.items()
    }
    shard = make_header(shapes, "x.safetensors")
    (folder / shard.file).write_bytes(shard.header + b"".join(arrays[name].tobytes() for name in shard.tensors))
    return shard


def codes(folder: Path, arrays: Arrays) -> list[str]:
    return sorted({finding.code for finding in check_scales(folder, write(folder, arrays).tensors)})


def experts(*scales: tuple[float, float, float]) -> Arrays:
    """A layer's experts with their input scales of gate, up and down."""
    arrays: Arrays = {}
    for number, inputs in enumerate(scales):
        for name, value in zip(("gate", "up", "down"), inputs, strict=True):
            arrays |= module(f"{EXPERTS}.{number}.{name}_proj", inputs=value)
    return arrays


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ([(20.0, 20.0, 7.0), (20.0, 20.0, 9.0)], []),
        ([(20.0, 20.0, 7.0), (30.0, 30.0, 9.0)], ["experts-input-scale"]),
        ([(20.0, 20.0, 7.0), (20.0, 30.0, 9.0)], ["fused-input-scale"]),
        ([(20.0, 20.0, 7.0), (20.0, 20.0, 1.0)], ["scale-one"]),
    ],
)
def test_experts(scales: list[tuple[float, float, float]], expected: list[str], tmp_path: Path) -> None:
    """All experts see all calibration tokens, so gate/up of a layer share one input scale; down has its own."""
    assert codes(tmp_path, experts(*scales)) == expected


def test_layers_do_not_have_to_agree(tmp_path: Path) -> None:
    """Only what is fused, or reads the same input, is compared."""
    arrays: Arrays = {}
    for layer in (0, 1):
        for number, name in enumerate(("mlp.down_proj", "self_attn.o_proj"), 2 + 2 * layer):
            arrays |= module(f"model.language_model.layers.{layer}.{name}", weight=9.0 * number, inputs=2.0 * number)
    assert codes(tmp_path, arrays) == []


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 255), min_size=8, max_size=8))
def test_every_block_scale_byte(tmp_path_factory: pytest.TempPathFactory, content: list[int]) -> None:
    """A block scale is a positive FP8 number: of the 256 bytes, 1 to 126; each other one has its code."""
    folder = tmp_path_factory.mktemp("scales")
    arrays = module(MODULE)
    arrays[f"{MODULE}.weight_scale"] = np.array(content, np.uint8).reshape(4, 2)
    expected = {
        "scale-nan" if byte & 127 == 127 else "scale-zero" if byte & 127 == 0 else "scale-negative"
        for byte in content
        if not 1 <= byte <= 126
    }
    assert codes(folder, arrays) == sorted(expected)


@settings(max_examples=200, deadline=None)
@given(st.floats(width=32), st.sampled_from(["weight_global_scale", "input_global_scale"]))
def test_every_global_scale(tmp_path_factory: pytest.TempPathFactory, value: float, part: str) -> None:
    """A global scale is a positive finite number and not exactly 1.0; a weight's is over 1, as weights are small."""
    folder = tmp_path_factory.mktemp("scales")
    arrays = module(MODULE)
    arrays[f"{MODULE}.{part}"] = np.array([value], np.float32)
    good = 0 < value < float("inf") and value != 1.0 and (part == "input_global_scale" or value > 1)
    assert (codes(folder, arrays) == []) == good


def test_only_one_weight_is_not_zero(tmp_path: Path) -> None:
    """A matrix is not all zero if its last weight is not, however long the way there."""
    arrays = module(MODULE)
    packed = np.zeros((600, 4096), np.uint8)
    arrays[f"{MODULE}.weight_packed"] = packed
    assert codes(tmp_path, arrays) == ["weight-zero"]
    packed[-1, -1] = 0x10
    assert codes(tmp_path, arrays) == []


def test_what_has_another_shape_is_left_to_the_inventory(tmp_path: Path) -> None:
    """Scales of a wrong shape, and none at all, are not read as something they are not."""
    arrays = module(MODULE)
    arrays[f"{MODULE}.weight_global_scale"] = np.array([1.0, 1.0], np.float32)
    arrays[f"{MODULE}.weight_scale"] = np.zeros((0, 2), np.uint8)
    del arrays[f"{MODULE}.input_global_scale"]
    assert codes(tmp_path, arrays) == []
