"""The plan: exact sizes, what is quantized and why not, and every fault that metadata can show."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bundler.build import build
from bundler.build import resolve as plan_recipe
from bundler.checkpoint import INDEX, MAX_SHARD_BYTES, Shape, Tensor, render_index
from bundler.engines import parse_box
from bundler.errors import CompatibilityError
from bundler.findings import Severity
from bundler.gemma4 import Kind, layer_of
from bundler.hub import resolve
from bundler.plan import Plan, make_plan
from bundler.plan_json import plan_to_dict
from bundler.recipe import Recipe, SourceRef, load, parse
from bundler.source import Source, SourceFile
from tests.published import BODIES, QAT, config_of, tensors_of

ROOT = Path(__file__).parent.parent
BODY = "google/gemma-4-31B-it-qat-q4_0-unquantized"
SIDE_FILES = (
    "README.md",
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
    body: str = BODY,
    *,
    more: str = "",
    ignore: str = "[]",
    change: Callable[[Source], Source] | None = None,
    target: str | None = None,
) -> Plan:
    if change is None:
        return _plan_of(body, more, ignore, target)
    return make_plan(recipe_for(body, more, ignore), change(published(body)), published(f"{body}-assistant"))


@cache
def _plan_of(body: str, more: str, ignore: str, target: str | None) -> Plan:
    box = parse_box(target) if target else None
    recipe = recipe_for(body, more, ignore)
    return make_plan(recipe, published(body), published(f"{body}-assistant"), target=box)


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


def test_vision_tokens_are_taken_from_the_processor() -> None:
    """A body without vision_config.default_output_length, as transformers 5.17 saves it, can be built all the same."""
    vision = {key: value for key, value in config_of(BODY)["vision_config"].items() if key != "default_output_length"}
    plan = plan_of(change=with_config(vision_config=vision))
    assert not {code for code in codes(plan, Severity.ERROR) if code.startswith("vision-")}


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


def test_a_template_that_reaches_out_is_refused_before_it_is_run(tmp_path: Path) -> None:
    """A bake renders its calibration with the source's template: what it could do is known before."""
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__ }}")
    plan = plan_of(change=lambda source: dataclasses.replace(source, folder=tmp_path))
    assert "template-unsafe" in codes(plan, Severity.ERROR)


def test_a_missing_chat_template(tmp_path: Path) -> None:
    """A body without a chat template, in a file or in its tokenizer's config, is warned of."""
    (tmp_path / "tokenizer_config.json").write_text("{}")
    plan = plan_of(change=lambda s: dataclasses.replace(without("chat_template")(s), folder=tmp_path))
    assert "chat-template-missing" in codes(plan, Severity.WARNING)


@pytest.mark.parametrize(
    ("without_file", "code"),
    [("README.md", "drafter-card-missing"), ("generation_config.json", "drafter-generation-missing")],
)
def test_what_a_drafter_lacks(without_file: str, code: str) -> None:
    """A drafter without a card of its own, or without a generation config, is warned of."""
    drafter = published(f"{BODY}-assistant")
    files = tuple(file for file in drafter.files if file.path != without_file)
    plan = make_plan(recipe_for(BODY), published(BODY), dataclasses.replace(drafter, files=files))
    assert codes(plan, Severity.WARNING) == {code}


def test_tokenizers_that_are_not_here_are_told_apart_by_hash() -> None:
    """Another hash of tokenizer.json is a note, for only the files tell whether the vocabularies differ."""

    def hashed(repo: str, sha256: str) -> Source:
        source = published(repo)
        files = [dataclasses.replace(f, sha256=sha256 if f.path == "tokenizer.json" else None) for f in source.files]
        return dataclasses.replace(source, files=tuple(files))

    for sha256, found in (("1" * 64, False), ("2" * 64, True)):
        plan = make_plan(recipe_for(BODY), hashed(BODY, "1" * 64), hashed(f"{BODY}-assistant", sha256))
        assert ("drafter-tokenizer-unseen" in codes(plan, Severity.NOTE)) == found


