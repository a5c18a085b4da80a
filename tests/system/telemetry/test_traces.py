"""Traces of a real system at a real collector: one connected tree per request, across processes."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from secrets import token_hex
from typing import Any

import grpc
import pytest

from foretoken import AsyncClient, Client
from foretoken.running.ports import free_port
from protos.generated import common_pb2, gateway_pb2, gateway_pb2_grpc, scheduler_pb2
from tests.live import Live, serving, wait_for
from tests.observability.tracing.otlp import Collector, Seen, collecting

pytestmark = pytest.mark.slow

PARTS = {"tokenize", "stream", "queue", "forecast", "slice"}
WITH_PREDICTOR = PARTS | {"predict"}  # if the request still runs when the predictor is parent
LONG = {"max_tokens": 400, "ignore_eos": True}
SERVICES = {f"foretoken-{name}" for name in ("gateway", "scheduler", "predictor", "worker")}
PROMPT = "Count from 1 to 20.\n"


def tracing(collector: Collector) -> list[str]:
    settings = {
        "tracing.endpoint": collector.address,
        "tracing.delay_s": "0.1",
        "tracing.metrics_interval_s": "0.2",
        "scheduler.forecast_timeout_s": "10",  # wait for a slow predictor
        "scheduler.forecast_late_s": "20",
    }
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


@pytest.fixture(scope="module")
def live(collector: Collector) -> Iterator[Live]:
    with serving(*tracing(collector), "--set", "preset.slice=tokens") as system:
        wait_for_predictor(system, collector)
        yield system


def wait_for_predictor(live: Live, collector: Collector) -> None:
    """The system is ready before the predictor exports its first span."""
    before = len(_predict_spans(collector))
    with Client(live.grpc) as client:

        def answers() -> bool:
            client.complete(PROMPT, max_tokens=1)
            return len(_predict_spans(collector)) > before

        wait_for(answers, 60)


def _predict_spans(collector: Collector) -> list[Seen]:
    return [span for span in collector.spans if span.name == "predict"]


class ClientSpan:
    """A span of the client, the parent of a request's spans."""

    def __init__(self, flags: str = "01"):
        self.trace_id, self.span_id = token_hex(16), token_hex(8)
        self.traceparent = f"00-{self.trace_id}-{self.span_id}-{flags}"


