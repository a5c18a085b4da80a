"""Invalid messages to the batcher: the status and the named field."""

from typing import Any

import grpc
import numpy as np
import pytest
from grpc import aio

from protos.generated import batcher_pb2
from services.policies.preset import choose
from services.runtime.codecs.arrange import (
    encode_hello,
)
from tests.batcher.arranging import answer, waiting_request


def floats(*values: float) -> bytes:
    return np.array(values, "<f8").tobytes()


def ints(*values: int) -> bytes:
    return np.array(values, "<i8").tobytes()


def spoilt(**fields: Any) -> batcher_pb2.ArrangeMessage:
    message = waiting_request()
    for name, value in fields.items():
        setattr(message.candidates, name, value)
    return message


def with_column(name: str, value: bytes | None) -> batcher_pb2.ArrangeMessage:
    message = waiting_request()
    if value is None:
        del message.candidates.columns[name]
    else:
        message.candidates.columns[name] = value
    return message


def with_worker(**fields: Any) -> batcher_pb2.ArrangeMessage:
    message = waiting_request()
    for name, value in fields.items():
        setattr(message.candidates.workers[0], name, value)
    return message


def with_base_s(value: float) -> batcher_pb2.ArrangeMessage:
    message = waiting_request()
    message.candidates.workers[0].cost.base_s = value
    return message


def with_second_worker() -> batcher_pb2.ArrangeMessage:
    message = waiting_request()
    message.candidates.workers.append(message.candidates.workers[0])
    return message


def with_forecast(
    row: int, points: list[float], weights: list[float]
) -> batcher_pb2.ArrangeMessage:
    message = waiting_request()
    forecast_row = batcher_pb2.ForecastRow(row=row, points=points, weights=weights)
    message.candidates.forecasts.append(forecast_row)
    return message


NAN = float("nan")


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (spoilt(now=NAN), "now: must be finite"),
        (spoilt(rows=b"123"), "rows: has 3 bytes, not a multiple of 8"),
        (spoilt(rows=ints(0, -1)), "rows: must lie in [0, "),
        (spoilt(rows=ints(0, 2**25)), "rows: must lie in [0, "),
        (spoilt(rows=ints(4, 4)), "rows: must be unique"),
        (spoilt(rows=ints(*range(9))), "rows: at most 8 per round, got 9"),
        (spoilt(is_running=b"\0"), "is_running: must have 2 rows, got 1"),
        (spoilt(is_running=b"\0\1"), "is_running: a running request must have a home"),
        (spoilt(key=floats(1)), "key: must have 2 rows, got 1"),
        (spoilt(key=b"123"), "key: has 3 bytes, not a multiple of 8"),
        (spoilt(key=floats(1, NAN)), "key: must not be NaN"),
        (spoilt(queue_key=floats(1)), "queue_key: must have 2 rows, got 1"),
        (spoilt(queue_key=floats(NAN, 1)), "queue_key: must not be NaN"),
        (with_column("prompt", None), "columns: prompt is missing"),
        (with_column("colour", ints(1, 2)), "columns: unknown: colour"),
        (with_column("prompt", ints(1)), "columns['prompt']: must have 2 rows, got 1"),
        (with_column("prompt", b"1"), "columns['prompt']: has 1 bytes, not a multiple of 8"),
        (with_column("prompt", ints(1, -1)), "columns['prompt']: must lie in [0, "),
        (with_column("cap", ints(1, 2**40)), "columns['cap']: must lie in [0, "),
        (with_column("home", ints(-2, 1)), "columns['home']: must lie in [-1, "),
        (with_column("home", ints(0, 2**25)), "columns['home']: must lie in [-1, "),
        (with_column("total", floats(1, NAN)), "columns['total']: must not be NaN"),
        (
            with_column("forecast", ints(0, 2)),
            "columns['forecast']: names a row without a forecast",
        ),
        (
            with_column("forecast", ints(0, 99)),
            "columns['forecast']: names a row without a forecast",
        ),
        (with_worker(block_tokens=0), "workers: block_tokens must be positive"),
        (with_worker(kv_tokens=2**60), "workers: kv_tokens must be at most"),
        (with_worker(number=2**25), "workers: numbers must be at most"),
        (with_second_worker(), "workers: numbers must be unique"),
        (with_base_s(float("inf")), "workers: cost must be finite"),
        (with_forecast(2, [], []), "forecasts: row 2 is not a distribution"),
        (with_forecast(2, [2, 1], [0.5, 0.5]), "forecasts: row 2 is not a distribution"),
        (with_forecast(2, [1, 2], [1]), "forecasts: row 2 is not a distribution"),
        (with_forecast(2, [1, 2], [0.5, 0.4]), "forecasts: row 2 is not a distribution"),
        (with_forecast(2, [1, 2], [1.0, 0.0]), "forecasts: row 2 is not a distribution"),
        (with_forecast(2, [-1, 2], [0.5, 0.5]), "forecasts: row 2 is not a distribution"),
        (with_forecast(2, [NAN], [1]), "forecasts: row 2 is not a distribution"),
        (with_forecast(2, [1], [NAN]), "forecasts: row 2 is not a distribution"),
        (with_forecast(2, [1, 2.0**25], [0.5, 0.5]), "forecasts: row 2 is not a distribution"),
        (
            with_forecast(2**31, [1, 2], [0.5, 0.5]),
            "forecasts: row 2147483648 is not a distribution, or not below",
        ),
    ],
)
async def test_invalid_candidates_are_refused_with_field(
    message: batcher_pb2.ArrangeMessage, sentence: str
) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await answer(encode_hello(choose("fcfs")), message, rows_max=8)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in (caught.value.details() or "")


def hello(**change: Any) -> batcher_pb2.ArrangeMessage:
    message = encode_hello(choose("past-future"))
    message.hello.choices.update(change.get("choices", {}))
    message.hello.params.update(change.get("params", {}))
    return message


def incomplete() -> batcher_pb2.ArrangeMessage:
    message = hello()
    del message.hello.choices["order"]
    return message


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (waiting_request(), "hello: the first message of a stream must be a hello"),
        (incomplete(), "hello.choices: order missing"),
        (hello(choices={"form": "fifo"}), "hello: unknown preset.form 'fifo'"),
        (hello(params={"watermark": 1.0}), "hello: preset has no parameter 'watermark'"),
        (hello(params={"reserved": NAN}), "hello: preset.reserved must lie in [0, 1]"),
    ],
)
async def test_invalid_hello_is_refused(message: batcher_pb2.ArrangeMessage, sentence: str) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await answer(message)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert sentence in (caught.value.details() or "")


async def test_too_many_workers_or_forecasts_are_refused() -> None:
    start = encode_hello(choose("fcfs"))
    for message, sentence, config in (
        (with_second_worker(), "workers: at most 1 per round, got 2", {"workers_max": 1}),
        (waiting_request(), "rows: at most 1 per round, got 2", {"rows_max": 1}),
        (with_forecast(2, [1], [1]), "forecasts: at most 2 per round, got 3", {"rows_max": 2}),
    ):
        with pytest.raises(aio.AioRpcError) as caught:
            await answer(start, message, **config)
        assert sentence in (caught.value.details() or "")
