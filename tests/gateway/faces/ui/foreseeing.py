"""A server with the page's files that streams forecasts as a gateway does, step by step as the test
says; and one that keeps its API behind a key."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from gateway.faces.http.serve import serving_http
from gateway.faces.ui.routes import add_files

WORDS = [f"word{number} " for number in range(1, 41)]
CLASSES = {
    "interactive": {"ttft_s": 60.0, "tpot_s": 30.0, "mtpot_s": 60.0},
    "hasty": {"ttft_s": 1e-6, "tpot_s": 1e-6, "mtpot_s": 1e-6},
    "batch": {"ttft_s": None, "tpot_s": None, "mtpot_s": None},
}
ABOUT = {
    "model": "fake", "max_context_tokens": 512, "default_class": "interactive", "classes": CLASSES,
    "presets": [{"name": "foretoken", "about": "foresees"}, {"name": "fcfs", "about": "queues"}],
}  # fmt: skip
BOARD = {
    "ready": True, "draining": False, "age_s": 0.1, "preset": "foretoken", "queued": 0,
    "running": 1, "live": 1, "drain_s": 0.0, "worker_count": 0, "workers": [], "window_s": 60,
    "classes": {},
}  # fmt: skip
STORY = {
    "live": True,
    "chapters": [
        {
            "at_s": 0.0,
            "kind": "arrived",
            "text": "arrived with 9 prompt tokens",
            "times": 1,
            "until_s": 0.0,
        },
        {"at_s": 0.2, "kind": "passed", "text": "passed over: no room", "times": 3, "until_s": 0.9},
    ],
}


def foreseen(sent: int) -> dict[str, float]:
    """After so many of forty tokens: the interval closes from both sides."""
    left = 1 - sent / len(WORDS)
    told = {
        "expected_tokens": 40 + 8 * left, "low_tokens": max(sent, 40 - 28 * left),
        "high_tokens": 40 + 56 * left, "end_s": 0.05 * (40 - sent),
    }  # fmt: skip
    return told | ({"ttft_s": 0.41, "sla_expected": True} if sent == 0 else {})


@dataclass
class Foreseeing:
    """What it was asked, and how far it may go on."""

    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    classes: list[str | None] = field(default_factory=list)  # as the header says
    keys: list[str | None] = field(default_factory=list)  # of all requests, as they came
    knows_forecasts: bool = True
    key: str = ""  # that it wants; empty: none
    hung_up: int = 0
    refusal: tuple[int, str, dict[str, str]] | None = None  # status, message, headers
    allowed: int = len(WORDS)  # tokens that may go out
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def allow(self, tokens: int) -> None:
        async with self.moved:
            self.allowed = tokens
            self.moved.notify_all()

    async def events(self) -> AsyncIterator[bytes]:
        try:
            if self.knows_forecasts:
                yield event({}, forecast=foreseen(0))
            for number, word in enumerate(WORDS, 1):
                async with self.moved:
                    while self.allowed < number:
                        await self.moved.wait()
                told = foreseen(number) if self.knows_forecasts else None
                yield event({"content": word}, tokens=1, forecast=told)
            yield event({}, finish="stop")
            usage = {"prompt_tokens": 3, "completion_tokens": 40, "total_tokens": 43}
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.hung_up += 1
            raise


def event(
    delta: dict[str, str],
    tokens: int = 0,
    finish: str | None = None,
    forecast: dict[str, float] | None = None,
) -> bytes:
    logprobs = {"content": [{"token": "t", "logprob": -1.0}] * tokens}
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    told = {"id": "chatcmpl-f0e", "choices": [choice]} | (
        {"forecast": forecast} if forecast else {}
    )
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def build_app(server: Foreseeing) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def wants_key(request: Request, proceed: Any) -> Response:
        given = request.headers.get("authorization")
        path = request.url.path
        behind = path.startswith("/v1/") or path in ("/ui/about", "/ui/board")
        if behind:
            server.keys.append(given)
        if behind and server.key and given != f"Bearer {server.key}":
            return JSONResponse({"error": {"message": "no API key was given"}}, 401)
        answer: Response = await proceed(request)
        return answer

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        server.bodies.append(body := await request.json())
        server.classes.append(request.headers.get("x-foretoken-sla"))
        if server.refusal:
            status, message, headers = server.refusal
            return JSONResponse({"error": {"message": message}}, status, headers)
        if "include_forecast" in body["stream_options"] and not server.knows_forecasts:
            param = "stream_options.include_forecast"
            error = {"message": f"{param}: unknown field", "param": param}
            return JSONResponse({"error": error}, 400)
        return StreamingResponse(server.events(), media_type="text/event-stream")

    @app.get("/ui/about")
    async def about() -> Any:
        return ABOUT

    @app.get("/ui/board")
    async def board() -> Any:
        return BOARD

    @app.get("/ui/why/{request_id}")
    async def why(request_id: str) -> Any:
        return {"stories": [STORY | {"request_id": request_id}]}

    add_files(app)
    return app


@asynccontextmanager
async def foreseeing(**how: Any) -> AsyncIterator[Foreseeing]:
    server = Foreseeing(**how)
    async with serving_http(build_app(server), "127.0.0.1", 0) as port:
        server.url = f"http://127.0.0.1:{port}"
        yield server
