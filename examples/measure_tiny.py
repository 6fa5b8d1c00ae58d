"""Measure the tiny family on held-out text and write RESULTS.md: what each body and each drafter is worth.

Everything runs in float32 on the CPU. NVFP4 bodies are baked by bundler itself and evaluated as W4A4: the weights are
unpacked, and every input of a packed Linear is rounded to the same format, as compressed-tensors' forward does.
"""

from __future__ import annotations

import json
import math
import platform
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from corpus import LANGUAGES, Document, make_conversations, make_documents
from torch import nn
from train_tiny import STEPS, answer, decoder_linears, encode

SEED = 77
OBSERVERS = (
    *("memoryless_minmax", "memoryless_mse", "imatrix_mse"),
    *("nvfp4_expanded_mse", "nvfp4_expanded_imatrix"),
)
_RECIPE = """edition = 1
name = "{name}"
[body]
model = "./{body}"
[quantization]
compute = "exact"
weight_observer = "{observer}"
[calibration]
dataset = "calibration.jsonl"
num_samples = {samples}
max_seq_length = 256
[fidelity]
dataset = "heldout.jsonl"
num_samples = {heldout}
accept = "baked to be measured"
[drafter]
model = "./drafter"
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Speech:
    """How well a body speaks one language."""

    perplexity: float
    """Per token of held-out documents, questions included."""
    reply_perplexity: float
    """Per token that the model itself writes."""
    right: float
    """Share of held-out questions answered word for word."""


@dataclass(kw_only=True, slots=True)
class Drafting:
    """What became of a drafter's tokens, in all rounds."""

    rounds: int = 0
    drafted: list[int] = field(default_factory=lambda: [0] * STEPS)
    accepted: list[int] = field(default_factory=lambda: [0] * STEPS)

    @property
    def rate(self) -> float:
        """Accepted of all drafted tokens."""
        return sum(self.accepted) / max(1, sum(self.drafted))

    @property
    def length(self) -> float:
        """Mean tokens a round yields: the accepted ones and the body's own."""
        return 1 + sum(self.accepted) / max(1, self.rounds)

    @property
    def by_position(self) -> list[float]:
        """Share of rounds in which the first, second, … draft was accepted."""
        return [count / max(1, self.rounds) for count in self.accepted]


def bake(out: Path, body: str, samples: int, heldout: int, observer: str = "memoryless_minmax") -> Path:
    """OUT/body as an NVFP4 bundle, baked by bundler from a recipe; returns its folder."""
    from bundler import recipe
    from bundler.build import build

    path = out / f"{body}.toml"
    text = _RECIPE.format(name=f"{body}-nvfp4", body=body, samples=samples, heldout=heldout, observer=observer)
    path.write_text(text, encoding="utf-8")
    shutil.rmtree(out / f"{body}-nvfp4", ignore_errors=True)
    return build(recipe.load(path), out).folder


def load_body(folder: Path) -> Any:
    """A body in float32; a packed one as W4A4."""
    from transformers import AutoModelForImageTextToText, CompressedTensorsConfig

    packed = (folder / "bundle.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers says that the file's own quantization_config is the one used
        options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if packed else {}
        body = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16, **options).float().eval()
    rounded = [rounds_inputs(linear) for linear in decoder_linears(body)]
    if any(rounded) != packed or all(rounded) != packed:
        raise RuntimeError(f"{folder}: {sum(rounded)} of {len(rounded)} Linears round their inputs")
    return body


@torch.no_grad()
def rounds_inputs(linear: nn.Linear) -> bool:
    """Whether a Linear quantizes what it is given before it multiplies."""
    inputs = torch.linspace(-1, 1, 2 * linear.in_features).view(2, -1)
    return not torch.equal(linear(inputs), nn.functional.linear(inputs, linear.weight))


