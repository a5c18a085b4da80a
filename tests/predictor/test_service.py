"""The predictor's API over a socket and in process."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest
from grpc import aio
from prometheus_client import CollectorRegistry

from foretoken.running.options import ServeOptions, sections
from foretoken.running.topology import Shape, arrange
from observability.metrics import predictor as catalogue
from protos.generated import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.forecast import UNCAPPED
from services.predictor.config import PredictorConfig
from services.predictor.service import PredictorService
from services.runtime.codecs.common import decode_forecast
from services.runtime.config import COMMON
from services.runtime.network.channel import connect
from tests.observability.metrics.seen import uncatalogued, unseen
from tests.predictor.predictor_serving import ended, forecast_of, input_of, predicting
from tests.reach import WAYS, until


def forecast_request(*max_tokens: int, application: str = "") -> predictor_pb2.ForecastRequest:
    return predictor_pb2.ForecastRequest(
        inputs=[
            predictor_pb2.ForecastInput(model="demo", application=application, max_tokens=limit)
            for limit in max_tokens
        ]
    )


def finished(
    *lengths: int, reason: common_pb2.FinishReason.ValueType = common_pb2.FINISH_REASON_STOP
) -> predictor_pb2.ObserveOutcomesRequest:
    return predictor_pb2.ObserveOutcomesRequest(
        outcomes=[
            predictor_pb2.Outcome(model="demo", output_tokens=n, max_tokens=99, reason=reason)
            for n in lengths
        ]
    )


def being_generated(*tokens: int, application: str = "") -> predictor_pb2.ObserveOutcomesRequest:
    live = predictor_pb2.LiveAnswers(model="demo", application=application, output_tokens=tokens)
    return predictor_pb2.ObserveOutcomesRequest(live=[live])


def ended_without_outcome(*request_ids: str) -> predictor_pb2.ObserveOutcomesRequest:
    return predictor_pb2.ObserveOutcomesRequest(ended_ids=request_ids)


def reported_by(reporter: str) -> predictor_pb2.ObserveOutcomesRequest:
    return predictor_pb2.ObserveOutcomesRequest(reporter=reporter)


@pytest.mark.parametrize("way", WAYS)
async def test_forecast_uses_observed_outcomes(way: str) -> None:
    async with predicting(way=way) as running:
        stub = running.stub
        cold = await stub.Forecast(forecast_request(30, 40))
        assert [decode_forecast(f).truncated(30).points for f in cold.forecasts] == [(30,)] * 2
        assert {(f.source, f.shared_key, f.version) for f in cold.forecasts} == {
            ("history", "history/demo", 0)
        }

        cut_short = finished(9, reason=common_pb2.FINISH_REASON_CANCELLED)
        assert (await stub.Observe(cut_short)).version == 0
        assert (await stub.Observe(finished(5, 5, 7, 80))).version == 4
        warm = await stub.Forecast(forecast_request(30, application="copy"))
        (forecast,) = warm.forecasts
        assert list(forecast.points) == [5, 7, 80, UNCAPPED]
        assert list(forecast.weights) == pytest.approx([0.4, 0.2, 0.2, 0.2])
        assert (forecast.source, forecast.version) == ("history", 4)
        assert forecast.shared_key == "history/demo"


@pytest.mark.parametrize("way", WAYS)
async def test_live_answers_lengthen_the_forecast_until_they_are_replaced(way: str) -> None:
    """One answer of 5 tokens has ended, and three are longer: P(5) is 1 of 4 and the prior."""
    async with predicting(way=way) as running:
        stub = running.stub

        async def share_of_5(message: predictor_pb2.ObserveOutcomesRequest) -> float:
            version = (await stub.Observe(message)).version
            [forecast] = (await stub.Forecast(forecast_request(30))).forecasts
            assert version > versions[-1] and forecast.version > versions[-1]
            versions.append(version)
            return float(forecast.weights[list(forecast.points).index(5)])

        versions = [0]
        live = [predictor_pb2.LiveAnswers(model="demo", output_tokens=[9, 20, 5])]
        message = finished(5)
        message.live.extend(live)
        assert await share_of_5(message) == pytest.approx(1 / 5)
        assert await share_of_5(finished(5)) == pytest.approx(2 / 3)


@pytest.mark.parametrize("way", WAYS)
async def test_max_predictor_ignores_outcomes(way: str) -> None:
    async with predicting("max", way=way) as running:
        stub = running.stub
        assert (await stub.Observe(finished(5))).version == 0
        answer = await stub.Forecast(forecast_request(30))
        assert list(answer.forecasts) == [
            common_pb2.Forecast(points=[30], weights=[1], source="max")
        ]


@pytest.mark.parametrize(
    ("request_", "sentence"),
    [
        (forecast_request(5, 0), "inputs[1].max_tokens: must be 1 to 16777215, got 0"),
        (forecast_request(2**31), "inputs[0].max_tokens: must be 1 to 16777215"),
        (forecast_request(*[5] * 1_025), "inputs: at most 1024 per call, got 1025"),
        (
            forecast_request(5, application="a" * 257),
            "inputs[0]: model and application names have at most 256 characters",
        ),
        (
            forecast_of(input_of("r" * 1_025, "hello")),
            "inputs[0].request_id: must have 0 to 1024 characters, got 1025",
        ),
        (finished(*[5] * 1_025), "outcomes: at most 1024 per call, got 1025"),
        (ended_without_outcome(*["a"] * 1_025), "ended_ids: at most 1024 per call, got 1025"),
        (ended_without_outcome(""), "ended_ids: must have 1 to 1024 characters, got 0"),
        (reported_by("s" * 1_025), "reporter: must have 0 to 1024 characters, got 1025"),
        (being_generated(2**31), "live[0].output_tokens: at most 16777215"),
        (being_generated(*[5] * 16_385), "live: at most 16384 answers, got 16385"),
        (
            being_generated(5, application="a" * 257),
            "live[0]: model and application names have at most 256 characters",
        ),
    ],
)
@pytest.mark.parametrize("way", WAYS)
async def test_invalid_input_is_rejected_with_field_name(
    way: str,
    request_: predictor_pb2.ForecastRequest | predictor_pb2.ObserveOutcomesRequest,
    sentence: str,
) -> None:
    async with predicting(way=way) as running:
        stub = running.stub
        with pytest.raises(aio.AioRpcError) as caught:
            if isinstance(request_, predictor_pb2.ForecastRequest):
                await stub.Forecast(request_)
            else:
                await stub.Observe(request_)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in (caught.value.details() or "")


async def test_full_batch_is_answered_in_order() -> None:
    async with predicting("max", way="socket") as running:
        answer = await running.stub.Forecast(forecast_request(*range(1, 1_025)))
    assert [f.points[0] for f in answer.forecasts] == list(range(1, 1_025))


async def test_forecasts_and_outcomes_are_counted() -> None:
    async with predicting() as running:
        await running.stub.Forecast(forecast_request(3, 4))
        await running.stub.Observe(finished(5, 0))
        assert running.value("forecasts_total", source="history") == 2
        assert running.value("outcomes_total", learnt="yes") == 1
        assert running.value("outcomes_total", learnt="no") == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", "r" * 257),
        ("model", "m" * 257),
        ("key_name", "k" * 257),
        ("application", "a" * 257),
        ("prompt_tokens", 2**31),
        ("output_tokens", 2**31),
        ("max_tokens", 2**31),
        ("e2e_s", -1.0),
        ("e2e_s", float("nan")),
        ("e2e_s", float("inf")),
        ("preemptions", 2**31),
    ],
)
async def test_an_impossible_outcome_is_left_out_and_counted(field: str, value: object) -> None:
    async with predicting() as running:
        request = finished(5, 6)
        setattr(request.outcomes[0], field, value)
        assert (await running.stub.Observe(request)).version == 1
        assert running.value("outcomes_implausible_total", field=field) == 1
        assert running.value("outcomes_total", learnt="yes") == 1


async def test_relative_error_is_recorded_by_source() -> None:
    """Without outcomes all 1,000 tokens are expected: for 400 the error is 600, for 1,000 it is 0.
    Unknown and truncated requests record no error."""
    async with predicting() as running:
        await running.forecast(*(input_of(name, "hello") for name in "abc"))
        await running.observe(ended("a", 400), ended("b", 1_000), ended("unknown", 5))
        await running.observe(ended("c", 5, reason=common_pb2.FINISH_REASON_CANCELLED))
        assert running.value("relative_error_count", source="history") == 2
        assert running.value("relative_error_sum", source="history") == 1.5
        assert running.value("relative_error_bucket", source="history", le="0.05") == 1
        missing = unseen(running.registry, catalogue.ALL)
        assert missing == [catalogue.MODEL_AGE.family]  # no fit yet
        assert uncatalogued(running.registry, catalogue.ALL) == set()


async def test_request_that_ends_without_outcome_is_not_pending() -> None:
    async with predicting() as running:
        await running.forecast(*(input_of(name, "hello") for name in "abc"))
        message = ended_without_outcome("a", "unknown", "b")
        assert (await running.stub.Observe(message)).version == 0
        assert running.value("pending") == 1
        assert running.value("outcomes_total", learnt="no") == 0


async def test_further_listener_is_refused_until_another_leaves() -> None:
    async with predicting(listeners_max=1, way="socket") as running:
        listening = predictor_pb2.ImproveRequest()
        first = running.stub.Improve(listening)
        await until(lambda: running.service.listeners == 1)
        with pytest.raises(aio.AioRpcError) as refused:
            await anext(aiter(running.stub.Improve(listening)))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "predictor.listeners_max" in (refused.value.details() or "")
        first.cancel()
        await until(lambda: running.service.listeners == 0)
        again = running.stub.Improve(listening)
        await until(lambda: running.service.listeners == 1)
        again.cancel()


def test_unknown_predictor_prevents_start() -> None:
    with pytest.raises(ValueError, match="known: blend, classify, forest, history, "):
        PredictorService(PredictorConfig(model="psychic"), CollectorRegistry())


def test_history_starts_without_model_libraries() -> None:
    program = (
        "import sys, services.predictor.__main__; from prometheus_client import CollectorRegistry;"
        "from services.predictor.service import PredictorService as S;"
        "from services.predictor.config import PredictorConfig as C;"
        "[S(C(model=m), CollectorRegistry()) for m in ('history', 'max')];"
        "print({'torch', 'transformers', 'sklearn', 'scipy', 'usearch'} & set(sys.modules))"
    )
    message = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert message.stdout.strip() == b"set()"


@pytest.mark.slow
def test_process_lowers_its_priority() -> None:
    program = (
        "import os, sys; from services.predictor.__main__ import prepare;"
        "from services.predictor.config import PredictorConfig as C;"
        "before = os.nice(0); prepare(C(nice=3), {'log': {}});"
        "import torch; print(os.nice(0) - before, torch.get_num_threads())"
    )
    clean = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    message = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, env=clean
    )
    assert message.stdout.split() == [b"3", b"1"]


async def test_separate_process_serves_all_methods(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/predictor.sock"
    sets = [f"predictor.address={address}", "predictor.nice=1", "predictor.log_level=ERROR"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.predictor", *(w for s in sets for w in ("--set", s))
    )
    channel = connect(address)
    try:
        async with asyncio.timeout(60):
            stub = predictor_pb2_grpc.PredictorStub(channel)
            await channel.channel_ready()
            improvements = stub.Improve(predictor_pb2.ImproveRequest())
            reading = asyncio.ensure_future(anext(aiter(improvements)))
            answer = await stub.Forecast(forecast_request(30))
            assert [f.source for f in answer.forecasts] == ["history"]
            assert (await stub.Observe(finished(5, 7))).version == 2
            assert not reading.done()
            own = os.getpriority(os.PRIO_PROCESS, os.getpid())
            assert os.getpriority(os.PRIO_PROCESS, process.pid) == min(own + 1, 19)
            process.terminate()
            assert await process.wait() == 0
            with pytest.raises(aio.AioRpcError):
                await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await channel.close()


def test_log_settings_reach_predictor_process() -> None:
    sets = ("log.path=/tmp/x.sqlite", "log.keep_text=true", "predictor.model=blend")
    children = arrange([sections(ServeOptions(sets=sets))], Shape.SEPARATE, 1, 1, "/tmp").children
    reported = {child.section: child.overrides for child in children}
    assert reported["predictor"]["log"] == {"path": "/tmp/x.sqlite", "keep_text": "true"}
    others = {name: set(overrides) for name, overrides in reported.items() if name != "predictor"}
    assert others.pop("worker") == {"worker", "emulation", *COMMON}
    assert all(sections == {name, *COMMON} for name, sections in others.items())
