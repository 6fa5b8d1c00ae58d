# ruff: noqa: RUF001  (the card is typeset: it has dashes and multiplication signs)
"""The card: what a reader of a bundle finds, where every figure comes from, and what never gets in."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bundler import recipe as recipes
from bundler.card import Parts, load_sections, render, render_bundle, render_recipe, write_bundle
from bundler.card_checks import check_card, check_recipe
from bundler.card_tables import kept
from bundler.engines import load_facts
from bundler.errors import RecipeError, VerificationError
from bundler.findings import Severity, errors, warning
from bundler.front_matter import check_front_matter, hub_licences
from bundler.gemma4 import Kind, make_ignore
from bundler.manifest import (
    CalibrationEntry,
    FidelityEntry,
    FileEntry,
    LayerFidelity,
    Manifest,
    QuantizationEntry,
    SourceEntry,
    SourceFileEntry,
    compare,
    load,
    role_of,
)
from bundler.markdown import cell, code, prose
from bundler.measurements import load_measurements

RECIPES = Path(__file__).parents[1] / "recipes"
GOLDEN = Path(__file__).parent / "golden"
FACTS = load_facts()
MINIMAL = """edition = 1
name = "a-bundle"
[body]
model = "google/gemma-4-31B-it-qat-q4_0-unquantized"
[calibration]
dataset = "HuggingFaceH4/ultrachat_200k"
[drafter]
model = "google/gemma-4-31B-it-qat-q4_0-unquantized-assistant"
"""
CONFIG = {
    "model_type": "gemma4",
    "architectures": ["Gemma4ForConditionalGeneration"],
    "vision_config": {"hidden_size": 32},
    "text_config": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "attention_k_eq_v": True,
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": 1024,
    },
}
ASSISTANT = {
    "model_type": "gemma4_assistant",
    "architectures": ["Gemma4AssistantForCausalLM"],
    "text_config": {"num_hidden_layers": 4},
}
APACHE = {"license": "apache-2.0", "license_link": "https://ai.google.dev/gemma/docs/gemma_4_license"}


def parse(text: str = MINIMAL) -> recipes.Recipe:
    return recipes.parse(text, Path())


def sha(number: int) -> str:
    return f"{number:064x}"


def make_manifest(**changes: Any) -> Manifest:
    """A manifest as a build of MINIMAL would leave it, small numbers in place of the real ones."""
    body = [SourceFileEntry(path="config.json", size_bytes=3000, sha256=sha(1))]
    body += [SourceFileEntry(path="tokenizer.json", size_bytes=32_000_000, sha256=sha(2))]
    for n in (1, 2):
        path = f"model-0000{n}-of-00002.safetensors"
        body.append(SourceFileEntry(path=path, size_bytes=3 * 10**10, sha256=sha(10 + n)))
    drafter = [SourceFileEntry(path="config.json", size_bytes=2000, sha256=sha(4))]
    drafter += [SourceFileEntry(path="model.safetensors", size_bytes=939_042_560, sha256=sha(5))]
    files = [("LICENSE", 11_358, sha(6)), ("README.md", 1, sha(99)), ("assistant/config.json", 2000, sha(4))]
    files += [("assistant/model.safetensors", 939_042_560, sha(5)), ("config.json", 4000, sha(7))]
    files += [
        ("model-00001-of-00001.safetensors", 20_400_000_000, sha(8)),
        ("model.safetensors.index.json", 9, sha(9)),
    ]
    files += [("recipe.toml", 300, sha(98)), ("tokenizer.json", 32_000_000, sha(2))]
    calibration = CalibrationEntry(
        dataset="HuggingFaceH4/ultrachat_200k", config=None, split="train_sft", commit="c" * 40, sha256=None,
        num_samples=256, max_seq_length=2048, seed=42, num_tokens=301_234,
    )  # fmt: skip
    values: dict[str, Any] = {
        "name": "a-bundle",
        "tool": {"bundler": "0.1.0", "llmcompressor": "0.14.0.1"},
        "recipe_sha256": sha(98),
        "body": SourceEntry(
            model="google/gemma-4-31B-it-qat-q4_0-unquantized", revision=None, commit="a" * 40,
            card={**APACHE, "pipeline_tag": "image-text-to-text", "base_model": "google/gemma-4-31B-it"},
            files=tuple(body),
        ),
        "drafter": SourceEntry(
            model="google/gemma-4-31B-it-qat-q4_0-unquantized-assistant", revision=None, commit="b" * 40,
            card=APACHE, files=tuple(drafter),
        ),
        "quantization": QuantizationEntry(
            scheme="NVFP4", format="nvfp4-pack-quantized", ignore=("lm_head",),
            weight_observer="memoryless_minmax", input_observer="static_minmax", calibration=calibration,
            compute={"device": "cpu", "dtype": "bfloat16", "attention": "eager", "batch_size": 1},
            quantized_modules=410, quantized_parameters=29_000_000_000, kept_parameters=2_000_000_000,
            dropped_tensors=(), q4_0_blocks=0.998,
            fidelity=FidelityEntry(
                num_samples=8, num_tokens=3712, kl_divergence=0.0412, top1_agreement=0.9377, perplexity=6.21,
                perplexity_ratio=1.034,
                input_range=1.02, input_range_module="model.language_model.layers.1.self_attn.o_proj", layers=(
                    LayerFidelity(layer=0, sqnr_db=17.25, module="mlp.down_proj"),
                    LayerFidelity(layer=1, sqnr_db=15.5, module="self_attn.o_proj"),
                    LayerFidelity(layer=2, sqnr_db=None, module=None),
                ),
            ),
        ),
        "findings": (warning("config-converted", "config.json", "was re-saved in the new schema; converted back"),),
        "files": tuple(
            FileEntry(path=path, size_bytes=size, sha256=digest, role=role_of(path)) for path, size, digest in files
        ),
    }  # fmt: skip
    return Manifest(**{**values, **changes})


PARTS = Parts(body_config=CONFIG, drafter_config=ASSISTANT)


@functools.cache
def preview() -> str:
    return render_recipe(recipes.load(RECIPES / "31b-abliterated.toml"))


@functools.cache
def baked() -> str:
    text = MINIMAL + '[card]\nlanguages = ["en"]\n[publish]\nrepo_id = "org/a-bundle"\n'
    return render(parse(text), make_manifest(), (), FACTS, parts=PARTS, sections=["## Mine\n\nMy own words."])


def front_matter(card: str) -> dict[str, Any]:
    matter = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(matter, dict)
    return matter


# ---- whole cards ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "make"), [("31b-abliterated", preview), ("baked", baked)])
def test_the_card_is_the_golden_one(name: str, make: Any) -> None:
    """A card changes only on purpose: `python tests/test_card.py` writes the golden ones again."""
    assert make() == (GOLDEN / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_renders_a_card_without_a_fault(path: Path) -> None:
    """A preview needs nothing but the recipe and what lies beside it."""
    recipe = recipes.load(path)
    text = render_recipe(recipe)
    assert errors(check_recipe(recipe)) == []
    assert not re.search(r"\bNone\b(?!\. vLLM)|Undefined|\{\{|\{%", text)


SEED = {
    "one repo, speculative decoding included": r"in one repo",
    "2.9x English and 2.4x Japanese": r"2\.9× as fast in English.*2\.4× as fast in Japanese",
    "106 and 86 tok/s against 36": r"36\.4 → 106\.1 tok/s.*36\.4 → 85\.7 tok/s",
    "baseline 36-37 in both languages": r"both languages ran at 36 to 37 tok/s",
    "box": r"4 × RTX PRO 2000 Blackwell 16 GB",
    "practical on four entry-level cards": r"practical on four entry-level cards",
    "body size": r"20\.4 GB",
    "drafter size": r"0\.94 GB",
    "drafter class and layers": r"Gemma4AssistantForCausalLM, 4 layers that read the body's hidden states",
    "drafter bf16": r"Drafter, bf16",
    "method": r'`"method":"mtp"`, which vLLM turns into its gemma4_mtp',
    "four speculative tokens": r'"num_speculative_tokens":4',
    "four GPUs recommended, two leave no KV": r"2 GPUs of 16 GB with the drafter \| \*\*no usable KV\*\*",
    "vLLM from 0.21": r"Engine \| vLLM `>=0\.21`",
    "compressed-tensors is detected": r"compressed-tensors format from `config\.json`",
    "measured on 0.21.0": r"vLLM 0\.21\.0",
    "MTP is a separate checkpoint here": r"not a head inside the main checkpoint, as it is in Qwen3\.6",
    "second download and path spared": r"normally means a second download and a second path",
    "drafter is a local path": r"drafter is a local path.*no second download and no Hub look-up at serve time",
    "serve line, bash": r"""--speculative-config '\{"method":"mtp","model":"'"\$D"'/assistant",""",
    "serve line, PowerShell": r"'--speculative-config\.model' \"\$D/assistant\"",
    "one download": r"D=\$\(hf download \S+ --quiet\)",
    "+64 % from TP=2 to 4": r"TP=2 → TP=4\), no drafter \| \*\*\+64 %\*\*",
    "KV tokens": r"bf16 \| \*\*17,385 tokens\*\*",
    "FP8 KV for more": r"`--kv-cache-dtype fp8` fits more tokens",
    "token budget": r"`--max-num-batched-tokens` must be at least 2496.*'\{\"image\":0\}'",
    "token budget in the line": r"--max-num-batched-tokens 4096",
    "no P2P": r"`NCCL_P2P_DISABLE=1` and `--disable-custom-all-reduce`",
    "hangs without": r"tensor parallelism hangs unless both",
    "drop both with NVLink": r"drop both where there is NVLink or P2P",
    "CUDA graphs on": r"Keep CUDA graphs on",
    "quantization inheritance": r"Only drafting without a `model` inherits the body's quantization",
    "range of multipliers": r"Japanese 2\.1–2\.4×, English 2\.5–2\.9×",
    "why a dense body gains": r"leaves four GPUs with arithmetic to spare",
    "the MoE sibling": r"26B-A4B \(MoE\) with its drafter \| \*\*1\.2–1\.5×\*\*",
    "EAGLE-3, Japanese": r"EAGLE-3, trained on the plain 31B with English data \| Japanese \| 1–3 % \| Slower than no",
    "EAGLE-3, English": r"EAGLE-3, trained on the plain 31B with English data \| English \| 16 %",
    "why": r"EAGLE-3 imitates the distribution.*starts from the hidden states of the very body",
    "the assistant despite plain training": r"trained beside the plain 31B too",
    "traffic that is not English": r"only one that pays for Japanese.*other languages",
    "1 stream, Japanese": r"\| Japanese \| 36\.4 \| 85\.7 \| 2\.35× \| 41–51 % \| \[\[1\]\]",
    "1 stream, English": r"\| English \| 36\.4 \| 106\.1 \| 2\.91× \| 55–71 % \| \[\[1\]\]",
    "4 streams, Japanese": r"\| 4 \| Japanese \| 139\.5 \| 211\.6 \| 1\.52× \| ~39 % \|",
    "4 streams, English": r"\| 4 \| English \| 139\.5 \| 251\.9 \| 1\.81× \| ~52 % \|",
    "8 streams, Japanese": r"\| 8 \| Japanese \| 252\.9 \| 320\.1 \| 1\.27× \| ~41 % \|",
    "8 streams, English": r"\| 8 \| English \| 252\.9 \| 387\.2 \| 1\.53× \| ~53 % \|",
    "conditions": r"256 output tokens a request; temperature 0; diverse prompts, prefix cache busted; mean of 3",
    "baseline with Japanese prompts": r"baseline was measured with Japanese prompts",
    "decay with batching": r"2\.4× → 1\.5× → 1\.3×",
    "KV limits concurrency": r"KV memory ends before a crossover",
    "never better switched off": r"no setting on this box in which it was better switched off",
    "sibling breaks even at 8": r"at 8 streams drafting only breaks even",
    "non-QAT collapsed": r"plain 12B fell apart",
    "QAT is clean": r"Fluent Japanese, correct multi-step logic, valid haiku, no repetition and no mojibake",
    "start from QAT": r"start from a QAT checkpoint",
    "calibration": r"ultrachat_200k\)[^\n]*\n\| Samples \| 256 × at most 2,048 tokens",
    "several GPUs corrupt": r"corrupts its activations silently on boxes without peer-to-peer",
    "multimodal processor, CPU": r"one device, CPU or one GPU, and through the multimodal processor",
    "abliterated": r"Abliterated: refusal behaviour was removed upstream",
    "responsible and lawful": r"You are responsible for what you deploy; use it lawfully",
    "native on Blackwell": r"SM120 \(RTX PRO Blackwell, RTX 50\) \| vLLM \| \*\*native",
    "and it does run on older cards": r"Ampere, Ada, Hopper\) \| vLLM \| \*\*weight-only\.\*\* It runs",
    "the drafter is on the body's GPUs": r"runs in bf16 on the body's GPUs",
    "drafter unmodified, with its card": r"unchanged, with its own card as `assistant/README\.md`",
    "who reported it": r"reported by the publisher of the earlier bundle",
}
"""What the published card of this bundle told its readers, point by point; right where it erred."""


