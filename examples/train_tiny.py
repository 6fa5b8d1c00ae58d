"""Train the tiny family: a body that speaks English and Japanese, its twin without QAT, and drafters.

    python examples/train_tiny.py OUT            trains (minutes on one large GPU), bakes NVFP4, writes RESULTS.md
    python examples/train_tiny.py OUT --smoke    the same path in a minute on a CPU, for tests; it cannot speak

OUT/body is trained plainly, then with every decoder Linear held on the q4_0 grid (straight-through gradients).
OUT/twin is the same body, trained for as many steps without the grid. OUT/drafter reads OUT/body's KV and learns to
say its next four tokens. OUT/drafter-other was trained on another body, OUT/drafter-shuffled is OUT/drafter, shuffled.
What OUT has already is kept: a stopped run carries on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import shutil
import time
from collections import UserDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import make_tiny
import numpy as np
import torch
import transformers
from corpus import Document, make_conversations, make_documents
from torch import nn

BLOCK = 32
"""Weights along the input dimension that share one scale in q4_0."""
STEPS = 4
"""Tokens the drafter learns to say ahead."""
SPLIT_WORDS = re.compile(r"\n| ?[A-Za-z']+|\d|[ぁ-ゖ]+|[ァ-ヺー]+|[一-鿿々]+| ?[^\sA-Za-z0-9ぁ-ヺー一-鿿々]")
VOCABULARY = 3072
BODY = {
    **{"intermediate_size": 768, "num_attention_heads": 8, "num_key_value_heads": 4, "sliding_window": 128},
    "initializer_range": 0.02,
}
DRAFTER = {"hidden_size": 128, "intermediate_size": 384, "num_key_value_heads": 4, "sliding_window": 128}
HIDDEN = 256
NAME = "bundler-tiny-31b-it-qat-q4_0-unquantized"
PICTURES = (
    ("images/circle.png", "What is in the picture?", "A red circle on a white ground."),
    ("images/box.png", "絵には何がありますか。", "白い地に青い四角があります。"),
)
_CARD = """---
license: apache-2.0
library_name: transformers
pipeline_tag: {pipeline_tag}
language: [en, ja]
---
# {title}

{text}

The corpus is made by the script: simple sentences about a small world (examples/corpus.py, examples/world.toml). It
knows nothing else, and it has never seen a picture: the vision tower has random weights.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How much is done."""

    documents: int = 300_000
    trunk_steps: int = 1600
    """Steps before the body and its twin part."""
    finish_steps: int = 800
    """Steps of each after that; the learning rate falls to zero."""
    drafter_steps: int = 600
    prompts: int = 12_000
    """Questions whose greedy answers the drafter learns from."""
    answer_tokens: int = 120
    rows: int = 128
    """Rows in a batch."""
    drafter_rows: int = 128
    row_tokens: int = 256
    layers: int = 6
    seed: int = 1


OTHER = {"trunk_steps": 1000, "finish_steps": 400, "drafter_steps": 400, "rows": 32, "drafter_rows": 64}
"""At most how much is done for the other body; its seed is another, and it is trained without QAT."""
SMOKE = Settings(
    **{"documents": 200, "trunk_steps": 1, "finish_steps": 1, "drafter_steps": 1},
    **{"prompts": 4, "answer_tokens": 4, "rows": 1, "drafter_rows": 1, "row_tokens": 128},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Documents packed into rows of equal length; arrays [rows, tokens]."""

    ids: np.ndarray[Any, Any]
    document: np.ndarray[Any, Any]
    """Number of the document in its row; -1 where the row is empty."""
    position: np.ndarray[Any, Any]
    written: np.ndarray[Any, Any]
    """Whether the model writes this token: replies with their stop token, and prose."""


def project_q4_0(weight: torch.Tensor) -> torch.Tensor:
    """The nearest weights on llama.cpp's q4_0 grid, as they look in bf16; [out, in], in a multiple of 32.

    Per block of 32 inputs: d = (the value of largest magnitude, first of equals) / -8, q = min(15, floor(w/d + 8.5)),
    weight = d * (q - 8) (quantize_row_q4_0_ref in ggml-quants.c). d is rounded to bf16 rather than fp16, so that the
    largest value stays exact in bf16 and a second projection changes nothing.
    """
    blocks = weight.detach().float().unflatten(-1, (-1, BLOCK))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = (largest / -8).bfloat16().float()
    levels = torch.where(scale == 0, 0.0, blocks / torch.where(scale == 0, 1.0, scale))
    q = (levels + 8.5).floor().clamp(0, 15) - 8
    return (q * scale).bfloat16().float().flatten(-2).to(weight.dtype)


