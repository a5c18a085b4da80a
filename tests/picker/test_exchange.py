"""Transcripts of Envoy's protocol: each message and its answers."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
import yaml
from google.protobuf.struct_pb2 import Struct
from prometheus_client import CollectorRegistry

from protos.generated import ext_proc_pb2 as pb
from services.picker.config import PickerConfig
from services.picker.core.endpoints import Reading
from services.picker.core.pool import BYTES_PER_TOKEN, Pool
from services.picker.exchange import THREAD_BYTES, Exchange
from services.picker.links.forecasts import Forecasts
from services.picker.messages import MAX_CHUNK_BYTES
from services.picker.metrics import PickerMetrics
from services.picker.tracker import Tracker
from services.runtime.errors import InvalidArgument
from tests.live import ROOT

A, B = "10.0.0.1:8000", "10.0.0.2:8000"
BODY = json.dumps({"model": "m", "prompt": "Hello", "max_tokens": 9, "stream": True}).encode()


@dataclass
class Picker:
    """A picker's state without sockets, at a time that tests set."""

    config: PickerConfig = field(default_factory=PickerConfig)
    pool: Pool = field(default_factory=Pool)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        metrics = PickerMetrics(
            self.registry, lambda: self.pool.health(self.now), lambda: len(self.pool)
        )
        forecasts = Forecasts(self.config, None, metrics, self.pool.on_forecast)
        self.tracker = Tracker(
            self.config, self.pool, forecasts, metrics, lambda: self.now, self.priority
        )

    def priority(self, objective: str) -> int:
        return self.config.objectives.get(objective, 0)

    def ready(self, *addresses: str) -> "Picker":
        self.pool.set_endpoints(addresses, self.now)
        for address in addresses:
            self.pool.on_reading(address, Reading(kv_tokens=10_000), self.now, self.now)
        return self

    def open(self) -> Exchange:
        return Exchange(self.tracker, lambda: self.now)

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"foretoken_picker_{name}", labels) or 0.0


def request_headers(end: bool = False, **headers: str) -> pb.ProcessingRequest:
    listed = [
        pb.HeaderValue(key=key.replace("_", "-"), raw_value=value.encode())
        for key, value in headers.items()
    ]
    sent = pb.HttpHeaders(headers=pb.HeaderMap(headers=listed), end_of_stream=end)
    return pb.ProcessingRequest(request_headers=sent)


def request_body(body: bytes, end: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=end))


def response_headers(
    status: str, kind: str = "text/event-stream", end: bool = False, served: str = ""
) -> pb.ProcessingRequest:
    values = {":status": status, "content-type": kind}
    listed = [pb.HeaderValue(key=k, raw_value=v.encode()) for k, v in values.items()]
    sent = pb.HttpHeaders(headers=pb.HeaderMap(headers=listed), end_of_stream=end)
    message = pb.ProcessingRequest(response_headers=sent)
    if served:
        message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": served})
    return message


def response_body(body: bytes, end: bool = False) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(response_body=pb.HttpBody(body=body, end_of_stream=end))


def token(text: str, reason: str | None = None) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def destination(answer: pb.ProcessingResponse) -> str:
    common = answer.request_headers.response
    (header,) = common.header_mutation.set_headers
    assert header.header.key == "x-gateway-destination-endpoint"
    named = header.header.raw_value.decode()
    metadata = answer.dynamic_metadata.fields["envoy.lb"].struct_value
    assert metadata.fields["x-gateway-destination-endpoint"].string_value == named
    return named


def returned(answers: Iterable[pb.ProcessingResponse], kind: str) -> list[tuple[bytes, bool]]:
    parts = [getattr(each, kind).response.body_mutation.streamed_response for each in answers]
    return [(part.body, part.end_of_stream) for part in parts]


def refusal(answers: Iterable[pb.ProcessingResponse]) -> tuple[int, str, dict[str, str]]:
    (answer,) = answers
    immediate = answer.immediate_response
    headers = {h.header.key: h.header.raw_value.decode() for h in immediate.headers.set_headers}
    return immediate.status.code, json.loads(immediate.body)["error"]["message"], headers