def post(live: Live, path: str, parent: ClientSpan, **body: object) -> list[dict[str, Any]]:
    """A streamed answer's events over HTTP."""
    headers = {"content-type": "application/json", "traceparent": parent.traceparent}
    sent = {"model": "demo", "stream": True, "temperature": 0.0, "max_tokens": 48, **body}
    request = urllib.request.Request(f"{live.http}{path}", json.dumps(sent).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        lines = [line[6:] for line in response.read().decode().splitlines() if line]
    return [json.loads(line) for line in lines[:-1]]


def tree(collector: Collector, parent: ClientSpan, parts: set[str] = PARTS) -> Seen:
    """Wait for all parts of the request and return its root span.

    Checks that the spans form one tree and that none begins before the root."""
    wait_for(lambda: parts <= {span.name for span in collector.of(parent.trace_id)}, 30)
    wait_for(lambda: parent.span_id in {s.parent_id for s in collector.of(parent.trace_id)}, 30)
    spans = collector.of(parent.trace_id)
    known = {span.span_id: span for span in spans}
    assert len(known) == len(spans)
    [root] = [span for span in spans if span.parent_id == parent.span_id]
    for span in spans:
        assert span is root or span.parent_id in known, f"{span.name} has no parent"
        assert span.start_ns <= span.end_ns
        assert root.start_ns - 5e6 <= span.start_ns, f"{span.name} began before its request"
    return root


def named(collector: Collector, parent: ClientSpan, name: str) -> list[Seen]:
    return [span for span in collector.of(parent.trace_id) if span.name == name]


def check_answer(root: Seen, reported: Mapping[str, Any], reasons: list[str]) -> None:
    """The span records the forecast that the client received."""
    assert root.attributes["gen_ai.provider.name"] == "foretoken"
    assert root.attributes["gen_ai.request.model"] == "demo"
    assert root.attributes["gen_ai.response.model"] == "demo"
    assert root.attributes["gen_ai.usage.input_tokens"] == reported["prompt_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == reported["completion_tokens"]
    assert root.attributes["gen_ai.response.finish_reasons"] == reasons
    assert root.attributes["foretoken.sla.outcome"] in ("met", "missed")


def test_http_chat_makes_one_trace_across_processes(live: Live, collector: Collector) -> None:
    parent = ClientSpan()
    messages = [{"role": "user", "content": PROMPT}]
    events = post(
        live, "/v1/chat/completions", parent, messages=messages,
        stream_options={"include_usage": True}, **LONG,
    )  # fmt: skip
    root = tree(collector, parent, WITH_PREDICTOR)
    assert (root.service, root.name) == ("foretoken-gateway", "chat demo")
    assert {span.service for span in collector.of(parent.trace_id)} == SERVICES
    reasons = [each["finish_reason"] for event in events for each in event["choices"]]
    check_answer(root, events[-1]["usage"], [reasons[-1]])
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["url.path"] == "/v1/chat/completions"
    assert events[0]["id"] == f"chatcmpl-{root.attributes['gen_ai.response.id']}"
    parents = {span.name: span.parent_id for span in collector.of(parent.trace_id)}
    [forecast] = named(collector, parent, "forecast")
    assert parents.pop("predict") == forecast.span_id
    del parents[root.name]
    assert {name: parent for name, parent in parents.items() if parent != root.span_id} == {}
    made = root.attributes["gen_ai.usage.output_tokens"]
    wait_for(lambda: _in_slices(collector, parent) == made)


def _in_slices(collector: Collector, parent: ClientSpan) -> int:
    slices = named(collector, parent, "slice")
    return sum(span.attributes["foretoken.slice.tokens"] for span in slices)


def test_grpc_call_with_several_choices_makes_one_trace(live: Live, collector: Collector) -> None:
    parent = ClientSpan()
    request = gateway_pb2.GenerateRequest(
        prompt=PROMPT, sampling=common_pb2.Sampling(n=2, max_tokens=40, ignore_eos=True)
    )
    with grpc.insecure_channel(live.grpc) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        metadata = (("traceparent", parent.traceparent),)
        responses = list(stub.Generate(request, metadata=metadata, timeout=60))
    root = tree(collector, parent)
    assert root.name == "text_completion demo"
    usage = responses[-1].usage
    reported = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    check_answer(root, reported, ["length", "length"])
    wait_for(lambda: len(named(collector, parent, "queue")) == 2)
    ids = {span.attributes["foretoken.request.id"] for span in named(collector, parent, "queue")}
    assert ids == {f"{responses[0].request_id}-{choice}" for choice in (0, 1)}


@pytest.mark.slow
def test_request_without_traceparent_starts_a_trace(live: Live, collector: Collector) -> None:
    with Client(live.grpc) as client:
        answer = client.complete(PROMPT, max_tokens=4)
    wait_for(lambda: bool(_answered(collector, answer.request_id)), 30)
    [root] = _answered(collector, answer.request_id)
    assert root.parent_id == ""


def _answered(collector: Collector, response_id: str) -> list[Seen]:
    known = list(collector.spans)
    return [span for span in known if span.attributes.get("gen_ai.response.id") == response_id]


def test_unsampled_request_makes_no_trace(live: Live, collector: Collector) -> None:
    unsampled, sampled = ClientSpan("00"), ClientSpan()
    post(live, "/v1/completions", unsampled, prompt=PROMPT)
    post(live, "/v1/completions", sampled, prompt=PROMPT)
    tree(collector, sampled)
    assert not collector.of(unsampled.trace_id)


def test_rejected_request_records_its_error(live: Live, collector: Collector) -> None:
    parent = ClientSpan()
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(live, "/v1/completions", parent, prompt="")
    root = tree(collector, parent, set())
    assert root.attributes["error.type"] == "INVALID_ARGUMENT"
    assert "prompt" in root.failed


async def test_trace_ends_when_client_disconnects(live: Live, collector: Collector) -> None:
    before = {span.span_id for span in collector.spans}
    async with AsyncClient(live.grpc) as client:
        stream = client.generate("Count from 1 to 500.\n", max_tokens=1_000, ignore_eos=True)
        async for _ in stream:
            break
        stream.cancel()
    await asyncio.to_thread(wait_for, lambda: _cancelled(collector, before), 30)


def _cancelled(collector: Collector, before: set[str]) -> bool:
    ended = [span for span in collector.spans if span.span_id not in before]
    return any(
        span.attributes.get("error.type") == "cancelled"
        and span.attributes.get("gen_ai.response.finish_reasons") == ["cancelled"]
        for span in ended
    )


@pytest.mark.slow
def test_gen_ai_metrics_count_every_request(live: Live, collector: Collector) -> None:
    def count(name: str) -> int:
        points = collector.points.get(f"gen_ai.server.{name}", [])
        return sum(p.count for known, p in points if "error.type" not in known)

    def counts() -> dict[str, int]:
        return {name: count(name) for name in ("request.duration", "time_to_first_token")}

    before: dict[str, int] = {}
    while before != counts():  # earlier requests are still being exported
        before = counts()
        time.sleep(1)
    for parent in (ClientSpan(), ClientSpan("00"), ClientSpan()):
        post(live, "/v1/completions", parent, prompt=PROMPT)
    wanted = {name: number + 3 for name, number in before.items()}
    wait_for(lambda: counts() == wanted, 30)
    assert count("time_per_output_token") >= 3
    for known, _ in collector.points["gen_ai.server.time_to_first_token"]:
        assert known == {
            "gen_ai.operation.name": known["gen_ai.operation.name"],
            "gen_ai.provider.name": "foretoken",
            "gen_ai.request.model": "demo",
            "gen_ai.response.model": "demo",
        }


@pytest.mark.slow
def test_separate_services_answer_with_swapped_kv(collector: Collector) -> None:
    arguments = ("--separate", "--policy", "alise", "--kv-tokens", "512", "--host-gib", "0.1")
    with serving(*tracing(collector), *arguments) as live:
        wait_for_predictor(live, collector)
        parent = ClientSpan()
        post(live, "/v1/completions", parent, prompt=PROMPT, **LONG)
        root = tree(collector, parent, WITH_PREDICTOR)
        assert {span.service for span in collector.of(parent.trace_id)} == SERVICES
        with grpc.insecure_channel(live.grpc) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            why = ClientSpan()
            story = scheduler_pb2.WhyRequest(request_id=root.attributes["gen_ai.response.id"])
            stub.Why(story, metadata=(("traceparent", why.traceparent),), timeout=60)
        [front] = _named_soon(collector, why, "foretoken.v1.Gateway/Why")
        [behind] = _named_soon(collector, why, "foretoken.v1.Scheduler/Why")
        assert (front.parent_id, behind.parent_id) == (why.span_id, front.span_id)
        crowd = [ClientSpan() for _ in range(12)]
        asyncio.run(_crowd(live, crowd))
        wait_for(lambda: any(_swaps(collector, each) for each in crowd), 30)
        for each in crowd:
            tree(collector, each)
        swaps = [span for each in crowd for span in _swaps(collector, each)]
        assert {span.attributes["foretoken.swap.direction"] for span in swaps} >= {"offload"}


async def _crowd(live: Live, crowd: list[ClientSpan]) -> None:
    body: dict[str, Any] = {"prompt": "Count from 1 to 500.\n", "max_tokens": 200}
    async with asyncio.TaskGroup() as group:
        for parent in crowd:
            group.create_task(
                asyncio.to_thread(post, live, "/v1/completions", parent, ignore_eos=True, **body)
            )


def _swaps(collector: Collector, parent: ClientSpan) -> list[Seen]:
    return named(collector, parent, "swap")


def _named_soon(collector: Collector, parent: ClientSpan, name: str) -> list[Seen]:
    wait_for(lambda: bool(named(collector, parent, name)), 30)
    return named(collector, parent, name)


@pytest.mark.slow
def test_missing_collector_is_logged_once_per_process(tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    endpoint = f"http://127.0.0.1:{free_port()}"
    sets = {
        "tracing.endpoint": endpoint,
        "tracing.delay_s": "0.1",
        "tracing.timeout_s": "0.5",
        "tracing.metrics_interval_s": "0.2",
        "logging.format": "json",
    }
    arguments = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    arguments += ["--gateways", "1"]
    with serving(*arguments, stderr=log) as live, Client(live.grpc) as client:
        for _ in range(20):
            stream = client.generate("Reverse: red blue green\n", max_tokens=16, temperature=0.0)
            assert stream.complete().text.strip() == "green blue red"
        wait_for(lambda: log.read_text().count(endpoint) >= 4, 30)
        client.complete(PROMPT, max_tokens=40)
        assert live.stop() == 0
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    services = [line["service"] for line in lines if endpoint in line["message"]]
    assert sorted(services) == ["gateway", "predictor", "scheduler", "worker"]
    others = [line for line in lines if line["logger"] != "foretoken.running.console.lines"]
    assert {line["level"] for line in others} == {"WARNING"}