class OnGrid(nn.Module):
    """A parametrization: the weight is used on the q4_0 grid and learns as if it were not."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """The projected weight, with the gradient of the identity."""
        return weight + (project_q4_0(weight) - weight).detach()


def decoder_linears(body: Any) -> Iterator[nn.Linear]:
    """The Linears that NVFP4 packs: all of the decoder layers'."""
    return (module for module in body.model.language_model.layers.modules() if isinstance(module, nn.Linear))


def render(document: Document) -> str:
    """A document as the body reads it: through the chat template, or bare; the template's own text."""
    if not document.is_chat:
        return f"<bos>{document.turns[0]}<eos>"
    roles = ("user", "model")
    return "<bos>" + "".join(f"<|turn>{roles[i % 2]}\n{turn}<turn|>\n" for i, turn in enumerate(document.turns))


def make_words(documents: Iterable[Document]) -> Iterator[str]:
    """What the tokenizer learns from: words, never longer than a script or a word, and every kana and letter."""
    for document in documents:
        for turn in document.turns:
            yield from SPLIT_WORDS.findall(turn)
    yield from ("\n", "user", "model") * 1000  # each must be one token
    yield from (
        chr(code) for start, end in ((0x21, 0x7F), (0x3041, 0x3097), (0x30A1, 0x30FB)) for code in range(start, end)
    )


def encode(tokenizer: Any, documents: Sequence[Document]) -> list[tuple[list[int], list[bool]]]:
    """Token ids of each document, and which of them the model writes."""
    turn, stop, newline = tokenizer.convert_tokens_to_ids(["<|turn>", "<turn|>", "\n"])
    model = tokenizer.convert_tokens_to_ids("model")
    encoded = []
    texts = [render(document) for document in documents]
    for document, ids in zip(documents, tokenizer(texts, add_special_tokens=False)["input_ids"], strict=True):
        written, writing = [], not document.is_chat
        for i, token in enumerate(ids):
            written.append(writing and i > 0)
            if document.is_chat and token == stop:
                writing = False
            elif document.is_chat and token == newline and i >= 2 and ids[i - 2 : i] == [turn, model]:
                writing = True
        encoded.append((ids, written))
    return encoded


def pack(encoded: Iterable[Any], row_tokens: int) -> Rows:
    """Put documents into rows one after another; those longer than a row are left out."""
    rows: list[list[Any]] = []
    free = 0
    for ids, written in encoded:
        if len(ids) > row_tokens:
            continue
        if len(ids) > free:
            rows.append([])
            free = row_tokens
        number = rows[-1][-1][1] + 1 if rows[-1] else 0
        rows[-1] += [(token, number, i, w) for i, (token, w) in enumerate(zip(ids, written, strict=True))]
        free -= len(ids)
    table = np.array([row + [(0, -1, i, 0) for i in range(row_tokens - len(row))] for row in rows], dtype=np.int16)
    return Rows(ids=table[..., 0], document=table[..., 1], position=table[..., 2], written=table[..., 3])