async def placed(picker: Picker) -> Exchange:
    exchange = picker.open()
    assert list(await exchange.on(request_headers())) == []
    assert destination(next(iter(await exchange.on(request_body(BODY)))))
    return exchange


async def test_headers_are_answered_once_the_body_is_read_and_the_body_is_returned():
    picker = Picker().ready(A, B)
    exchange = picker.open()
    assert list(await exchange.on(request_headers())) == []
    assert list(await exchange.on(request_body(BODY[:9], end=False))) == []
    head, *body = await exchange.on(request_body(BODY[9:]))
    assert set(destination(head).split(",")) == {A, B}
    assert returned(body, "request_body") == [(BODY, True)]
    assert len(picker.pool) == 1 and picker.count("picks_total", endpoint=destination(head)[:13])


async def test_long_body_is_returned_in_chunks():
    picker = Picker().ready(A)
    exchange = picker.open()
    await exchange.on(request_headers())
    body = b"x" * (2 * MAX_CHUNK_BYTES + 5)
    _, *parts = await exchange.on(request_body(body))
    chunks = returned(parts, "request_body")
    assert b"".join(chunk for chunk, _ in chunks) == body
    assert [len(chunk) for chunk, _ in chunks] == [MAX_CHUNK_BYTES, MAX_CHUNK_BYTES, 5]
    assert [end for _, end in chunks] == [False, False, True]


async def test_trailers_end_a_body():
    exchange = Picker().ready(A).open()
    await exchange.on(request_headers())
    assert list(await exchange.on(request_body(BODY, end=False))) == []
    trailers = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())
    head, body, last = await exchange.on(trailers)
    assert destination(head) == A
    assert returned([body], "request_body") == [(BODY, False)]
    assert last.WhichOneof("response") == "request_trailers"


async def test_request_without_a_body_is_placed_by_its_headers():
    (head,) = await Picker().ready(A).open().on(request_headers(end=True))
    assert destination(head) == A


async def test_streamed_answer_is_returned_and_its_length_learned():
    picker = Picker().ready(A)
    exchange = await placed(picker)
    (head,) = await exchange.on(response_headers("200"))
    assert head.WhichOneof("response") == "response_headers"
    for number, text in enumerate(["a", "b", "c"]):
        picker.now = 1.0 + number
        chunk = token(text, "stop" if text == "c" else None)
        answers = await exchange.on(response_body(chunk))
        assert returned(answers, "response_body") == [(chunk, False)]
        assert picker.pool.servers[A].flights[1].tokens == number + 1
    assert returned(await exchange.on(response_body(b"", end=True)), "response_body") == [
        (b"", True)
    ]
    assert len(picker.pool) == 0
    assert picker.count("ended_total", result="complete") == 1
    assert picker.count("output_tokens_total") == 3
    assert picker.count("time_to_first_token_seconds_sum") == 1.0
    exchange.close()
    assert picker.count("ended_total", result="broken") == 0
    # about every second answer has three tokens, the other one its own max_tokens
    arrived = await placed(picker)
    forecast = picker.pool.servers[A].flights[2].forecast
    assert forecast.points == (3.0, 9.0)
    arrived.close()
    assert picker.count("ended_total", result="broken") == 1 and len(picker.pool) == 0


async def test_whole_answer_is_learned_from_its_usage():
    picker = Picker().ready(A)
    exchange = await placed(picker)
    await exchange.on(response_headers("200", "application/json"))
    picker.now = 1.0
    usage = {"prompt_tokens": 2, "completion_tokens": 4}
    body = json.dumps({"choices": [{"finish_reason": "length"}], "usage": usage}).encode()
    await exchange.on(response_body(body, end=True))
    assert picker.count("output_tokens_total") == 4
    assert picker.pool.servers[A].steps


