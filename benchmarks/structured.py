"""Structured output beside plain text: tokens/s of many streams, and the first token of a schema
that the server does not know.

    python -m benchmarks.serving --structured [--peer-python PYTHON_WITH_VLLM] [--json FILE]

Every answer has exactly `OUTPUT_TOKENS` tokens: a structured one is cut in the middle of an array.
Plain and structured rounds alternate, on every system in turn.
"""

import asyncio
import json
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import count

from benchmarks.harness.report import Key, Measurements, alternating, nested, show, write
from benchmarks.harness.system import System, foretoken_system, vllm_server
from foretoken.bench.client import Server
from foretoken.bench.samples import Sample
from models.tasks import examples

STREAMS, OUTPUT_TOKENS = 64, 128
KV_TOKENS = 65_536
ANSWERED_S = 300.0
PLAIN, KNOWN, UNKNOWN = "plain", "known schema", "unknown schema"
TEMPERATURES = (0.0, 1.0)
ROW: dict[str, object] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["fruit", "animal", "color", "tool"]},
        "name": {"type": "string", "maxLength": 24},
        "ok": {"type": "boolean"},
    },
    "required": ["id", "kind", "name", "ok"],
    "additionalProperties": False,
}


def make_schema(number: int) -> dict[str, object]:
    """Rows that no answer of OUTPUT_TOKENS completes. Each number has a schema of its own."""
    rows = {"type": "array", "items": ROW, "minItems": OUTPUT_TOKENS}
    name = f"rows_{number}"
    return {"type": "object", "properties": {name: rows}, "required": [name]}


def make_body(prompt: str, schema: int | None, temperature: float, tokens: int) -> bytes:
    """A streamed chat request, with a schema by its number or with plain text."""
    body: dict[str, object] = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": temperature,
        "seed": 1,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if schema is None:
        body["ignore_eos"] = True
    else:
        named = {"name": "rows", "schema": make_schema(schema)}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    return json.dumps(body).encode()


class Client:
    """Sends streams to one system. Each prompt and each unknown schema is sent once."""

    def __init__(self, url: str, prompts: Iterator[str]):
        self._server, self._prompts = Server(url), prompts
        self._schemas = count(1)

    async def tokens_per_s(self, structured: bool, temperature: float, streams: int) -> float:
        """Tokens/s until the last of the simultaneous streams has ended."""
        schema = 0 if structured else None
        began_s = time.perf_counter()
        asked = (self._ask(schema, temperature, OUTPUT_TOKENS) for _ in range(streams))
        samples = await asyncio.gather(*asked)
        elapsed_s = time.perf_counter() - began_s
        return sum(sample.output_tokens for sample in samples) / elapsed_s

    async def ttft_s(self, kind: str) -> float:
        """The time to the first token of a stream on an idle system."""
        schema = {PLAIN: None, KNOWN: 0, UNKNOWN: next(self._schemas)}[kind]
        return (await self._ask(schema, 0.0, 4)).ttft_s

    async def close(self) -> None:
        await self._server.close()

    async def _ask(self, schema: int | None, temperature: float, tokens: int) -> Sample:
        sample = Sample(0.0)
        body = make_body(next(self._prompts), schema, temperature, tokens)
        began_s = time.perf_counter()
        await self._server.stream("/v1/chat/completions", body, sample, began_s, ANSWERED_S)
        if sample.problem or sample.output_tokens != tokens:
            raise RuntimeError(
                f"an answer has {sample.output_tokens} instead of {tokens} tokens {sample.problem}"
            )
        return sample


async def measure(options: Namespace, systems: Mapping[str, System]) -> Measurements:
    rounds, requests, streams = (1, 2, 4) if options.quick else (5, 40, STREAMS)
    measured = Measurements()
    prompts = (each.user for each in examples(0, 10**6, held_out=False))
    clients = {name: Client(system.http, prompts) for name, system in systems.items()}
    for client in clients.values():  # compiles the known schema and warms the server up
        await client.tokens_per_s(True, 1.0, streams)
        await client.ttft_s(UNKNOWN)
    for _, names in alternating(list(clients), rounds):
        for name in names:
            for temperature in TEMPERATURES:
                for kind in (PLAIN, KNOWN):
                    speed = await clients[name].tokens_per_s(kind == KNOWN, temperature, streams)
                    measured.add((name, f"temperature {temperature:g}", f"{kind}, tokens/s"), speed)
    for _ in range(requests):
        for name, client in clients.items():
            for kind in (PLAIN, KNOWN, UNKNOWN):
                measured.add((name, "idle", f"{kind}, ttft_ms"), await client.ttft_s(kind) * 1e3)
    for client in clients.values():
        await client.close()
    return measured


def run(options: Namespace) -> None:
    """Measures foretoken, and vLLM if a Python that has it is given; prints and records it."""
    with ExitStack() as stack:
        size = ("--kv-tokens", str(KV_TOKENS), "--dtype", "float32")
        systems = {"foretoken": stack.enter_context(foretoken_system(*size))}
        if options.peer_python:
            systems["vLLM"] = stack.enter_context(vllm_server(options.peer_python, KV_TOKENS))
        measured = asyncio.run(measure(options, systems))
    rows = [(*key, measured.figure(*key)) for key in measured.values]
    title = f"{STREAMS} streams of {OUTPUT_TOKENS} tokens: median (lowest–highest)"
    show(title, ("system", "load", "figure", ""), rows)
    ratios: dict[Key, float] = {
        (name, load): measured.figure(name, load, f"{KNOWN}, tokens/s").median
        / measured.figure(name, load, f"{PLAIN}, tokens/s").median
        for name in systems
        for load in (f"temperature {temperature:g}" for temperature in TEMPERATURES)
    }
    ratio_rows = [(*key, f"{ratio:.3f}") for key, ratio in ratios.items()]
    show("Tokens/s with a schema as a share of plain", ("system", "load", "share"), ratio_rows)
    record = measured.medians() | {"repeats": measured.repeats(), "shares": nested(ratios)}
    write(options.json, record)
