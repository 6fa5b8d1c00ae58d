"""A twin is a bundle's structure made small: its own JSON, its own tensor names, an answer known beforehand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published import DRAFTERS, config_of
from twins import REPOS

from bundler import drafter, known_answer, twin
from bundler.checkpoint import load_json
from bundler.gemma4 import find_kind, fused_groups, own_layer_types
from bundler.inventory import body_shapes, drafter_shapes
from bundler.weights import check_shards

BODIES = [repo.removesuffix("-assistant") for repo in DRAFTERS]


def keys_of(document: Any, at: str = "") -> set[str]:
    if not isinstance(document, dict):
        return {at}
    return {key for name, value in document.items() for key in keys_of(value, f"{at}.{name}")} | {at}


@pytest.fixture(scope="module")
def baked(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The twin of the session's bundle."""
    return twin.make_twin(bundle, tmp_path_factory.mktemp("twin"))


@pytest.mark.parametrize("repo", BODIES)
def test_only_numbers_and_the_layer_list_change(repo: str) -> None:
    """Every key of both config.json stays, and every text, flag and null; the kind stays too."""
    config, assistant = config_of(repo), config_of(f"{repo}-assistant")
    for before, after in zip((config, assistant), twin.shrink(config, assistant), strict=True):
        assert keys_of(before) == keys_of(after)
        stack = [(before, after)]
        while stack:
            one, other = stack.pop()
            for key in one:
                if isinstance(one[key], dict):
                    stack.append((one[key], other[key]))
                elif key != "layer_types" and not (type(one[key]) is int and type(other[key]) is int):
                    assert one[key] == other[key], key
    assert find_kind(config) == find_kind(twin.shrink(config, assistant)[0])


@pytest.mark.parametrize("repo", BODIES)
def test_ratios_and_pattern_stay(repo: str) -> None:
    """Head ratios within and between the two, the layer pattern and the shared layers are the bundle's."""
    config, assistant = config_of(repo), config_of(f"{repo}-assistant")
    small, small_assistant = twin.shrink(config, assistant)
    heads = ("num_attention_heads", "num_key_value_heads", "num_global_key_value_heads")
    pairs = ((config, small), (assistant, small_assistant))
    counts = [(one["text_config"][key], other["text_config"][key]) for one, other in pairs for key in heads]
    assert len({one / other for one, other in counts if one}) == 1
    types, own = small["text_config"]["layer_types"], own_layer_types(small["text_config"])
    assert "".join(config["text_config"]["layer_types"]).startswith("".join(own))
    assert "".join(config["text_config"]["layer_types"]).endswith("".join(types[len(own) :]))
    assert set(own) == {"sliding_attention", "full_attention"}
    assert bool(config["text_config"]["num_kv_shared_layers"]) == (len(own) < len(types))


@pytest.mark.parametrize("repo", BODIES)
def test_a_twin_is_legal_and_small(repo: str) -> None:
    """The pair still fits, every quantized Linear has whole groups of 16 and all matrices together are small."""
    small, assistant = twin.shrink(config_of(repo), config_of(f"{repo}-assistant"))
    shapes = body_shapes(small)
    assert drafter.check_pair(small, assistant, {}) != []  # its tensors are not given here
    found = {finding.code for finding in drafter.check_pair(small, assistant, {})}
    assert found == {"drafter-tensor-missing"}
    text = small["text_config"]
    for key in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
        assert (text.get(key) or 0) % 16 == 0
    matrices = {name: shape for name, shape in shapes.items() if "embed_tokens" not in name}
    assert sum(shape.nbytes for shape in matrices.values()) < 60_000_000
    assert fused_groups(name.removesuffix(".weight") for name in shapes)


def test_a_fault_of_the_schema_is_kept() -> None:
    """A config.json that was saved by a newer transformers stays one: the twin must not heal it."""
    config, assistant = config_of(REPOS["dense"]), config_of(f"{REPOS['dense']}-assistant")
    text = config["text_config"]
    heads, dim = text["num_global_key_value_heads"], text["global_head_dim"]
    text["per_layer_config"] = {
        str(index): {"head_dim": dim, "num_key_value_heads": heads}
        for index, kind in enumerate(text["layer_types"])
        if kind == "full_attention"
    }
    small = twin.shrink(config, assistant)[0]["text_config"]
    expected = {"head_dim": small["global_head_dim"], "num_key_value_heads": small["num_global_key_value_heads"]}
    assert small["per_layer_config"] == {"5": expected}


