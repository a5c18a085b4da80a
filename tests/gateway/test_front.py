"""A front with two models: selection by name, limits, status, stories and metrics."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import aio

from foretoken import AsyncClient, InvalidRequest
from protos.generated import common_pb2 as common
from protos.generated import gateway_pb2, gateway_pb2_grpc
from protos.generated import scheduler_pb2 as sched
from services.runtime.errors import Code, ServiceError
from tests.gateway.gateway_fakes import FakeScheduler, tokens_of
from tests.gateway.model_fakes import Models, run_models
from tests.observability.tracing.otlp import WrittenSpans

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
async def models() -> AsyncIterator[Models]:
    async with run_models({"small": "11", "large": "22"}) as running:
        yield running


@pytest.mark.parametrize(
    ("asked", "served", "text"),
    [("small", "small", "11"), ("large", "large", "22"), ("", "small", "11")],
)
async def test_every_face_selects_the_model_by_name(
    asked: str, served: str, text: str, models: Models
) -> None:
    named = {"model": asked} if asked else {}
    whole = (await models.http("POST", COMPLETIONS, {**named, "prompt": "1,"})).json
    assert (whole["model"], whole["choices"][0]["text"]) == (served, text)
    messages = [{"role": "user", "content": "1,"}]
    chat = {**named, "messages": messages, "stream": True}
    events = (await models.http("POST", CHAT, chat)).events
    assert {event["model"] for event in events} == {served}
    assert "".join(e["choices"][0]["delta"]["content"] for e in events if e["choices"]) == text
    async with AsyncClient(models.first.grpc_address) as client:
        assert (await client.complete("1,", model=asked)).text == text
        assert await client.models() == ["small", "large"]
    fakes = models.fakes[served]
    assert {request.model for request in fakes.scheduler.requests} == {served}
    others = [each for name, each in models.fakes.items() if name != served]
    assert not any(each.scheduler.requests or each.worker.prompts for each in others)
    body = {**named, "prompt": "1,"}
    assert (await models.http("POST", "/tokenize", body)).json["count"] == 2
    tokens = {**named, "tokens": tokens_of("12")}
    assert (await models.http("POST", "/detokenize", tokens)).json["prompt"] == "12"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "1,"}), (CHAT, {"messages": [{"role": "user", "content": "1"}]}),
        ("/tokenize", {"prompt": "1,"}), ("/detokenize", {"tokens": [1]}),
    ],
)  # fmt: skip
async def test_unknown_model_is_404_with_the_served_names(
    path: str, body: dict[str, object], models: Models
) -> None:
    reply = await models.http("POST", path, {**body, "model": "gpt-9"})
    message = "model: 'gpt-9' is not served here; known: small, large"
    assert (reply.status, reply.json["error"]["message"]) == (404, message)
    assert (await models.http("GET", "/v1/models/gpt-9")).status == 404
    async with AsyncClient(models.first.grpc_address) as client:
        with pytest.raises(InvalidRequest, match="known: small, large"):
            await client.complete("1,", model="gpt-9")


async def test_models_and_status_are_of_all_models(models: Models) -> None:
    cards = (await models.http("GET", "/v1/models")).json["data"]
    assert [(card["id"], card["max_model_len"]) for card in cards] == [
        ("small", 512), ("large", 512),
    ]  # fmt: skip
    assert (await models.http("GET", "/v1/models/large")).json["id"] == "large"
    both = {"small": "ok", "large": "ok"}
    assert (await models.http("GET", "/health")).json == {"status": "ok", "models": both}
    assert (await models.http("GET", "/load")).json == {"server_load": 0}


async def test_health_is_that_of_any_model_or_of_the_named_one(models: Models) -> None:
    small = models.fakes["small"]
    small.scheduler.streams[-1].put_nowait(small.scheduler.fleet([]))
    await small.until(lambda: not models.front.gateways["small"].ready)
    why = "no worker is attached"
    reply = await models.http("GET", "/health")
    assert (reply.status, reply.json["models"]) == (200, {"small": why, "large": "ok"})
    one = await models.http("GET", "/health?model=small")
    assert (one.status, one.json) == (503, {"status": why, "models": {"small": why}})
    assert (await models.http("GET", "/health?model=large")).status == 200
    assert (await models.http("GET", "/health?model=gpt-9")).status == 404
    draining = asyncio.ensure_future(models.front.drain())
    await small.until(lambda: all(g.draining for g in models.front.gateways.values()))
    reply = await models.http("GET", "/health")
    assert (reply.status, reply.json["status"]) == (503, "draining")
    await draining


async def test_health_and_models_have_the_warnings_of_a_model_that_serves(models: Models) -> None:
    small = models.fakes["small"]
    event = small.scheduler.fleet([small.scheduler.worker_address])
    event.fleet.warnings.append("the outcome log is full")
    small.scheduler.streams[-1].put_nowait(event)
    await small.until(lambda: bool(models.front.gateways["small"].warnings))
    reply = await models.http("GET", "/health")
    assert (reply.status, reply.json["status"]) == (200, "ok")
    assert reply.json["warnings"] == {"small": ["the outcome log is full"]}
    assert "warnings" not in (await models.http("GET", "/health?model=large")).json
    async with aio.insecure_channel(models.first.grpc_address) as channel:
        listing = gateway_pb2_grpc.GatewayStub(channel).ListModels(gateway_pb2.ListModelsRequest())
        listed = {model.name: list(model.warnings) for model in (await listing).models}
    assert listed == {"small": ["the outcome log is full"], "large": []}


async def test_workers_of_another_model_do_not_make_a_model_ready() -> None:
    """A scheduler address that belongs to another model."""
    async with run_models({"small": "1", "large": "2"}) as models:
        large = models.fakes["large"]
        stray = FakeScheduler(model="medium")
        large.scheduler.streams[-1].put_nowait(stray.fleet([large.scheduler.worker_address]))
        await large.until(lambda: not models.front.gateways["large"].ready)
        states = (await models.http("GET", "/health")).json["models"]
        wrong = "the scheduler has no worker of this model, only of medium"
        assert states == {"small": "ok", "large": wrong}


async def test_full_model_leaves_room_for_the_other() -> None:
    """Two live choices for both together: one each."""
    async with run_models({"small": "", "large": ""}, max_sessions=2) as models:
        small, large = models.fakes["small"], models.fakes["large"]

        def ask(name: str) -> asyncio.Task:
            body = {"model": name, "prompt": "1,", "max_tokens": 1}
            return asyncio.create_task(models.http("POST", COMPLETIONS, body))

        first = ask("small")
        await small.until(lambda: bool(small.worker.prompts))
        assert (await models.http("GET", "/load")).json == {"server_load": 1}
        refused = await ask("small")
        assert (refused.status, refused.json["error"]["code"]) == (429, "queue_full")
        second = ask("large")
        await large.until(lambda: bool(large.worker.prompts))
        assert (await models.http("GET", "/load")).json == {"server_load": 2}
        assert (await ask("large")).status == 429  # before its body is read: all are full
        for fakes in (small, large):
            name = fakes.worker.prompts[0].request_id
            fakes.worker.send(name, 0, tokens_of("1"), common.FINISH_REASON_LENGTH)
        assert [(await each).status for each in (first, second)] == [200, 200]
        lines = (await models.http("GET", "/metrics")).text.splitlines()
        # The first model's: one by its name, and one before its model was read.
        for name, count in (("small", 2), ("large", 0)):
            labels = f'model_name="{name}",reason="sessions"'
            assert f"foretoken_refusals_total{{{labels}}} {count}.0" in lines


@pytest.mark.parametrize(
    ("config", "headers"), [({}, {"x-request-timeout-s": "2"}), ({"default_deadline_s": 2.0}, {})]
)
async def test_busy_model_does_not_refuse_for_the_other(
    config: dict[str, Any], headers: dict[str, str]
) -> None:
    """The first model's queue takes longer than the client waits, and the body is not read yet."""
    async with run_models({"small": "11", "large": "22"}, **config) as models:
        small = models.fakes["small"]
        busy = sched.FleetView(
            workers=small.scheduler.fleet([small.scheduler.worker_address]).fleet.workers,
            queued=9,
            drain_s=60.0,
        )
        small.scheduler.streams[-1].put_nowait(sched.SchedulerEvent(fleet=busy))
        await small.until(lambda: not models.front.gateways["small"].intake.has_room(2.0))
        statuses = {}
        for model in ("small", "large"):
            body = {"model": model, "prompt": "1,"}
            statuses[model] = (await models.http("POST", COMPLETIONS, body, headers)).status
        assert statuses == {"small": 429, "large": 200}


