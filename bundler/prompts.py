"""The fixed prompts of `bundle prove`, and one greedy answer of an engine to each."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bundler.engines.server import Server
from bundler.evidence import Answer

ANSWER_TOKENS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One fixed question. Without `chat` it is completed as raw text."""

    name: str
    text: str
    chat: bool = True
    image: bool = False


PROMPTS = (
    Prompt(name="completion", text="The quick brown fox", chat=False),
    Prompt(name="english", text="What is the capital of Japan?"),
    Prompt(name="japanese", text="日本の首都はどこですか。"),
    Prompt(name="image", text="What is in this picture?", image=True),
)


def ask(server: Server, prompt: Prompt, model: str) -> Answer:
    """One greedy answer, with the ids of prompt and answer and the engine's own first choices."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "seed": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if not prompt.chat:
        answer = server.post("/v1/completions", {**body, "prompt": prompt.text, "logprobs": 3})
        choice = answer["choices"][0]
        tops = [(entry or {}) for entry in (choice.get("logprobs") or {}).get("top_logprobs") or []]
        return _answer(prompt, choice["text"], choice.get("prompt_token_ids"), choice.get("token_ids"), tops)
    answer = server.post(
        "/v1/chat/completions", {**body, "messages": make_messages(prompt), "logprobs": True, "top_logprobs": 3}
    )
    choice = answer["choices"][0]
    content = (choice.get("logprobs") or {}).get("content") or []
    tops = [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in content]
    text = choice["message"].get("content") or ""
    return _answer(prompt, text, answer.get("prompt_token_ids"), choice.get("token_ids"), tops)


def _answer(prompt: Prompt, text: str, prompt_ids: Any, ids: Any, tops: Sequence[Mapping[str, float]]) -> Answer:
    return Answer(
        prompt=prompt.name,
        asked=prompt.text,
        image=prompt.image,
        prompt_ids=tuple(prompt_ids or ()),
        text=text,
        token_ids=tuple(ids or ()),
        tops=tuple({key.removeprefix("token_id:"): round(value, 4) for key, value in top.items()} for top in tops),
    )


def make_messages(prompt: Prompt) -> list[dict[str, Any]]:
    """The chat of a prompt."""
    if not prompt.image:
        return [{"role": "user", "content": prompt.text}]
    url = "data:image/png;base64," + base64.b64encode(make_image()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": prompt.text}]
    return [{"role": "user", "content": parts}]


def make_image(side: int = 96) -> bytes:
    """A PNG: a blue square on red."""
    inner = range(side // 4, side - side // 4)
    rows = b"".join(
        b"\0" + b"".join(b"\x20\x40\xe0" if x in inner and y in inner else b"\xe0\x20\x20" for x in range(side))
        for y in range(side)
    )

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body
