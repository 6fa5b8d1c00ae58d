"""The plan: exact sizes, what is quantized and why not, and every fault that metadata can show."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bundler.checkpoint import MAX_SHARD_BYTES, Shape, Tensor, render_index
from bundler.errors import CompatibilityError
from bundler.findings import Severity
from bundler.gemma4 import Kind, layer_of
from bundler.hub import resolve
from bundler.plan import Plan, make_plan, plan_to_dict
from bundler.recipe import Recipe, SourceRef, load, parse
from bundler.source import Source, SourceFile
from tests.published import BODIES, QAT, config_of, tensors_of

ROOT = Path(__file__).parent.parent
BODY = "google/gemma-4-31B-it-qat-q4_0-unquantized"
SIDE_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
)


def published(repo: str) -> Source:
    """A Hub repository as it is published, with headers but without a single file at hand."""
    tensors = tensors_of(repo)
    weights = SourceFile(path="model.safetensors", size_bytes=max(t.end for t in tensors.values()), sha256=None)
    return Source(
        model=repo,
        revision=None,
        commit="c" * 40,
        folder=Path("not-fetched"),
        files=(*(SourceFile(path=name, size_bytes=1, sha256=None) for name in SIDE_FILES), weights),
        config=config_of(repo),
        card={"license": "apache-2.0", "base_model": repo.removesuffix(QAT)},
        tensors=tensors,
    )


def recipe_for(body: str, more: str = "", ignore: str = "[]") -> Recipe:
    text = f"""
    edition = 1
    name = "gemma"
    quantization.ignore = {ignore}
    serve.version = ">=0.23"
    {more}
    calibration.dataset = "HuggingFaceH4/ultrachat_200k"
    [body]
    model = "{body}"
    [drafter]
    model = "{body}-assistant"
    """
    return parse(text, Path())


def plan_of(
    body: str = BODY, *, more: str = "", ignore: str = "[]", change: Callable[[Source], Source] = lambda s: s
) -> Plan:
    return make_plan(recipe_for(body, more, ignore), change(published(body)), published(f"{body}-assistant"))


def codes(plan: Plan, severity: Severity | None = None) -> set[str]:
    return {finding.code for finding in plan.findings if severity in (None, finding.severity)}


@pytest.mark.parametrize("body", BODIES)
def test_every_published_pair_can_be_planned(body: str) -> None:
    """Each of Google's bodies with its own drafter plans without an error, at its real size."""
    plan = plan_of(body)
    assert codes(plan, Severity.ERROR) == set()
    assert ("body-not-qat" in codes(plan)) == (QAT not in body)
    assert plan.drafter_bytes == max(tensor.end for tensor in plan.drafter.tensors.values())


@pytest.mark.parametrize(
    ("size", "kind", "weights_bytes", "modules", "parameters"),
    [
        ("31B", Kind.DENSE, 20_446_823_120, 410, 29_286_727_680),
        ("26B-A4B", Kind.MOE, 16_423_458_412, 90 + 115 + 30 * 128 * 3, 24_483_430_400),
        ("12B", Kind.UNIFIED, 8_251_001_632, 328, 10_899_947_520),
        ("E4B", Kind.PER_LAYER, 10_290_387_124, 258, 3_890_216_960),
        ("E2B", Kind.PER_LAYER, 7_570_352_558, 205, 1_835_532_288),
    ],
)
def test_sizes_of_the_real_bodies(size: str, kind: Kind, weights_bytes: int, modules: int, parameters: int) -> None:
    """Output size to the byte and quantized parameters of every size; the 31B has the 20.4 GB that were published."""
    plan = plan_of(f"google/gemma-4-{size}-it{QAT}")
    assert plan.kind is kind
    assert plan.layout.nbytes == weights_bytes
    assert (len(plan.layout.quantized), plan.layout.quantized_parameters) == (modules, parameters)
    assert plan.body_bytes == weights_bytes + len(render_index(plan.layout.shards).encode())


@pytest.mark.parametrize("body", BODIES)
def test_groups_account_for_every_tensor(body: str) -> None:
    """The groups' parameters are the source's, less what is dropped; their bytes are the shards', less the headers."""
    plan = plan_of(body)
    dropped = sum(plan.body.tensors[name].shape.numel for name in plan.layout.dropped)
    source = sum(tensor.shape.numel for tensor in plan.body.tensors.values())
    assert sum(group.parameters for group in plan.groups) == source - dropped
    headers = sum(len(shard.header) for shard in plan.layout.shards)
    assert sum(group.size_bytes for group in plan.groups) == plan.layout.nbytes - headers
    assert all(group.quantized != bool(group.reason) for group in plan.groups)


