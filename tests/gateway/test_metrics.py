"""The gateway's metrics equal its clients' measurements and name the cause of each SLA miss."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest

from foretoken import AsyncClient, ForetokenError
from gateway.faces.grpc.decode import decode_request
from observability.metrics import gateway as catalogue
from protos.generated import common_pb2 as common
from protos.generated import gateway_pb2
from protos.generated import scheduler_pb2 as sched
from protos.generated.worker_pb2 import Prompt
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of
from tests.gateway.gateway_fixtures import IDS, STOP, first_prompt
from tests.gateway.gateway_fixtures import harness as harness
from tests.gateway.measuring import CLASSES, Pace, check_counts

PAUSE_S = 0.3  # of the phase that causes the miss; the budget is a third of it
TTFT, MTPOT = {"ttft_s": PAUSE_S / 3}, {"mtpot_s": PAUSE_S / 3}
WAYS = ("grpc", "http", "whole")
# All differ and are long compared with delivery, so that metrics of generated tokens differ from
# metrics of delivered tokens.
PREFILL_S, STEP_S, MESSAGES_S = 0.08, 0.05, 0.12


Verdict = tuple[str, str, str]


def repeat(prompt: Prompt) -> Sequence[int]:
    return tokens_of("1") * prompt.max_tokens


@pytest.mark.slow
async def test_metrics_agree_with_500_clients() -> None:
    async with run_harness(
        repeat, sla_classes=CLASSES, default_sla="easy",
        max_messages_per_s=0.01, max_pause_s=MESSAGES_S,
    ) as harness:  # fmt: skip
        harness.worker.prefill_s, harness.worker.step_s = PREFILL_S, STEP_S
        pace = Pace(PREFILL_S, STEP_S)
        await check_counts(harness.grpc_address, harness.http_url, 500, 400, 32, pace)


def verdicts(harness: Harness) -> dict[Verdict, float]:
    """The counted requests by (class, outcome, cause)."""
    return {
        (sample.labels["class"], sample.labels["outcome"], sample.labels["cause"]): sample.value
        for family in harness.gateway.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "foretoken_sla_requests_total" and sample.value
    }


async def ask(harness: Harness, way: str, budgets: dict[str, float]) -> None:
    """Sends a request and reads its answer to the end, an error included."""
    if way == "grpc":
        with suppress(ForetokenError):
            async with AsyncClient(harness.grpc_address) as client:
                await client.complete("1,", sla=budgets)
        return
    header = ",".join(f"{name}={value}" for name, value in budgets.items())
    body = {"prompt": "1,", "stream": way == "http"}
    await harness.http("POST", "/v1/completions", body, {"x-foretoken-sla": header})


async def reject(harness: Harness) -> None:
    pass


async def queue(harness: Harness) -> None:
    await harness.until(lambda: bool(harness.scheduler.requests))
    await asyncio.sleep(PAUSE_S)
    name = harness.scheduler.requests[0].request_id
    harness.scheduler.send_placed(name)
    await first_prompt(harness)
    harness.worker.send(name, 0, IDS, STOP)


async def prefill(harness: Harness) -> None:
    name = await first_prompt(harness)
    (live,) = harness.gateway.sessions.table
    # Longer than the wait for placement, which takes a while on a busy machine.
    await asyncio.sleep(PAUSE_S + live.session.timeline.queued_s)
    harness.worker.send(name, 0, IDS, STOP)


async def decode(harness: Harness) -> None:
    name = await send_two_tokens(harness)
    await asyncio.sleep(PAUSE_S)
    harness.worker.send(name, 2, IDS[2:], STOP)


async def preempt(harness: Harness) -> None:
    name = await send_two_tokens(harness)
    harness.scheduler.send_event(name, preempted=sched.Preempted(output_tokens=2))
    await asyncio.sleep(PAUSE_S)
    harness.scheduler.send_placed(name)
    await harness.until(lambda: len(harness.worker.prompts) == 2)
    harness.worker.send(name, 2, IDS[2:], STOP)


async def swap_in(harness: Harness) -> None:
    name = await send_two_tokens(harness)
    harness.scheduler.send_event(name, preempted=sched.Preempted(output_tokens=2))
    harness.scheduler.send_event(name, resumed=sched.Resumed(held_tokens=16))
    await asyncio.sleep(PAUSE_S)
    harness.worker.send(name, 2, IDS[2:], STOP)


async def send_two_tokens(harness: Harness) -> str:
    """The request's id, once two of its tokens have arrived."""
    name = await first_prompt(harness)
    harness.worker.send(name, 0, IDS[:2])
    await harness.until(lambda: harness.gateway.metrics.generation_tokens._value.get() == 2)
    return name


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("force", "budgets", "cause"),
    [
        (reject, TTFT, "rejected"),
        (queue, TTFT, "queued"),
        (prefill, TTFT, "prefill"),
        (decode, MTPOT, "decode"),
        (preempt, MTPOT, "preempted"),
        (swap_in, MTPOT, "swap-in"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_sla_miss_is_counted_by_cause(
    harness: Harness,
    force: Callable[[Harness], Awaitable[None]],
    budgets: dict[str, float],
    cause: str,
    way: str,
) -> None:
    harness.scheduler.place = force is not queue
    if force is reject:
        rejected = sched.Rejected(reason=sched.REJECT_REASON_QUEUE_FULL, message="full")
        harness.scheduler.answers = lambda _: sched.RequestEvent(rejected=rejected)
    pending = asyncio.ensure_future(ask(harness, way, budgets))
    await force(harness)
    await pending
    assert verdicts(harness) == {("custom", "missed", cause): 1}


async def test_disconnected_client_is_a_miss_by_the_client(harness: Harness) -> None:
    async with AsyncClient(harness.grpc_address) as client:
        stream = client.generate("1,")
        reading = asyncio.ensure_future(stream.complete())
        await send_two_tokens(harness)
        stream.cancel()
        await reading
    await harness.until(lambda: bool(verdicts(harness)))
    assert verdicts(harness) == {("standard", "missed", "client"): 1}


async def test_slow_client_counts_against_the_sla(
    harness: Harness,
) -> None:
    request = gateway_pb2.GenerateRequest(prompt="1,", sla=common.Sla(mtpot_s=MTPOT["mtpot_s"]))
    call = await harness.gateway.open(
        [
            await harness.gateway.intake.parse(
                decode_request(request), harness.gateway.intake.admit()
            )
        ]
    )

    async def read() -> None:
        async for chunk in call.chunks():
            if chunk.reason is None:
                continue
            await asyncio.sleep(PAUSE_S)  # the client does not read

    reading = asyncio.ensure_future(read())
    name = await send_two_tokens(harness)
    await harness.until(lambda: call.choices[0].session.client_timeline.timeline.tokens > 0)
    harness.worker.send(name, 2, IDS[2:], STOP)
    await reading
    assert verdicts(harness) == {("custom", "missed", "decode"): 1}
    value = harness.gateway.metrics.registry.get_sample_value
    assert value("foretoken_inter_token_latency_seconds_count") == len(IDS) - 2
    assert (value("foretoken_inter_token_latency_seconds_sum") or 0.0) >= PAUSE_S


@pytest.mark.parametrize("way", WAYS[:1] + WAYS[2:])
async def test_tokens_of_one_message_share_its_gap(harness: Harness, way: str) -> None:
    pending = asyncio.ensure_future(ask(harness, way, MTPOT))
    name = await send_two_tokens(harness)
    await asyncio.sleep(PAUSE_S)
    harness.worker.send(name, 2, IDS[2:], STOP)
    await pending
    value = harness.gateway.metrics.registry.get_sample_value
    assert value("foretoken_inter_token_latency_seconds_count") == len(IDS) - 2
    assert value("foretoken_inter_token_latency_seconds_sum") == pytest.approx(
        value("foretoken_request_max_time_per_output_token_seconds_sum", {"class": "custom"})
    )


async def test_refused_request_counts_as_a_miss() -> None:
    async with run_harness(max_sessions=1) as small, AsyncClient(small.grpc_address) as client:
        pending = asyncio.ensure_future(client.complete("1,"))
        name = await first_prompt(small)
        for sla in ("interactive", None, {"ttft_s": 1.0}, 'evil"'):
            with pytest.raises(ForetokenError):
                await client.complete("1,", sla=sla, n=2)
        for header in ({"x-foretoken-sla": "batch"}, {"x-foretoken-sla": 'evil"} 1'}):
            await small.http("POST", "/v1/completions", {"prompt": "1,"}, header)
        small.worker.send(name, 0, IDS, STOP)
        await pending
        assert verdicts(small) == {
            ("interactive", "missed", "rejected"): 2,
            ("standard", "missed", "rejected"): 2,
            ("custom", "missed", "rejected"): 5,
            ("batch", "missed", "rejected"): 1,
            ("standard", "met", ""): 1,
        }


async def test_client_text_does_not_become_a_label(harness: Harness) -> None:
    harness.worker.script = repeat
    evil = 'evil"} 1\\'
    bodies: list[tuple[dict[str, object], dict[str, str]]] = [
        ({"model": evil}, {}),
        ({"user": evil}, {"x-foretoken-application": evil}),
        ({}, {"x-foretoken-sla": evil}),
        ({}, {"x-foretoken-sla": f"{evil}=1"}),
        ({}, {"x-foretoken-sla": "interactive,ttft_s=1e-9"}),
        ({}, {"x-foretoken-sla": "batch"}),
    ]
    asked: list[dict[str, Any]] = [
        {"model": evil}, {"sla": evil}, {"application": evil, "cache_salt": evil},
    ]  # fmt: skip
    for body, headers in bodies:
        sent = {"prompt": "1,", "max_tokens": 2, **body}
        await harness.http("POST", "/v1/completions", sent, headers)
    async with AsyncClient(harness.grpc_address) as client:
        for options in asked:
            with suppress(ForetokenError):
                await client.complete("1,", max_tokens=2, **options)
    text = (await harness.http("GET", "/metrics")).text
    assert "evil" not in text
    classes = set(re.findall(r'class="(.*?)"', text))
    assert classes == {"interactive", "standard", "batch", "custom"}
    recorded: Counter[str] = Counter()
    for (name, *_), number in verdicts(harness).items():
        recorded[name] += int(number)
    assert recorded == {"custom": 1, "batch": 1, "standard": 2}
    assert set(harness.gateway.sla_window.by_class(time.monotonic())) == set(recorded)
    assert {request.sla.name for request in harness.scheduler.requests} == set(recorded)


async def test_every_catalogued_metric_is_exported_with_its_type(harness: Harness) -> None:
    text = (await harness.http("GET", "/metrics")).text
    reported = dict(re.findall(r"^# TYPE (\w+) (\w+)$", text, re.MULTILINE))
    expected = {metric.family: metric.kind.value for metric in catalogue.ALL}
    assert reported == expected


async def test_class_histograms_start_at_zero(harness: Harness) -> None:
    value = harness.gateway.metrics.registry.get_sample_value
    for metric in (catalogue.TTFT, catalogue.TPOT, catalogue.MTPOT, catalogue.E2E):
        for name in ("interactive", "standard", "batch", "custom"):
            assert value(f"{metric.family}_count", {"class": name}) == 0
