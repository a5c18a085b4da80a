"""Forecasts from the scheduler's updates to the client's chunks, over gRPC and HTTP sockets."""

import asyncio
from typing import Any

import pytest

from foretoken import AsyncClient, Chunk, Forecast
from gateway.sessions.ttft_promises import MIN_ERRORS
from protos.generated import common_pb2 as common
from protos.generated import scheduler_pb2 as sched
from tests.gateway.gateway_fakes import Harness
from tests.gateway.gateway_fixtures import IDS, STOP, WORDS, first_prompt
from tests.gateway.gateway_fixtures import client as client
from tests.gateway.gateway_fixtures import harness as harness
from tests.gateway.sessions.test_sessions import HERE, SessionTranscript

ASKS = {"stream": True, "stream_options": {"include_forecast": True}}
PATHS = {
    "/v1/completions": {"prompt": "1,", "max_tokens": 50},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "1,"}], "max_tokens": 50},
}


PROMISED_S = 0.52  # for an expectation of 0.25 s, uncalibrated


def forecast_of(*points: float, ttft_s: float | None = 0.25) -> sched.ForecastUpdate:
    """Equally likely lengths, at 0.1 s per token."""
    return sched.ForecastUpdate(
        forecast=common.Forecast(points=points, source="test"), token_s=0.1, ttft_s=ttft_s
    )


def lengths(seen: Forecast | None) -> tuple[float, ...] | None:
    return (seen.low_tokens, round(seen.expected_tokens, 6), seen.high_tokens) if seen else None


async def test_grpc_forecasts_come_before_tokens_with_each_chunk_and_at_the_end(
    harness: Harness, client: AsyncClient
) -> None:
    chunks = aiter(client.generate("1,", max_tokens=50, include_forecast=True))
    first = asyncio.ensure_future(anext(chunks))
    name = await first_prompt(harness)
    assert harness.scheduler.requests[0].include_forecast
    harness.scheduler.send_event(name, forecast_update=forecast_of(10, 30, 90))
    alone = await first
    assert (alone.text, list(alone.token_ids)) == ("", [])
    assert lengths(alone.forecast) == (10, 30, 50)  # truncated at max_tokens
    assert alone.forecast and alone.forecast.ttft_s == pytest.approx(PROMISED_S)
    assert alone.forecast.sla_expected is True
    harness.worker.send(name, 0, IDS[:3])
    begun = await anext(chunks)
    assert begun.text and lengths(begun.forecast) == (10, 30, 50)
    assert begun.forecast and begun.forecast.ttft_s == alone.forecast.ttft_s
    assert begun.forecast.end_s == pytest.approx(27 * 0.1)
    harness.worker.send(name, 3, IDS[3:], STOP)
    rest = [chunk async for chunk in chunks]
    last = rest[-1].forecast
    assert lengths(last) == (len(IDS),) * 3
    assert last and (last.end_s, last.ttft_s, last.sla_expected) == (0.0, None, None)
    assert "".join(chunk.text for chunk in [begun, *rest]) == WORDS


async def test_unreachable_sla_is_reported_at_once(harness: Harness, client: AsyncClient) -> None:
    """The promise counts, not the scheduler's expectation."""
    chunks = aiter(client.generate("1,", sla={"ttft_s": 0.5}, include_forecast=True))
    first = asyncio.ensure_future(anext(chunks))
    harness.scheduler.send_event(await first_prompt(harness), forecast_update=forecast_of(10))
    seen = (await first).forecast
    assert seen and seen.sla_expected is False


@pytest.mark.parametrize("path", PATHS)
async def test_http_chunk_has_the_forecast_beside_the_choice(harness: Harness, path: str) -> None:
    pending = asyncio.ensure_future(harness.http("POST", path, {**PATHS[path], **ASKS}))
    name = await first_prompt(harness)
    harness.scheduler.send_event(name, forecast_update=forecast_of(10, 35))
    await harness.until(lambda: all(openings(harness)))
    harness.worker.send(name, 0, IDS[:3])
    harness.worker.send(name, 3, IDS[3:], STOP)
    events = (await pending).events
    assert all(len(event["choices"]) == 1 and "usage" not in event for event in events)
    first, last = events[0]["forecast"], events[-1]["forecast"]
    end_s = first.pop("end_s")
    assert first == {
        "expected_tokens": 22.5, "low_tokens": 10, "high_tokens": 35,
        "ttft_s": PROMISED_S, "sla_expected": True,
    }  # fmt: skip
    assert 0 < end_s <= 0.25 + 21.5 * 0.1
    tokens = len(IDS)
    assert last.items() >= {
        "expected_tokens": tokens, "low_tokens": tokens, "high_tokens": tokens, "end_s": 0.0,
    }.items()  # fmt: skip
    assert text_of(events) == WORDS


