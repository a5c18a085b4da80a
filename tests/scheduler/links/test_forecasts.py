"""Forecasts while the predictor answers, is slow, is down, and returns."""

import asyncio
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.generated import common_pb2, predictor_pb2
from tests.observability.lines import lines_of
from tests.reach import until
from tests.scheduler.links.link_fixtures import (
    PATIENT,
    FakePredictor,
    Owner,
    asking,
    learning,
    predictor_at,
    refusal,
    request,
    running_peers,
    socket_in,
)

HASTY: dict[str, Any] = {
    "forecast_pause_s": 0.05,
    "forecast_pause_max_s": 0.1,
    "forecast_failures_max": 2,
}


async def test_questions_during_call_share_next_call(
    tmp_path: Path,
) -> None:
    owner, predictor = Owner(), FakePredictor()
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path), **PATIENT) as peers,
    ):
        predictor.free.clear()
        peers.forecasts.keep_text("a", common_pb2.PromptText(user_input="hello"))
        peers.forecasts.ask(asking("a"))
        await until(lambda: len(predictor.calls) == 1)
        for name in ("b", "c"):
            peers.forecasts.ask(asking(name))
        predictor.free.set()
        await until(lambda: len(owner.events) == 2)
    assert predictor.names() == [["a"], ["b", "c"]]
    assert predictor.calls[0][0].text.user_input == "hello"
    assert [owner.sources(name) for name in "abc"] == [["model"]] * 3
    assert owner.value("forecast_fallbacks_total", reason="late") == 0


async def test_history_answers_at_timeout_and_late_forecast_replaces_it(
    tmp_path: Path,
) -> None:
    owner, predictor = Owner(), FakePredictor()
    predictor.free.clear()
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path), forecast_late_s=30) as peers,
    ):
        for learn in learning(["old"]):
            peers.learn(learn)
        peers.forecasts.ask(asking("a"))
        await until(lambda: owner.sources("a") == ["fallback"])
        peers.forecasts.ask(asking("b"))  # and it does not wait for the pending call
        await until(lambda: owner.sources("b") == ["fallback"])
        predictor.free.set()
        await until(lambda: owner.sources("b") == ["fallback", "model"])
    assert owner.sources("a") == ["fallback", "model"]
    assert owner.forecasts("a")[1].mean() == 40
    assert predictor.names() == [["a"], ["b"]]
    assert owner.value("forecast_fallbacks_total", reason="late") == 2
    assert owner.value("forecasts_replaced_total", by="late") == 2


async def test_stuck_call_is_cancelled_and_next_question_sent(
    tmp_path: Path,
) -> None:
    owner, predictor = Owner(), FakePredictor()
    predictor.free.clear()
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path), forecast_late_s=0.2) as peers,
    ):
        peers.forecasts.ask(asking("a"))
        await until(lambda: owner.sources("a") == ["fallback"])
        peers.forecasts.ask(asking("b"))
        await until(lambda: len(predictor.calls) == 2)
    assert predictor.names() == [["a"], ["b"]]
    assert owner.sources("a") == ["fallback"]


@pytest.mark.slow
async def test_open_breaker_uses_history_until_predictor_returns(
    tmp_path: Path,
) -> None:
    owner, predictor = Owner(), FakePredictor()
    settings = PATIENT | HASTY | {"forecast_pause_s": 2.0, "forecast_pause_max_s": 2.0}
    async with running_peers(owner, socket_in(tmp_path), **settings) as peers:
        for name in ("a", "b"):
            peers.forecasts.ask(asking(name))
            await until(partial(owner.has, name, ["fallback"]))
        assert owner.value("forecast_fallbacks_total", reason="failed") == 2
        assert owner.value("forecast_breaker", phase="open") == 1
        peers.forecasts.ask(asking("c", "d"))
        await until(lambda: owner.sources("d") == ["fallback"])
        assert owner.value("forecast_fallbacks_total", reason="open") == 2

        async with predictor_at(socket_in(tmp_path), predictor):
            await until(lambda: owner.value("forecast_breaker", phase="closed") == 1)
            peers.forecasts.ask(asking("e"))
            await until(lambda: owner.sources("e") == ["model"])
    assert predictor.names() == [
        ["c", "d"],
        ["e"],
    ]  # questions asked during the pause are in the probe
    assert owner.sources("c") == owner.sources("d") == ["fallback", "model"]


async def test_slow_predictor_still_improves_forecasts(tmp_path: Path) -> None:
    owner, predictor = Owner(), FakePredictor()
    async with predictor_at(socket_in(tmp_path), predictor):
        settings = HASTY | {"forecast_late_s": 30}
        async with running_peers(owner, socket_in(tmp_path), **settings) as peers:
            for name in ("a", "b", "c"):
                predictor.free.clear()
                peers.forecasts.ask(asking(name))
                await until(partial(owner.has, name, ["fallback"]))
                predictor.free.set()
                await until(partial(owner.has, name, ["fallback", "model"]))
    assert predictor.names() == [["a"], ["b"], ["c"]]


async def test_stale_questions_are_not_sent(tmp_path: Path) -> None:
    owner, predictor = Owner(), FakePredictor()
    settings = PATIENT | {"forecast_late_s": 0.2, "forecast_failures_max": 1}
    settings |= {"forecast_pause_s": 1.0, "forecast_pause_max_s": 1.0}
    async with running_peers(owner, socket_in(tmp_path), **settings) as peers:
        for name in ("fails", "is too old"):
            peers.forecasts.ask(asking(name))
            await until(partial(owner.has, name, ["fallback"]))
        async with predictor_at(socket_in(tmp_path), predictor):
            for number in count():
                peers.forecasts.ask(asking(f"new {number}"))
                await asyncio.sleep(0.02)
                if predictor.calls:
                    break
    assert all(name.startswith("new") for name in predictor.names()[0])
    assert owner.sources("is too old") == ["fallback"]