@pytest.mark.parametrize(
    ("fields", "learned"),
    [
        ({"prompt": "x" * 600}, True),
        ({"prompt": ["x" * 600]}, True),
        ({"prompt": ["x" * 600, "y"]}, False),
        ({"prompt": [7] * 600}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
    ],
)
async def test_bytes_per_token_are_learned_from_whole_texts_alone(fields: dict, learned: bool):
    picker = Picker().ready(A)
    exchange = picker.open()
    await exchange.on(request_headers())
    await exchange.on(request_body(json.dumps(fields).encode()))
    await exchange.on(response_headers("200", "application/json"))
    usage = {"prompt_tokens": 100, "completion_tokens": 4}
    await exchange.on(response_body(json.dumps({"usage": usage}).encode(), end=True))
    assert (picker.pool.bytes_per_token != BYTES_PER_TOKEN) is learned


async def test_large_body_and_names_without_bytes_are_placed():
    picker = Picker().ready(A)
    exchange = picker.open()
    fields = {"model": "\ud800", "cache_salt": "\ud800", "prompt": "x" * THREAD_BYTES}
    await exchange.on(request_headers())
    head, *_ = await exchange.on(request_body(json.dumps(fields).encode()))
    assert destination(head) == A
    assert picker.pool.servers[A].flights[1].prompt_bytes == THREAD_BYTES


async def test_subset_hint_and_objective_are_obeyed():
    config = PickerConfig(objectives={"batch": -1})
    picker = Picker(config).ready(A, B)
    exchange = picker.open()
    first = request_headers(x_gateway_inference_objective="batch", x_llm_d_slo_ttft_ms="0.001")
    hint = Struct()
    hint.update({"x-gateway-destination-endpoint-subset": f" {B} ,10.9.9.9:1"})
    first.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hint)
    await exchange.on(first)
    status, message, headers = refusal(await exchange.on(request_body(BODY)))
    assert (status, headers["retry-after"]) == (429, "1")
    assert "negative priority" in message
    assert list(await exchange.on(request_body(BODY))) == []  # refused once
    assert picker.count("refused_total", cause="shed") == 1

    exchange = picker.open()
    first = request_headers(end=True)
    first.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hint)
    assert destination(next(iter(await exchange.on(first)))) == B


async def test_subset_hint_without_a_known_endpoint_is_503():
    picker = Picker().ready(A)
    first = request_headers(end=True)
    hint = Struct()
    hint.update({"x-gateway-destination-endpoint-subset": []})
    first.metadata_context.filter_metadata["envoy.lb.subset_hint"].CopyFrom(hint)
    status, message, headers = refusal(await picker.open().on(first))
    assert (status, headers["retry-after"]) == (503, "1")
    assert message == "the pool has no endpoint that the request may use"


async def test_wrong_header_and_large_body_are_refused():
    picker = Picker(PickerConfig(max_body_bytes=100)).ready(A)
    status, message, _ = refusal(await picker.open().on(request_headers(x_llm_d_slo_tpot_ms="x")))
    assert status == 400 and message.startswith("x-llm-d-slo-tpot-ms: must be")
    exchange = picker.open()
    await exchange.on(request_headers())
    assert list(await exchange.on(request_body(b"x" * 100, end=False))) == []
    status, message, _ = refusal(await exchange.on(request_body(b"x")))
    assert status == 413 and message == "the body has over 100 bytes (picker.max_body_bytes)"


async def test_bodies_that_are_read_together_are_bounded():
    picker = Picker(PickerConfig(max_reading_bytes=100)).ready(A)
    first, second, third = picker.open(), picker.open(), picker.open()
    for exchange in (first, second, third):
        await exchange.on(request_headers())
    assert list(await first.on(request_body(b"x" * 60, end=False))) == []
    status, _, headers = refusal(await second.on(request_body(b"x" * 60, end=False)))
    assert (status, headers["retry-after"]) == (429, "1")
    first.close()
    assert list(await third.on(request_body(b"x" * 100, end=False))) == []


