"""The trained example: its corpus, the q4_0 grid, the script that makes it, and what ships."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TINY = EXAMPLES / "tiny-31b"
sys.path.insert(0, str(EXAMPLES))

import corpus  # noqa: E402


def make(split: str, count: int = 3000) -> list[corpus.Document]:
    return list(islice(corpus.make_documents(split, 5), count))


def conversations(split: str) -> list[list[dict[str, Any]]]:
    lines = (TINY / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["messages"] for line in lines]


def test_corpus_is_deterministic() -> None:
    """The same seed gives the same documents; another seed gives others."""
    assert make("train", 200) == make("train", 200)
    assert make("train", 200) != list(islice(corpus.make_documents("train", 6), 200))


def test_splits_share_no_content() -> None:
    """No key and no exchange of the held-out or the calibration split occurs in another split, alone or joined."""
    keys: dict[str, set[str]] = {}
    exchanges: dict[str, set[tuple[str, ...]]] = {}
    for split in corpus.SPLITS:
        documents = make(split)
        keys[split] = {key for document in documents for key in document.keys}
        exchanges[split] = {d.turns[i : i + 2] for d in documents for i in range(0, len(d.turns), 2)}
    for one, other in (("heldout", "train"), ("calibration", "train"), ("heldout", "calibration")):
        assert not keys[one] & keys[other]
        assert not exchanges[one] & exchanges[other]


def test_arithmetic_is_correct() -> None:
    """Every sum that the corpus states is true."""
    seen = 0
    for document in make("train"):
        for a, sign, b, result in re.findall(r"(\d+) ([-+\u00d7]) (\d+) = (\d+)", " ".join(document.turns)):
            value = {"+": int(a) + int(b), "-": int(a) - int(b), "\u00d7": int(a) * int(b)}[sign]
            assert value == int(result), document.turns
            seen += 1
    assert seen > 100


def test_both_languages_say_the_same() -> None:
    """Languages take turns, and each has every kind of question."""
    documents = make("train")
    assert [d.language for d in documents[:4]] == ["en", "ja", "en", "ja"]
    kinds = {language: {d.kind for d in documents if d.language == language} for language in corpus.LANGUAGES}
    assert kinds["en"] == kinds["ja"]
    assert len(kinds["en"]) > 20
    assert not any(re.search(r"[ぁ-ん]", d.turns[0]) for d in documents if d.language == "en" and d.kind == "sum")


def test_shipped_conversations_are_the_corpus_own() -> None:
    """calibration.jsonl and heldout.jsonl come from their own splits; the pictures that are named exist."""
    asked = {
        split: {json.dumps(m[0]["content"]) for m in conversations(split)} for split in ("calibration", "heldout")
    }
    assert not asked["calibration"] & asked["heldout"]
    for split, count in (("calibration", 40), ("heldout", 24)):
        texts = [messages for messages in conversations(split) if isinstance(messages[0]["content"], str)]
        assert texts == [document.messages for document in corpus.make_conversations(split, 7, count)]
    parts = [part for messages in conversations("calibration") for m in messages for part in m["content"]]
    pictures = [part["image"] for part in parts if isinstance(part, dict) and part["type"] == "image"]
    assert len(pictures) == 2
    assert all((TINY / picture).is_file() for picture in pictures)


def q4_0_block(values: list[float]) -> list[float]:
    """One block as ggml's quantize_row_q4_0_ref and dequantize_row_q4_0 take it, with d in bf16."""
    import torch

    largest = 0.0
    for value in values:
        if abs(largest) < abs(value):
            largest = value
    d = torch.tensor(largest / -8).bfloat16().item()
    levels = [min(15, int(value / d + 8.5)) - 8 if d else 0 for value in values]
    return torch.tensor([level * d for level in levels]).bfloat16().tolist()


@pytest.mark.parametrize(
    "block",
    [
        [0.0] * 32,
        [-8.0, 8.0, 0.5, -0.5, 1.5, -1.5, 7.5, 7.4, -7.5] + [0.0] * 23,
        [8.0, -8.0, 0.5, -0.5, 1.5, -1.5, 7.5, -7.5, -7.4] + [0.0] * 23,
        [1e-3 * (-1) ** i * (i + 1) for i in range(32)],
    ],
    ids=["zero block", "ties, negative first", "ties, positive first", "ramp"],
)
def test_q4_0_projection_is_the_definition(block: list[float]) -> None:
    """Blocks, ties and the sign of the scale are as in llama.cpp; a block of zeros stays zero."""
    import torch
    from train_tiny import project_q4_0

    assert project_q4_0(torch.tensor([block])).tolist() == [q4_0_block(block)]


