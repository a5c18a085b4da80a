"""Clients that measure: what each saw of its answer, and the sums to hold a gateway's counts to.

They run on the loop they are awaited on, and share its clock: where that is the gateway's too, both
measure the same moments but for the way between them.
"""

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from grpc import aio
from prometheus_client.parser import text_string_to_metric_families

from protos.generated import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.runtime.channel import connect
from services.sla import BECAUSE
from tests.gateway.gateway_fakes import demo_text

PROMPT = "copy: 1 2 3\n"
# What requests of each class are to see, by what they ask for; `left` are left by their clients.
CLASSES: dict[str, dict[str, float]] = {
    "easy": {}, "late": {"ttft_s": 1e-6}, "slow": {"tpot_s": 1e-9}, "whole": {}, "left": {},
}  # fmt: skip
KINDS = ("easy", "easy", "easy", "easy", "late", "late", "slow", "slow", "whole", "left")
STREAMED = ("easy", "late", "slow")
TOKENS = 8
# How far a span that a client saw may be from what the gateway tells of it, a mean a request: for
# the way between socket and client on a machine that is busy.
WAY_S, WAY_SHARE = 0.005, 0.25


@dataclass
class Seen:
    """One answer, by its client: when it was asked for, when each message with tokens was there."""

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
    def decode_s(self) -> float:
        return self.took_s[-1] - self.took_s[0]

    @property
    def tpot_s(self) -> float:
        return self.decode_s / (self.tokens - 1)

    @property
    def mtpot_s(self) -> float:
        return max((b - a for a, b in pairwise(self.took_s)), default=0.0)

    @property
    def e2e_s(self) -> float:
        return (self.took_s[-1] if self.took_s else self.ended_s) - self.asked_s


async def ask_all(
    grpc: str, http: str, numbers: Collection[int], left_tokens: int, at_once: int
) -> list[Seen]:
    """The requests of these numbers over both ways, of the kinds in their turn. Who leaves has
    asked for `left_tokens`."""
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
    """An event is a chunk, as the gateway sends them."""
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


class Counts:
    """A gateway's `/metrics`, read once."""

    def __init__(self, http: str):
        text = urllib.request.urlopen(f"{http}/metrics", timeout=30).read().decode()
        self._samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]

    def of(self, name: str, **labels: str) -> float:
        """The gateway's own, summed over the labels that are not given."""
        return sum(
            sample.value
            for sample in self._samples
            if sample.name == f"foretoken_{name}"
            and "worker" not in sample.labels
            and labels.items() <= sample.labels.items()
        )


async def check_counts(
    grpc: str, http: str, count: int, left_tokens: int, at_once: int
) -> dict[str, str]:
    """Asks, and holds what a fresh gateway with CLASSES has counted to what its clients saw.

    Counts and tokens are the same; times are but for the way between socket and client. Returns
    what is too far apart, by metric and class.
    """
    seen: list[Seen] = []
    for kinds in (STREAMED, ("whole",), ("left",)):
        numbers = [number for number in range(count) if _kind(number) in kinds]
        seen += await ask_all(grpc, http, numbers, left_tokens, at_once)
        counts = await _settled(http, len(seen))
        _check_tokens(counts, seen)
    by_kind = {kind: [each for each in seen if each.kind == kind] for kind in CLASSES}
    _check_outcomes(counts, by_kind)
    finished = count - len(by_kind["left"])
    assert counts.of("request_success_total", finished_reason="length") == finished
    assert counts.of("request_success_total", finished_reason="cancelled") == count - finished
    assert counts.of("request_success_total") == count
    assert counts.of("prompt_tokens_total") == count * seen[0].prompt_tokens
    found = {
        f"{name} of {kind}": _apart(counts, name, kind, by_kind[kind], measure)
        for name, measure in MEASURES.items()
        for kind in STREAMED
    }
    found[f"{E2E} of whole"] = _apart(counts, E2E, "whole", by_kind["whole"], MEASURES[E2E])
    return {name: apart for name, apart in found.items() if apart}


