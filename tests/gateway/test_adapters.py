"""LoRA adapters at the gateway: names, loading, and what the peers receive."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from foretoken import AsyncClient
from tests.gateway.model_fakes import Models, run_models

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
COMPLETIONS = "/v1/completions"


@pytest.fixture
async def models() -> AsyncIterator[Models]:
    async with run_models({"small": "11", "large": "22"}, adapter_loading=True) as running:
        yield running


async def load(models: Models, name: str, model: str = "") -> None:
    answer = await models.http(
        "POST", LOAD, {"lora_name": name, "lora_path": f"/adapters/{name}", "model": model}
    )
    assert answer.status == 200, answer.json
    await models.first.until(
        lambda: any(name in g.adapters for g in models.front.gateways.values())
    )


async def test_loaded_adapter_is_listed_and_answers_under_its_name(models: Models) -> None:
    await load(models, "terse", "large")
    cards = (await models.http("GET", "/v1/models")).json["data"]
    assert [card["id"] for card in cards] == ["small", "large", "terse"]
    assert (cards[2]["parent"], cards[2]["root"]) == ("large", "/adapters/terse")
    assert (await models.http("GET", "/v1/models/terse")).json == cards[2]
    body = {"model": "terse", "prompt": "1,"}
    whole = (await models.http("POST", COMPLETIONS, body)).json
    assert (whole["model"], whole["choices"][0]["text"]) == ("terse", "22")
    events = (await models.http("POST", COMPLETIONS, {**body, "stream": True})).events
    assert {event["model"] for event in events} == {"terse"}
    async with AsyncClient(models.first.grpc_address) as client:
        assert (await client.complete("1,", model="terse", application="app")).text == "22"
        assert await client.models() == ["small", "large", "terse"]
    twice = {"lora_name": "terse", "lora_path": "/adapters/terse", "model": "small"}
    again = await models.http("POST", LOAD, twice)
    assert (again.status, again.json["error"]["param"]) == (400, "lora_name")
    assert "another model has an adapter" in again.json["error"]["message"]
    fakes = models.fakes["large"]
    assert {prompt.adapter for prompt in fakes.worker.prompts} == {"terse"}
    requests = fakes.scheduler.requests
    assert {request.model for request in requests} == {"large"}
    assert [request.application for request in requests] == ["@terse", "@terse", "app@terse"]
    shown = (await models.http("GET", "/metrics?name[]=vllm:lora_requests_info")).text
    labels = 'model_name="large",max_lora="1",running_lora_adapters="",waiting_lora_adapters=""'
    assert f"vllm:lora_requests_info{{{labels}}} " in shown and 'model_name="small"' not in shown

    gateway, scheduler = models.front.gateways["large"], fakes.scheduler
    held, scheduler.adapters = scheduler.adapters, []
    scheduler.streams[-1].put_nowait(scheduler.fleet([]))  # a restarted scheduler
    await models.first.until(lambda: not gateway.sessions.peers.fleet.addresses)
    assert gateway.adapters == {"terse": "/adapters/terse"}
    scheduler.adapters = held

    await models.http("POST", UNLOAD, {"lora_name": "terse"})
    await models.first.until(lambda: not models.front.gateways["large"].adapters)
    refused = await models.http("POST", COMPLETIONS, body)
    assert refused.status == 404
    assert "known: small, large" in refused.json["error"]["message"]
    assert (await models.http("POST", UNLOAD, {"lora_name": "terse"})).status == 404


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({"lora_name": "a"}, "lora_path", "field required"),
        ({"lora_name": "", "lora_path": "/a"}, "lora_name", "at least 1 character"),
        ({"lora_name": "a" * 257, "lora_path": "/a"}, "lora_name", "at most 256"),
        ({"lora_name": 7, "lora_path": "/a"}, "lora_name", "string"),
        ({"lora_name": "a", "lora_path": "/a", "lora_pth": 1}, "lora_pth", "not"),
        ({"lora_name": "small", "lora_path": "/a"}, "lora_name", "name of a served model"),
        ({"lora_name": "a ", "lora_path": "/a"}, "lora_name", "blanks"),
        ({"lora_name": "a", "lora_path": "/bad"}, "lora_path", "the folder /bad does not exist"),
    ],
)
async def test_wrong_adapter_is_refused_with_its_field(
    body: dict[str, Any], param: str, sentence: str, models: Models
) -> None:
    answer = await models.http("POST", LOAD, body)
    error = answer.json["error"]
    assert (answer.status, error["param"]) == (400, param)
    assert sentence in error["message"]


async def test_clients_load_no_adapters_by_default() -> None:
    async with run_models({"small": "11"}) as models:
        for path in (LOAD, UNLOAD):
            answer = await models.http("POST", path, {"lora_name": "a", "lora_path": "/a"})
            assert answer.status == 400
            assert "gateway.adapter_loading" in answer.json["error"]["message"]


async def ask_unknown(models: Models) -> tuple[int, str]:
    answer = await models.http("POST", COMPLETIONS, {"model": "terse", "prompt": "1,"})
    assert (await models.http("GET", "/v1/models/terse")).status == answer.status
    return answer.status, answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("answers", "known"),
    [({"large": "2"}, "large"), ({"small": "1", "large": "2"}, "small, large")],
)
async def test_unknown_name_is_503_until_each_model_has_had_a_worker(
    answers: Mapping[str, str], known: str
) -> None:
    async with run_models(answers, workerless=["large"]) as models:
        awaited = (
            f"model: 'terse' is not served here yet; known: {known}; "
            "adapters of large are known once a worker is attached; retry later"
        )
        assert await ask_unknown(models) == (503, awaited)
        gateway, scheduler = models.front.gateways["large"], models.fakes["large"].scheduler
        await models.first.until(lambda: bool(scheduler.streams))
        scheduler.streams[-1].put_nowait(scheduler.fleet([]))
        await models.first.until(lambda: gateway.sessions.peers.scheduler_connected)
        assert await ask_unknown(models) == (503, awaited)
        scheduler.streams[-1].put_nowait(scheduler.fleet(["127.0.0.1:1"]))
        unknown = 404, f"model: 'terse' is not served here; known: {known}"
        await models.first.until(lambda: gateway.knows_adapters)
        assert await ask_unknown(models) == unknown
        scheduler.streams[-1].put_nowait(scheduler.fleet([]))  # all workers leave
        await models.first.until(lambda: not gateway.sessions.peers.fleet.addresses)
        assert await ask_unknown(models) == unknown
        await models.fakes["large"].scheduler_server.stop(0)
        await models.first.until(lambda: not gateway.sessions.peers.scheduler_connected)
        assert await ask_unknown(models) == unknown


async def test_unknown_name_is_404_once_a_missing_worker_is_not_awaited() -> None:
    async with run_models(
        {"small": "1", "large": "2"}, workerless=["large"], adapters_wait_s=0
    ) as models:
        assert await ask_unknown(models) == (
            404, "model: 'terse' is not served here; known: small, large"
        )  # fmt: skip
