"""The tensors that a config.json promises, against what Google publishes."""

from __future__ import annotations

import pytest
from published import BODIES, DRAFTERS, config_of, shapes_of

from bundler.checkpoint import Shape
from bundler.gemma4 import dropped_tensors
from bundler.inventory import body_shapes, check_geometry, drafter_shapes


@pytest.mark.parametrize("repo", BODIES)
def test_body_shapes_are_what_is_published(repo: str) -> None:
    """A body's config.json gives every published tensor, by name, dtype and shape, but K/V that the class drops."""
    config, shapes = config_of(repo), shapes_of(repo)
    dropped = set(dropped_tensors(shapes, config))
    assert body_shapes(config) == {name: shape for name, shape in shapes.items() if name not in dropped}


@pytest.mark.parametrize("repo", DRAFTERS)
def test_drafter_shapes_are_what_is_published(repo: str) -> None:
    """A drafter's config.json gives every published tensor, the ordered embeddings of E2B and E4B included."""
    assert drafter_shapes(config_of(repo)) == shapes_of(repo)


def test_an_untied_head_is_promised() -> None:
    """Where config.json says that the head is not the embeddings' own tensor, it has to be stored."""
    config = config_of(BODIES[0])
    config["tie_word_embeddings"] = False
    assert body_shapes(config)["lm_head.weight"] == Shape(dtype="BF16", dims=(262144, 5376))


@pytest.mark.parametrize("repo", BODIES + DRAFTERS)
def test_published_geometry_is_whole(repo: str) -> None:
    """No published config.json lacks a number that shapes follow from."""
    assert check_geometry(config_of(repo), "config.json") == []


def test_every_unusable_number_is_named_at_once() -> None:
    """Missing, negative, huge, boolean and textual numbers are all reported, each with its key path."""
    config = config_of("google/gemma-4-E4B-it")
    config["text_config"] |= {"hidden_size": "2560", "intermediate_size": -1, "num_hidden_layers": 10**9}
    config["text_config"] |= {"vocab_size": True, "vocab_size_per_layer_input": None}
    del config["text_config"]["global_head_dim"]
    config["vision_config"]["patch_size"] = 1.5
    config["audio_config"]["subsampling_conv_channels"] = [128]
    findings = check_geometry(config, "config.json")
    assert {finding.code for finding in findings} == {"config-geometry"}
    assert {finding.where.removeprefix("config.json: ") for finding in findings} == {
        "text_config.hidden_size",
        "text_config.intermediate_size",
        "text_config.num_hidden_layers",
        "text_config.vocab_size",
        "text_config.vocab_size_per_layer_input",
        "text_config.global_head_dim",
        "text_config.layer_types",
        "vision_config.patch_size",
        "audio_config.subsampling_conv_channels",
    }


@pytest.mark.parametrize(
    "sections", [{"text_config": None}, {"text_config": [1]}, {"text_config": {"layer_types": 3}}]
)
def test_no_config_makes_the_check_itself_fail(sections: dict[str, object]) -> None:
    """Whatever stands in a config.json, the answer is findings."""
    assert check_geometry({"model_type": "gemma4", **sections}, "config.json")
