"""Which drafter fits which body, and the copy that goes into a bundle."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from published import BODIES, DRAFTERS, QAT, SIZES, config_of, tensors_of

from bundler.checkpoint import Shape, Tensor
from bundler.drafter import (
    check_pair,
    check_source_names,
    check_token_ordering,
    check_tokenizers,
    copy,
    make_vocabulary,
)
from bundler.errors import SourceError
from bundler.findings import Finding, Severity
from bundler.source import SourceFile

BODY, DRAFTER = BODIES[0], DRAFTERS[0]
ORDERED = "google/gemma-4-E4B-it-assistant"


def _size(repo: str) -> str:
    return next(size for size in SIZES if f"-{size}-" in repo)


def _codes(findings: list[Finding]) -> set[str]:
    return {finding.code for finding in findings}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("qat", ["", QAT])
def test_published_pairs_match(drafter: str, qat: str) -> None:
    """Every published drafter, QAT or not, fits the bodies of its own size, and nothing at all is said about it."""
    body = f"google/gemma-4-{_size(drafter)}-it{qat}"
    assert check_pair(config_of(body), config_of(drafter), tensors_of(drafter)) == []


MISMATCHES = {
    ("31B", "26B-A4B"): {"drafter-backbone", "drafter-kv-heads"},
    ("31B", "12B"): {"drafter-backbone", "drafter-kv-heads", "drafter-model-type"},
    ("31B", "E4B"): {"drafter-backbone", "drafter-kv-heads", "drafter-sliding-window"},
    ("26B-A4B", "31B"): {"drafter-backbone", "drafter-kv-heads"},
    ("26B-A4B", "12B"): {"drafter-backbone", "drafter-kv-heads", "drafter-model-type"},
    ("12B", "26B-A4B"): {"drafter-backbone", "drafter-kv-heads", "drafter-model-type"},
    ("12B", "E2B"): {"drafter-backbone", "drafter-kv-heads", "drafter-model-type", "drafter-sliding-window"},
    ("E4B", "E2B"): {"drafter-backbone", "drafter-kv-heads"},
    ("E2B", "E4B"): {"drafter-backbone", "drafter-kv-heads"},
    ("E4B", "31B"): {"drafter-backbone", "drafter-kv-heads", "drafter-sliding-window"},
}


@pytest.mark.parametrize(("body", "drafter"), MISMATCHES)
def test_mismatched_pairs_are_refused(body: str, drafter: str) -> None:
    """A drafter of another size is refused with every reason at once."""
    repo = f"google/gemma-4-{drafter}-it-assistant"
    findings = check_pair(config_of(f"google/gemma-4-{body}-it"), config_of(repo), tensors_of(repo))
    assert _codes(findings) == MISMATCHES[body, drafter]
    assert {finding.severity for finding in findings} == {Severity.ERROR}


@pytest.mark.parametrize("body", SIZES)
@pytest.mark.parametrize("drafter", SIZES)
def test_no_pair_of_two_sizes_passes(body: str, drafter: str) -> None:
    """Of all published pairs only those of one size are accepted."""
    repo = f"google/gemma-4-{drafter}-it{QAT}-assistant"
    findings = check_pair(config_of(f"google/gemma-4-{body}-it"), config_of(repo), tensors_of(repo))
    assert (findings == []) == (body == drafter)


def test_a_mismatch_names_both_numbers() -> None:
    """The message for a drafter of another size gives its backbone and the body's hidden size."""
    repo = "google/gemma-4-26B-A4B-it-assistant"
    findings = check_pair(config_of(BODY), config_of(repo), tensors_of(repo))
    found = next(finding for finding in findings if finding.code == "drafter-backbone")
    assert "2816" in found.message
    assert "5376" in found.message
    assert found.where == "assistant/config.json: backbone_hidden_size"


def _set(section: str | None, **values: object) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        (config[section] if section else config).update(values)

    return change