@pytest.mark.parametrize(("companion", "found"), [(None, True), (True, True), (False, False)])
def test_a_qat_drafter_is_named_only_if_it_may_exist(companion: bool | None, found: bool) -> None:
    """A QAT body with the plain drafter is warned of its companion, unless the Hub says there is none."""
    drafter = published("google/gemma-4-31B-it-assistant")
    recipe = recipe_for(BODY)
    recipe = dataclasses.replace(recipe, drafter=dataclasses.replace(recipe.drafter, model=drafter.model))
    plan = make_plan(recipe, published(BODY), drafter, companion=companion)
    assert ("drafter-not-qat" in codes(plan, Severity.WARNING)) == found


def test_attention_in_bf16_needs_no_qat() -> None:
    """A body without QAT is warned of where attention becomes 4-bit, and not where the recipe keeps it."""
    body = "google/gemma-4-31B-it"
    assert "body-not-qat" in codes(plan_of(body), Severity.WARNING)
    assert "body-not-qat" not in codes(plan_of(body, ignore=r"['re:.*self_attn\..*']"))


def test_a_drafter_config_that_cannot_be_read() -> None:
    """A drafter whose per_layer_config says several things has no config that engines read: an error, and a plan."""
    drafter = resaved(published(f"{BODY}-assistant"))
    text = dict(drafter.config["text_config"])
    text["per_layer_config"] = {"0": {"head_dim": 1}, "1": {"head_dim": 2}}
    odd = dataclasses.replace(drafter, config={**drafter.config, "text_config": text})
    plan = make_plan(recipe_for(BODY), published(BODY), odd)
    assert "drafter-config-schema" in codes(plan, Severity.ERROR)
    assert plan.serving is None


# Serving: what the recipe asks, on a box that is named.


@pytest.mark.parametrize(
    ("target", "more", "code", "severity"),
    [
        ("4x16GB", "serve.tensor_parallel_size = 4\nserve.max_model_len = 16384", None, None),
        ("2x16GB", "serve.tensor_parallel_size = 2\nserve.max_model_len = 16384", "target-too-small", Severity.ERROR),
        ("2x16GB", "serve.tensor_parallel_size = 4\nserve.max_model_len = 16384", "target-cards", Severity.ERROR),
        ("4x48GB", "serve.max_model_len = 16384", "target-cards-idle", Severity.NOTE),
        ("1xH200", "serve.max_model_len = 16384", "hardware-degraded", Severity.WARNING),
        ("1xB200", "serve.max_model_len = 16384", "hardware-broken", Severity.WARNING),
        (
            "2xRTX 3090",
            "serve = { tensor_parallel_size = 2, max_model_len = 8192, kv_cache_dtype = 'fp8', version = '>=0.23' }",
            "hardware-broken",
            Severity.ERROR,
        ),
        (None, "serve.max_model_len = 300000", "context-too-long", Severity.ERROR),
        (None, "", "context-not-said", Severity.NOTE),
    ],
)
def test_a_target_box(target: str | None, more: str, code: str | None, severity: Severity | None) -> None:
    """What a named box has no room for, cannot share or does slowly is a finding with its reason; the rest is not."""
    recipe = recipe_for(BODY, more) if "serve = {" not in more else None
    if recipe is None:
        text = recipe_for(BODY).text.replace('serve.version = ">=0.23"', more)
        recipe = parse(text, Path())
    box = parse_box(target) if target else None
    plan = make_plan(recipe, published(BODY), published(f"{BODY}-assistant"), target=box)
    serving = {"target", "context", "hardware", "no"}
    found = [(f.code, f.severity) for f in plan.findings if f.code.partition("-")[0] in serving]
    assert ((code, severity) in found) if code else found == []
    assert all(f.message for f in plan.findings)


def test_a_refused_target_says_what_would_do() -> None:
    """The refusal of a box names a context, a number of cards, serving without the drafter, and the smallest box."""
    more = "serve.max_model_len = 16384"
    (finding,) = [f for f in plan_of(more=more, target="4x24GB").findings if f.code == "target-too-small"]
    assert "no KV cache is left" in finding.message
    assert "serve.tensor_parallel_size = 2" in str(finding.hint)
    assert "1 x 48 GB" in str(finding.hint)
    (finding,) = [f for f in plan_of(more=more, target="1x32GB").findings if f.code == "target-too-small"]
    assert "serve.max_model_len = 6144" in str(finding.hint)


