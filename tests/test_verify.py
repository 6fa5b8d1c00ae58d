"""A real bundle without a fault, and the same bundle with every fault that bytes can show, one at a time."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from subprocess import run

import pytest
from breaks import (
    ATTENTION,
    LAYERS,
    MLP,
    POINTER,
    Break,
    both,
    change,
    drop,
    edit_json,
    layer_names,
    pack_kept,
    parts,
    poke,
    put,
    rehash,
    remove,
    repack,
    scale,
    swap_shard,
    truncate,
    with_tensor,
    without,
    write,
)

from bundler.checkpoint import INDEX
from bundler.findings import Finding, Severity
from bundler.manifest import hash_file
from bundler.verify import verify

SHARD, THIRD = "model-00001-of-00001.safetensors", "model-00003-of-00003.safetensors"
CONFIG, GENERATION, TOKENIZER, SETTINGS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
QUANTIZATION = (CONFIG, "quantization_config")
GROUP = (*QUANTIZATION, "config_groups", "group_0")
QKV = [f"{ATTENTION}.{name}_proj" for name in "qkv"]

WEIGHTS: dict[str, tuple[Break, set[str]]] = {
    "no index": (remove(INDEX), {"index-missing"}),
    "index that is no JSON": (write(INDEX, b"{"), {"index-unreadable"}),
    "index without a weight_map": (drop(INDEX, "weight_map"), {"index-unreadable"}),
    "index that leaves the folder": (put(INDEX, "weight_map", "x", value="../x.safetensors"), {"index-unreadable"}),
    "index that is a pointer": (write(INDEX, POINTER), {"index-unreadable"}),
    "index names an absent file": (
        put(INDEX, "weight_map", "model.language_model.norm.weight", value="model-2.safetensors"),
        {"shard-missing"},
    ),
    "index lacks a tensor": (drop(INDEX, "weight_map", "model.language_model.norm.weight"), {"index-unmapped"}),
    "index has a tensor too many": (put(INDEX, "weight_map", "x", value=SHARD), {"index-stale"}),
    "index has another size": (put(INDEX, "metadata", "total_size", value=1), {"index-total-size"}),
    "index has no metadata": (drop(INDEX, "metadata"), {"index-total-size"}),
    "tensor in another shard than mapped": (
        both(
            repack(lambda tensors: None, shards=2),
            edit_json(INDEX, lambda index: index["weight_map"].update(swap_shard(index["weight_map"]))),
        ),
        {"index-wrong-shard"},
    ),
    "orphan shard": (
        lambda root: shutil.copy(root / SHARD, root / "model-00002-of-00002.safetensors"), {"shard-orphan"},
    ),
    "tensor in two shards": (
        both(
            repack(lambda tensors: None, shards=2),
            lambda root: shutil.copy(root / "model-00002-of-00002.safetensors", root / THIRD),
            put(INDEX, "weight_map", "x", value=THIRD),
        ),
        {"tensor-twice", "index-stale", "index-wrong-shard"},
    ),
    "shard missing": (
        both(repack(lambda tensors: None, shards=2), remove("model-00002-of-00002.safetensors")), {"shard-missing"},
    ),
    "truncated shard": (truncate(SHARD), {"shard-unreadable"}),
    "shard that is a pointer": (write(SHARD, POINTER), {"lfs-pointer"}),
    "pickled weights": (write("pytorch_model.bin", b"\x80"), {"pickle-present", "source-unknown"}),
    "layer missing": (lambda root: without(*layer_names(root, 3))(root), {"layer-missing"}),
    "module missing": (without(*parts(f"{MLP}.gate_proj")), {"module-missing"}),
    "input scale missing": (without(*parts(f"{MLP}.down_proj", "input_global_scale")), {"scale-missing"}),
    "weight scale missing": (without(*parts(f"{MLP}.down_proj", "weight_scale")), {"scale-missing"}),
    "packed weight missing": (without(*parts(f"{MLP}.down_proj", "weight_packed")), {"weight-missing"}),
    "norm missing": (without(f"{LAYERS}.1.input_layernorm.weight"), {"tensor-missing"}),
    "layer scalar missing": (without(f"{LAYERS}.1.layer_scalar"), {"tensor-missing"}),
    "embeddings missing": (without("model.language_model.embed_tokens.weight"), {"tensor-missing"}),
    "vision linear missing": (
        without("model.vision_tower.encoder.layers.0.mlp.up_proj.linear.weight"), {"tensor-missing"},
    ),
    "norm of another width": (with_tensor("model.language_model.norm.weight", "BF16", 64), {"tensor-shape"}),
    "scale of another shape": (with_tensor(f"{MLP}.down_proj.weight_scale", "F8_E4M3", 128, 8), {"tensor-shape"}),
    "scale of another dtype": (with_tensor(f"{MLP}.down_proj.weight_scale", "U8", 256, 48), {"tensor-dtype"}),
    "norm in integers": (with_tensor("model.language_model.norm.weight", "I16", 256), {"tensor-dtype"}),
    "unknown tensor": (with_tensor("model.extra.weight", "BF16", 4), {"tensor-unexpected"}),
    "values on a full layer": (
        with_tensor(f"{LAYERS}.5.self_attn.v_proj.weight", "BF16", 64, 128), {"tensor-unexpected"},
    ),
    "head stored though tied": (with_tensor("lm_head.weight", "BF16", 768, 128), {"tied-head-stored"}),
    "untied without a head": (put(CONFIG, "tie_word_embeddings", value=False), {"head-missing", "manifest-record"}),
    "module stored twice": (with_tensor(f"{MLP}.down_proj.weight", "BF16", 128, 256), {"half-quantized"}),
    "module left in bf16": (
        with_tensor(f"{MLP}.down_proj.weight", "BF16", 128, 256, drop=parts(f"{MLP}.down_proj")), {"not-quantized"},
    ),
    "one of a fused group in bf16": (
        with_tensor(f"{MLP}.up_proj.weight", "BF16", 256, 128, drop=parts(f"{MLP}.up_proj")), {"fused-group-split"},
    ),
    "kept by config, but packed": (
        edit_json(CONFIG, lambda c: c["quantization_config"]["ignore"].append(f"{MLP}.down_proj")),
        {"kept-quantized", "manifest-record"},
    ),
    "vision packed": (
        pack_kept("model.vision_tower.encoder.layers.0.mlp.up_proj.linear", 128, 64), {"kept-quantized"},
    ),
    "embeddings packed": (pack_kept("model.language_model.embed_tokens", 768, 128), {"kept-quantized"}),
    "packed weights all zero": (poke(f"{MLP}.down_proj.weight_packed", lambda old: bytes(len(old))), {"weight-zero"}),
    "packed weights all ±0": (
        poke(f"{MLP}.down_proj.weight_packed", lambda old: b"\x80\x08" * (len(old) // 2)), {"weight-zero"},
    ),
    "block scale NaN": (poke(f"{MLP}.down_proj.weight_scale", lambda old: old[:-1] + b"\x7f"), {"scale-nan"}),
    "block scale -NaN": (poke(f"{MLP}.down_proj.weight_scale", lambda old: b"\xff" + old[1:]), {"scale-nan"}),
    "block scale zero": (poke(f"{MLP}.down_proj.weight_scale", lambda old: b"\x00" + old[1:]), {"scale-zero"}),
    "block scale -0": (poke(f"{MLP}.down_proj.weight_scale", lambda old: b"\x80" + old[1:]), {"scale-zero"}),
    "block scale negative": (poke(f"{MLP}.down_proj.weight_scale", lambda old: b"\x88" + old[1:]), {"scale-negative"}),
    "input scale NaN": (scale(float("nan"), f"{MLP}.down_proj.input_global_scale"), {"scale-nan"}),
    "input scale infinite": (scale(float("inf"), f"{MLP}.down_proj.input_global_scale"), {"scale-infinite"}),
    "input scale zero": (scale(0.0, f"{MLP}.down_proj.input_global_scale"), {"scale-zero"}),
    "input scale negative": (scale(-2.0, f"{MLP}.down_proj.input_global_scale"), {"scale-negative"}),
    "input scale exactly one": (scale(1.0, f"{MLP}.down_proj.input_global_scale"), {"scale-one"}),
    "one of three input scales exactly one": (scale(1.0, f"{QKV[1]}.input_global_scale"), {"scale-one"}),
    "weight scale exactly one": (scale(1.0, f"{MLP}.down_proj.weight_global_scale"), {"scale-one"}),
    "weight scale the wrong way up": (scale(1e-4, f"{MLP}.down_proj.weight_global_scale"), {"scale-reciprocal"}),
    "q/k/v with other weight scales": (scale(777.0, f"{QKV[2]}.weight_global_scale"), {"fused-weight-scale"}),
    "gate/up with other weight scales": (scale(777.0, f"{MLP}.up_proj.weight_global_scale"), {"fused-weight-scale"}),
    "q/k of a full layer with other input scales": (
        scale(777.0, f"{LAYERS}.5.self_attn.k_proj.input_global_scale"), {"fused-input-scale"},
    ),
}  # fmt: skip

SIDE_FILES: dict[str, tuple[Break, set[str]]] = {
    "config that is no JSON": (write(CONFIG, b"{"), {"json-unreadable"}),
    "config that is a list": (write(CONFIG, b"[]"), {"json-unreadable"}),
    "no config": (remove(CONFIG), {"side-file-missing"}),
    "config of another model": (put(CONFIG, "model_type", value="gemma3"), {"config-kind"}),
    "no architectures": (drop(CONFIG, "architectures"), {"config-architectures"}),
    "new schema": (put(CONFIG, "text_config", "per_layer_config", value={}), {"config-schema"}),
    "no global_head_dim": (drop(CONFIG, "text_config", "global_head_dim"), {"config-geometry"}),
    "a layer too few in config": (
        put(CONFIG, "text_config", "num_hidden_layers", value=5), {"config-geometry"},
    ),
    "not quantized by config": (drop(*QUANTIZATION), {"quantization-config", "manifest-record"}),
    "another method": (put(*QUANTIZATION, "quant_method", value="modelopt"), {"quantization-config"}),
    "another format": (put(*QUANTIZATION, "format", value="pack-quantized"), {"quantization-config"}),
    "another group size": (put(*GROUP, "weights", "group_size", value=32), {"quantization-config"}),
    "eight bits": (put(*GROUP, "input_activations", "num_bits", value=8), {"quantization-config"}),
    "static activations": (put(*GROUP, "input_activations", "dynamic", value=False), {"quantization-config"}),
    "weights only": (put(*GROUP, "input_activations", value=None), {"quantization-config"}),
    "other targets": (put(*GROUP, "targets", value=["re:.*mlp.*"]), {"quantization-config"}),
    "quantized outputs": (put(*GROUP, "output_activations", value={"num_bits": 8}), {"quantization-config"}),
    "a second group": (put(*QUANTIZATION, "config_groups", "group_1", value={}), {"quantization-config"}),
    "a quantized cache": (put(*QUANTIZATION, "kv_cache_scheme", value={"num_bits": 8}), {"quantization-config"}),
    "rotated weights": (put(*QUANTIZATION, "transform_config", value={"R1": {}}), {"quantization-config"}),
    "ignore that is no list": (
        put(*QUANTIZATION, "ignore", value="lm_head"), {"quantization-config", "manifest-record"},
    ),
    "regex without re:": (
        edit_json(CONFIG, lambda c: c["quantization_config"]["ignore"].append(".*router.*")),
        {"ignore-pattern"},
    ),
    "broken regex": (
        edit_json(CONFIG, lambda c: c["quantization_config"]["ignore"].append("re:(")), {"ignore-pattern"},
    ),
    "vision not ignored": (drop(*QUANTIZATION, "ignore", 1), {"ignore-incomplete", "manifest-record"}),
    "head not ignored": (drop(*QUANTIZATION, "ignore", 0), {"ignore-incomplete", "manifest-record"}),
    "no tokenizer": (remove(TOKENIZER), {"side-file-missing", "drafter-tokenizer-missing"}),
    "tokenizer that is a pointer": (write(TOKENIZER, POINTER), {"lfs-pointer", "drafter-tokenizer"}),
    "tokenizer without a vocabulary": (write(TOKENIZER, b"{}"), {"tokenizer-vocab", "drafter-tokenizer"}),
    "tokenizer larger than the embeddings": (
        both(*(edit_json(folder + TOKENIZER, lambda t: t["added_tokens"].append({"id": 3072, "content": "<new>"}))
               for folder in ("", "assistant/"))),
        {"tokenizer-vocab"},
    ),
    "no soft tokens": (drop(CONFIG, "vision_config", "default_output_length"), {"vision-tokens-missing"}),
    "other soft tokens": (put(CONFIG, "vision_config", "default_output_length", value=280), {"vision-tokens-differ"}),
    "no tokenizer config": (remove(SETTINGS), {"side-file-missing"}),
    "no processor": (remove("processor_config.json"), {"side-file-missing"}),
    "no generation config": (remove(GENERATION), {"side-file-missing"}),
    "one stop token": (put(GENERATION, "eos_token_id", value=1), {"stop-tokens"}),
    "no end of turn": (put(GENERATION, "eos_token_id", value=[1]), {"stop-tokens"}),
    "strange stop tokens": (put(GENERATION, "eos_token_id", value=[[1], None]), {"stop-tokens"}),
    "no licence": (remove("LICENSE"), {"side-file-missing"}),
    "no card": (remove("README.md"), {"side-file-missing"}),
    "card that is a pointer": (write("README.md", POINTER), {"lfs-pointer"}),
    "no recipe": (remove("recipe.toml"), {"side-file-missing"}),
    "releases without the drafter": (
        change("recipe.toml", lambda old: old.replace(b'">=0.21"', b'">=0.20"')), {"engine-broken"},
    ),
}  # fmt: skip

WARNINGS: dict[str, tuple[Break, set[str]]] = {
    "dead pattern": (
        edit_json(CONFIG, lambda c: c["quantization_config"]["ignore"].append("model.langauge_model.norm")),
        {"dead-ignore"},
    ),
    "axial rope": (put(CONFIG, "vision_config", "rope_parameters", "rope_type", value="axial"), {"config-axial"}),
    "re-saved tokenizer class": (put(SETTINGS, "tokenizer_class", value="TokenizersBackend"), {"tokenizer-resaved"}),
    "list of special tokens": (put(SETTINGS, "extra_special_tokens", value=["<x>"]), {"tokenizer-resaved"}),
    "padding in the tokenizer": (
        both(*(put(folder + TOKENIZER, "padding", value={}) for folder in ("", "assistant/"))), {"tokenizer-resaved"},
    ),
    "no chat template": (remove("chat_template.jinja"), {"chat-template-missing"}),
    "float32 norm": (with_tensor("model.language_model.norm.weight", "F32", 256), {"tensor-dtype"}),
    "no drafter card": (remove("assistant/README.md"), {"drafter-card-missing"}),
    "no drafter generation config": (remove("assistant/generation_config.json"), {"drafter-generation-missing"}),
    "no drafter tokenizer": (remove("assistant/tokenizer.json"), {"drafter-tokenizer-missing"}),
    "re-saved drafter": (
        put("assistant/config.json", "text_config", "per_layer_config",
            value={"3": {"head_dim": 64, "num_key_value_heads": 1}}),
        {"drafter-config-schema"},
    ),
}  # fmt: skip

DRAFTER: dict[str, tuple[Break, set[str]]] = {
    "no drafter": (lambda root: shutil.rmtree(root / "assistant"), {"side-file-missing"}),
    "no drafter config": (remove("assistant/config.json"), {"side-file-missing"}),
    "drafter config that is no JSON": (write("assistant/config.json", b"{"), {"json-unreadable"}),
    "another model": (put("assistant/config.json", "model_type", value="gemma4"), {"drafter-model-type"}),
    "another backbone": (
        put("assistant/config.json", "backbone_hidden_size", value=512), {"drafter-backbone", "drafter-tensor-shape"},
    ),
    "another window": (
        put("assistant/config.json", "text_config", "sliding_window", value=64), {"drafter-sliding-window"},
    ),
    "quantized by config": (put("assistant/config.json", "quantization_config", value={}), {"drafter-quantized"}),
    "layers of which each is its own kind": (
        put("assistant/config.json", "text_config", "per_layer_config", value={"0": {"head_dim": 64}}),
        {"drafter-config-schema"},
    ),
    "weights that are a pointer": (write("assistant/model.safetensors", POINTER), {"lfs-pointer"}),
    "truncated weights": (truncate("assistant/model.safetensors"), {"shard-unreadable"}),
    "no weights": (remove("assistant/model.safetensors"), {"shard-missing", "drafter-tensor-missing"}),
    "a tensor missing": (without("pre_projection.weight", folder="assistant"), {"drafter-tensor-missing"}),
    "keys of its own": (
        with_tensor("model.layers.0.self_attn.k_proj.weight", "BF16", 64, 64, folder="assistant"),
        {"drafter-tensor-unexpected"},
    ),
    "another tokenizer": (
        edit_json("assistant/tokenizer.json", lambda t: t["added_tokens"].append({"id": 767, "content": "<new>"})),
        {"drafter-tokenizer"},
    ),
    "pickled weights": (write("assistant/model.pt", b"\x80"), {"pickle-present", "source-unknown"}),
}  # fmt: skip

ALL = {
    f"{table}: {name}": row
    for table, rows in {"weights": WEIGHTS, "side files": SIDE_FILES, "drafter": DRAFTER}.items()
    for name, row in rows.items()
}


def _faults(findings: Iterable[Finding]) -> set[str]:
    return {finding.code for finding in findings if finding.severity is not Severity.NOTE}


def test_a_real_bundle_has_no_fault(bundle: Path) -> None:
    """Nothing at all is said about a bundle as it is built."""
    assert verify(bundle) == []


def test_a_rehashed_bundle_has_no_fault(bundle_copy: Path) -> None:
    """What these tests do to bundle.json after they break something is no fault of its own."""
    rehash(bundle_copy)
    assert verify(bundle_copy) == []


def test_several_shards_are_no_fault(bundle_copy: Path) -> None:
    """The same weights in three shards are as good."""
    repack(lambda tensors: None, shards=3)(bundle_copy)
    rehash(bundle_copy)
    assert verify(bundle_copy) == []


@pytest.mark.parametrize("fault", ALL)
def test_every_fault_is_found(fault: str, bundle_copy: Path) -> None:
    """One planted fault gives its own error, and no other than those it really causes."""
    breaks, expected = ALL[fault]
    breaks(bundle_copy)
    rehash(bundle_copy)
    findings = verify(bundle_copy)
    assert _faults(findings) == expected
    assert any(finding.severity is Severity.ERROR for finding in findings)


@pytest.mark.parametrize("fault", WARNINGS)
def test_what_is_only_a_warning(fault: str, bundle_copy: Path) -> None:
    """What a user should know but can serve with is a warning."""
    breaks, expected = WARNINGS[fault]
    breaks(bundle_copy)
    if "ignore" in str(expected):  # the record has to follow, or it is a second fault
        ignore = json.loads((bundle_copy / CONFIG).read_text())["quantization_config"]["ignore"]
        put("bundle.json", "quantization", "ignore", value=ignore)(bundle_copy)
    rehash(bundle_copy)
    findings = verify(bundle_copy)
    assert {(finding.code, finding.severity) for finding in findings} == {
        (code, Severity.WARNING) for code in expected
    }


@pytest.mark.parametrize("fault", ALL | WARNINGS)
def test_every_change_shows_in_the_hashes(fault: str, bundle_copy: Path) -> None:
    """Without a new bundle.json every fault is also a file that is missing, extra or not what it was."""
    (ALL | WARNINGS)[fault][0](bundle_copy)
    assert any(finding.code.startswith("file-") for finding in verify(bundle_copy))


def test_messages_name_tensor_and_file(bundle_copy: Path) -> None:
    """A fault in a tensor is placed by file and tensor, and says what to do."""
    tensor = f"{MLP}.down_proj.input_global_scale"
    scale(1.0, tensor)(bundle_copy)
    rehash(bundle_copy)
    (finding,) = verify(bundle_copy)
    assert finding.where == f"{SHARD}: {tensor}"
    assert finding.hint


def test_all_faults_at_once(bundle_copy: Path) -> None:
    """Faults of every kind are reported in one run."""
    for breaks in (
        scale(1.0, f"{MLP}.down_proj.input_global_scale"),
        drop(CONFIG, "architectures"),
        put(GENERATION, "eos_token_id", value=1),
        put("assistant/config.json", "quantization_config", value={}),
        remove("LICENSE"),
    ):
        breaks(bundle_copy)
    rehash(bundle_copy)
    assert _faults(verify(bundle_copy)) == {
        "scale-one", "config-architectures", "stop-tokens", "drafter-quantized", "side-file-missing",
    }  # fmt: skip


def test_a_layer_beyond_the_config(bundle_copy: Path) -> None:
    """Tensors of a layer that config.json does not count are unexpected."""
    types = ["sliding_attention"] * 4 + ["full_attention"]
    put(CONFIG, "text_config", "num_hidden_layers", value=5)(bundle_copy)
    put(CONFIG, "text_config", "layer_types", value=types)(bundle_copy)
    rehash(bundle_copy)
    assert "tensor-unexpected" in _faults(verify(bundle_copy))


MANIFEST: dict[str, tuple[Break, set[str]]] = {
    "no manifest": (remove("bundle.json"), {"manifest-missing"}),
    "another schema": (put("bundle.json", "schema", value=9), {"manifest-schema"}),
    "another recipe": (put("bundle.json", "recipe_sha256", value="0" * 64), {"recipe-hash"}),
    "copy of another file": (
        put("bundle.json", "body", "files", value=[{"path": f, "size_bytes": 1, "sha256": "0" * 64} for f in (
            "chat_template.jinja", GENERATION, "processor_config.json", TOKENIZER, SETTINGS)]),
        {"source-differs"},
    ),
    "drafter of another source": (put("bundle.json", "drafter", "files", value=[]), {"source-unknown"}),
    "another scheme": (put("bundle.json", "quantization", "scheme", value="FP8"), {"manifest-record"}),
    "fewer modules": (put("bundle.json", "quantization", "quantized_modules", value=1), {"manifest-record"}),
    "other parameters": (put("bundle.json", "quantization", "quantized_parameters", value=1), {"manifest-record"}),
    "misleading name": (put("bundle.json", "name", value="eagle3-mix"), {"forbidden-name"}),
    "listed but absent": (
        edit_json("bundle.json", lambda m: m["files"].append(
            {"path": "assets/a.svg", "size_bytes": 1, "sha256": "0" * 64, "role": "asset"})),
        {"file-missing"},
    ),
    "listed outside": (
        edit_json("bundle.json", lambda m: m["files"].append(
            {"path": "../a", "size_bytes": 1, "sha256": "0" * 64, "role": "body"})),
        {"path-name"},
    ),
    "extra file": (write("notes.txt", b""), {"file-extra"}),
    "changed file": (change("LICENSE", bytes.upper), {"file-hash"}),
    "grown file": (change("LICENSE", lambda content: content + b"\n"), {"file-size"}),
    "missing file": (remove("LICENSE"), {"file-missing"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", MANIFEST)
def test_what_disagrees_with_the_manifest(fault: str, bundle_copy: Path) -> None:
    """A manifest that does not describe the bundle, or itself, is an error; the other checks still run."""
    breaks, expected = MANIFEST[fault]
    breaks(bundle_copy)
    assert _faults(verify(bundle_copy)) == expected


def _link(name: str, target: str) -> Break:
    return lambda root: (root / name).symlink_to(target)


PATHS: dict[str, tuple[Break, set[str]]] = {
    "link to a folder": (_link("more", "assistant"), {"path-link"}),
    "link out": (_link("more", "/etc/hostname"), {"path-link", "file-extra"}),
    "link to nothing": (_link("more", "nothing"), {"path-link"}),
    "pipe": (lambda root: os.mkfifo(root / "pipe"), {"path-special"}),
    "pipe in place of weights": (
        both(remove("assistant/model.safetensors"), lambda root: os.mkfifo(root / "assistant" / "model.safetensors")),
        {"path-special", "file-missing", "shard-missing", "drafter-tensor-missing"},
    ),
    "pipe in place of the manifest": (
        both(remove("bundle.json"), lambda root: os.mkfifo(root / "bundle.json")),
        {"path-special", "manifest-missing"},
    ),
    "name that does not travel": (write("a:b", b""), {"path-name", "file-extra"}),
    "name of another method": (write("dflash.txt", b""), {"forbidden-name", "file-extra"}),
}


@pytest.mark.parametrize("fault", PATHS)
def test_what_must_not_be_in_a_bundle(fault: str, bundle_copy: Path) -> None:
    """Links that leave the bundle, what is no file, and names that do not travel are errors; nothing follows them."""
    breaks, expected = PATHS[fault]
    breaks(bundle_copy)
    assert _faults(verify(bundle_copy)) == expected


def test_a_link_inside_is_a_file(bundle_copy: Path) -> None:
    """A link to another file of the bundle is no fault beside that it has to be listed."""
    (bundle_copy / "assets").mkdir()
    (bundle_copy / "assets" / "copy").symlink_to("../LICENSE")
    rehash(bundle_copy)
    assert verify(bundle_copy) == []


def test_a_misleading_place_is_a_warning(bundle: Path, tmp_path: Path) -> None:
    """Where a bundle lies can mislead vLLM too; that is the user's folder and not the bundle's fault."""
    place = tmp_path / "eagle-3" / bundle.name
    shutil.copytree(bundle, place)
    (finding,) = verify(place)
    assert (finding.code, finding.severity) == ("forbidden-name", Severity.WARNING)


def test_a_snapshot_of_the_hub_cache(bundle: Path, tmp_path: Path) -> None:
    """The Hub's cache holds a snapshot as links to blobs, and what downloads leave is not the bundle's."""
    repo = tmp_path / "models--ns--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "blobs").mkdir(parents=True)
    for path in sorted(bundle.rglob("*")):
        if path.is_file():
            blob, link = repo / "blobs" / hash_file(path)[1], snapshot / path.relative_to(bundle)
            shutil.copy(path, blob)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    (snapshot / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (snapshot / ".cache" / "huggingface").mkdir(parents=True)
    (snapshot / ".cache" / "huggingface" / "CACHEDIR.TAG").write_text("")
    assert verify(snapshot) == []


@pytest.mark.parametrize("place", ["absent", "file"])
def test_no_bundle_at_all(place: str, tmp_path: Path) -> None:
    """A path that is no folder is a finding."""
    (tmp_path / "file").write_text("")
    assert [finding.code for finding in verify(tmp_path / place)] == ["bundle-missing"]


def test_an_empty_folder(tmp_path: Path) -> None:
    """A folder without anything lacks the manifest, the index and every file."""
    assert _faults(verify(tmp_path)) >= {"manifest-missing", "index-missing", "side-file-missing"}


def test_a_folder_of_nonsense(bundle_copy: Path) -> None:
    """Every JSON file replaced by some other JSON: findings, no exception."""
    documents: list[object] = [[], {}, {"text_config": 3, "model_type": ["x"]}, {"weight_map": {"x": 3}, "model": []}]
    documents += [{"model_type": "gemma4", "text_config": {}, "quantization_config": {"config_groups": {"a": 3}}}]
    for document in documents:
        for path in bundle_copy.rglob("*.json"):
            path.write_text(json.dumps(document))
        assert _faults(verify(bundle_copy))


def test_neither_torch_nor_network_libraries(bundle: Path) -> None:
    """A bundle is verified with none of the heavy libraries loaded."""
    code = (
        "import sys; from pathlib import Path; from bundler.verify import verify; "
        f"assert verify(Path({str(bundle)!r})) == []; "
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'llmcompressor', 'httpx'} & set(sys.modules)))"
    )
    done = run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
