"""config.json and the small files, for every kind of body."""

from __future__ import annotations

from typing import Any

import pytest
from published import BODIES, QAT, config_of

from bundler.findings import Finding
from bundler.gemma4 import find_kind, make_ignore
from bundler.sidefiles import (
    check_chat_template,
    check_completed,
    check_config,
    check_generation,
    check_presence,
    check_processor,
    check_quantization,
    check_tokenizer,
    complete_vision,
)

BODY, MOE, UNIFIED, PER_LAYER = (f"google/gemma-4-{size}-it" for size in ("31B", "26B-A4B", "12B", "E4B"))
NUMBERS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}


def quantized(repo: str, *ignore: str) -> dict[str, Any]:
    """A published config.json with what NVFP4 W4A4 adds to it."""
    config = config_of(repo)
    group = {
        "targets": ["Linear"],
        "weights": {**NUMBERS, "dynamic": False},
        "input_activations": {**NUMBERS, "dynamic": "local"},
        "output_activations": None,
    }
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(make_ignore(find_kind(config), ignore)),
    }
    return config


def codes(findings: list[Finding]) -> list[str]:
    return [finding.code for finding in findings]


@pytest.mark.parametrize("repo", BODIES)
def test_published_configs_pass(repo: str) -> None:
    """Each published config.json with our quantization_config is without a fault; 12B QAT lacks its soft tokens."""
    config = quantized(repo)
    assert check_config(config) == []
    processor = {"image_processor": {"max_soft_tokens": 280}}
    lacking = repo == f"{UNIFIED}{QAT}"
    assert codes(check_processor(processor, config)) == (["vision-tokens-missing"] if lacking else [])
    completed = complete_vision(config, processor)
    assert codes(check_completed(config, completed)) == (["vision-tokens-completed"] if lacking else [])
    assert check_processor(processor, completed) == []
    assert check_quantization(config) == []


@pytest.mark.parametrize(
    ("repo", "pattern", "module"),
    [
        (BODY, "lm_head", "lm_head"),
        (BODY, "re:.*embed_vision.*", "model.embed_vision.embedding_projection"),
        (MOE, "re:.*router.*", "model.language_model.layers.0.router.proj"),
        (PER_LAYER, "re:.*audio_tower.*", "model.audio_tower.output_proj"),
        (PER_LAYER, "re:.*embed_audio.*", "model.embed_audio.embedding_projection"),
        (PER_LAYER, "re:.*per_layer_projection$", "model.language_model.layers.0.per_layer_projection"),
        (PER_LAYER, "re:.*per_layer_model_projection$", "model.language_model.per_layer_model_projection"),
        (UNIFIED, "re:.*vision_embedder.*", "model.vision_embedder.patch_dense"),
    ],
)
def test_what_an_engine_would_take_for_quantized(repo: str, pattern: str, module: str) -> None:
    """Every Linear that stays bf16 has to be on the ignore list, or an engine looks for its scales."""
    config = quantized(repo)
    config["quantization_config"]["ignore"].remove(pattern)
    findings = check_quantization(config)
    assert set(codes(findings)) == {"ignore-incomplete"}
    assert any(f"name {module}:" in finding.message for finding in findings)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("re:.*self_attn.*", []),
        (r"re:.*layers\.0\.experts\.5\.up_proj", []),
        ("model.language_model.layers.0.mlp.up_proj", []),
        ("re:.*selfattn.*", ["dead-ignore"]),
        ("language_model.layers.0.mlp.up_proj", ["dead-ignore"]),
        (".*self_attn.*", ["ignore-pattern"]),
        ("re:*", ["ignore-pattern"]),
    ],
)
def test_patterns_of_the_recipe(pattern: str, expected: list[str]) -> None:
    """A pattern matches some module; one that is only meant as a regular expression is an error."""
    assert codes(check_quantization(quantized(MOE, pattern))) == expected


def test_patterns_of_the_preset_may_match_nothing() -> None:
    """The dense bodies have no audio tower, and no one stores the head: those patterns are no typo."""
    assert "re:.*audio_tower.*" in make_ignore(find_kind(config_of(BODY)))
    assert check_quantization(quantized(BODY)) == []


def test_a_fault_names_its_key() -> None:
    """A contradiction is placed by its key path and says what it must be."""
    config = quantized(BODY)
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 32
    (finding,) = check_quantization(config)
    assert finding.where == "config.json: quantization_config.config_groups.*.weights.group_size"
    assert finding.message == "is 32, NVFP4 W4A4 has 16"


@pytest.mark.parametrize(
    ("stops", "expected"),
    [([1, 106, 50], []), ([106, 1], []), (106, ["stop-tokens"]), ([1, 50], ["stop-tokens"]), ([106], ["stop-tokens"])],
)
def test_stop_tokens(stops: object, expected: list[str]) -> None:
    """The list holds what config.json declares and the end of a turn."""
    assert codes(check_generation({"eos_token_id": stops}, config_of(BODY), {"<turn|>": 106})) == expected


def test_tokens_fit_the_embeddings() -> None:
    """The last id is below vocab_size."""
    config = config_of(BODY)
    assert check_tokenizer({}, {}, {"a": 262143}, config) == []
    assert codes(check_tokenizer({}, {}, {"a": 262144}, config)) == ["tokenizer-vocab"]


@pytest.mark.parametrize("processor", [{"image_processor": {"max_soft_tokens": 70}}, {"max_soft_tokens": 70}])
def test_soft_tokens(processor: dict[str, Any]) -> None:
    """Config and image processor agree on the tokens of an image, in either form of the processor's file."""
    for repo in (BODY, UNIFIED):
        config = config_of(repo)
        assert codes(check_processor(processor, config)) == ["vision-tokens-differ"]
        config["vision_config"] |= {"default_output_length": 70, "num_soft_tokens": 70}
        assert check_processor(processor, config) == []


def test_what_a_bundle_needs() -> None:
    """Either processor file will do, and a chat template may be in the tokenizer's settings."""
    names = {finding.where for finding in check_presence([])}
    assert names == {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "processor_config.json",
        "assistant/config.json", "README.md", "LICENSE", "recipe.toml",
    }  # fmt: skip
    assert check_presence(names) == []
    assert check_presence(names - {"processor_config.json"} | {"preprocessor_config.json"}) == []
    assert codes(check_chat_template([], {})) == ["chat-template-missing"]
    assert check_chat_template([], {"chat_template": "x"}) == []