@pytest.mark.parametrize("point", SEED)
def test_a_reader_finds_every_point_of_the_published_card(point: str) -> None:
    """Whoever knew the earlier card of this bundle finds all of it here."""
    assert re.search(SEED[point], preview(), re.DOTALL), point


def test_what_the_published_card_got_wrong_is_not_repeated() -> None:
    """It runs on Ampere and Hopper in vLLM, and the licence is what the sources' cards say."""
    card = preview()
    assert not re.search(r"(?i)will not run|required.{0,20}blackwell|blackwell.{0,20}required|gemma terms", card)
    assert "license" not in front_matter(card)


def test_reported_figures_are_not_claimed_for_this_bundle() -> None:
    """A figure that somebody else reported for another bake says so at the headline and over the tables."""
    card = preview()
    assert "not measured with the files of this repository" in card
    assert "reported by the publisher of another bake" in card


# ---- front matter --------------------------------------------------------------------------------------------------


def test_front_matter_follows_the_body() -> None:
    """Licence and task are the body's own; base_model is its direct parent alone, as a string."""
    assert front_matter(baked()) == {
        "license": "apache-2.0",
        "license_link": "https://ai.google.dev/gemma/docs/gemma_4_license",
        "language": ["en"],
        "base_model": "google/gemma-4-31B-it-qat-q4_0-unquantized",
        "base_model_relation": "quantized",
        "library_name": "vllm",
        "pipeline_tag": "image-text-to-text",
        "tags": ["gemma4", "nvfp4", "compressed-tensors", "mtp", "speculative-decoding"],
    }
    assert check_front_matter(baked()) == []