ROPE = {
    "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    "full_attention": {"rope_type": "default"},
}
CONFIG_FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], set[str]]] = {
    "another model_type": (_set(None, model_type="gemma3"), {"drafter-model-type"}),
    "no architectures": (_set(None, architectures=None), {"drafter-architectures"}),
    "the body's architecture": (_set(None, architectures=["Gemma4ForCausalLM"]), {"drafter-architectures"}),
    "quantized": (_set(None, quantization_config={}), {"drafter-quantized"}),
    "another vocabulary": (_set("text_config", vocab_size=262208), {"drafter-vocab", "drafter-tensor-shape"}),
    "no such layers": (_set("text_config", layer_types=["full_attention"] * 4), {"drafter-tensor-shape"}),
    "another head_dim": (_set("text_config", head_dim=128), {"drafter-head-dim", "drafter-tensor-shape"}),
    "another global_head_dim": (
        _set("text_config", global_head_dim=256),
        {"drafter-head-dim", "drafter-tensor-shape"},
    ),
    "other kv heads": (_set("text_config", num_key_value_heads=8), {"drafter-kv-heads"}),
    "other global kv heads": (_set("text_config", num_global_key_value_heads=2), {"drafter-kv-heads"}),
    "keys of its own": (_set("text_config", attention_k_eq_v=False), {"drafter-kv-heads"}),
    "another window": (_set("text_config", sliding_window=512), {"drafter-sliding-window"}),
    "another rope": (_set("text_config", rope_parameters=ROPE), {"drafter-rope"}),
    "some layers shared": (_set("text_config", num_kv_shared_layers=2), {"drafter-kv-shared"}),
    "no layer shared": (_set("text_config", num_kv_shared_layers=0), set()),
    "per-layer vocabulary": (_set("text_config", vocab_size_per_layer_input=262144), {"drafter-per-layer"}),
    "per-layer vocabulary by default": (_set("text_config", vocab_size_per_layer_input=None), {"drafter-per-layer"}),
    "a double-wide mlp": (_set("text_config", use_double_wide_mlp=True), {"drafter-double-wide"}),
    "not tied": (_set(None, tie_word_embeddings=False), {"drafter-untied"}),
    "no backbone": (_set(None, backbone_hidden_size=None), {"config-geometry"}),
    "ordered embeddings": (_set(None, use_ordered_embeddings=True), {"drafter-tensor-missing"}),
}


@pytest.mark.parametrize("fault", CONFIG_FAULTS)
def test_every_rule_on_the_config(fault: str) -> None:
    """Each thing that must hold between a body and a drafter has a code of its own when it does not."""
    change, expected = CONFIG_FAULTS[fault]
    config = config_of(DRAFTER)
    change(config)
    assert _codes(check_pair(config_of(BODY), config, tensors_of(DRAFTER))) == expected


def test_mixture_of_experts_and_per_layer_inputs_are_refused() -> None:
    """A drafter whose layers would hold experts or per-layer inputs is refused for that, and for what it lacks."""
    config = config_of(DRAFTER)
    config["text_config"] |= {"enable_moe_block": True, "num_experts": 2, "moe_intermediate_size": 16}
    config["text_config"] |= {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 512}
    findings = check_pair(config_of(BODY), config, tensors_of(DRAFTER))
    assert _codes(findings) == {"drafter-moe", "drafter-per-layer", "drafter-tensor-missing"}


def test_the_last_layer_that_keeps_a_cache_counts() -> None:
    """A layer type that only KV-shared body layers have is none the drafter can read."""
    body = config_of("google/gemma-4-E4B-it")
    body["text_config"]["layer_types"] = ["sliding_attention"] * 24 + ["full_attention"] * 18
    findings = check_pair(body, config_of(ORDERED), tensors_of(ORDERED))
    assert _codes(findings) == {"drafter-layer-types"}


def test_centroids_must_divide_the_vocabulary() -> None:
    """Ordered embeddings give every centroid the same number of tokens."""
    config = config_of(ORDERED)
    config["num_centroids"] = 2047
    findings = check_pair(config_of("google/gemma-4-E4B-it"), config, tensors_of(ORDERED))
    assert _codes(findings) == {"drafter-centroids", "drafter-tensor-shape"}


def _tensor(dtype: str, *dims: int) -> Tensor:
    shape = Shape(dtype=dtype, dims=dims)
    return Tensor(shape=shape, file="model.safetensors", start=0, end=shape.nbytes)


TENSOR_FAULTS: dict[str, tuple[str, Tensor | None, str, Severity]] = {
    "missing": ("model.layers.0.self_attn.q_proj.weight", None, "drafter-tensor-missing", Severity.ERROR),
    "keys of its own": (
        "model.layers.0.self_attn.k_proj.weight", _tensor("BF16", 4096, 1024), "drafter-tensor-unexpected",
        Severity.ERROR,
    ),
    "misshapen": ("pre_projection.weight", _tensor("BF16", 1024, 5376), "drafter-tensor-shape", Severity.ERROR),
    "float32": ("post_projection.weight", _tensor("F32", 5376, 1024), "drafter-tensor-dtype", Severity.WARNING),
    "packed": ("post_projection.weight", _tensor("U8", 5376, 1024), "drafter-tensor-dtype", Severity.ERROR),
}  # fmt: skip