def openings(harness: Harness) -> list[Any]:
    """The first forecast sent for each live choice."""
    return [tracker.opening for tracker in trackers(harness)]


def trackers(harness: Harness) -> list[Any]:
    return [live.session.forecast_tracker for live in harness.gateway.sessions.table]


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(c["text"] if "text" in c else c["delta"]["content"] for c in choices)


async def test_usage_comes_after_forecasts(harness: Harness) -> None:
    options = {"include_forecast": True, "include_usage": True}
    body = {**PATHS["/v1/completions"], "stream": True, "stream_options": options}
    pending = asyncio.ensure_future(harness.http("POST", "/v1/completions", body))
    name = await first_prompt(harness)
    harness.scheduler.send_event(name, forecast_update=forecast_of(10))
    await harness.until(lambda: all(openings(harness)))
    harness.worker.send(name, 0, IDS, STOP)
    *parts, last = (await pending).events
    assert all("forecast" in part and part["usage"] is None for part in parts)
    assert last["choices"] == [] and "forecast" not in last
    assert last["usage"]["completion_tokens"] == len(IDS)


async def test_each_choice_has_its_own_forecast(harness: Harness, client: AsyncClient) -> None:
    chunks = client.generate("1,", n=2, max_tokens=50, include_forecast=True)
    reading = asyncio.ensure_future(collect(chunks))
    await harness.until(lambda: len(harness.worker.prompts) == 2)
    for prompt in harness.worker.prompts:
        at = int(prompt.request_id[-1])
        harness.scheduler.send_event(prompt.request_id, forecast_update=forecast_of(10 * (at + 1)))
    await harness.until(lambda: all(openings(harness)))
    for prompt in harness.worker.prompts:
        harness.worker.send(prompt.request_id, 0, IDS, STOP)
    chunks_of: dict[int, list[Chunk]] = {0: [], 1: []}
    for chunk in await reading:
        chunks_of[chunk.index].append(chunk)
    assert [lengths(of[0].forecast) for of in chunks_of.values()] == [(10,) * 3, (20,) * 3]
    assert [lengths(of[-1].forecast) for of in chunks_of.values()] == [(len(IDS),) * 3] * 2


async def collect(stream: Any) -> list[Chunk]:
    return [chunk async for chunk in stream]


async def test_request_without_forecasts_receives_none(
    harness: Harness, client: AsyncClient
) -> None:
    """Even if the scheduler sends an update."""
    reading = asyncio.ensure_future(collect(client.generate("1,")))
    name = await first_prompt(harness)
    assert not harness.scheduler.requests[0].include_forecast
    harness.scheduler.send_event(name, forecast_update=forecast_of(10))
    harness.worker.send(name, 0, IDS, STOP)
    assert [chunk.forecast for chunk in await reading] == [None]


async def test_chunk_without_a_known_forecast_has_no_field(harness: Harness) -> None:
    body = {**PATHS["/v1/completions"], **ASKS}
    pending = asyncio.ensure_future(harness.http("POST", "/v1/completions", body))
    name = await first_prompt(harness)
    harness.worker.send(name, 0, IDS, STOP)
    events = (await pending).events
    assert text_of(events) == WORDS
    assert all("forecast" not in event for event in events)


async def test_impossible_forecast_is_ignored(harness: Harness, client: AsyncClient) -> None:
    reading = asyncio.ensure_future(collect(client.generate("1,", include_forecast=True)))
    name = await first_prompt(harness)
    for bad in (
        forecast_of(),
        forecast_of(3, 2),
        forecast_of(float("nan")),
        forecast_of(5, ttft_s=-1.0),
    ):
        harness.scheduler.send_event(name, forecast_update=bad)
    harness.worker.send(name, 0, IDS[:2])
    harness.worker.send(name, 2, IDS[2:], STOP)
    chunks = await reading
    assert "".join(chunk.text for chunk in chunks) == WORDS
    assert all(chunk.forecast is None for chunk in chunks)


