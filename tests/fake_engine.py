"""A stand-in for `vllm serve` at the engine seam: the same command line, the same endpoints, no model.

It answers every prompt by repeating the prompt's last token, which is the right answer of a twin. FAKE_ENGINE holds
JSON that makes it misbehave: `dies`, `deaf` (to interrupts), `empty`, `wrong_with_drafter`, `accepts` (per step),
`unfilled`, `log`, and `prompts`, the token ids of a chat by its text.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODE: dict[str, Any] = json.loads(os.environ.get("FAKE_ENGINE", "{}"))


class Handler(BaseHTTPRequestHandler):
    drafts = 0
    per_step = 0

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self._send(b"")
        elif self.path == "/metrics":
            self._send(self._metrics().encode())
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/v1/completions":
            ids = _ids(body["prompt"])
            choice = {"text": _text(body), **self._choice(ids, body)}
            tops = [{f"token_id:{token}": -0.1, "token_id:1": -4.0} for token in choice["token_ids"]]
            self._json({"choices": [{**choice, "prompt_token_ids": ids, "logprobs": {"top_logprobs": tops}}]})
        elif self.path == "/v1/chat/completions":
            ids = _ids(_asked(body["messages"][-1]["content"]))
            choice = self._choice(ids, body)
            tops = [
                {"top_logprobs": [{"token": f"token_id:{token}", "logprob": -0.1}]} for token in choice["token_ids"]
            ]
            message = {"role": "assistant", "content": _text(body)}
            answer = {**choice, "message": message, "logprobs": {"content": tops}}
            self._json({"choices": [answer], "prompt_token_ids": ids})
        else:
            self.send_error(404, "no such path")

    def _choice(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        wrong = MODE.get("wrong_with_drafter") and Handler.per_step
        answer = [(ids[-1] + (1 if wrong else 0))] * body["max_tokens"]
        if Handler.per_step:
            Handler.drafts += body["max_tokens"]
        return {"token_ids": answer, "finish_reason": "length"}

    def _metrics(self) -> str:
        lines = ["# HELP vllm:spec_decode_num_drafts_total Number of drafts.", "vllm:generation_tokens_total 7"]
        if Handler.per_step:
            accepted = Handler.drafts * MODE.get("accepts", 2)
            lines += [
                f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {Handler.drafts}.0',
                f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {Handler.drafts * Handler.per_step}.0',
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0',
                'vllm:spec_decode_num_accepted_tokens_created{engine="0"} 1.79e+09',
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {accepted // 2}.0',
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {accepted // 2}.0',
            ]
        return "\n".join(lines) + "\n"

    def _json(self, document: dict[str, Any]) -> None:
        self._send(json.dumps(document).encode())

    def _send(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _ids(text: str) -> list[int]:
    return list(MODE.get("prompts", {}).get(text) or [2, *(256 + byte for byte in text.encode())])


def _asked(content: Any) -> str:
    return content if isinstance(content, str) else next(part["text"] for part in content if part["type"] == "text")


def _text(body: dict[str, Any]) -> str:
    return "" if MODE.get("empty") else "x" * int(body["max_tokens"])


def _report(drafting: bool) -> None:
    path = os.environ.get("BUNDLER_REPORT")
    if path:
        events = [
            {"event": "weights", "model": "Fake", "unfilled": MODE.get("unfilled", {})},
            {"event": "shim", "name": "fake", "why": "there is no engine"},
            {
                "event": "engine",
                "runner": "fake.worker.Runner",
                "kernels": {"CompressedTensorsW4A4Fp4": MODE.get("quantized", 0), "EmulationNvFp4LinearKernel": 1},
                "attention": {"FakeImpl": 1},
            },
            {"event": "attention-groups", "heads": [[4], [4]], "check": MODE.get("heads", "passes")},
        ]
        with open(path, "a") as file:  # noqa: PTH123
            file.writelines(json.dumps(event) + "\n" for event in events)


def main() -> None:
    words = sys.argv[1:]
    assert words[0] == "serve"
    port = int(words[words.index("--port") + 1])
    if "--speculative-config" in words:
        config = json.loads(words[words.index("--speculative-config") + 1])
        assert os.path.isdir(config["model"]), config  # noqa: PTH112
        Handler.per_step = config["num_speculative_tokens"]
    print(f"serving {words[1]} from {sys.argv[0]}", flush=True)
    if "log" in MODE:
        print(MODE["log"], flush=True)
    if MODE.get("dies"):
        sys.exit(3)
    if MODE.get("deaf"):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        subprocess.Popen(
            [sys.executable, "-c", "import signal, time; signal.signal(2, signal.SIG_IGN); time.sleep(600)"]
        )
    if MODE.get("never_ready"):
        time.sleep(600)
    _report(bool(Handler.per_step))
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    try:
        server.serve_forever(poll_interval=0.05)
    except KeyboardInterrupt:
        print("Application shutdown complete.", flush=True)


if __name__ == "__main__":
    main()
