"""A fake server with the page's files. It streams an answer with forecasts, token by token, as far
as the test allows, and can require an API key."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from gateway.faces.app import read_live_page
from gateway.faces.http.serve import serving_http
from gateway.faces.static import add_page

WORDS = [f"word{number} " for number in range(1, 41)]
CLASSES = {
    "interactive": {"ttft_s": 60.0, "tpot_s": 30.0, "mtpot_s": 60.0},
    "hasty": {"ttft_s": 1e-6, "tpot_s": 1e-6, "mtpot_s": 1e-6},
    "batch": {"ttft_s": None, "tpot_s": None, "mtpot_s": None},
}
ABOUT = {
    "model": "fake", "max_context_tokens": 512, "default_class": "interactive", "classes": CLASSES,
    "presets": [{"name": "foretoken", "about": "forecasts"}, {"name": "fcfs", "about": "queues"}],
}  # fmt: skip
BOARD = {
    "ready": True, "draining": False, "age_s": 0.1, "preset": "foretoken", "queued": 644,
    "running": 1, "live": 1, "arriving": 44, "drain_s": 0.0, "worker_count": 0,
    "workers": [], "window_s": 60,
    "classes": {
        "interactive": {"met": 3, "missed": {"queued": 1}, "tokens": 400, "good_tokens": 300},
        "a-class-with-a-long-name": {
            "met": 900, "missed": {"prefill": 17, "rejected": 5, "preempted": 90},
            "tokens": 99_000, "good_tokens": 80_000,
        },
    },
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
        {"at_s": 0.2, "kind": "waited", "text": "waited: no memory", "times": 3, "until_s": 0.9},
    ],
}


def forecast_after(sent: int) -> dict[str, float]:
    """Forecast after `sent` of forty tokens. The interval narrows from both sides."""
    left = 1 - sent / len(WORDS)
    forecast = {
        "expected_tokens": 40 + 8 * left, "low_tokens": max(sent, 40 - 28 * left),
        "high_tokens": 40 + 56 * left, "end_s": 0.05 * (40 - sent),
    }  # fmt: skip
    return forecast | ({"ttft_s": 0.41, "sla_expected": True} if sent == 0 else {})


@dataclass
class ForecastServer:
    """Records requests and streams `words` up to `allowed` tokens; below 0, not even a forecast."""

    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    classes: list[str | None] = field(default_factory=list)  # values of the SLA header
    keys: list[str | None] = field(default_factory=list)  # authorization headers of all requests
    words: Sequence[str] = tuple(WORDS)
    forecast: Callable[[int], dict[str, float]] = forecast_after
    supports_forecasts: bool = True
    key: str = ""  # required API key; empty: none
    disconnects: int = 0
    refusal: tuple[int, str, dict[str, str]] | None = None  # status, message, headers
    allowed: int = 10**6
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def allow(self, tokens: int) -> None:
        async with self.changed:
            self.allowed = tokens
            self.changed.notify_all()

    async def events(self) -> AsyncIterator[bytes]:
        try:
            await self.wait_until_allowed(0)
            if self.supports_forecasts:
                yield event({}, forecast=self.forecast(0))
            for number, word in enumerate(self.words, 1):
                await self.wait_until_allowed(number)
                forecast = self.forecast(number) if self.supports_forecasts else None
                yield event({"content": word}, tokens=1, forecast=forecast)
            yield event({}, finish="stop")
            count = len(self.words)
            usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": count + 3}
            yield b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        except asyncio.CancelledError:
            self.disconnects += 1
            raise

    async def wait_until_allowed(self, tokens: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.allowed >= tokens)


def event(
    delta: dict[str, str],
    tokens: int = 0,
    finish: str | None = None,
    forecast: dict[str, float] | None = None,
) -> bytes:
    logprobs = {"content": [{"token": "t", "logprob": -1.0}] * tokens}
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
    chunk = {"id": "chatcmpl-f0e", "choices": [choice]} | (
        {"forecast": forecast} if forecast else {}
    )
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def build_app(server: ForecastServer) -> FastAPI:
    app = FastAPI()

    @app.middleware("http")
    async def require_key(request: Request, proceed: Any) -> Response:
        given = request.headers.get("authorization")
        path = request.url.path
        protected = path.startswith("/v1/") or path in ("/ui/about", "/ui/board")
        if protected:
            server.keys.append(given)
        if protected and server.key and given != f"Bearer {server.key}":
            return JSONResponse(
                {"error": {"message": "the API key is wrong" if given else "no API key was given"}},
                401,
            )
        answer: Response = await proceed(request)
        return answer

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        server.bodies.append(body := await request.json())
        server.classes.append(request.headers.get("x-foretoken-sla"))
        if server.refusal:
            status, message, headers = server.refusal
            return JSONResponse({"error": {"message": message}}, status, headers)
        if "include_forecast" in body["stream_options"] and not server.supports_forecasts:
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

    add_page(app, read_live_page())
    return app


@asynccontextmanager
async def serving_forecasts(**options: Any) -> AsyncIterator[ForecastServer]:
    server = ForecastServer(**options)
    async with serving_http(build_app(server), "127.0.0.1", 0) as port:
        server.url = f"http://127.0.0.1:{port}"
        yield server
