"""The family's kinds, what of each stays bf16, what NVFP4 makes of the rest, and the two schemas of config.json."""

from __future__ import annotations

import pytest
from published import BODIES, DRAFTERS, QAT, config_of, shapes_of

from bundler.checkpoint import Shape
from bundler.errors import CompatibilityError
from bundler.gemma4 import (
    Kind,
    dropped_tensors,
    find_kind,
    fused_groups,
    group_name,
    is_ignored,
    kv_geometry,
    layer_of,
    linear_shapes,
    make_ignore,
    make_output_shapes,
    own_layer_types,
    to_published_schema,
)

B31, B26, B12, E4B, E2B = (f"google/gemma-4-{size}-it" for size in ("31B", "26B-A4B", "12B", "E4B", "E2B"))
KINDS = {B31: Kind.DENSE, B26: Kind.MOE, B12: Kind.UNIFIED, E4B: Kind.PER_LAYER, E2B: Kind.PER_LAYER}


@pytest.mark.parametrize("repo", BODIES)
def test_kind(repo: str) -> None:
    """Every published body, QAT or not, is of the kind its size says."""
    assert find_kind(config_of(repo)) is KINDS[repo.removesuffix(QAT)]


@pytest.mark.parametrize("repo", DRAFTERS)
def test_a_drafter_is_no_body(repo: str) -> None:
    """A drafter's config is refused, and the refusal says what it is."""
    with pytest.raises(CompatibilityError, match="no Gemma 4 body") as caught:
        find_kind(config_of(repo))
    assert caught.value.hint == "a drafter is not a body"


def test_other_models_are_no_body() -> None:
    """A config of another family, or none at all, is refused."""
    for config in ({"model_type": "gemma3", "text_config": {}}, {}, {"model_type": "gemma4", "text_config": None}):
        with pytest.raises(CompatibilityError, match="no Gemma 4 body"):
            find_kind(config)


@pytest.mark.parametrize(
    ("repo", "modules", "parameters", "size_bytes"),
    [
        (B31, 410, 29_286_727_680, 20_446_509_992),
        (B26, 11_725, 24_483_430_400, 16_417_035_012),
        (B12, 328, 10_899_947_520, 8_250_788_512),
        (E4B, 258, 3_890_216_960, 10_290_018_788),
        (E2B, 205, 1_835_532_288, 7_570_020_910),
    ],
)
@pytest.mark.parametrize("qat", ["", QAT])
def test_output_of_every_size(repo: str, qat: str, modules: int, parameters: int, size_bytes: int) -> None:
    """What is quantized of each published body, and the exact size of the tensors that come out."""
    config, shapes = config_of(repo), shapes_of(repo + qat)
    output, quantized = make_output_shapes(shapes, config, make_ignore(KINDS[repo]))
    assert len(quantized) == modules
    assert sum(rows * columns for rows, columns in quantized.values()) == parameters
    assert sum(shape.nbytes for shape in output.values()) == size_bytes
    assert all(layer_of(module) is not None for module in quantized)


@pytest.mark.parametrize("repo", KINDS)
def test_only_the_decoders_linears_are_packed(repo: str) -> None:
    """Towers, embeddings, router, per-layer projections and norms keep the source's shape and dtype."""
    config, shapes = config_of(repo), shapes_of(repo)
    output, quantized = make_output_shapes(shapes, config, make_ignore(KINDS[repo]))
    never = ("vision", "audio", "embed", "router", "per_layer", "norm")
    assert not [module for module in quantized if any(word in module for word in never)]
    kept = {name: shape for name, shape in output.items() if name.rpartition(".")[0] not in quantized}
    assert kept == {name: shapes[name] for name in kept}


def test_experts_become_one_module_per_projection() -> None:
    """The fused [experts, rows, columns] parameters are split as llm-compressor writes and vLLM maps them."""
    linears = linear_shapes(shapes_of(B26))
    experts = {name: shape for name, shape in linears.items() if ".layers.7.experts." in name}
    assert len(experts) == 3 * 128
    assert experts["model.language_model.layers.7.experts.127.gate_proj"] == (704, 2816)
    assert experts["model.language_model.layers.7.experts.0.up_proj"] == (704, 2816)
    assert experts["model.language_model.layers.7.experts.0.down_proj"] == (2816, 704)


def test_an_ignored_expert_keeps_its_own_slice() -> None:
    """Experts that the recipe keeps in bf16 are written as 2-D weights, one per projection."""
    ignore = (*make_ignore(Kind.MOE), r"re:.*layers\.0\.experts.*")
    output, quantized = make_output_shapes(shapes_of(B26), config_of(B26), ignore)
    name = "model.language_model.layers.0.experts.5.down_proj"
    assert name not in quantized
    assert output[f"{name}.weight"] == Shape(dtype="BF16", dims=(2816, 704))
    assert "model.language_model.layers.0.experts.down_proj" not in output