def test_a_licence_that_is_not_known_is_left_out_and_noted() -> None:
    """Before a build the card names no licence, and a note says when it will."""
    recipe = recipes.load(RECIPES / "31b-abliterated.toml")
    assert [finding.code for finding in check_recipe(recipe)] == ["card-licence-open"]
    assert "own card says |" not in preview()


@pytest.mark.parametrize(
    ("matter", "code", "severity"),
    [
        ("license: not-a-licence", "card-licence-unlisted", Severity.ERROR),
        ("license: [mit]", "card-licence-unlisted", Severity.ERROR),
        ("license: mit\ndate: 2026-99-99", "card-not-yaml", Severity.ERROR),
        ("license: mit\na: &a [x]\nb: *a", "card-not-yaml", Severity.ERROR),
        ("license: other", "card-licence-unnamed", Severity.ERROR),
        ("license: mit\nbase_model: null", "card-base-model", Severity.ERROR),
        ("license: mit\nbase_model: [null]", "card-base-model", Severity.ERROR),
        ("license: mit\nbase_model: [a/b, c/d]", "card-base-model-list", Severity.WARNING),
        ("license: mit\ntags: [a", "card-not-yaml", Severity.ERROR),
        ("- just\n- a list", "card-not-yaml", Severity.ERROR),
    ],
)
def test_front_matter_that_the_hub_refuses_or_misreads_is_found(matter: str, code: str, severity: Severity) -> None:
    """A card is checked before the first byte is sent."""
    assert [(f.code, f.severity) for f in check_front_matter(f"---\n{matter}\n---\n# x\n")] == [(code, severity)]


