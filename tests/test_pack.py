"""Packing: the bytes of compressed-tensors, whatever the weights; and NVFP4 as an engine computes with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bundler.errors import QuantizationError
from bundler.quantize.nvfp4 import round_input
from bundler.quantize.pack import _pack_rows, global_scale_of, observe, pack

NAMES = ("model.self_attn.q_proj", "model.self_attn.k_proj", "model.self_attn.v_proj")
ROWS = st.integers(1, 9)
GROUPS = st.integers(1, 5)


def library(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The oracle: llm-compressor's observer arithmetic over the fused group, compressed-tensors' own packer."""
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    amax = torch.stack([weight.abs().max() for weight in weights.values()]).max().reshape(1)
    global_scale = generate_gparam(-amax, amax)
    packed = {}
    for name, weight in weights.items():
        groups = weight.unflatten(-1, (-1, 16))
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, global_scale=global_scale)
        state = {"weight": weight, "weight_scale": scale.bfloat16(), "weight_global_scale": global_scale}
        packed |= {f"{name}.{part}": value for part, value in NVFP4PackedCompressor.compress(state, scheme).items()}
    return packed


def raw(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Tensors as bytes."""
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def bf16(bits: Any) -> torch.Tensor:
    """bf16 values from their bits; NaN and infinity become zero, since a weight that holds them is refused."""
    weight = torch.from_numpy(bits.astype(np.int16)).view(torch.bfloat16)
    return torch.where(weight.isfinite(), weight, torch.zeros_like(weight))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_weights_pack_as_compressed_tensors_packs_them(data: st.DataObject) -> None:
    """Any bf16 bits (denormals, -0, zero groups, largest values, odd row counts), alone or fused: the same bytes."""
    columns = 16 * data.draw(GROUPS)
    shapes = [(data.draw(ROWS), columns) for _ in range(data.draw(st.integers(1, 3)))]
    weights = {
        NAMES[n]: bf16(data.draw(arrays.arrays(np.uint16, shape, elements=st.integers(0, 0xFFFF))))
        for n, shape in enumerate(shapes)
    }
    if not any(weight.any() for weight in weights.values()):
        weights[NAMES[0]][0, 0] = 1.0
    if any(not weight.any() for weight in weights.values()):
        with pytest.raises(QuantizationError, match="all zero"):
            dict(pack(weights))
        return
    assert raw(dict(pack(weights))) == raw(library(weights))


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_the_gpu_path_packs_the_same_bytes(data: st.DataObject) -> None:
    """What torch computes on a GPU, run on the CPU, gives the bytes of the compiled loops."""
    shape = (data.draw(ROWS), 16 * data.draw(GROUPS))
    weight = bf16(data.draw(arrays.arrays(np.uint16, shape, elements=st.integers(0, 0xFFFF))))
    weight[0, 0] = 1.0
    packed = dict(pack({"w": weight}))
    rows, codes = _pack_rows(weight, observe(weight), float(packed["w.weight_global_scale"]))
    assert torch.equal(rows, packed["w.weight_packed"])
    assert torch.equal(codes, packed["w.weight_scale"].view(torch.uint8))


@given(st.floats(0, 2.0**127, width=32))
@settings(deadline=None)
def test_the_global_scale_is_compressed_tensors(amax: float) -> None:
    """The global scale of any magnitude is compressed-tensors' own, to the bit, in bf16."""
    from compressed_tensors.quantization.utils import generate_gparam

    value = torch.tensor([amax]).bfloat16()
    assert torch.equal(global_scale_of(value), generate_gparam(-value, value))


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 0.02, 1.0, 3e38])
def test_usual_weights_at_any_magnitude(scale: float) -> None:
    """Normal weights of every magnitude give the same bytes."""
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(33, 96, generator=generator).mul(scale / 4).bfloat16() for name in NAMES}
    assert raw(dict(pack(weights))) == raw(library(weights))


def test_ties_go_to_the_even_neighbour() -> None:
    """Every midpoint of e2m1, with both signs, and the signs of what rounds to zero."""
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    weight = torch.tensor([[*midpoints, *(-value for value in midpoints)], [6.0, -0.0, -0.1, 0.1] + [0.0] * 12])
    weights = {"w": weight.bfloat16()}
    packed = dict(pack(weights))
    assert raw(packed) == raw(library(weights))
    nibbles = torch.stack([packed["w.weight_packed"] & 15, packed["w.weight_packed"] >> 4], dim=-1).flatten(1)
    assert nibbles[0].tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 8, 10, 10, 12, 12, 14, 14, 15]
    assert nibbles[1, :4].tolist() == [7, 0, 8, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_cannot_be_packed_is_named(value: float) -> None:
    """One NaN or infinity anywhere, or nothing but zeros, is refused, every such weight by name."""
    weights = {name: torch.ones(5, 32, dtype=torch.bfloat16) for name in ("good", "bad", "empty")}
    weights["bad"][3, 17] = value
    weights["empty"][:] = 0
    with pytest.raises(QuantizationError) as caught:
        dict(pack(weights))
    assert "bad: its weight is not finite; empty: its weight is all zero" in str(caught.value)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_inputs_are_rounded_as_at_run_time(data: st.DataObject) -> None:
    """Rounding of activations is compressed-tensors' fake quantization with dynamic local scales, bit for bit."""
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    shape = (1, data.draw(ROWS), 16 * data.draw(GROUPS))
    elements = st.floats(-1e4, 1e4, width=16)
    value = torch.from_numpy(data.draw(arrays.arrays(np.float32, shape, elements=elements))).bfloat16()
    global_scale = torch.tensor([data.draw(st.floats(0.125, 4096, width=32))])
    args = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations
    scale, zero = compute_dynamic_scales_and_zp(value, args, torch.nn.Module(), global_scale)
    theirs = fake_quantize(value, scale, zero, args, global_scale=global_scale)
    assert torch.equal(round_input(value, global_scale), theirs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_packs_the_same_bytes() -> None:
    """Also where weights lie on a q4_0 grid, whose ties a division by a number would miss on a GPU."""
    generator = torch.Generator().manual_seed(1)
    levels = torch.randint(-8, 8, (257, 512), generator=generator)
    for scale in (torch.rand(257, 1, generator=generator) * 0.01, torch.full((257, 1), 2.0**-7)):
        weight = (levels * scale).bfloat16()
        packed = {name: tensor.cpu() for name, tensor in pack({"model.mlp.down_proj": weight.cuda()})}
        assert raw(packed) == raw(dict(pack({"model.mlp.down_proj": weight})))