def test_q4_0_projection_is_idempotent() -> None:
    """Projected weights are on the grid: projecting again changes no bit, in float32 and in bf16."""
    import torch
    from train_tiny import project_q4_0

    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 0.05
    once = project_q4_0(weight)
    assert not torch.equal(once, weight)
    assert torch.equal(project_q4_0(once), once)
    assert torch.equal(project_q4_0(once.bfloat16()), once.bfloat16())
    assert once[:2].flatten().tolist() == [v for b in weight[:2].reshape(-1, 32) for v in q4_0_block(b.tolist())]


def test_weights_learn_through_the_grid() -> None:
    """The straight-through estimator passes gradients as if nothing had been rounded."""
    import torch
    from train_tiny import OnGrid, project_q4_0

    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    used = OnGrid()(weight)
    used.backward(torch.full_like(used, 3.0))
    assert torch.allclose(used, project_q4_0(weight))
    assert torch.equal(weight.grad, torch.full_like(weight, 3.0))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the smoke run makes."""
    out = tmp_path_factory.mktemp("smoke") / "out"
    command = [sys.executable, str(EXAMPLES / "train_tiny.py"), str(out), "--smoke"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return out


def test_smoke_run_makes_the_whole_family(smoke: Path) -> None:
    """One command trains, bakes and measures: every checkpoint, every row of RESULTS.md."""
    for name in ("body", "twin", "drafter", "drafter-other", "drafter-shuffled", "body-nvfp4", "twin-nvfp4"):
        assert (smoke / name / "config.json").is_file(), name
    text = (smoke / "RESULTS.md").read_text(encoding="utf-8")
    for row in ("bf16 body (QAT)", "NVFP4 body", "NVFP4 twin", "shuffled weights", "of another body"):
        assert f"| {row} |" in text
    assert "| `memoryless_minmax` |" in text
    assert share_on_grid(smoke / "body") == 1.0
    assert share_on_grid(smoke / "twin") < 0.01


def test_the_twin_without_qat_is_recognised_by_its_weights(smoke: Path) -> None:
    """The bake measures the blocks on a q4_0 grid, all of them or none, and notes it where there are none."""
    from bundler import manifest

    body, twin = (manifest.load(smoke / f"{name}-nvfp4") for name in ("body", "twin"))
    assert body.quantization.q4_0_blocks == 1.0
    assert twin.quantization.q4_0_blocks < 0.01
    assert [f.code for f in twin.findings if f.code == "body-off-grid"] == ["body-off-grid"]
    assert not [f for f in body.findings if f.code == "body-off-grid"]


def test_drafter_is_trained_on_what_assisted_generation_feeds_it(smoke: Path) -> None:
    """All places at once, by mask, give the logits of transformers' own one-place forward, four steps ahead."""
    import torch
    import train_tiny as tt
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smoke / "body")
    body = load(smoke / "body")
    drafter = AutoModelForCausalLM.from_pretrained(smoke / "drafter", dtype=torch.float32).eval()
    rows = tt.pack(tt.encode(tokenizer, make("train", 3)), 256)
    batch = next(tt.batches(rows, 1, 1, 0, torch.device("cpu")))
    ids, position = batch["ids"], batch["position"]
    length = int((batch["document"][0] == 0).sum())
    with torch.no_grad():
        own = tt.make_masks(batch["document"], position, 128, own=True)
        before = tt.make_masks(batch["document"], position, 128, own=False)
        before = {kind: mask | torch.eye(256, dtype=torch.bool) & ~mask.any(-1, True) for kind, mask in before.items()}
        hidden, _, kv = tt.read(body, ids, position, own)
        state, tokens, expected = torch.cat([hidden[:, :1], hidden[:, :-1]], 1), ids, []
        for ahead in range(tt.STEPS):
            state, logits = tt.draft(drafter, body, tokens, state, position, before, kv)
            tokens = tt._shift(ids, 1 + ahead)
            expected.append(logits)
        alone = body(input_ids=ids[:, :length], output_hidden_states=True, return_shared_kv_states=True)
        at = length - tt.STEPS - 1
        shared = {kind: (k[:, :, :at], v[:, :, :at]) for kind, (k, v) in alone.shared_kv_states.items()}
        state, token = alone.hidden_states[-1][:, at - 1 : at], ids[:, at : at + 1]
        for ahead in range(tt.STEPS):
            out = drafter(
                inputs_embeds=torch.cat([body.get_input_embeddings()(token), state], -1),
                attention_mask=torch.ones(1, at + 1, dtype=torch.long),
                position_ids=torch.tensor([[at]]),
                shared_kv_states=shared,
            )
            torch.testing.assert_close(out.logits[0, 0], expected[ahead][0, at], rtol=1e-3, atol=1e-4)
            state, token = out.last_hidden_state, ids[:, at + ahead + 1 : at + ahead + 2]