async def test_metrics_have_the_series_of_each_model(models: Models) -> None:
    body = {"model": "large", "prompt": "1,"}
    assert (await models.http("POST", COMPLETIONS, body)).status == 200
    lines = (await models.http("GET", "/metrics")).text.splitlines()
    assert 'foretoken_generation_tokens_total{model_name="small"} 0.0' in lines
    assert 'foretoken_generation_tokens_total{model_name="large"} 2.0' in lines
    assert sum(line.startswith("# TYPE foretoken_generation_tokens") for line in lines) == 1


async def test_story_is_found_at_the_scheduler_that_has_it(models: Models) -> None:
    large = models.fakes["large"].scheduler
    large.stories["abc"] = sched.Story(request_id="abc-0")
    assert [story.request_id for story in (await models.front.why("abc")).stories] == ["abc-0"]
    reply = await models.http("GET", "/ui/why/abc")
    assert reply.json["stories"][0]["request_id"] == "abc-0"
    assert (await models.http("GET", "/ui/why/other")).status == 404
    models.fakes["small"].scheduler.stories["abc"] = sched.Story(request_id="abc-1")
    found = await models.front.why("abc")  # a client's own id may be used for both models
    assert [story.request_id for story in found.stories] == ["abc-1", "abc-0"]


async def test_missing_scheduler_is_reported_for_an_unknown_story(models: Models) -> None:
    await models.fakes["small"].scheduler_server.stop(0)
    models.fakes["large"].scheduler.stories["abc"] = sched.Story(request_id="abc-0")
    assert len((await models.front.why("abc")).stories) == 1
    with pytest.raises(ServiceError) as caught:
        await models.front.why("other")
    assert caught.value.code is Code.UNAVAILABLE