def test_a_card_without_front_matter_is_found() -> None:
    """The Hub would show a warning banner over it."""
    assert [finding.code for finding in check_front_matter("# x\n")] == ["card-not-yaml"]


def test_the_licences_of_the_family_are_on_the_list() -> None:
    """The list of the Hub's identifiers is whole enough for the sources there are."""
    assert {"apache-2.0", "gemma", "mit", "other"} <= hub_licences()


@pytest.mark.parametrize("value", ["a: b", "'quoted'", "- dash", "multi\nline", "#hash", "\N{SNOWMAN}", "yes"])
def test_front_matter_survives_any_value(value: str) -> None:
    """Whatever a source's card holds, the YAML reads back the same."""
    card = {**APACHE, "license_name": value}
    text = render(parse(), None, (), FACTS, parts=Parts(body_card=card))
    assert front_matter(text)["license_name"] == value


def test_an_abliterated_body_needs_a_warning() -> None:
    """A body without refusals is not published without a word about it."""
    text = MINIMAL.replace('google/gemma-4-31B-it-qat-q4_0-unquantized"', 'huihui-ai/gemma-4-31B-abliterated"')
    assert "card-warning-missing" in {finding.code for finding in check_recipe(parse(text))}
    warned = parse(text + '[card]\nwarnings = ["Abliterated."]\n')
    assert "card-warning-missing" not in {finding.code for finding in check_recipe(warned)}
    assert "> [!WARNING]\n> Abliterated." in render_recipe(warned)
    tagged = Parts(body_card={"tags": ["uncensored"]})
    assert "card-warning-missing" in {finding.code for finding in check_recipe(parse(), tagged)}