def test_shapes_of_a_quantized_module() -> None:
    """Two weights a byte, one FP8 scale for 16 weights, two float32 global scales."""
    output, _ = make_output_shapes(shapes_of(B31), config_of(B31), make_ignore(Kind.DENSE))
    module = "model.language_model.layers.5.self_attn.q_proj"
    assert {name: shape for name, shape in output.items() if name.startswith(f"{module}.")} == {
        f"{module}.weight_packed": Shape(dtype="U8", dims=(16384, 2688)),
        f"{module}.weight_scale": Shape(dtype="F8_E4M3", dims=(16384, 336)),
        f"{module}.weight_global_scale": Shape(dtype="F32", dims=(1,)),
        f"{module}.input_global_scale": Shape(dtype="F32", dims=(1,)),
    }


@pytest.mark.parametrize(("repo", "count"), [(B31, 0), (E4B, 54), (E2B, 60), (E4B + QAT, 0)])
def test_shared_layers_lose_their_kv(repo: str, count: int) -> None:
    """K, V and K norm of layers that read another layer's are dropped where a checkpoint still holds them."""
    assert len(dropped_tensors(shapes_of(repo), config_of(repo))) == count


def test_ignore_matches_as_compressed_tensors_does() -> None:
    """A plain entry matches a whole name; `re:` matches from the start of it; the recipe's own entries come last."""
    assert is_ignored("lm_head", ["lm_head"])
    assert not is_ignored("model.lm_head", ["lm_head"])
    assert is_ignored("model.vision_tower.encoder", ["re:.*vision_tower.*"])
    assert not is_ignored("model.vision_tower", ["re:vision_tower"])
    assert make_ignore(Kind.DENSE, ["re:.*o_proj", "lm_head"])[-1] == "re:.*o_proj"
    assert make_ignore(Kind.DENSE, ["lm_head"]) == make_ignore(Kind.DENSE)


def test_fused_groups() -> None:
    """q/k/v and gate/up belong together; a full layer without v_proj has q/k; down and o stand alone."""
    linears = linear_shapes({name: shape for name, shape in shapes_of(B31).items() if layer_of(name) in (4, 5)})
    names = [group_name(group).removeprefix("model.language_model.layers.") for group in fused_groups(linears)]
    assert names == [
        "4.mlp.{gate,up}_proj",
        "4.self_attn.{q,k,v}_proj",
        "5.mlp.{gate,up}_proj",
        "5.self_attn.{q,k}_proj",
    ]


@pytest.mark.parametrize(
    ("repo", "sliding", "full", "own"),
    [
        (B31, (16, 256), (4, 512), 60),
        (B26, (8, 256), (2, 512), 30),
        (E4B, (2, 256), (2, 512), 24),
        (E2B, (1, 256), (1, 512), 15),
    ],
)
def test_kv_geometry(repo: str, sliding: tuple[int, int], full: tuple[int, int], own: int) -> None:
    """K/V heads and head dim of either layer type, and the layers that keep a cache of their own."""
    text = config_of(repo)["text_config"]
    assert kv_geometry(text, "sliding_attention") == sliding
    assert kv_geometry(text, "full_attention") == full
    assert len(own_layer_types(text)) == own


def _resaved(repo: str) -> dict[str, object]:
    """A config as transformers >= 5.15 writes it."""
    config = config_of(repo)
    text = config["text_config"]
    values = {"head_dim": text.pop("global_head_dim")}
    if (heads := text.pop("num_global_key_value_heads")) is not None:
        values["num_key_value_heads"] = heads
    full = [str(index) for index, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
    text["per_layer_config"] = {index: dict(values) for index in full}
    if "rope_parameters" in config["vision_config"]:
        config["vision_config"]["rope_parameters"]["rope_type"] = "axial"
    return config


@pytest.mark.parametrize("repo", KINDS)
def test_a_resaved_config_is_converted_back(repo: str) -> None:
    """What transformers >= 5.15 re-saves comes back as Google published it, and the conversion is reported."""
    assert to_published_schema(_resaved(repo)) == (config_of(repo), True)


@pytest.mark.parametrize("repo", KINDS)
def test_a_published_config_is_left_alone(repo: str) -> None:
    """A config in Google's schema is returned as an equal copy that shares nothing with the original."""
    config = config_of(repo)
    result, converted = to_published_schema(config)
    assert result == config
    assert not converted
    result["text_config"]["layer_types"].clear()
    assert config == config_of(repo)


def test_an_empty_per_layer_config_means_one_head_dim() -> None:
    """transformers writes no layer at all where full layers are like the sliding ones."""
    config = _resaved(B31)
    config["text_config"]["per_layer_config"] = {}  # type: ignore[index]
    result, converted = to_published_schema(config)
    assert converted
    assert result["text_config"]["global_head_dim"] == 256
    assert result["text_config"]["num_global_key_value_heads"] is None


def test_layers_that_differ_have_no_published_form() -> None:
    """A config whose full layers are not all alike, or that names other layers, is refused."""
    for layer, value in (("59", {"head_dim": 128}), ("0", {"head_dim": 512, "num_key_value_heads": 4})):
        config = _resaved(B31)
        config["text_config"]["per_layer_config"][layer] = value  # type: ignore[index]
        with pytest.raises(CompatibilityError, match="per_layer_config"):
            to_published_schema(config)