async def test_live_page_shows_one_model_at_a_time(models: Models) -> None:
    about = (await models.http("GET", "/ui/about")).json
    assert (about["model"], about["models"]) == ("small", ["small", "large"])
    assert (await models.http("GET", "/ui/about?model=large")).json["model"] == "large"
    large = (await models.http("GET", "/ui/board?model=large")).json
    assert [worker["model"] for worker in large["workers"]] == ["large"]
    first = (await models.http("GET", "/ui/board")).json
    assert [worker["model"] for worker in first["workers"]] == ["small"]
    assert (await models.http("GET", "/ui/board?model=gpt-9")).status == 404


async def test_other_model_answers_while_one_scheduler_is_lost(models: Models) -> None:
    await models.fakes["small"].scheduler_server.stop(0)
    await models.first.until(lambda: not models.front.gateways["small"].ready)
    body = {"model": "large", "prompt": "1,"}
    answer = await models.http("POST", COMPLETIONS, body)
    assert answer.json["choices"][0]["text"] == "22"


@pytest.mark.parametrize(
    ("asked", "status", "named"), [("large", 200, "large"), ("", 200, "small"), ("x", 404, "small")]
)
async def test_trace_names_the_selected_model(asked: str, status: int, named: str) -> None:
    """A request of an unknown model has the trace of the first one."""
    written = WrittenSpans()
    async with run_models({"small": "11", "large": "22"}, spans=written) as models:
        reply = await models.http("POST", COMPLETIONS, {"model": asked, "prompt": "1,"})
        await models.first.until(lambda: written.all[0].end_s is not None)
    request = written.all[0]
    assert (reply.status, request.name) == (status, f"text_completion {named}")
    assert request.attributes["gen_ai.request.model"] == named
    measured = {attributes["gen_ai.request.model"] for *_, attributes in written.measured}
    assert measured == {named}