# ---- nothing invented, nothing let in ------------------------------------------------------------------------------


def test_a_section_without_data_does_not_appear() -> None:
    """A minimal preview has no tables of measurements, hashes or versions, and no licence."""
    card = render_recipe(parse())
    assert not re.search(
        r"(?m)^#+ (Measured|Provenance|Sources|Tested)|SHA-256, as|\| Tool \||tok/s|reported by", card
    )
    assert "| As it was run |" not in card


def test_before_the_kind_is_known_no_fact_of_a_kind_is_shown() -> None:
    """A name that says nothing of the size selects only what holds for all; config.json decides when it is there."""
    text = MINIMAL.replace("gemma-4-31B-it-qat", "gemma-x-it-qat")
    assert "native" not in render_recipe(parse(text))
    assert "Gemma 4 31B dense" in render(parse(text), None, (), FACTS, parts=PARTS)


def test_kv_bytes_are_those_of_the_published_31b() -> None:
    """Keys and values of a token in bf16: sliding layers up to the window, full layers for the whole context."""
    layers = (["sliding_attention"] * 5 + ["full_attention"]) * 10
    config = {**CONFIG, "text_config": {**CONFIG["text_config"], "num_hidden_layers": 60, "layer_types": layers}}  # type: ignore[dict-item]
    card = render(parse(), None, (), FACTS, parts=Parts(body_config=config))
    assert "81,920 bytes a token in the full-attention layers; 819,200 in the sliding ones, for at most 1,024" in card


@pytest.mark.parametrize("kind", list(Kind))
def test_everything_that_stays_has_a_reason(kind: Kind) -> None:
    """No pattern of the ignore list is left without a word on why."""
    assert {why for what, _, why in kept(kind, ()) if what == "by the recipe"} == set()
    assert len(kept(kind, ())) >= 3
    assert {pattern for _, pattern, _ in kept(kind, ())} <= set(make_ignore(kind))


HOSTILE = "a|b <script>alert(1)</script> {{ 7 * 7 }} {% if %}\n# heading `tick"


