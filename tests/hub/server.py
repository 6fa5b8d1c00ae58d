"""The serving side: a thread that answers HTTP, faults on demand, and a log of every request."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .call import Call
from .endpoints import ENDPOINTS
from .store import HubError, Store
from .xet import Xet


@dataclass(kw_only=True)
class Fault:
    """What happens to the next `times` requests whose method and path match.

    `status` answers in place of the handler; with `after`, the handler does its work first and only its answer is
    lost. `reset` breaks the connection off behind the head of an answer (of `status`, else 200); `stall` never answers
    at all. `edit` changes the body of the handler's answer, and `set_status` its status. `meanwhile` runs before the
    request's body is read: somebody else's doing, between two requests of a client; with `after`, once the handler has
    done its work.
    """

    method: str
    path: str
    times: int = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False
    reset: bool = False
    stall: bool = False
    edit: Callable[[bytes], bytes] | None = None
    set_status: int | None = None
    meanwhile: Callable[[], object] | None = None


@dataclass(kw_only=True)
class Logged:
    """One request as it came in and what went out."""

    method: str
    path: str
    range: str | None
    user_agent: str
    host: str = ""
    has_token: bool = False
    status: int = 0
    sent_bytes: int = 0

    @property
    def is_write(self) -> bool:
        """Whether the request could change anything on the Hub."""
        asks = "/api/validate-yaml" in self.path or "/preupload/" in self.path
        return self.method not in {"GET", "HEAD"} and not asks


class HubServer:
    """The server: a store, the faults to come, the requests that were, and the thread that serves them."""

    def __init__(self, folder: Path) -> None:
        # the protocol is named, because asyncio turns Nagle's delay off only where it is: 40 ms a request otherwise
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self._socket.listen()
        port = self._socket.getsockname()[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self.storage = f"http://localhost:{port}"
        self.reset(folder)
        config = uvicorn.Config(self._make_app(), lifespan="off", ws="none", http="h11", log_config=None)
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self._socket]}, daemon=True)

    def reset(self, folder: Path) -> None:
        """An empty Hub whose repos lie in `folder`, with nothing wrong and nothing logged."""
        self.store = Store(folder)
        self.faults: list[Fault] = []
        self.log: list[Logged] = []
        self.parts: dict[tuple[str, int], bytes] = {}
        self.page_size = 1000
        """Tree entries in one answer."""
        self.page_origin = self.endpoint
        """Where the next page of a listing is said to be."""
        self.multipart_bytes, self.part_bytes = 5_000_000_000, 16_000_000
        self.xet: Xet | None = None

    def start(self) -> None:
        """Serve until `stop`."""
        self._thread.start()
        while not self._uvicorn.started:
            time.sleep(0.01)

    def stop(self) -> None:
        """Close every connection and end the thread."""
        self._uvicorn.should_exit = True
        self._thread.join()

    def writes(self) -> list[str]:
        """Every logged request that could have changed something, as `METHOD path`."""
        return [f"{entry.method} {entry.path}" for entry in self.log if entry.is_write]

    def _make_app(self) -> ASGIApp:
        routes = [Route(path, self._endpoint(handler), methods=[method]) for method, path, handler in ENDPOINTS]
        return _Front(self, Starlette(routes=routes))

    def _endpoint(self, handler: Callable[[Call], Response]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            call = Call(server=self, request=request, body=await request.body())
            try:
                return handler(call)  # short enough not to be worth a thread
            except HubError as exc:
                headers = {"X-Error-Message": exc.message} | ({"X-Error-Code": exc.code} if exc.code else {})
                return JSONResponse(exc.body, exc.status, headers=headers)

        return endpoint


class _Front:
    """In front of the routes: logs every request, plays the faults, and keeps `%2F` inside one part of a path."""

    def __init__(self, server: HubServer, app: ASGIApp) -> None:
        self.server, self.app = server, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = scope["raw_path"].decode().split("?")[0]
        path = re.sub(r"%2[fF]", "%2F", unquote(re.sub(r"%2[fF]", "%252F", raw)))
        scope = {**scope, "path": path}
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        logged = Logged(
            method=scope["method"],
            path=path,
            range=headers.get("range"),
            user_agent=headers.get("user-agent", ""),
            host=headers.get("host", ""),
            has_token="authorization" in headers,
        )
        self.server.log.append(logged)

        async def send_logged(message: Message) -> None:
            logged.status = message.get("status", logged.status)
            logged.sent_bytes += len(message.get("body", b""))
            await send(message)

        fault = self._next_fault(logged)
        if fault is None:
            return await self.app(scope, receive, send_logged)
        loses_answer = fault.status is not None or fault.reset or fault.stall
        if fault.after:
            await self.app(scope, receive, _nowhere)
        if fault.meanwhile is not None:
            await run_in_threadpool(fault.meanwhile)
        if fault.edit is not None:
            send_logged = _edited(send_logged, fault.edit, fault.set_status)
        if not loses_answer:
            return await self.app(scope, receive, send_logged)
        while not fault.after and (await receive()).get("more_body"):
            pass
        if fault.stall:
            while (await receive())["type"] != "http.disconnect":
                pass
            return None
        if fault.reset:  # an answer that promises a body and ends without one: uvicorn closes the connection
            head = [(b"content-length", b"1")]
            return await send({"type": "http.response.start", "status": fault.status or 200, "headers": head})
        return await JSONResponse({"error": "fault"}, fault.status, headers=fault.headers)(scope, receive, send_logged)

    def _next_fault(self, logged: Logged) -> Fault | None:
        for fault in self.server.faults:
            if fault.times > 0 and fault.method == logged.method and re.search(fault.path, logged.path):
                fault.times -= 1
                return fault
        return None


async def _nowhere(message: Message) -> None:
    pass


def _edited(send: Send, edit: Callable[[bytes], bytes], status: int | None) -> Send:
    """Holds the head of an answer back until its body is complete, then sends both, changed."""
    held: list[Message] = []

    async def send_edited(message: Message) -> None:
        held.append(message)
        if message["type"] != "http.response.body" or message.get("more_body"):
            return
        body = edit(b"".join(part.get("body", b"") for part in held))
        head = [(name, value) for name, value in held[0]["headers"] if name.lower() != b"content-length"]
        head.append((b"content-length", str(len(body)).encode()))
        await send({**held[0], "status": status or held[0]["status"], "headers": head})
        await send({"type": "http.response.body", "body": body})

    return send_edited