@torch.no_grad()
def score(body: Any, encoded: Sequence[Any]) -> list[torch.Tensor]:
    """Log-probabilities of every next token, [tokens - 1, vocabulary] for each document."""
    return [
        body(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float().log_softmax(-1)
        for ids, _ in encoded
    ]


def measure_speech(
    body: Any, tokenizer: Any, documents: Sequence[Document], questions: Sequence[Document], max_new_tokens: int
) -> Speech:
    """Perplexity on documents and right answers to questions."""
    losses, replies = [], []
    encoded = encode(tokenizer, documents)
    for (ids, written), scores in zip(encoded, score(body, encoded), strict=True):
        loss = -scores.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        losses.append(loss)
        replies.append(loss[torch.tensor(written[1:])])
    asked = [document for document in questions if document.has_one_answer]
    prompts = [prompt for prompt, _ in make_prompts(tokenizer, asked)]
    said = answer(body, tokenizer, prompts, max_new_tokens=max_new_tokens)
    right = sum(
        tokenizer.decode(tokens, skip_special_tokens=True).strip() == document.turns[-1]
        for tokens, document in zip(said, asked, strict=True)
    )
    return Speech(
        perplexity=math.exp(torch.cat(losses).mean()),
        reply_perplexity=math.exp(torch.cat(replies).mean()),
        right=right / max(1, len(asked)),
    )


def compare(source: Any, packed: Any, tokenizer: Any, documents: Sequence[Document]) -> tuple[float, float]:
    """Mean KL divergence (nats) from source to packed, and how often their likeliest tokens agree, per token."""
    encoded = encode(tokenizer, documents)
    divergence, agreement = [], []
    for p, q in zip(score(source, encoded), score(packed, encoded), strict=True):
        divergence.append((p.exp() * (p - q)).sum(-1))
        agreement.append((p.argmax(-1) == q.argmax(-1)).float())
    return torch.cat(divergence).mean().item(), torch.cat(agreement).mean().item()


def make_prompts(tokenizer: Any, questions: Sequence[Document]) -> list[tuple[list[int], Document]]:
    """The token ids of each question up to where the model begins to write."""
    return [
        (ids[: written.index(True)], question)
        for question, (ids, written) in zip(questions, encode(tokenizer, questions), strict=True)
    ]


def measure_drafting(
    body: Any, drafter: Any, tokenizer: Any, questions: Sequence[Document], max_new_tokens: int
) -> Drafting:
    """transformers' assisted generation, greedy: each round's drafts against the text that came out.

    The text must be the one that the body writes alone.
    """
    stops = [1, tokenizer.convert_tokens_to_ids("<turn|>")]
    drafter.generation_config.num_assistant_tokens = STEPS
    drafter.generation_config.num_assistant_tokens_schedule = "constant"
    found = Drafting()
    for prompt, _ in make_prompts(tokenizer, questions):
        options = {
            **{"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.long)},
            **{"do_sample": False, "max_new_tokens": max_new_tokens, "eos_token_id": stops, "pad_token_id": 0},
        }
        with _watch_rounds() as rounds:
            text = body.generate(**options, assistant_model=drafter)[0].tolist()
        if text != body.generate(**options)[0].tolist():
            raise RuntimeError("the drafter changed the text")
        for known, drafts in rounds:
            found.rounds += 1
            same = True
            for i, token in enumerate(drafts):
                same = same and text[known + i : known + i + 1] == [token]
                found.drafted[i] += 1
                found.accepted[i] += same
    return found


@contextmanager
def _watch_rounds() -> Iterator[list[tuple[int, list[int]]]]:
    """Note every round of drafting: how many tokens were known, and what was drafted."""
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

    rounds: list[tuple[int, list[int]]] = []
    get_candidates = Generator.get_candidates

    def watched(self: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
        candidates, logits = get_candidates(self, input_ids, *args, **kwargs)
        known = input_ids.shape[1]
        if candidates.shape[1] > known:
            rounds.append((known, candidates[0, known:].tolist()))
        return candidates, logits

    Generator.get_candidates = watched
    try:
        yield rounds
    finally:
        Generator.get_candidates = get_candidates


def measure(out: Path, *, few: bool = False) -> None:
    """Bake, measure every pair, and write OUT/RESULTS.md."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_float32_matmul_precision("highest")
    tokenizer = AutoTokenizer.from_pretrained(out / "body")
    documents = 2 if few else 400
    texts = list(islice(make_documents("heldout", SEED), documents))
    questions = make_conversations("heldout", SEED, 2 if few else 400)
    prompts = make_conversations("heldout", SEED + 1, 2 if few else 88)
    samples, length = (2, 4) if few else (42, 120)
    folders = {"body": out / "body", "twin": out / "twin"}
    folders |= {f"{name}-nvfp4": bake(out, name, samples, 2 if few else 24) for name in ("body", "twin")}
    bodies = {name: load_body(folder) for name, folder in folders.items()}
    drafters = {
        name: AutoModelForCausalLM.from_pretrained(out / name, dtype=torch.float32).eval()
        for name in ("drafter", "drafter-shuffled", "drafter-other")
    }

    def in_language(chosen: Sequence[Document], language: str) -> list[Document]:
        return [document for document in chosen if document.language == language]

    speech = {
        (name, language): measure_speech(
            body, tokenizer, in_language(texts, language), in_language(questions, language), length
        )
        for name, body in bodies.items()
        for language in LANGUAGES
    }
    fidelity = {name: compare(bodies[name], bodies[f"{name}-nvfp4"], tokenizer, texts) for name in ("body", "twin")}
    pairs = [(name, "drafter") for name in bodies] + [
        (name, drafter) for drafter in ("drafter-shuffled", "drafter-other") for name in ("body", "body-nvfp4")
    ]
    pairs = pairs[::2] if few else pairs
    drafting = {
        (*pair, language): measure_drafting(
            bodies[pair[0]], drafters[pair[1]], tokenizer, in_language(prompts, language), length
        )
        for pair in pairs
        for language in LANGUAGES
    }
    samples_said = _say(bodies, tokenizer, prompts[: 2 if few else 24], length)
    counts = {"documents": len(texts), "questions": len(questions), "prompts": len(prompts), "calibration": samples}
    text = render_results(out, speech, fidelity, drafting, samples_said, counts)
    (out / "RESULTS.md").write_text(text, encoding="utf-8")
    print(text)


def measure_observers(out: Path, *, few: bool = False) -> None:
    """Bake OUT/body with every weight observer, and add to OUT/RESULTS.md what the gate measures of each."""
    from bundler import manifest

    text = _OBSERVERS
    for observer in OBSERVERS[:1] if few else OBSERVERS:
        folder = bake(out, "body", 2 if few else 42, 2 if few else 24, observer)
        found = manifest.load(folder).quantization.fidelity
        figures = f"{found.kl_divergence} | {found.top1_agreement:.2%} | {found.perplexity_ratio} | "
        text += f"| `{observer}` | {figures}{found.worst(1)[0].sqnr_db} |\n"
    results = out / "RESULTS.md"
    before, _, after = results.read_text(encoding="utf-8").partition(_HOW)
    results.write_text(before.partition(_OBSERVERS)[0] + text + _HOW + after, encoding="utf-8")


def _say(
    bodies: dict[str, Any], tokenizer: Any, questions: Sequence[Document], max_new_tokens: int
) -> list[tuple[str, str, str]]:
    prompts = [prompt for prompt, _ in make_prompts(tokenizer, questions)]
    said = [
        [
            tokenizer.decode(tokens, skip_special_tokens=True).strip()
            for tokens in answer(b, tokenizer, prompts, max_new_tokens=max_new_tokens)
        ]
        for b in (bodies["body"], bodies["body-nvfp4"])
    ]
    return [(question.turns[0], *both) for question, *both in zip(questions, *said, strict=True)]


_NAMES = {
    **{
        "body": "bf16 body (QAT)",
        "body-nvfp4": "NVFP4 body",
        "twin": "bf16 twin (no QAT)",
        "twin-nvfp4": "NVFP4 twin",
    },
    **{"drafter": "its drafter", "drafter-shuffled": "shuffled weights", "drafter-other": "of another body"},
}
_INTRODUCTION = """# What the tiny family is worth

Written by `python examples/train_tiny.py OUT`, from text that was held out: contents and wordings that were neither
trained on nor calibrated with ({documents} documents, {questions} questions, {prompts} prompts to draft for; half of
each in English, half in Japanese). Everything is float32 and greedy on a CPU. NVFP4 is W4A4: weights unpacked, inputs
of every packed Linear rounded. The NVFP4 bodies were baked by bundler from {calibration} calibration conversations.

## Speech
Perplexity a token: of whole documents, and of what the model itself writes. Right: questions with one right answer
that got it, word for word.

| body | en: documents | en: replies | en: right | ja: documents | ja: replies | ja: right |
|---|---|---|---|---|---|---|
"""
_DRAFTING = """
## Drafting
transformers' assisted generation, {steps} drafts a round. Rate: accepted of all drafted tokens. Length: tokens a round
yields, the body's own included. By position: share of rounds whose first, second, … draft was accepted (a round drafts
less when it reaches a stop token).

| body | drafter | language | rate | length | by position | rounds |
|---|---|---|---|---|---|---|
"""
_OBSERVERS = """
## Weight observers
What the gate of `bundle build` measures of the NVFP4 body, on the 24 conversations that ship, for each of
llm-compressor's observers that NVFP4 weights can have.

| `weight_observer` | KL divergence, nats a token | same likeliest token | perplexity ratio | noisiest layer, dB |
|---|---|---|---|---|
"""
_HOW = "\n## How\n"
_MADE = {"body and twin": "body", "drafter": "drafter", "other body": "other/body", "its drafter": "other/drafter"}
Table = dict[tuple[str, ...], Any]


def render_results(
    out: Path,
    speech: Table,
    fidelity: dict[str, tuple[float, float]],
    drafting: Table,
    said: Sequence[tuple[str, str, str]],
    counts: dict[str, int],
) -> str:
    """RESULTS.md."""
    text = _INTRODUCTION.format(**counts)
    for name in ("body", "body-nvfp4", "twin", "twin-nvfp4"):
        told = [speech[name, language] for language in LANGUAGES]
        cells = " | ".join(f"{s.perplexity:.3f} | {s.reply_perplexity:.4f} | {s.right:.1%}" for s in told)
        text += f"| {_NAMES[name]} | {cells} |\n"
    text += "\n## What NVFP4 costs, with QAT and without\n"
    text += "| body | KL divergence from its bf16, nats a token | same likeliest token | perplexity ratio en | ja |\n"
    text += "|---|---|---|---|---|\n"
    for name in ("body", "twin"):
        divergence, agreement = fidelity[name]
        ratios = [speech[f"{name}-nvfp4", lang].perplexity / speech[name, lang].perplexity for lang in LANGUAGES]
        cells = " | ".join(f"{ratio:.4f}" for ratio in ratios)
        text += f"| {_NAMES[f'{name}-nvfp4']} | {divergence:.5f} | {agreement:.2%} | {cells} |\n"
    text += f"\n{_judge_qat(fidelity)}\n" + _DRAFTING.format(steps=STEPS)
    for (body, drafter, language), found in drafting.items():
        positions = " · ".join(f"{share:.0%}" for share in found.by_position)
        row = f"{found.rate:.1%} | {found.length:.2f} | {positions} | {found.rounds}"
        text += f"| {_NAMES[body]} | {_NAMES[drafter]} | {language} | {row} |\n"
    text += "\n## What it says\nHeld-out questions, answered by the bf16 body and by the NVFP4 body.\n\n"
    for question, plainly, packed in said:
        text += f"- {question}\n  - bf16: {plainly}\n  - NVFP4: {'the same' if packed == plainly else packed}\n"
    return text + _render_how(out)


def _judge_qat(fidelity: dict[str, tuple[float, float]]) -> str:
    (with_qat, _), (without, _) = fidelity["body"], fidelity["twin"]
    if with_qat < 0.9 * without:
        return f"QAT against q4_0 helps NVFP4 here: the divergence is {without / with_qat:.2f} times smaller."
    if with_qat > 1.1 * without:
        return f"QAT against q4_0 does not help NVFP4 here: the divergence is {with_qat / without:.2f} times larger."
    return "QAT against q4_0 makes no difference to NVFP4 at this size: the divergences differ by less than 10 %."


def _render_how(out: Path) -> str:
    from bundler.quantize.environment import versions

    text = f"{_HOW}| what | seed | steps | rows x tokens a step | on | s | torch | transformers |\n"
    text += "|---|---|---|---|---|---|---|---|\n"
    for what, name in _MADE.items():
        made = json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        s = made["settings"]
        drafts = "drafter" in what
        steps = s["drafter_steps"] if drafts else f"{s['trunk_steps']} + {s['finish_steps']}"
        rows = s["drafter_rows" if drafts else "rows"]
        text += (
            f"| {what} | {s['seed']} | {steps} | {rows} x {s['row_tokens']} | {made['device']} | {made['seconds']} | "
        )
        text += f"{made['torch']} | {made['transformers']} |\n"
    tools = ", ".join(f"{name} {version}" for name, version in versions().items())
    return f"{text}\nMeasured on {platform.machine()}, Python {platform.python_version()}: {tools}.\n"