def test_values_cannot_break_out_of_their_place() -> None:
    """Pipes, HTML, line breaks and template syntax of a value are text."""
    card = {**APACHE, "license": "other", "license_name": HOSTILE}
    recipe = parse()
    hostile = replace(recipe, card=replace(recipe.card, title=HOSTILE, summary=HOSTILE, warnings=(HOSTILE,)))
    text = render(hostile, None, (), FACTS, parts=Parts(body_card=card), sections=["## S\n\n{{ 7 * 7 }}"])
    body = text.split("---\n", 2)[2]
    assert "<script" not in body
    assert body.count("{{ 7 * 7 }}") == 5
    assert "\n# heading" not in body
    row = next(line for line in body.splitlines() if "other" not in line and "script" in line and line.startswith("|"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 3


@pytest.mark.parametrize("value", ["javascript:alert(1)", "https://a b", "x) [y](z", "https://a.b/(c)|d", "LICENSE"])
def test_a_link_of_a_source_stays_one_link(value: str) -> None:
    """What a source's card gives as the address of its terms is a link only if it is an address."""
    text = render(parse(), None, (), FACTS, parts=Parts(body_card={**APACHE, "license_link": value}))
    (row,) = [line for line in text.splitlines() if line.startswith("| Body, ")]
    assert len(re.findall(r"(?<!\\)\|", row)) == 3
    assert "javascript" not in row
    assert ("([terms](" in row) is value.endswith(("d", "LICENSE"))


@pytest.mark.parametrize(
    ("value", "as_cell", "as_code"),
    [
        ("a|b", r"a\|b", r"`a\|b`"),
        ("a\nb", "a b", "`a b`"),
        ("<b>&", "&lt;b&gt;&", "`<b>&`"),
        ("`x`", "`x`", "`` `x` ``"),
    ],
)
def test_markdown_values(value: str, as_cell: str, as_code: str) -> None:
    """A cell stays a cell, a code span a code span."""
    assert (cell(value), code(value)) == (as_cell, as_code)
    assert "\n" not in prose(value)


def test_tables_are_whole() -> None:
    """Every row of every table has as many cells as its header."""
    for card in (preview(), baked()):
        for block in re.findall(r"(?m)(?:^\|.*\|\n)+", card):
            widths = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
            assert len(widths) == 1, block


# ---- the publisher's own sections ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("No heading.", "card-section-heading"),
        ("## S\n\n| a | b |\n|---|---|\n| 1 | 2 |", "card-table-unsourced"),
        ("## S\n\na | b\n--- | ---\n1 | 2", "card-table-unsourced"),
        ("## S\n\n<table><tr><td>3</td></tr></table>", "card-table-unsourced"),
        ('## S\n\n`--speculative-config \'{"model":"org/name/assistant"}\'`', "card-drafter-id"),
        ('## S\n\n`--speculative-config \'{"quantization":"fp8"}\'`', "card-drafter-quantization"),
        ("## S\n\n`--override-generation-config '{\"top_k\":1}'`", "card-stop-tokens"),
    ],
)
def test_a_section_that_misleads_is_found(text: str, code: str) -> None:
    """Figures come from measurement files, and no snippet of a section breaks the engine."""
    recipe = parse(MINIMAL + '[card]\nsections = ["s.md"]\n[publish]\nrepo_id = "org/name"\n')
    assert code in {finding.code for finding in check_card(recipe, baked(), sections=[text])}


def test_a_good_section_is_not_found_fault_with() -> None:
    """Prose, lists, links and code are the publisher's own business."""
    recipe = parse(MINIMAL + '[card]\nsections = ["s.md"]\n[publish]\nrepo_id = "org/name"\n')
    text = "## S\n\nWords, a | pipe, https://huggingface.co/org/name/assistant.\n\n- a list\n\n---\n"
    assert check_card(recipe, baked(), sections=[text]) == []


def test_sections_are_read_in_order(tmp_path: Path) -> None:
    """Sections stand in the order of the recipe; one that is not there is an error of the recipe."""
    (tmp_path / "a.md").write_text("## A\n")
    (tmp_path / "b.md").write_text("## B\n")
    assert load_sections(tmp_path, [Path("b.md"), Path("a.md")]) == ("## B", "## A")
    with pytest.raises(RecipeError, match=r"c\.md"):
        load_sections(tmp_path, [Path("c.md")])


def test_a_cache_type_that_was_not_measured_is_found(tmp_path: Path) -> None:
    """An acceptance rate that was measured with another KV cache does not stand for this one."""
    (tmp_path / "m.json").write_bytes((RECIPES / "31b-abliterated" / "reported-vllm-0.21.0.json").read_bytes())
    text = MINIMAL + '[serve]\nkv_cache_dtype = "fp8"\n[card]\nmeasurements = ["m.json"]\n'
    found = {finding.code for finding in check_recipe(recipes.parse(text, tmp_path))}
    assert "card-kv-unmeasured" in found


def test_where_the_drafter_costs_the_card_says_so(tmp_path: Path) -> None:
    """A multiplier below one is shown, with the advice to serve without the drafter there."""
    common = {"streams": 8, "language": "en"}
    document = {
        "schema": 1, "basis": "measured", "source": "bundle measure", "body": "x", "engine": "vllm",
        "version": "0.32.0", "box": "1 x B200",
        "runs": [
            {**common, "drafter": None, "figures": {"output_throughput": 100}},
            {**common, "drafter": "assistant", "num_speculative_tokens": 4, "figures": {"output_throughput": 90}},
        ],
    }  # fmt: skip
    (tmp_path / "m.json").write_text(json.dumps(document))
    card = render(parse(), None, load_measurements([tmp_path / "m.json"]), FACTS)
    assert "| 8 | English | 100.0 | 90.0 | 0.90× |" in card
    assert "**Slower with the drafter:** English at 8 stream(s)." in card
    assert "reported by the publisher" not in card


