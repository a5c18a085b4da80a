"""Streams of the real stack carry forecasts with intervals that narrow to the answer length."""

import json
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from openai import OpenAI

from foretoken import Client
from foretoken.client.answers import Chunk
from tests.live import MODES, Live, serving
from tests.system.children import paused_workers_of

LONG = "Count from 1 to 90.\n"
MOST = 300
OPTIONS = {"include_usage": True, "include_forecast": True}


@pytest.fixture(scope="module", params=["embedded", "separate"])
def live(request: pytest.FixtureRequest) -> Iterator[Live]:
    with serving(*MODES[request.param]) as system:
        yield system


def check(reported: Sequence[dict[str, Any]], tokens: int) -> None:
    """Check the forecasts of an answer of `tokens` tokens."""
    assert len(reported) > 3
    for seen in reported:
        assert 0 <= seen["low_tokens"] <= seen["expected_tokens"] <= seen["high_tokens"] <= MOST
        assert seen["end_s"] >= 0
    widths = [seen["high_tokens"] - seen["low_tokens"] for seen in reported]
    assert widths[-1] == 0 <= widths[0]
    assert reported[-1]["low_tokens"] == reported[-1]["expected_tokens"] == tokens
    assert reported[-1]["end_s"] == 0
    assert 0 < reported[0]["ttft_s"] < 60 and reported[0]["sla_expected"] is True


@pytest.mark.slow
def test_forecast_interval_narrows_during_the_stream(live: Live) -> None:
    body = {
        "prompt": LONG, "max_tokens": MOST, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": OPTIONS,
    }  # fmt: skip
    headers = {"content-type": "application/json", "x-foretoken-sla": "batch"}
    request = urllib.request.Request(
        f"{live.http}/v1/completions", json.dumps(body).encode(), headers
    )
    with paused_workers_of(live):  # until the forecast exists, so that the first chunk carries it
        response = urllib.request.urlopen(request, timeout=60)
        first = response.readline().decode()
    with response:
        lines = [first, *response.read().decode().splitlines()]
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    *parts, last = events
    check([part["forecast"] for part in parts if "forecast" in part], MOST)
    assert last["usage"]["completion_tokens"] == MOST


@pytest.mark.slow
def test_grpc_stream_carries_the_same_forecasts(live: Live) -> None:
    chunks, tokens = stream_with_forecasts(live)
    check([vars(chunk.forecast) for chunk in chunks if chunk.forecast], tokens)


def stream_with_forecasts(live: Live) -> tuple[list[Chunk], int]:
    """An answer with a forecast that precedes its first token, and its token count."""
    with Client(live.grpc) as client:
        stream = client.generate(
            LONG, max_tokens=MOST, temperature=0, sla="batch", include_forecast=True
        )
        chunks = iter(stream)
        with paused_workers_of(live):
            first = next(chunks)
        rest = list(chunks)
    assert stream.usage
    return [first, *rest], stream.usage.completion_tokens


@pytest.mark.slow
def test_forecast_of_a_schema_begins_at_its_shortest_answer(live: Live) -> None:
    """The names alone take 100 tokens; earlier answers of the application were shorter."""
    names = [f"a_rather_long_name_{letter}" for letter in "abcdef"]
    properties = {name: {"type": "null"} for name in names}
    schema = {"type": "object", "properties": properties, "required": names}
    with OpenAI(base_url=f"{live.http}/v1", api_key="none", max_retries=0) as client:
        named = {"x-foretoken-application": "named"}
        ask: Any = client.completions.create
        for _ in range(3):
            ask(model="demo", prompt="Reverse: red blue\n", temperature=0, extra_headers=named)
        with paused_workers_of(live):
            chunks = iter(ask(
                model="demo", prompt=LONG, max_tokens=MOST, temperature=0, stream=True,
                stream_options=OPTIONS, extra_headers=named, extra_body={"guided_json": schema},
            ))  # fmt: skip
            first = next(chunks)
        *_, last = chunks
    assert min(first.forecast["low_tokens"], last.usage.completion_tokens) > 100


@pytest.mark.slow
def test_openai_client_receives_forecasts_per_choice(live: Live) -> None:
    with OpenAI(base_url=f"{live.http}/v1", api_key="none", max_retries=0) as client:
        ask: Any = client.chat.completions.create
        turns = [{"role": "user", "content": LONG}]
        with paused_workers_of(live):
            chunks = iter(ask(
                model="demo", messages=turns, n=2, max_tokens=MOST, seed=3, stream=True,
                stream_options=OPTIONS,
            ))  # fmt: skip
            first = [next(chunks), next(chunks)]
        *parts, last = first + list(chunks)
    reported: dict[int, list[Any]] = {0: [], 1: []}
    for part in parts:
        if "forecast" in part.model_extra:
            reported[part.choices[0].index].append(part.forecast)
    ends = [of[-1]["expected_tokens"] for of in reported.values()]
    assert sum(ends) == last.usage.completion_tokens


@pytest.mark.slow
def test_forecast_outcomes_are_counted(live: Live) -> None:
    stream_with_forecasts(live)
    text = urllib.request.urlopen(f"{live.http}/metrics", timeout=10).read().decode()
    lines = [line for line in text.splitlines() if line.startswith("foretoken_client_")]
    for name in ("forecasts", "ttft_promises", "sla_forecasts"):
        counts = [float(x.split()[-1]) for x in lines if x.startswith(f"foretoken_client_{name}_t")]
        assert sum(counts) >= 1, lines