def test_what_stays_bf16_in_every_kind() -> None:
    """Vision, audio, embeddings, router and per-layer parts stay bf16, attention, mlp and experts become NVFP4."""
    for size, kept in {
        "31B": {"vision", "embeddings", "norms, scalars"},
        "26B-A4B": {"vision", "embeddings", "norms, scalars", "router"},
        "12B": {"vision", "audio", "embeddings", "norms, scalars"},
        "E4B": {"vision", "audio", "embeddings", "norms, scalars", "per-layer", "per-layer table"},
    }.items():
        plan = plan_of(f"google/gemma-4-{size}-it{QAT}")
        assert {group.name for group in plan.groups if not group.quantized} == kept
        experts = {"experts"} if size == "26B-A4B" else set()
        assert {group.name for group in plan.groups if group.quantized} == {"attention", "mlp"} | experts


def test_shards_are_whole_layers_of_at_most_5_gb() -> None:
    """No shard is larger than 5 GB and no decoder layer is split over two."""
    plan = plan_of()
    assert all(shard.nbytes <= MAX_SHARD_BYTES for shard in plan.layout.shards)
    files: dict[int | None, set[str]] = {}
    for shard in plan.layout.shards:
        for name in shard.tensors:
            files.setdefault(layer_of(name), set()).add(shard.file)
    assert len(files) == 60 + 1
    assert all(len(shards) == 1 for shards in files.values())


def test_the_recipe_of_the_seed() -> None:
    """The seed's bundle plans without errors; that its drafter is the plain body's is said."""
    recipe = load(ROOT / "recipes" / "31b-abliterated.toml")
    body = dataclasses.replace(published(BODY), model=recipe.body.model)
    plan = make_plan(recipe, body, published(recipe.drafter.model), "d" * 40)
    assert codes(plan, Severity.ERROR) == set()
    assert "drafter-not-qat" in codes(plan, Severity.WARNING)
    assert plan_to_dict(plan)["calibration"]["commit"] == "d" * 40


def test_the_recipe_of_the_newcomer() -> None:
    """recipes/tiny-31b.toml plans from the folders in this repository without an error or a warning."""
    recipe = load(ROOT / "recipes" / "tiny-31b.toml")
    drafter = resolve(SourceRef(model=recipe.drafter.model), recipe.folder)
    plan = make_plan(recipe, resolve(recipe.body, recipe.folder), drafter)
    assert codes(plan, Severity.ERROR) | codes(plan, Severity.WARNING) == set()
    assert plan.kind is Kind.DENSE


# Faults: what is changed in a good pair → the finding it must give.


def with_config(**values: Any) -> Callable[[Source], Source]:
    return lambda source: dataclasses.replace(source, config={**source.config, **values})


def with_tensor(name: str, dtype: str = "BF16", dims: tuple[int, ...] = (1,)) -> Callable[[Source], Source]:
    tensor = Tensor(shape=Shape(dtype=dtype, dims=dims), file="model.safetensors", start=0, end=0)
    return lambda source: dataclasses.replace(source, tensors={**source.tensors, name: tensor})


def without(part: str) -> Callable[[Source], Source]:
    def change(source: Source) -> Source:
        return dataclasses.replace(
            source,
            tensors={name: tensor for name, tensor in source.tensors.items() if part not in name},
            files=tuple(file for file in source.files if part not in file.path),
        )

    return change


def resaved(source: Source) -> Source:
    text = dict(source.config["text_config"])
    full = {"head_dim": text.pop("global_head_dim"), "num_key_value_heads": text.pop("num_global_key_value_heads")}
    layers = [str(i) for i, kind in enumerate(text["layer_types"]) if kind == "full_attention"]
    text["per_layer_config"] = {layer: full for layer in layers}
    return dataclasses.replace(source, config={**source.config, "text_config": text})


FIRST = "model.language_model.layers.0"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (with_config(quantization_config={"quant_method": "compressed-tensors"}), "already-quantized"),
        (with_tensor(f"{FIRST}.mlp.up_proj.weight", "U8", (21504, 2688)), "already-quantized"),
        (with_tensor("lm_head.weight", dims=(262144, 5376)), "tied-head-stored"),
        (with_config(tie_word_embeddings=False), "head-missing"),
        (without(f"{FIRST}.mlp"), "body-tensor-missing"),
        (with_tensor(f"{FIRST}.mlp.side_proj.weight"), "body-tensor-unexpected"),
        (with_tensor(f"{FIRST}.mlp.up_proj.weight", dims=(5376, 21504)), "body-tensor-shape"),
        (with_tensor(f"{FIRST}.mlp.up_proj.weight", "F32", (21504, 5376)), "body-dtype"),
        (with_config(text_config={"hidden_size": "wide"}), "config-geometry"),
        (with_config(architectures=["Gemma3ForConditionalGeneration"]), "config-architectures"),
    ],
)  # fmt: skip
def test_a_body_that_cannot_be_laid_out(change: Callable[[Source], Source], code: str) -> None:
    """A body that is quantized, incomplete or misdescribed is refused before anything else, with the reason's code."""
    with pytest.raises(CompatibilityError) as caught:
        plan_of(change=change)
    assert code in {finding.code for finding in caught.value.findings if finding.severity is Severity.ERROR}