@pytest.mark.parametrize("fault", TENSOR_FAULTS)
def test_every_rule_on_the_tensors(fault: str) -> None:
    """A drafter holds exactly the tensors that its config promises; what it lacks would stay random, silently."""
    name, tensor, code, severity = TENSOR_FAULTS[fault]
    tensors = tensors_of(DRAFTER)
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    (finding,) = check_pair(config_of(BODY), config_of(DRAFTER), tensors)
    assert (finding.code, finding.severity) == (code, severity)
    assert name in finding.where


def test_a_stored_head_is_allowed() -> None:
    """lm_head.weight may be there, tied or not, if it has the embeddings' shape."""
    for tied in (True, False):
        config, tensors = config_of(DRAFTER), tensors_of(DRAFTER)
        config["tie_word_embeddings"] = tied
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        assert check_pair(config_of(BODY), config, tensors) == []


@pytest.mark.parametrize("config", [{}, {"model_type": ["x"]}, {"model_type": "gemma4_assistant", "text_config": 3}])
def test_no_config_makes_the_check_itself_fail(config: dict[str, Any]) -> None:
    """Whatever stands in either config.json, the answer is findings."""
    assert check_pair(config_of(BODY), config, {})
    assert check_pair(config, config_of(DRAFTER), tensors_of(DRAFTER))


def _tokenizer(folder: Path, vocabulary: object, **more: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, **more}))
    return folder


def test_tokenizers(tmp_path: Path) -> None:
    """Equal bytes say nothing, equal ids are a note, a token with another id is an error that shows it."""
    body = _tokenizer(tmp_path / "body", {"a": 0, "b": 1}, added_tokens=[{"id": 2, "content": "<eos>"}])
    assert (
        check_tokenizers(
            body, _tokenizer(tmp_path / "same", {"a": 0, "b": 1}, added_tokens=[{"id": 2, "content": "<eos>"}])
        )
        == []
    )
    (same,) = check_tokenizers(body, _tokenizer(tmp_path / "ids", {"b": 1, "a": 0, "<eos>": 2}))
    assert (same.severity, same.code) == (Severity.NOTE, "drafter-tokenizer-bytes")
    (other,) = check_tokenizers(body, _tokenizer(tmp_path / "other", {"a": 0, "b": 2, "<eos>": 1}))
    assert (other.severity, other.code) == (Severity.ERROR, "drafter-tokenizer")
    assert "'<eos>' (2 in the body, 1)" in other.message
    (broken,) = check_tokenizers(body, _tokenizer(tmp_path / "broken", None))
    assert (broken.severity, broken.code) == (Severity.ERROR, "drafter-tokenizer")
    (absent,) = check_tokenizers(body, tmp_path)
    assert (absent.severity, absent.code) == (Severity.WARNING, "drafter-tokenizer-missing")


def test_vocabulary_of_unigram_models() -> None:
    """A vocabulary may be a table, or a list whose places are the ids; anything else is a SourceError."""
    assert make_vocabulary({"model": {"vocab": [["<unk>", 0.0], ["a", -1.5]]}}) == {"<unk>": 0, "a": 1}
    for model in ({}, {"vocab": {"a": "x"}}, {"vocab": {"a": float("inf")}}, {"vocab": [3]}, []):
        with pytest.raises(SourceError, match="no vocabulary"):
            make_vocabulary({"model": model})


@pytest.mark.parametrize(
    ("body", "drafter", "companion"),
    [
        ("google/gemma-4-31B-it-qat-q4_0-unquantized", DRAFTER, DRAFTERS[1]),
        ("huihui-ai/Huihui-gemma-4-31B-it-qat-abliterated", DRAFTER, DRAFTERS[1]),
        ("google/gemma-4-31B-it-qat-q4_0-unquantized", DRAFTERS[1], None),
        ("google/gemma-4-31B-it", DRAFTER, None),
        ("someone/aquatic-31B", DRAFTER, None),
        ("qat/body", "../drafter", None),
    ],
)
def test_a_qat_body_has_a_drafter_of_its_own(body: str, drafter: str, companion: str | None) -> None:
    """A QAT body with the plain drafter is allowed, with a warning that names the QAT drafter."""
    findings = check_source_names(body, drafter)
    if companion is None:
        assert findings == []
    else:
        (finding,) = findings
        assert (finding.code, finding.severity) == ("drafter-not-qat", Severity.WARNING)
        assert companion in str(finding.hint)