@pytest.mark.parametrize("code", [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.INTERNAL])
async def test_refused_call_uses_history_without_counting_failure(
    tmp_path: Path, code: grpc.StatusCode
) -> None:
    owner, predictor = Owner(), FakePredictor()
    predictor.refusals = [refusal(code)]
    settings = PATIENT | {"forecast_failures_max": 1}
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path), **settings) as peers,
    ):
        peers.forecasts.ask(asking("a"))
        await until(lambda: owner.sources("a") == ["fallback"])
    is_open = code is grpc.StatusCode.INTERNAL
    assert owner.value("forecast_breaker", phase="open") == is_open


async def test_log_of_single_request_call_has_trace_id(tmp_path: Path) -> None:
    owner, predictor = Owner(), FakePredictor()
    predictor.refusals = [refusal(grpc.StatusCode.INTERNAL)]
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(
            owner,
            socket_in(tmp_path),
            traceparent=lambda name: f"00-{'ab' * 16}-{'cd' * 8}-01" if name == "a" else "",
            **PATIENT,
        ) as peers,
    ):
        with lines_of("services.scheduler.links.forecasts") as lines:
            peers.forecasts.ask(asking("a"))
            await until(lambda: owner.sources("a") == ["fallback"])
            [line] = [each for each in lines() if each["message"].startswith("no forecast")]
    assert (line["request_id"], line["trace_id"]) == ("a", "ab" * 16)


async def test_invalid_distribution_is_no_answer(tmp_path: Path) -> None:
    owner, predictor = Owner(), FakePredictor()
    predictor.answer = common_pb2.Forecast(points=[float("nan")])
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path), **PATIENT) as peers,
    ):
        peers.forecasts.ask(asking("a"))
        await until(lambda: owner.sources("a") == ["fallback"])


async def test_forecast_is_truncated_at_max_tokens(tmp_path: Path) -> None:
    """Beyond its last point, a request is still expected to generate tokens."""
    owner, predictor = Owner(), FakePredictor(tokens=40)
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path), **PATIENT) as peers,
    ):
        peers.forecasts.ask((request("a", 100), request("b", 30)))
        await until(lambda: len(owner.events) == 1)
    assert [f.max_tokens for n in "ab" for f in owner.forecasts(n)] == [100, 30]
    assert owner.forecasts("a")[0].mean_remaining(60) > 0
    assert owner.forecasts("b")[0].mean() == 30


async def test_improve_stream_is_reopened_after_restart(tmp_path: Path) -> None:
    def better(tokens: float, *names: str) -> predictor_pb2.ImprovedForecasts:
        forecast = common_pb2.Forecast(points=[tokens], source="better")
        return predictor_pb2.ImprovedForecasts(request_ids=names, forecasts=[forecast] * len(names))

    owner, first, second = Owner(), FakePredictor(), FakePredictor()
    async with running_peers(owner, socket_in(tmp_path), **PATIENT) as peers:
        async with predictor_at(socket_in(tmp_path), first):
            peers.forecasts.ask(asking("a", "b"))
            await until(lambda: owner.sources("a") == ["model"] and bool(first.followers))
            first.followers[0].put_nowait(better(150, "unknown", "a"))
            await until(lambda: owner.sources("a") == ["model", "better"])
            first.followers[0].put_nowait(better(float("nan"), "a"))
            first.followers[0].put_nowait(better(20, "a"))
            await until(lambda: len(owner.sources("a")) == 3)
        async with predictor_at(socket_in(tmp_path), second):
            await until(lambda: bool(second.followers), 20)
            second.followers[0].put_nowait(better(15, "b"))
            await until(lambda: owner.sources("b") == ["model", "better"])
            peers.forecasts.forget("b")
            second.followers[0].put_nowait(better(14, "b"))
            second.followers[0].put_nowait(better(14, "a"))
            await until(lambda: len(owner.sources("a")) == 4)
    assert [f.mean() for f in owner.forecasts("a")] == [40, 100, 20, 14]
    assert owner.sources("unknown") == []
    assert owner.sources("b") == ["model", "better"]
    assert owner.value("forecasts_replaced_total", by="improved") == 4


async def test_ended_request_is_forgotten(tmp_path: Path) -> None:
    owner, predictor = Owner(), FakePredictor()
    predictor.free.clear()
    async with (
        predictor_at(socket_in(tmp_path), predictor),
        running_peers(owner, socket_in(tmp_path), **PATIENT) as peers,
    ):
        for name in ("a", "b", "c"):
            peers.forecasts.keep_text(name, common_pb2.PromptText(user_input=name))
        peers.forecasts.forget("a")  # refused on arrival
        peers.forecasts.ask(asking("a"))
        await until(lambda: len(predictor.calls) == 1)
        peers.forecasts.ask(asking("b", "c"))
        peers.forecasts.forget("b")  # cancelled while its question waits
        predictor.free.set()
        await until(lambda: owner.sources("c") == ["model"])
    assert predictor.names() == [["a"], ["c"]]
    assert not predictor.calls[0][0].HasField("text")
    assert owner.sources("b") == []