async def test_failed_endpoint_is_left_out_and_the_one_that_served_counts():
    picker = Picker().ready(A, B)
    exchange = await placed(picker)
    chosen = next(a for a, s in picker.pool.servers.items() if s.flights)
    other = A if chosen == B else B
    await exchange.on(response_headers("200", served=other))
    assert len(picker.pool.servers[other].flights) == 1
    exchange.close()
    exchange = await placed(picker)
    await exchange.on(response_headers("503", served=A))
    assert picker.pool.health(picker.now)[A] == "lost"
    await exchange.on(response_body(b"", end=True))
    assert picker.count("ended_total", result="error") == 1
    (head,) = await picker.open().on(request_headers(end=True))
    assert destination(head) == B


async def test_answers_that_envoy_keeps_are_not_returned():
    picker = Picker().ready(A)
    exchange = picker.open()
    first = request_headers(end=True)
    first.protocol_config.request_body_mode = pb.FULL_DUPLEX_STREAMED
    first.protocol_config.response_body_mode = pb.STREAMED
    await exchange.on(first)
    await exchange.on(response_headers("200"))
    (answer,) = await exchange.on(response_body(token("a")))
    assert answer.WhichOneof("response") == "response_body"
    assert not answer.response_body.HasField("response")


@pytest.mark.parametrize(("mode", "name"), [(pb.BUFFERED, "BUFFERED"), (77, "77")])
async def test_other_body_modes_of_requests_are_explained(mode, name):
    first = request_headers()
    first.protocol_config.request_body_mode = mode
    sentence = f"^request_body_mode: must be FULL_DUPLEX_STREAMED, got {name}; set it"
    with pytest.raises(InvalidArgument, match=sentence):
        await Picker().ready(A).open().on(first)


TRAILERS = pb.ProcessingRequest(request_trailers=pb.HttpTrailers())


@pytest.mark.parametrize(
    ("earlier", "message", "field"),
    [
        ([], request_body(BODY), "request_body"),
        ([], TRAILERS, "request_trailers"),
        ([request_headers()], request_headers(end=True), "request_headers"),
        ([request_headers(end=True)], request_headers(end=True), "request_headers"),
        ([request_headers(end=True)], request_body(BODY), "request_body"),
        ([request_headers(), request_body(BODY)], request_body(b""), "request_body"),
    ],
)
async def test_a_stream_carries_one_request_in_order(earlier, message, field):
    picker = Picker().ready(A)
    exchange = picker.open()
    for each in earlier:
        await exchange.on(each)
    with pytest.raises(InvalidArgument, match=f"^{field}: must "):
        await exchange.on(message)
    exchange.close()
    assert len(picker.pool) == 0


@pytest.mark.parametrize(("by_key", "cached"), [(True, 0), (False, 192)])
async def test_other_keys_find_no_cached_prefix_unless_servers_share_it(by_key, cached):
    picker = Picker(PickerConfig(prefixes_by_key=by_key)).ready(A)

    async def expects_cached(**headers: str) -> float:
        before = picker.count("prefix_cached_tokens_total")
        exchange = picker.open()
        await exchange.on(request_headers(False, **headers))
        await exchange.on(request_body(json.dumps({"prompt": "x" * 1_000}).encode()))
        return picker.count("prefix_cached_tokens_total") - before

    assert await expects_cached(authorization="Bearer a") == 0
    assert await expects_cached(authorization="Bearer a") == 192
    assert await expects_cached(x_api_key="a") == 192
    assert await expects_cached(authorization="Bearer b") == cached
    assert await expects_cached() == cached


@pytest.mark.parametrize("status", ["", "x", "²00", "9" * 5_000])
async def test_status_that_is_none_is_passed_over(status):
    exchange = Picker().ready(A).open()
    await exchange.on(request_headers(end=True))
    [answer] = await exchange.on(response_headers(status))
    assert answer.WhichOneof("response") == "response_headers"


def test_envoy_has_no_lower_bounds_than_the_picker():
    config = yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text())
    most = PickerConfig().max_in_flight
    bounds = ("max_connections", "max_pending_requests", "max_requests", "max_retries")
    clusters = config["static_resources"]["clusters"]
    assert {each["name"] for each in clusters} == {"picker", "model_servers"}
    for cluster in clusters:
        [thresholds] = cluster["circuit_breakers"]["thresholds"]
        assert thresholds == dict.fromkeys(bounds, most)