@pytest.mark.parametrize(
    ("change", "code", "severity"),
    [
        (without("processor_config"), "side-file-missing", Severity.ERROR),
        (without("tokenizer.json"), "side-file-missing", Severity.ERROR),
        (without("generation_config"), "side-file-missing", Severity.ERROR),
        (resaved, "config-schema-converted", Severity.NOTE),
        (lambda source: dataclasses.replace(source, card={}), "licence-unknown", Severity.ERROR),
    ],
)
def test_a_body_with_a_remark(change: Callable[[Source], Source], code: str, severity: Severity) -> None:
    """A body that can be laid out gets a plan, and what is wrong or odd about it is a finding of that plan."""
    plan = plan_of(change=change)
    assert [finding.severity for finding in plan.findings if finding.code == code] == [severity]
    assert plan.layout.nbytes == plan_of().layout.nbytes


def test_vision_tokens_must_be_said() -> None:
    """A body without vision_config.default_output_length, as transformers 5.17 saves it, is warned of."""
    vision = {key: value for key, value in config_of(BODY)["vision_config"].items() if key != "default_output_length"}
    assert "vision-tokens-missing" in codes(plan_of(change=with_config(vision_config=vision)), Severity.WARNING)


def test_a_resaved_config_plans_like_the_original() -> None:
    """A body in transformers' new schema has the layout of the published one; a drafter in it is warned of."""
    recipe = recipe_for(BODY)
    plan = make_plan(recipe, resaved(published(BODY)), resaved(published(f"{BODY}-assistant")))
    assert plan.layout == plan_of().layout
    assert "drafter-config-schema" in codes(plan, Severity.WARNING)


@pytest.mark.parametrize("body", ["google/gemma-4-E4B-it", "google/gemma-4-E2B-it"])
def test_tensors_of_shared_layers_are_dropped(body: str) -> None:
    """K and V of layers that read another layer's are not carried, and a note says so; the QAT files have none."""
    plan = plan_of(body)
    assert len(plan.layout.dropped) == {"google/gemma-4-E4B-it": 54, "google/gemma-4-E2B-it": 60}[body]
    assert "tensors-dropped" in codes(plan, Severity.NOTE)
    assert plan_of(body + QAT).layout.dropped == ()
    assert {tensor for shard in plan.layout.shards for tensor in shard.tensors}.isdisjoint(plan.layout.dropped)


def test_a_smaller_drafter_is_refused() -> None:
    """A drafter that was made for a body of another size is an error of the plan, before anything is baked."""
    plan = make_plan(recipe_for(BODY), published(BODY), published("google/gemma-4-26B-A4B-it-assistant"))
    assert "drafter-backbone" in codes(plan, Severity.ERROR)


# The recipe's own choices.


def test_ignored_modules_stay_bf16() -> None:
    """What the recipe's ignore names is kept, shown as the recipe's wish, and the output grows accordingly."""
    plan = plan_of(ignore=r"['re:.*self_attn\..*']")
    attention = [group for group in plan.groups if group.name == "attention"]
    assert [(group.quantized, group.reason) for group in attention] == [(False, "quantization.ignore")]
    assert plan.layout.nbytes > plan_of().layout.nbytes
    assert codes(plan, Severity.ERROR) == set()


def test_a_pattern_that_matches_nothing() -> None:
    """An ignore entry without a module is a warning that names the entry."""
    plan = plan_of(ignore="['re:.*mlp.*down_proj', 'model.layers.0.mlp.up_proj']")
    assert [f.where for f in plan.findings if f.code == "dead-ignore"] == ["quantization.ignore[1]"]


@pytest.mark.parametrize(
    ("body", "ignore"),
    [
        (BODY, "['re:.*q_proj']"),
        (BODY, "['model.language_model.layers.3.mlp.gate_proj']"),
        (f"google/gemma-4-26B-A4B-it{QAT}", r"['re:.*experts\.7\..*']"),
    ],
)
def test_fused_modules_cannot_be_split(body: str, ignore: str) -> None:
    """q/k/v, gate/up and the experts of a layer are one matrix in engines: half of it in bf16 is an error."""
    assert "fused-group-split" in codes(plan_of(body, ignore=ignore), Severity.ERROR)


def test_something_must_be_left_to_quantize() -> None:
    """An ignore list that keeps everything is an error."""
    assert "nothing-quantized" in codes(plan_of(ignore="['re:.*']"), Severity.ERROR)