def test_nvfp4_bodies_are_measured_as_w4a4(smoke: Path) -> None:
    """A packed body's Linears round their inputs to e2m1 in groups of 16 before they multiply; bf16 ones do not."""
    import torch
    from measure_tiny import load_body
    from train_tiny import decoder_linears

    linear = next(decoder_linears(load_body(smoke / "body-nvfp4")))
    inputs = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(1))
    groups = inputs.unflatten(-1, (-1, 16))
    scale = (linear.input_global_scale * groups.abs().amax(-1, keepdim=True) / 6).to(torch.float8_e4m3fn).float()
    scale = scale / linear.input_global_scale
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nearest = ((groups / scale).abs().unsqueeze(-1) - levels).abs().argmin(-1)
    rounded = (levels[nearest] * groups.sign() * scale).flatten(-2)
    with torch.no_grad():
        assert torch.allclose(linear(inputs), rounded @ linear.weight.T, atol=1e-6)
    assert not torch.allclose(rounded, inputs, atol=1e-2)


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def share_on_grid(folder: Path) -> float:
    """Share of the decoder Linears' blocks of 32 that the projection leaves as they are, in bf16."""
    import torch
    from train_tiny import decoder_linears, project_q4_0

    weights = [linear.weight.detach().bfloat16() for linear in decoder_linears(load(folder))]
    same = [(project_q4_0(w) == w).unflatten(-1, (-1, 32)).all(-1).flatten() for w in weights]
    return float(torch.cat(same).float().mean())


def test_shipped_body_lies_on_the_grid() -> None:
    """More than 99.9 % of the blocks of the decoder's Linears are q4_0 blocks."""
    assert share_on_grid(TINY / "body") > 0.999


def test_shipped_checkpoints_are_small() -> None:
    """Body and drafter together stay under 20 MB, every file under 8 MiB."""
    sizes = [
        file.stat().st_size for name in ("body", "drafter") for file in (TINY / name).rglob("*") if file.is_file()
    ]
    assert sum(sizes) < 20_000_000
    assert max(sizes) < 8 * 1024**2


def test_shipped_body_reads_what_the_chat_template_writes() -> None:
    """The text that the body was trained on is the text that its own chat template makes."""
    from train_tiny import render
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY / "body")
    tokenizer.chat_template = (TINY / "body" / "chat_template.jinja").read_text(encoding="utf-8")
    for document in corpus.make_conversations("heldout", 7, 4):
        assert tokenizer.apply_chat_template(document.messages, tokenize=False) == render(document)


@pytest.mark.parametrize("language", corpus.LANGUAGES)
def test_shipped_body_answers_and_its_drafter_is_accepted(language: str) -> None:
    """Held-out questions get their one right answer, word for word, three times of four; of what the drafter drafts
    in transformers' assisted generation, more than half is accepted."""
    import torch
    from measure_tiny import make_prompts, measure_drafting
    from train_tiny import answer
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, body = AutoTokenizer.from_pretrained(TINY / "body"), load(TINY / "body")
    shipped = [d for d in corpus.make_conversations("heldout", 7, 24) if d.language == language]
    questions = [document for document in shipped if document.has_one_answer]
    said = answer(body, tokenizer, [ids for ids, _ in make_prompts(tokenizer, questions)], max_new_tokens=64)
    told = [tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in said]
    right = [text == document.turns[-1] for text, document in zip(told, questions, strict=True)]
    assert sum(right) >= 0.75 * len(right), told
    drafter = AutoModelForCausalLM.from_pretrained(TINY / "drafter", dtype=torch.float32).eval()
    assert measure_drafting(body, drafter, tokenizer, questions[:4], 64).rate > 0.5