def _check_tokens(counts: Counts, seen: Sequence[Seen]) -> None:
    """All of the answers are over. Of one that its client left, only it knows what came after."""
    finished = [each for each in seen if each.kind != "left"]
    left = [each for each in seen if each.kind == "left"]
    assert {each.tokens for each in finished} == {TOKENS}
    made = counts.of("generation_tokens_total") - len(finished) * TOKENS
    if left:
        assert 2 * len(left) <= made <= sum(each.max_tokens for each in left)
    else:
        assert made == 0
    streamed = [each for each in finished if each.kind in STREAMED]
    gaps = counts.of(f"{GAP}_count") - sum(TOKENS - each.first_tokens for each in streamed)
    if len(seen) == len(streamed):
        assert gaps == 0
        # A gap's tokens share it: together they are the time between first and last.
        told_s = counts.of(f"{GAP}_sum")
        assert told_s == pytest.approx(counts.of("request_decode_time_seconds_sum"), rel=0.05)
        assert _difference(told_s, [each.decode_s for each in streamed], 1) == ""
    else:
        # Of an answer that is sent whole nobody sees how its tokens came.
        assert 0 < gaps <= (TOKENS - 1) * (len(finished) - len(streamed)) + max(0.0, made)


# What may have broken each class; a client can't tell what it waited for.
EXPECTED: dict[str, tuple[str, ...]] = {
    "easy": (),
    "whole": (),
    "late": ("queued", "prefill"),
    "slow": ("decode",),
    "left": ("client",),
}
E2E = "e2e_request_latency_seconds"
TPOT = "request_time_per_output_token_seconds"
GAP = "inter_token_latency_seconds"
MEASURES: dict[str, Callable[[Seen], float]] = {
    "time_to_first_token_seconds": lambda seen: seen.ttft_s,
    TPOT: lambda seen: seen.tpot_s,
    "request_max_time_per_output_token_seconds": lambda seen: seen.mtpot_s,
    E2E: lambda seen: seen.e2e_s,
}


async def _settled(http: str, count: int) -> Counts:
    """Once those whose clients left are over, too."""
    async with asyncio.timeout(30):
        while True:
            counts = await asyncio.to_thread(Counts, http)
            if counts.of("request_success_total") >= count:
                return counts
            await asyncio.sleep(0.05)


def _check_outcomes(counts: Counts, by_kind: dict[str, list[Seen]]) -> None:
    for kind, causes in EXPECTED.items():
        of_class = {"class": kind}
        missed = [each for each in by_kind[kind] if causes and _is_missed(each)]
        booked = {
            cause: number
            for cause in ("", *BECAUSE)
            if (number := counts.of("sla_requests_total", cause=cause, **of_class))
        }
        assert booked.keys() <= {"", *causes}, booked
        assert counts.of("sla_requests_total", outcome="missed", **of_class) == len(missed)
        assert counts.of("sla_requests_total", **of_class) == len(by_kind[kind])
        good = sum(each.tokens for each in by_kind[kind]) - sum(each.tokens for each in missed)
        assert counts.of("goodput_tokens_total", **of_class) == good


def _is_missed(seen: Seen) -> bool:
    """Of `slow`, what came in one message has no pace to miss."""
    return seen.kind != "slow" or len(seen.took_s) > 1


def _apart(
    counts: Counts, name: str, kind: str, seen: Sequence[Seen], measure: Callable[[Seen], float]
) -> str:
    assert counts.of(f"{name}_count", **{"class": kind}) == len(seen)
    told_s = counts.of(f"{name}_sum", **{"class": kind})
    parts = TOKENS - 1 if name == TPOT else 1  # the way is in it once
    return _difference(told_s, [measure(each) for each in seen], parts)


def _difference(told_s: float, saw_s: Sequence[float], parts: int) -> str:
    """Empty where both are the same but for the way."""
    told_s, mean_s = told_s / len(saw_s), sum(saw_s) / len(saw_s)
    allowed_s = WAY_S / parts + WAY_SHARE * mean_s
    assert allowed_s < mean_s, f"{mean_s:.4f} s can't be told from 0 by {allowed_s:.4f} s"
    return "" if abs(told_s - mean_s) <= allowed_s else f"{told_s:.4f} s, seen {mean_s:.4f} s"