def test_token_ordering_lists_every_token(tmp_path: Path) -> None:
    """Ordered embeddings hold a permutation of all ids."""
    tensor = Tensor(shape=Shape(dtype="I64", dims=(3,)), file="x", start=8, end=32)
    for order, codes in (((2, 0, 1), set()), ((2, 0, 0), {"drafter-token-ordering"})):
        (tmp_path / "x").write_bytes(bytes(8) + b"".join(token.to_bytes(8, "little") for token in order))
        assert _codes(check_token_ordering(tmp_path, {"masked_embedding.token_ordering": tensor})) == codes


def _listing(folder: Path) -> list[SourceFile]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return [
        SourceFile(path=path.relative_to(folder).as_posix(), size_bytes=path.stat().st_size, sha256=None)
        for path in paths
    ]


@pytest.fixture
def drafter_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    (folder / ".cache").mkdir(parents=True)
    for name in (
        "README.md", "LICENSE", "NOTICE.txt", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", ".gitattributes", "pytorch_model.bin",
        "training_args.bin", "model.onnx", ".cache/config.json", "notes.txt",
    ):  # fmt: skip
        (folder / name).write_bytes(f"bytes of {name}".encode())
    return folder


def test_copy_is_byte_for_byte(drafter_folder: Path, tmp_path: Path) -> None:
    """A drafter's own files arrive as they are, with their hashes; pickles and repository files stay behind."""
    destination = tmp_path / "bundle" / "assistant"
    copied = copy(drafter_folder, _listing(drafter_folder), destination)
    assert [file.path for file in copied] == [
        "LICENSE", "NOTICE.txt", "README.md", "chat_template.jinja", "config.json", "generation_config.json",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert sorted(path.name for path in destination.iterdir()) == [file.path for file in copied]
    for file in copied:
        content = (destination / file.path).read_bytes()
        assert content == (drafter_folder / file.path).read_bytes()
        assert (file.size_bytes, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_copy_stands_alone(drafter_folder: Path, tmp_path: Path) -> None:
    """Sources that are links, as in the Hub's cache, become files; a later change of the source changes nothing."""
    linked = tmp_path / "snapshot"
    linked.mkdir()
    (linked / "config.json").symlink_to(drafter_folder / "config.json")
    (file,) = copy(linked, _listing(linked), tmp_path / "out")
    target = tmp_path / "out" / "config.json"
    assert not target.is_symlink()
    assert target.stat().st_ino != (drafter_folder / "config.json").stat().st_ino
    (drafter_folder / "config.json").write_bytes(b"other")
    assert hashlib.sha256(target.read_bytes()).hexdigest() == file.sha256


def test_copy_again_gives_the_same(drafter_folder: Path, tmp_path: Path) -> None:
    """A second run over a half-made copy ends with the same files and hashes."""
    listing, destination = _listing(drafter_folder), tmp_path / "out"
    first = copy(drafter_folder, listing, destination)
    (destination / "config.json").write_bytes(b"half")
    (destination / "model.safetensors.part").write_bytes(b"half")
    assert copy(drafter_folder, listing, destination) == first
    assert not list(destination.glob("*.part"))


def test_copy_refuses_what_is_not_the_listed_file(drafter_folder: Path, tmp_path: Path) -> None:
    """A file of another size or hash, a Git LFS pointer and an absent file are SourceErrors, and no copy is left."""
    path = drafter_folder / "model.safetensors"
    size = path.stat().st_size
    for listed in (
        SourceFile(path=path.name, size_bytes=size + 1, sha256=None),
        SourceFile(path=path.name, size_bytes=size, sha256="0" * 64),
    ):
        with pytest.raises(SourceError, match="its repository says"):
            copy(drafter_folder, [listed], tmp_path / "out")
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SourceError, match="Git LFS pointer"):
        copy(drafter_folder, _listing(drafter_folder), tmp_path / "out")
    listing = _listing(drafter_folder)
    shutil.rmtree(drafter_folder)
    with pytest.raises(SourceError, match="cannot copy"):
        copy(drafter_folder, listing[-1:] + listing, tmp_path / "out")
    assert not list((tmp_path / "out").glob("model*"))