# ---- the lines of the card work ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [preview, baked])
def test_the_bash_blocks_of_the_card_run(make: Any, tmp_path: Path) -> None:
    """What a reader pastes reaches hf and vLLM as it should: one JSON, a local drafter, the body alone without one."""
    log = tmp_path / "log"
    for name in ("hf", "vllm", "curl", "bundle"):
        stub = tmp_path / name
        lines = [f"#!{sys.executable}", "import json, sys", f"with open({str(log)!r}, 'a') as log:"]
        lines += [f"    print(json.dumps([{name!r}, *sys.argv[1:]]), file=log)"]
        lines += ["print('/the models/snapshot')"] if name == "hf" else []
        stub.write_text("\n".join(lines) + "\n")
        stub.chmod(0o755)
    blocks = re.findall(r"```bash\n(.*?)```", make(), re.DOTALL)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", "-euc", "\n".join(blocks)], check=True, env=env, stdout=subprocess.DEVNULL)
    calls = [json.loads(line) for line in log.read_text().splitlines()]
    (both, alone) = [call for call in calls if call[0] == "vllm"]
    assert both[1:3] == ["serve", "/the models/snapshot"]
    assert json.loads(both[both.index("--speculative-config") + 1]) == {
        "method": "mtp",
        "model": "/the models/snapshot/assistant",
        "num_speculative_tokens": 4,
    }
    assert "--speculative-config" not in alone
    (request,) = [call for call in calls if call[0] == "curl"]
    name = both[both.index("--served-model-name") + 1]
    assert json.loads(request[request.index("-d") + 1])["model"] == name


def test_a_pinned_engine_gets_its_remedy() -> None:
    """The card of a recipe for vLLM 0.26 prints the runner that works there, one for 0.27 the pin."""
    assert "VLLM_USE_V2_MODEL_RUNNER=1 vllm serve" in render_recipe(parse(MINIMAL + '[serve]\nversion = "==0.26.0"\n'))
    assert "only with `transformers<=5.14.1`" in render_recipe(parse(MINIMAL + '[serve]\nversion = "==0.27.*"\n'))


def test_rendering_is_repeatable() -> None:
    """The card's own entry in the manifest is not part of the card, so rendering it again changes nothing."""
    manifest = make_manifest()
    other = tuple(entry for entry in manifest.files if entry.role != "card")
    first, second = (render(parse(), m, (), FACTS, parts=PARTS) for m in (manifest, replace(manifest, files=other)))
    assert first == second


# ---- a real bundle -------------------------------------------------------------------------------------------------


def test_the_card_of_a_bundle_is_what_is_recorded_in_it(bundle: Path) -> None:
    """The README.md that a build wrote is what its manifest, configs and measurements render to, again and again."""
    text = render_bundle(bundle)
    assert (bundle / "README.md").read_text(encoding="utf-8") == text
    assert errors(check_front_matter(text)) == []
    manifest = load(bundle)
    for entry in manifest.files:
        if entry.role in ("body", "drafter", "licence"):
            assert f"{entry.sha256}  {entry.path}\n" in text


def test_a_card_that_is_written_again_leaves_the_bundle_whole(bundle_copy: Path) -> None:
    """`bundle card` puts the card's new hash into bundle.json, and nothing else changes."""
    (bundle_copy / "measurements").mkdir(exist_ok=True)
    before = load(bundle_copy)
    (bundle_copy / "README.md").write_text("stale", encoding="utf-8")
    write_bundle(bundle_copy, repo_id="org/elsewhere")
    text = (bundle_copy / "README.md").read_text(encoding="utf-8")
    assert "hf download org/elsewhere --quiet" in text
    after = load(bundle_copy)
    assert compare(after, bundle_copy) == []
    assert [entry for entry in after.files if entry.role != "card"] == [e for e in before.files if e.role != "card"]


def test_a_bundle_that_is_not_whole_has_no_card(bundle_copy: Path) -> None:
    """Without its recipe there is nothing to render from, and the error says what to do."""
    (bundle_copy / "recipe.toml").unlink()
    with pytest.raises(VerificationError, match=r"recipe\.toml"):
        render_bundle(bundle_copy)


if __name__ == "__main__":
    for golden, make in (("31b-abliterated", preview), ("baked", baked)):
        (GOLDEN / f"{golden}.md").write_text(make(), encoding="utf-8", newline="\n")
