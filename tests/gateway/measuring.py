"""Clients that record when each message arrived, to check a gateway's metrics against.

They run on the gateway's event loop and read its clock. The gateway measures each span later than
the client starts it and earlier than the client ends it, and no earlier than the worker allows, so
every bound holds however busy the machine is.
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import pytest
from grpc import aio
from prometheus_client.parser import text_string_to_metric_families

from protos.generated import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.runtime.network.channel import connect
from services.sla import BECAUSE
from tests.gateway.gateway_fakes import demo_text

PROMPT = "copy: 1 2 3\n"
# Clients of class `left` disconnect after two messages.
CLASSES: dict[str, dict[str, float]] = {
    "easy": {}, "late": {"ttft_s": 1e-6}, "slow": {"tpot_s": 1e-9}, "whole": {}, "left": {},
}  # fmt: skip
KINDS = ("easy", "easy", "easy", "easy", "late", "late", "slow", "slow", "whole", "left")
STREAMED = ("easy", "late", "slow")
TOKENS = 8
CLOCK_S = 0.001  # a timer of the event loop may fire earlier by its resolution


@dataclass
class Seen:
    """One answer as its client saw it: when the client sent the request, when each message with
    tokens arrived, and when the stream ended."""

    kind: str
    max_tokens: int
    asked_s: float = 0.0
    took_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0
    first_tokens: int = 0  # in the first message with any
    tokens: int = 0
    prompt_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.took_s[0] - self.asked_s

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.asked_s


async def ask_all(
    grpc: str, http: str, numbers: Collection[int], left_tokens: int, at_once: int
) -> list[Seen]:
    """Sends the requests of these numbers over gRPC and HTTP, `at_once` at a time; requests of
    class `left` have `max_tokens` of `left_tokens`."""
    turns = asyncio.Semaphore(at_once)
    channel = connect(grpc)
    host, port = http.removeprefix("http://").split(":")

    async def one(number: int) -> Seen:
        kind = _kind(number)
        seen = Seen(kind, left_tokens if kind == "left" else TOKENS)
        async with turns:
            if number // len(KINDS) % 2 and seen.kind != "whole":
                await _over_grpc(channel, seen)
            else:
                await _over_http(host, int(port), seen)
        return seen

    try:
        return await asyncio.gather(*map(one, numbers))
    finally:
        await channel.close()


def _kind(number: int) -> str:
    return KINDS[number % len(KINDS)]


async def _over_grpc(channel: aio.Channel, seen: Seen) -> None:
    request = gateway_pb2.GenerateRequest(
        prompt=PROMPT,
        sla=common_pb2.Sla(name=seen.kind),
        sampling=common_pb2.Sampling(max_tokens=seen.max_tokens, ignore_eos=True, temperature=0.0),
    )
    seen.asked_s = time.monotonic()
    call = gateway_pb2_grpc.GatewayStub(channel).Generate(request)
    async for response in call:
        if response.HasField("usage"):
            seen.tokens = response.usage.completion_tokens
            seen.prompt_tokens = response.usage.prompt_tokens
        else:
            seen.took_s.append(time.monotonic())
            seen.first_tokens = seen.first_tokens or len(response.token_ids)
        if seen.kind == "left" and len(seen.took_s) == 2:
            call.cancel()
            return
    seen.ended_s = time.monotonic()


async def _over_http(host: str, port: int, seen: Seen) -> None:
    body: dict[str, object] = {
        "prompt": PROMPT, "ignore_eos": True, "temperature": 0,
        "max_tokens": seen.max_tokens,
    }  # fmt: skip
    if seen.kind != "whole":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    raw = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nx-foretoken-sla: {seen.kind}\r\n"
        f"Content-Length: {len(raw)}\r\nConnection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    try:
        seen.asked_s = time.monotonic()
        writer.write(head.encode() + raw)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.startswith(b"http/1.1 200 "), answer
        if b"transfer-encoding: chunked" in answer:
            await _read_events(reader, seen)
        else:
            _read_usage(json.loads(await reader.read()), seen)
        seen.ended_s = time.monotonic()
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, seen: Seen) -> None:
    """Each chunk is one event, as the gateway sends them."""
    while size := int(await reader.readline(), 16):
        data = (await reader.readexactly(size + 2)).strip()
        now_s = time.monotonic()
        if data == b"data: [DONE]":
            continue
        event = json.loads(data.removeprefix(b"data: "))
        if event["choices"]:
            seen.took_s.append(now_s)
            text = event["choices"][0]["text"]
            seen.first_tokens = seen.first_tokens or len(demo_text().encode(text))
        else:
            _read_usage(event, seen)
        if seen.kind == "left" and len(seen.took_s) == 2:
            return


def _read_usage(answer: dict[str, dict[str, int]], seen: Seen) -> None:
    seen.tokens = answer["usage"]["completion_tokens"]
    seen.prompt_tokens = answer["usage"]["prompt_tokens"]


@dataclass(frozen=True)
class Pace:
    """The least time of the worker for a prefill and for each step."""

    prefill_s: float = 0.0
    step_s: float = 0.0


class Counts:
    """A gateway's `/metrics`, read once."""

    def __init__(self, http: str):
        text = urllib.request.urlopen(f"{http}/metrics", timeout=30).read().decode()
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def total(self, name: str, **labels: str) -> float:
        """The gateway's own value, summed over the labels that are not given."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == f"foretoken_{name}"
            and "worker" not in sample.labels
            and labels.items() <= sample.labels.items()
        )


async def check_counts(
    grpc: str, http: str, count: int, left_tokens: int, at_once: int, pace: Pace
) -> None:
    """Sends `count` requests to a fresh gateway with CLASSES and checks its metrics: counts and
    tokens equal the clients', spans lie within the bounds."""
    seen: list[Seen] = []
    for kinds in (STREAMED, ("whole",), ("left",)):
        numbers = [number for number in range(count) if _kind(number) in kinds]
        seen += await ask_all(grpc, http, numbers, left_tokens, at_once)
        counts = await _settled(http, len(seen))
        _check_tokens(counts, seen)
    by_kind = {kind: [each for each in seen if each.kind == kind] for kind in CLASSES}
    _check_outcomes(counts, by_kind)
    finished = count - len(by_kind["left"])
    assert counts.total("request_success_total", finished_reason="length") == finished
    assert counts.total("request_success_total", finished_reason="cancelled") == count - finished
    assert counts.total("request_success_total") == count
    assert counts.total("prompt_tokens_total") == count * seen[0].prompt_tokens
    for kind in STREAMED:
        _check_streamed_spans(counts, kind, by_kind[kind], pace)
    _check_e2e(counts, "whole", by_kind["whole"], pace)