async def test_forecast_continues_from_delivered_tokens_after_a_loss(
    harness: Harness, client: AsyncClient
) -> None:
    chunks = aiter(client.generate("1,", max_tokens=50, include_forecast=True))
    first = asyncio.ensure_future(anext(chunks))
    name = await first_prompt(harness)
    harness.scheduler.send_event(name, forecast_update=forecast_of(2, 30))
    await first
    harness.worker.send(name, 0, IDS[:3])
    assert lengths((await anext(chunks)).forecast) == (30,) * 3
    harness.worker.break_stream()
    await harness.until(lambda: len(harness.worker.prompts) == 2)
    again = harness.scheduler.requests[-1]
    assert (again.delivered_tokens, again.include_forecast) == (3, True)
    harness.scheduler.send_event(
        again.request_id, forecast_update=forecast_of(3, 9, 20, ttft_s=None)
    )
    await harness.until(lambda: trackers(harness)[0]._forecast.forecast.points == (3, 9, 20))
    harness.worker.send(again.request_id, 3, IDS[3:4])
    resumed = (await anext(chunks)).forecast
    assert lengths(resumed) == (9, 14.5, 20)
    assert resumed and resumed.ttft_s is None
    harness.worker.send(again.request_id, 4, IDS[4:], STOP)
    rest = [chunk async for chunk in chunks]
    assert lengths(rest[-1].forecast) == (len(IDS),) * 3


async def test_forecast_outcome_is_counted_once(harness: Harness, client: AsyncClient) -> None:
    for points in ((1, 50), (40, 50)):
        harness.worker.prompts.clear()
        reading = asyncio.ensure_future(
            collect(client.generate("1,", max_tokens=50, include_forecast=True))
        )
        name = await first_prompt(harness)
        harness.scheduler.send_event(name, forecast_update=forecast_of(*points, ttft_s=500.0))
        await harness.until(lambda: all(openings(harness)))
        harness.worker.send(name, 0, IDS, STOP)
        await reading
    assert count_forecasts(harness, "forecasts", covered="yes") == 1
    assert count_forecasts(harness, "forecasts", covered="no") == 1
    assert count_forecasts(harness, "ttft_promises", kept="yes") == 2
    assert count_forecasts(harness, "sla_forecasts", foreseen="broken", outcome="met") == 2


async def test_outcomes_calibrate_promises(harness: Harness, client: AsyncClient) -> None:
    """The scheduler expects 500 s each time, and the answer arrives at once."""
    promised_s: list[float] = []
    for _ in range(MIN_ERRORS + 1):
        harness.worker.prompts.clear()
        chunks = aiter(client.generate("1,", max_tokens=50, include_forecast=True))
        first = asyncio.ensure_future(anext(chunks))
        name = await first_prompt(harness)
        harness.scheduler.send_event(name, forecast_update=forecast_of(10, ttft_s=500.0))
        forecast = (await first).forecast
        assert forecast and forecast.ttft_s is not None
        promised_s.append(forecast.ttft_s)
        harness.worker.send(name, 0, IDS, STOP)
        await collect(chunks)
    assert promised_s[:-1] == [pytest.approx(1000.02)] * MIN_ERRORS
    assert promised_s[-1] < 400


def count_forecasts(harness: Harness, name: str, **labels: str) -> float | None:
    registry = harness.gateway.metrics.registry
    return registry.get_sample_value(f"foretoken_client_{name}_total", labels)


async def test_forecast_does_not_answer_an_announcement() -> None:
    """Only a placement answers the announcement to a new scheduler."""
    transcript = SessionTranscript()
    _, name = transcript.open_request(include_forecast=True)
    transcript.reopen_scheduler()
    transcript.send_event(name, forecast_update=forecast_of(10))
    transcript.send_event(name, placed=sched.Placed(worker_id="h", worker_address=HERE))
    assert (
        len(transcript.prompts) == 1
    )  # the placement answers the announcement, so the request stays