def test_legal_sizes_respect_what_engines_break() -> None:
    """26B-A4B can be shared by 1 or 4 cards, not by 2 (half an expert is no kernel's width); E4B's drafter by 4."""
    sizes = {}
    for size in ("31B", "26B-A4B", "E4B"):
        serving = plan_of(f"google/gemma-4-{size}-it{QAT}").serving
        assert serving is not None
        sizes[size] = serving.sizes
    assert sizes == {"31B": (1, 2, 4, 8), "26B-A4B": (1, 4), "E4B": (1, 2, 4)}


# For machines.


def test_json_is_plain_and_its_keys_are_fixed() -> None:
    """`--json` prints plain JSON whose keys, pinned here, other programs may rely on."""
    document = json.loads(json.dumps(plan_to_dict(plan_of(more="serve.max_model_len = 4096"))))
    assert document["schema"] == 1
    assert list(document) == [
        "schema", "name", "kind", "body", "drafter", "quantization", "calibration", "serve", "groups",
        "quantized_modules", "quantized_parameters", "kept_parameters", "dropped_tensors", "shards", "body_bytes",
        "drafter_bytes", "total_bytes", "findings", "serving", "bake",
    ]  # fmt: skip
    assert list(document["body"]) == [
        "model", "revision", "commit", "licence", "licence_link", "parameters", "weight_bytes", "date", "gated",
        "file_bytes",
    ]  # fmt: skip
    serving = document["serving"]
    assert list(serving) == [
        "tensor_parallel_sizes", "context_tokens", "kv", "weights", "cards", "target", "smallest", "releases",
        "command", "assumptions",
    ]  # fmt: skip
    assert list(serving["cards"][0]["drafting"]) == [
        "cards", "card", "card_bytes", "weights_bytes", "work_bytes", "kv_bytes", "kv_tokens", "context_tokens",
        "context_tokens_of_8",
    ]  # fmt: skip
    assert all(row["text"] and row["source"] for row in serving["assumptions"])
    assert list(document["groups"][0]) == ["name", "quantized", "modules", "parameters", "size_bytes", "reason"]
    assert document["total_bytes"] == document["body_bytes"] + document["drafter_bytes"]
    assert document["quantization"]["ignore"][0] == "lm_head"
    assert document["serve"]["max_model_len"] == 4096


@pytest.mark.parametrize("kind", ["moe", "per-layer", "unified"])
def test_planned_sizes_are_what_is_built(kind: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Every shard, the index and the drafter have the planned size, to the byte; test_build.py says so of the 31B."""
    rows = [{"messages": [{"role": "user", "content": f"How are you, number {n}?"}]} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    text = f"""
    edition = 1
    name = "tiny"
    body.model = "{tiny(kind) / "body"}"
    drafter.model = "{tiny(kind) / "drafter"}"
    calibration = {{ dataset = "rows.jsonl", num_samples = 2, max_seq_length = 16 }}
    fidelity = {{ num_samples = 1, max_seq_length = 16, accept = "random weights" }}
    serve.version = ">=0.24"
    """
    recipe = parse(text, tmp_path)
    plan, built = plan_recipe(recipe), build(recipe, tmp_path / "dist")
    assert built is not None
    written = {path.name: path.stat().st_size for path in built.folder.glob("*.safetensors*")}
    shards = {shard.file: shard.nbytes for shard in plan.layout.shards}
    assert written == {**shards, INDEX: plan.body_bytes - sum(shards.values())}
    assert plan.drafter_bytes == (built.folder / "assistant" / "model.safetensors").stat().st_size


def test_equal_inputs_give_equal_plans() -> None:
    """Planning is pure: twice the same inputs give twice the same plan."""
    assert plan_of(change=lambda source: source) == plan_of()