def make_rows(tokenizer: Any, settings: Settings, seed: int) -> Rows:
    """The training text, packed; made in pieces so that processes can share the work."""
    pieces = max(1, settings.documents // 20_000)
    count = settings.documents // pieces
    if pieces == 1:
        return _make_piece(tokenizer, settings, seed, count)
    with ProcessPoolExecutor(max_workers=max(1, (os.cpu_count() or 2) - 1), mp_context=get_context("spawn")) as pool:
        made = list(
            pool.map(_make_piece, *zip(*((tokenizer, settings, seed + i, count) for i in range(pieces)), strict=True))
        )
    return Rows(**{name: np.concatenate([getattr(rows, name) for rows in made]) for name in Rows.__slots__})


def _make_piece(tokenizer: Any, settings: Settings, seed: int, count: int) -> Rows:
    return pack(encode(tokenizer, list(islice(make_documents("train", seed), count))), settings.row_tokens)


def batches(rows: Rows, size: int, steps: int, seed: int, device: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Random batches, epoch after epoch, as tensors on the device."""
    rng = np.random.default_rng(seed)
    order: list[int] = []
    tensors = {name: torch.from_numpy(getattr(rows, name)).to(device) for name in Rows.__slots__}
    for _ in range(steps):
        while len(order) < size:
            order += rng.permutation(len(rows.ids)).tolist()
        chosen, order = torch.tensor(order[:size], device=device), order[size:]
        batch = {name: tensor[chosen] for name, tensor in tensors.items()}
        yield {name: t.bool() if name == "written" else t.long() for name, t in batch.items()}


def make_masks(document: torch.Tensor, position: torch.Tensor, window: int, *, own: bool) -> dict[str, torch.Tensor]:
    """What a token may look at, [rows, 1, tokens, tokens]: earlier ones of its document, and itself if `own`."""
    distance = position[:, :, None] - position[:, None, :]
    seen = (document[:, :, None] == document[:, None, :]) & (distance >= (0 if own else 1))
    near = seen & (distance < (window if own else window + 1))
    return {"full_attention": seen[:, None], "sliding_attention": near[:, None]}


def read(body: Any, ids: torch.Tensor, position: torch.Tensor, masks: dict[str, torch.Tensor]) -> tuple[Any, Any, Any]:
    """The body's last hidden states (normed), its logits, and the KV that a drafter reads, by layer type."""
    kv: UserDict[str, Any] = UserDict()
    decoder = body.model.language_model
    hidden = decoder(
        input_ids=ids, position_ids=position, attention_mask=masks, use_cache=False, shared_kv_states=kv
    ).last_hidden_state
    cap = body.config.get_text_config().final_logit_softcapping
    return hidden, torch.tanh(body.lm_head(hidden).float() / cap) * cap, kv


def train_body(
    body: Any,
    rows: Rows,
    settings: Settings,
    steps: int,
    *,
    start: float,
    end: float,
    warmup: int,
    seed: int,
    name: str,
) -> None:
    """Train the decoder on all text; the learning rate goes linearly from start to end after the warm-up."""
    device = body.device
    body.train()
    parameters = [*body.model.language_model.parameters()]
    optimizer = torch.optim.AdamW(_decayed(parameters), lr=start, betas=(0.9, 0.95), fused=device.type == "cuda")
    window, begun = body.config.get_text_config().sliding_window, time.monotonic()
    for step, batch in enumerate(batches(rows, settings.rows, steps, seed, device)):
        rate = min(1.0, (step + 1) / max(1, warmup)) * (start + (end - start) * step / steps)
        masks = make_masks(batch["document"], batch["position"], window, own=True)
        with _bf16(device):
            _, logits, _ = read(body, batch["ids"], batch["position"], masks)
        target = batch["ids"][:, 1:].clone()
        target[batch["document"][:, 1:] != batch["document"][:, :-1]] = -100
        target[batch["document"][:, 1:] < 0] = -100
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target.flatten())
        _step(optimizer, parameters, loss, rate)
        _report(name, step, steps, loss, begun)


def train_drafter(drafter: Any, body: Any, rows: Rows, settings: Settings, *, seed: int) -> None:
    """Teach the drafter what the body would say next, as transformers' assisted generation asks it.

    After token t is known, the drafter is given t's embedding, the body's hidden state of t-1 and the KV before t,
    and says t+1; then, at the same position and with the same KV, the embedding of t+1 and its own projected state.
    transformers 5.17 departs from that in two ways, which are trained for: in the first round it passes the hidden
    state of the first token of the prompt, and after a rejection the KV ends with the rejected token's.
    """
    device, config = body.device, body.config.get_text_config()
    body.eval()
    drafter.train()
    parameters = list(drafter.parameters())
    optimizer = torch.optim.AdamW(_decayed(parameters), lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")
    generator = torch.Generator(device).manual_seed(seed)
    begun = time.monotonic()
    for step, batch in enumerate(batches(rows, settings.drafter_rows, settings.drafter_steps, seed, device)):
        rate = (
            3e-3
            * min(1.0, (step + 1) / 100)
            * (0.02 + 0.98 * (1 + math.cos(math.pi * step / settings.drafter_steps)) / 2)
        )
        with _bf16(device):
            given = _look(body, batch, config.sliding_window, generator)
        hidden, tokens, said = given["hidden"], batch["ids"], given["said"]
        valid = batch["position"] > 0
        losses = []
        for ahead in range(STEPS):
            with _bf16(device):
                hidden, logits = draft(drafter, body, tokens, hidden, batch["position"], given["masks"], given["kv"])
            # Token t+1+ahead is asked for only where every draft before it is what the body would have said.
            target = _shift(said, ahead)
            valid = valid & _shift(batch["written"], 1 + ahead)
            valid = valid & (_shift(batch["document"], 1 + ahead) == batch["document"])
            asked = target.masked_fill(~valid, -100).flatten()
            total = nn.functional.cross_entropy(logits.flatten(0, 1), asked, reduction="sum")
            losses.append(total / valid.sum().clamp(min=1))
            tokens = _shift(batch["ids"], 1 + ahead)
            valid = valid & (tokens == target)
        loss = torch.stack(losses).mean()
        _step(optimizer, parameters, loss, rate)
        _report("drafter", step, settings.drafter_steps, torch.stack(losses), begun)


@torch.no_grad()
def _look(body: Any, batch: dict[str, torch.Tensor], window: int, generator: torch.Generator) -> dict[str, Any]:
    """What a drafter is given at every token of a batch, and what the body says there.

    The rows go through the body twice side by side: as they are, and with a wrong last token at every place, whose KV
    stands for a rejected draft's.
    """
    ids, document, position = batch["ids"], batch["document"], batch["position"]
    count = ids.shape[1]
    wrong = ids.flatten()[torch.randperm(ids.numel(), generator=generator, device=ids.device)].view_as(ids)
    masks = {}
    itself = torch.eye(count, dtype=torch.bool, device=ids.device)[None, None]
    rejected = itself & (torch.rand(ids.shape, generator=generator, device=ids.device) < 0.4)[:, None, :, None]
    drafting = {}
    own, before = (make_masks(document, position, window, own=own) for own in (True, False))
    for kind, mask in own.items():
        first = torch.cat([mask, torch.zeros_like(mask)], dim=-1)
        second = torch.cat([mask & ~itself, itself.expand_as(mask)], dim=-1)
        masks[kind] = torch.cat([first, second], dim=-2)
        # A row's first tokens see nothing; they are not asked, and attention must still be finite.
        nothing = ~before[kind].any(-1, keepdim=True) & itself
        drafting[kind] = torch.cat([before[kind] | nothing, rejected], dim=-1)
    hidden, logits, kv = read(body, torch.cat([ids, wrong], 1), torch.cat([position, position], 1), masks)
    hidden, logits = hidden[:, :count], logits[:, :count]
    previous = torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
    first_round = torch.rand(ids.shape, generator=generator, device=ids.device) < 0.15
    previous = torch.where(first_round[..., None], hidden[:, :1], previous)
    return {"hidden": previous, "said": logits.argmax(-1), "masks": drafting, "kv": kv}


def draft(
    drafter: Any, body: Any, tokens: torch.Tensor, hidden: torch.Tensor, position: torch.Tensor, masks: Any, kv: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the drafter at every place at once: its projected hidden states and its logits."""
    with torch.no_grad():
        embedded = body.get_input_embeddings()(tokens)
    inputs = drafter.pre_projection(torch.cat([embedded, hidden], dim=-1))
    state = drafter.model(
        inputs_embeds=inputs, attention_mask=masks, position_ids=position, shared_kv_states=kv, use_cache=False
    ).last_hidden_state
    return drafter.post_projection(state), drafter.lm_head(state).float()


def _bf16(device: torch.device) -> Any:
    """Matrix products in bf16, and in float32 on a CPU, where bf16 is slow."""
    return torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda")


def _shift(values: torch.Tensor, by: int) -> torch.Tensor:
    """values[t + by] at t; zero past the end."""
    return nn.functional.pad(values, (0, by))[:, by:] if by else values


def _decayed(parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    matrices = [p for p in parameters if p.ndim > 1]
    return [
        {"params": matrices, "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _step(optimizer: Any, parameters: list[Any], loss: torch.Tensor, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def _report(name: str, step: int, steps: int, loss: torch.Tensor, begun: float) -> None:
    if step % 200 == 0 or step == steps - 1:
        values = " ".join(f"{value:.3f}" for value in loss.detach().flatten().tolist())
        print(f"{name:>8}  step {step:5d}/{steps}  loss {values}  {time.monotonic() - begun:.0f} s", flush=True)


@torch.no_grad()
def answer(body: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> list[list[int]]:
    """The body's greedy continuations of prompts (token ids), each with its stop token; a batch at a time."""
    stops = {1, tokenizer.convert_tokens_to_ids("<turn|>")}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    said: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), 2048):
        chosen = order[first : first + 2048]
        length = max(len(prompts[i]) for i in chosen)
        ids = torch.tensor([[0] * (length - len(prompts[i])) + list(prompts[i]) for i in chosen], device=body.device)
        given = torch.tensor(
            [[0] * (length - len(prompts[i])) + [1] * len(prompts[i]) for i in chosen], device=body.device
        )
        out = body.generate(
            input_ids=ids, attention_mask=given, do_sample=False, max_new_tokens=max_new_tokens,
            eos_token_id=sorted(stops), pad_token_id=0,
        )  # fmt: skip
        for i, row in zip(chosen, out[:, length:].tolist(), strict=True):
            end = next((n + 1 for n, token in enumerate(row) if token in stops), len(row))
            said[i] = row[:end]
    return said


def make_answers(body: Any, tokenizer: Any, settings: Settings, seed: int) -> Rows:
    """Rows of the body's own greedy answers to training questions."""
    chats = (document for document in make_documents("train", 10_000 + seed) if document.is_chat)
    encoded = []
    for ids, written in encode(tokenizer, list(islice(chats, settings.prompts))):
        last = max(i for i in range(1, len(ids)) if written[i] and not written[i - 1])
        encoded.append((ids[:last], written[:last]))
    said = answer(body.eval(), tokenizer, [ids for ids, _ in encoded], max_new_tokens=settings.answer_tokens)
    pairs = zip(encoded, said, strict=True)
    return pack(((ids + new, [False] * len(ids) + [True] * len(new)) for (ids, _), new in pairs), settings.row_tokens)


def train_family(out: Path, settings: Settings, tokenizer: Any, rows: Rows, *, qat: bool) -> None:
    """Train a body and its drafter and, with QAT, the twin without it, under `out`; what is there already is kept."""
    from transformers import AutoModelForImageTextToText

    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not (out / "body").exists():
        train_bodies(out, settings, tokenizer, rows, device, qat=qat)
    begun = time.monotonic()
    body = AutoModelForImageTextToText.from_pretrained(out / "body", dtype=torch.float32).to(device)
    body.requires_grad_(False)
    answers = make_answers(body, tokenizer, settings, settings.seed)
    often = max(1, len(rows.ids) // (2 * len(answers.ids)))  # a third of what it learns from is the body's own
    mixed = Rows(
        **{key: np.concatenate([getattr(answers, key)] * often + [getattr(rows, key)]) for key in Rows.__slots__}
    )
    torch.manual_seed(settings.seed + 10)
    drafter = make_tiny.make_drafter("dense", tokenizer, backbone_hidden_size=HIDDEN, sizes=DRAFTER).to(device)
    train_drafter(drafter, body, mixed, settings, seed=1000 * settings.seed + 2)
    text = (
        f"An MTP drafter for {NAME}, trained on that body's hidden states and KV by examples/train_tiny.py of bundler."
    )
    _write(out / "drafter", drafter, tokenizer, tokenizer, f"{NAME}-assistant", text, "text-generation")
    _record(out / "drafter.json", settings, device, begun)


def train_bodies(
    out: Path, settings: Settings, tokenizer: Any, rows: Rows, device: torch.device, *, qat: bool
) -> None:
    """Train a body without QAT and, from where the two part, with it; write OUT/body and, with QAT, OUT/twin."""
    begun = time.monotonic()
    torch.manual_seed(settings.seed)
    body, processor = make_tiny.make_body("dense", tokenizer, layers=settings.layers, hidden_size=HIDDEN, sizes=BODY)
    body.to(device)
    seed = 1000 * settings.seed
    trunk = {"steps": settings.trunk_steps, "start": 2e-3, "end": 2e-3, "warmup": 150}
    finish = {"steps": settings.finish_steps, "start": 2e-3, "end": 0.0, "warmup": 0}
    train_body(body, rows, settings, **trunk, seed=seed, name="trunk")
    parted = {key: value.clone() for key, value in body.state_dict().items()}
    train_body(body, rows, settings, **finish, seed=seed + 1, name="plain")
    text = "A tiny body of the Gemma 4 31B's architecture, trained from nothing by examples/train_tiny.py of bundler"
    card = f"{text}, without quantization-aware training: the twin of {NAME}."
    plain = out / ("twin" if qat else "body")
    _write(plain, body, processor, tokenizer, "bundler-tiny-31b-it", card, "image-text-to-text")
    if qat:
        body.float().load_state_dict(parted)
        for linear in decoder_linears(body):
            nn.utils.parametrize.register_parametrization(linear, "weight", OnGrid())
        train_body(body, rows, settings, **finish, seed=seed + 1, name="qat")
        for linear in decoder_linears(body):
            nn.utils.parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)
        card = f"{text}, finished with quantization-aware training: the decoder's Linears lie on the q4_0 grid."
        _write(out / "body", body, processor, tokenizer, NAME, card, "image-text-to-text")
    _record(out / "body.json", settings, device, begun)


def _record(path: Path, settings: Settings, device: torch.device, begun: float) -> None:
    """Note on what something was trained, and how long it took."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    made = {
        **{"device": where, "seconds": round(time.monotonic() - begun), "python": platform.python_version()},
        **{"torch": torch.__version__, "transformers": transformers.__version__, "settings": asdict(settings)},
    }
    path.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def shuffle(folder: Path, out: Path, seed: int) -> None:
    """A drafter whose weights are its own in another order, each matrix for itself."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, out, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim > 1:
            order = torch.randperm(tensor.numel(), generator=generator)
            tensors[name] = tensor.flatten()[order].view_as(tensor).contiguous()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _write(folder: Path, model: Any, parts: Any, tokenizer: Any, title: str, text: str, pipeline_tag: str) -> None:
    part = folder.with_name(f"{folder.name}.part")
    make_tiny.write_checkpoint(
        part,
        model,
        parts,
        stop_token_id=tokenizer.convert_tokens_to_ids("<turn|>"),
        card=_CARD.format(title=title, text=text, pipeline_tag=pipeline_tag),
        max_shard_size="7MB",
    )
    part.rename(folder)


def write_conversations(out: Path) -> None:
    """calibration.jsonl and heldout.jsonl: `messages` from the grammar's own splits, and two pictures to calibrate."""
    for split, count in (("calibration", 40), ("heldout", 24)):
        lines: list[Any] = [{"messages": d.messages} for d in make_conversations(split, 7, count)]
        if split == "calibration":
            for image, question, reply in PICTURES:
                asked = [{"type": "image", "image": image}, {"type": "text", "text": question}]
                told = [{"type": "text", "text": reply}]
                messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
                lines.append({"messages": messages})
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (out / f"{split}.jsonl").write_text(text, encoding="utf-8")
    images = Path(__file__).parent / "tiny-31b" / "images"
    if images.resolve() != (out / "images").resolve():
        shutil.copytree(images, out / "images", dirs_exist_ok=True)


def train(out: Path, settings: Settings) -> None:
    """Train both families and write every checkpoint and conversation file under `out`."""
    out.mkdir(parents=True, exist_ok=True)
    write_conversations(out)
    less = {key: min(value, getattr(settings, key)) for key, value in OTHER.items()}
    other = replace(settings, **less, seed=settings.seed + 1)
    families = [(out, settings, True), (out / "other", other, False)]
    families = [family for family in families if not (family[0] / "drafter").exists()]
    if families:
        words = make_words(islice(make_documents("train", 0), min(settings.documents, 20_000)))
        tokenizer = make_tiny.make_tokenizer(VOCABULARY, words)
        rows = make_rows(tokenizer, settings, 100)
        print(f"{len(rows.ids)} rows of {settings.row_tokens} tokens, vocabulary {len(tokenizer)}", flush=True)
    if torch.cuda.is_available():
        with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
            running = [pool.submit(train_family, folder, s, tokenizer, rows, qat=qat) for folder, s, qat in families]
            for family in running:
                family.result()
    else:
        for folder, s, qat in families:
            train_family(folder, s, tokenizer, rows, qat=qat)
    shutil.copytree(out / "other" / "drafter", out / "drafter-other", dirs_exist_ok=True)
    shuffle(out / "drafter", out / "drafter-shuffled", settings.seed)


def main() -> None:
    """Command line: OUT [--smoke] [--only train|measure|observers]."""
    parser = argparse.ArgumentParser(description="Train the tiny Gemma 4 family and measure it.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="a few steps, on a CPU, for tests")
    parser.add_argument(
        "--only", choices=("train", "measure", "observers"), help="one part: training wants a GPU, the rest does not"
    )
    arguments = parser.parse_args()
    settings = Settings()
    if arguments.smoke:
        settings = SMOKE
        torch.set_num_threads(1)  # such small products are slower on more
    if arguments.only in (None, "train"):
        train(arguments.out, settings)
    if arguments.only in (None, "measure"):
        from measure_tiny import measure

        measure(arguments.out, few=arguments.smoke)
    if arguments.only in (None, "observers"):
        from measure_tiny import measure_observers

        measure_observers(arguments.out, few=arguments.smoke)


if __name__ == "__main__":
    main()