def test_the_baked_twin_has_the_bundles_tensors(bundle: Path, baked: Path) -> None:
    """Tensor names, dtypes, ignore list and side files of the twin are the bundle's."""
    mine, its = (load_json(folder / "config.json") for folder in (bundle, baked))
    scale = twin.make_scale(mine, load_json(bundle / "assistant" / "config.json"))
    assert twin.check_twin(bundle, baked, scale) == []
    assert its["quantization_config"] == mine["quantization_config"]
    for name in ("tokenizer.json", "processor_config.json", "chat_template.jinja", "generation_config.json"):
        assert (baked / name).read_bytes() == (bundle / name).read_bytes()


def test_a_twin_of_another_structure_is_seen(bundle_copy: Path, baked: Path) -> None:
    """A bundle that lacks a tensor is not what its twin is, and is named with it."""
    index = json.loads((bundle_copy / "model.safetensors.index.json").read_text())
    lost = "model.language_model.layers.0.mlp.gate_proj.input_global_scale"
    assert lost in index["weight_map"]
    config = load_json(bundle_copy / "config.json")
    scale = twin.make_scale(config, load_json(bundle_copy / "assistant" / "config.json"))
    from safetensors.numpy import load_file, save_file

    path = bundle_copy / index["weight_map"][lost]
    (bundle_copy / "model.safetensors.index.json").unlink()
    tensors = {name: value for name, value in _load(load_file, path).items() if name != lost}
    path.unlink()
    save_file(tensors, path)
    assert [(f.code, f.where) for f in twin.check_twin(bundle_copy, baked, scale) if lost in f.where] == [
        ("twin-differs", lost)
    ]


def _load(load_file: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """numpy knows no bf16 and no FP8: bytes of the same size stand for them."""
    import numpy as np

    tensors, _ = check_shards(path.parent, index_required=False)
    data = path.read_bytes()
    return {name: np.frombuffer(data[t.start : t.end], np.uint8) for name, t in tensors.tensors.items()}


def test_its_weights_repeat_the_last_token(baked: Path) -> None:
    """By our own dequantized arithmetic the twin answers any prompt with its last token, and clearly so."""
    from bundler.reference import Answered, compare

    prompt = (2, 300, 41, 77)
    (judged,) = compare(baked, [Answered(name="any", prompt_ids=prompt, answer_ids=(77,) * 8)], first=8)
    assert (judged.equal, judged.tokens, judged.worst_gap) == (8, 8, 0.0)
    assert judged.noise < 0.05


def test_its_drafter_foresees_that(baked: Path) -> None:
    """transformers' own assisted generation accepts every token that the twin's drafter drafts."""
    import torch
    from transformers import AutoModelForCausalLM

    config = load_json(baked / "assistant" / "config.json")
    assistant = AutoModelForCausalLM.from_pretrained(baked / "assistant", dtype=torch.float32)
    embeddings = check_shards(baked)[0].tensors["model.language_model.embed_tokens.weight"]
    hidden = config["backbone_hidden_size"]
    with (baked / embeddings.file).open("rb") as file:
        file.seek(embeddings.start)
        data = bytearray(file.read(embeddings.end - embeddings.start))
    table = torch.frombuffer(data, dtype=torch.bfloat16).reshape(embeddings.shape.dims).float()
    tokens = torch.tensor([77, 300, 41, 500])
    seen = torch.cat([table[tokens] * hidden**0.5, torch.zeros(4, hidden)], -1)
    with torch.no_grad():
        drafted = assistant.model.norm(assistant.pre_projection(seen)) @ assistant.model.embed_tokens.weight.T
    assert drafted.argmax(-1).tolist() == tokens.tolist()


def test_random_shapes_are_those_of_the_inventory() -> None:
    """Every tensor that a kind's config promises is made, with its dtype and shape."""
    import torch

    generator = torch.Generator().manual_seed(0)
    for kind, repo in REPOS.items():
        config, assistant = twin.shrink(config_of(repo), config_of(f"{repo}-assistant"))
        for document in (config["text_config"], assistant["text_config"]):
            document["vocab_size"] = 64
            if document.get("vocab_size_per_layer_input"):
                document["vocab_size_per_layer_input"] = 64
        assistant["num_centroids"] = 8
        vocabulary, ordering, centroids = known_answer.make_embedding(config, assistant, generator)
        body = known_answer.make_body_weights(body_shapes(config), vocabulary, generator)
        small = known_answer.make_drafter_weights(
            drafter_shapes(assistant), vocabulary, ordering, centroids, generator
        )
        for shapes, tensors in ((body_shapes(config), body), (drafter_shapes(assistant), small)):
            assert {name: shape.dims for name, shape in shapes.items()} == {
                name: tuple(tensor.shape) for name, tensor in tensors.items()
            }, kind