def test_experts_may_stay_bf16_together() -> None:
    """Keeping all experts is possible; they are then stored one by one, as the quantized ones are."""
    plan = plan_of(f"google/gemma-4-26B-A4B-it{QAT}", ignore=r"['re:.*\.experts\..*']")
    assert codes(plan, Severity.ERROR) == set()
    assert f"{FIRST}.experts.127.down_proj.weight" in plan.layout.kept


@pytest.mark.parametrize(
    ("body", "cards", "code"),
    [
        (BODY, 3, "tensor-parallel"),
        (BODY, 64, "tensor-parallel"),
        (f"google/gemma-4-E4B-it{QAT}", 8, "tensor-parallel"),
        (f"google/gemma-4-26B-A4B-it{QAT}", 2, "engine-broken"),
        (BODY, 4, None),
        (BODY, 8, None),
        (f"google/gemma-4-E4B-it{QAT}", 2, None),
    ],
)
def test_tensor_parallel_sizes(body: str, cards: int, code: str | None) -> None:
    """Cards that heads, widths, the drafter or the engine's kernels cannot be spread over are refused."""
    found = codes(plan_of(body, more=f"serve.tensor_parallel_size = {cards}"), Severity.ERROR)
    assert found == ({code} if code else set())


def test_legal_sizes_are_named() -> None:
    """The refusal of a tensor parallel size says which ones would do."""
    plan = plan_of(more="serve.tensor_parallel_size = 6")
    assert [f.hint for f in plan.findings if f.code == "tensor-parallel"] == ["possible: 1, 2, 4, 8"]


def test_unusual_draft_length_is_noted() -> None:
    """A number of draft tokens outside what is known to pay is a note, not a refusal."""
    body = f"google/gemma-4-26B-A4B-it{QAT}"
    recipe = dataclasses.replace(
        recipe_for(body), drafter=dataclasses.replace(recipe_for(body).drafter, num_speculative_tokens=9)
    )
    plan = make_plan(recipe, published(body), published(f"{body}-assistant"))
    assert "draft-length-unusual" in codes(plan, Severity.NOTE)


# Side files that are at hand.


@pytest.mark.parametrize(
    ("stops", "bad"),
    [([1, 106, 50], False), ([1, 106], False), (1, True), ([1, 50], True), (None, True), ([], True)],
)
def test_stop_tokens(tmp_path: Path, stops: object, bad: bool) -> None:
    """A generation_config.json that would not stop at the end of a turn is an error."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    plan = plan_of(change=lambda source: dataclasses.replace(source, folder=tmp_path))
    assert ("stop-tokens" in codes(plan, Severity.ERROR)) == bad


def test_an_unreadable_side_file(tmp_path: Path) -> None:
    """A side file that is no JSON is an error that names it."""
    (tmp_path / "processor_config.json").write_text("{")
    plan = plan_of(change=lambda source: dataclasses.replace(source, folder=tmp_path))
    assert [f.where for f in plan.findings if f.code == "json-unreadable"] == ["processor_config.json"]


def test_a_missing_chat_template(tmp_path: Path) -> None:
    """A body without a chat template, in a file or in its tokenizer's config, is warned of."""
    (tmp_path / "tokenizer_config.json").write_text("{}")
    plan = plan_of(change=lambda s: dataclasses.replace(without("chat_template")(s), folder=tmp_path))
    assert "chat-template-missing" in codes(plan, Severity.WARNING)


# For machines.


def test_json_is_plain_and_its_keys_are_fixed() -> None:
    """`--json` prints plain JSON whose keys, pinned here, other programs may rely on."""
    document = json.loads(json.dumps(plan_to_dict(plan_of(more="serve.max_model_len = 4096"))))
    assert document["schema"] == 1
    assert list(document) == [
        "schema", "name", "kind", "body", "drafter", "quantization", "calibration", "serve", "groups",
        "quantized_modules", "quantized_parameters", "kept_parameters", "dropped_tensors", "shards", "body_bytes",
        "drafter_bytes", "total_bytes", "findings",
    ]  # fmt: skip
    assert list(document["body"]) == [
        "model", "revision", "commit", "licence", "licence_link", "parameters", "weight_bytes",
    ]  # fmt: skip
    assert list(document["groups"][0]) == ["name", "quantized", "modules", "parameters", "size_bytes", "reason"]
    assert document["total_bytes"] == document["body_bytes"] + document["drafter_bytes"]
    assert document["quantization"]["ignore"][0] == "lm_head"
    assert document["serve"]["max_model_len"] == 4096


def test_equal_inputs_give_equal_plans() -> None:
    """Planning is pure: twice the same inputs give twice the same plan."""
    assert plan_of() == plan_of()