def _check_tokens(counts: Counts, seen: Sequence[Seen]) -> None:
    """Checks token counts after all answers. A client that disconnected does not know the later
    tokens."""
    finished = [each for each in seen if each.kind != "left"]
    left = [each for each in seen if each.kind == "left"]
    assert {each.tokens for each in finished} == {TOKENS}
    made = counts.total("generation_tokens_total") - len(finished) * TOKENS
    if left:
        assert 2 * len(left) <= made <= sum(each.max_tokens for each in left)
    else:
        assert made == 0
    streamed = [each for each in finished if each.kind in STREAMED]
    gaps = counts.total(f"{GAP}_count") - sum(TOKENS - each.first_tokens for each in streamed)
    if len(seen) == len(streamed):
        assert gaps == 0
        # Tokens of one message share its gap: the sum is the time from the first to the last token.
        metric_s = counts.total(f"{GAP}_sum")
        assert metric_s == pytest.approx(counts.total("request_decode_time_seconds_sum"), rel=0.05)
    else:
        # A client of a whole answer cannot see the gaps between its tokens.
        assert 0 < gaps <= (TOKENS - 1) * (len(finished) - len(streamed)) + max(0.0, made)


# Causes that a missed SLA of each class may have.
EXPECTED: dict[str, tuple[str, ...]] = {
    "easy": (),
    "whole": (),
    "late": ("queued", "prefill"),
    "slow": ("decode",),
    "left": ("client",),
}
E2E = "e2e_request_latency_seconds"
TTFT = "time_to_first_token_seconds"
TPOT = "request_time_per_output_token_seconds"
MTPOT = "request_max_time_per_output_token_seconds"
GAP = "inter_token_latency_seconds"


async def _settled(http: str, count: int) -> Counts:
    """The counts once `count` requests have ended."""
    async with asyncio.timeout(30):
        while True:
            counts = await asyncio.to_thread(Counts, http)
            if counts.total("request_success_total") >= count:
                return counts
            await asyncio.sleep(0.05)


def _check_outcomes(counts: Counts, by_kind: dict[str, list[Seen]]) -> None:
    for kind, causes in EXPECTED.items():
        of_class = {"class": kind}
        missed = [each for each in by_kind[kind] if causes and _is_missed(each)]
        recorded = {
            cause: number
            for cause in ("", *BECAUSE)
            if (number := counts.total("sla_requests_total", cause=cause, **of_class))
        }
        assert recorded.keys() <= {"", *causes}, recorded
        assert counts.total("sla_requests_total", outcome="missed", **of_class) == len(missed)
        assert counts.total("sla_requests_total", **of_class) == len(by_kind[kind])
        good = sum(each.tokens for each in by_kind[kind]) - sum(each.tokens for each in missed)
        assert counts.total("goodput_tokens_total", **of_class) == good


def _is_missed(seen: Seen) -> bool:
    """An answer of class `slow` in one message has no TPOT to miss."""
    return seen.kind != "slow" or len(seen.took_s) > 1


def _check_streamed_spans(counts: Counts, kind: str, seen: Sequence[Seen], pace: Pace) -> None:
    ttft_s, tpot_s, mtpot_s = (_mean(counts, name, kind, seen) for name in (TTFT, TPOT, MTPOT))
    assert pace.prefill_s <= ttft_s + CLOCK_S <= fmean(each.ttft_s for each in seen) + 2 * CLOCK_S
    decode_s = (TOKENS - 1) * tpot_s
    assert 0 < tpot_s <= mtpot_s <= decode_s + CLOCK_S
    assert ttft_s + decode_s <= _check_e2e(counts, kind, seen, pace) + CLOCK_S


def _check_e2e(counts: Counts, kind: str, seen: Sequence[Seen], pace: Pace) -> float:
    metric_s = _mean(counts, E2E, kind, seen)
    least_s = pace.prefill_s + (TOKENS - 1) * pace.step_s
    assert least_s <= metric_s + CLOCK_S <= fmean(each.e2e_s for each in seen) + 2 * CLOCK_S
    return metric_s


def _mean(counts: Counts, name: str, kind: str, seen: Sequence[Seen]) -> float:
    """The mean over one observation for each answer."""
    assert counts.total(f"{name}_count", **{"class": kind}) == len(seen)
    return counts.total(f"{name}_sum", **{"class": kind}) / len(seen)
