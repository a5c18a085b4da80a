"""What a server is, by its answers over HTTP, whatever these contain."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from foretoken.running.options import demo_model
from services.runtime.config import ConfigError
from services.worker.backend.capacity import Capacity
from services.worker.backend.client import BackendClient
from services.worker.backend.config import BackendConfig
from services.worker.backend.dialect import Dialect
from services.worker.backend.discovery import Backend, discover
from services.worker.folder import load_tokenizer
from tests.foretoken.bench.openai_fake import (
    ReceivedRequest,
    ScriptedAnswer,
    error_answer,
    event,
    fake_server,
    model_list,
)

DEMO = load_tokenizer(demo_model())
NO_PAGE = error_answer(404, "no such page")
COMPLETIONS = "/v1/completions"
TEXT = ScriptedAnswer([event(choices=[{"text": "3"}])])


async def found(pages: Mapping[str, ScriptedAnswer], models: ScriptedAnswer) -> Backend:
    def answer(request: ReceivedRequest) -> ScriptedAnswer:
        return pages.get(request.path, NO_PAGE)

    async with (
        fake_server(answer, models) as server,
        BackendClient(server.url, BackendConfig()) as client,
    ):
        return await discover(client, DEMO, "", "m")


def page(**content: Any) -> ScriptedAnswer:
    return ScriptedAnswer([json.dumps(content).encode()])


@pytest.mark.parametrize(
    ("pages", "models", "sentence"),
    [
        ({}, NO_PAGE, "is no OpenAI-compatible server: it lists no models at /v1/models"),
        ({}, ScriptedAnswer([b"<html>"]), "is no OpenAI-compatible server"),
        ({}, ScriptedAnswer([b"[" * 100_000]), "is no OpenAI-compatible server"),
        ({}, model_list("m"), "answers no request at /v1/completions"),
    ],
)
async def test_server_of_something_else_is_one_sentence(
    pages: Mapping[str, ScriptedAnswer], models: ScriptedAnswer, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        await found(pages, models)


@pytest.mark.parametrize("choices", [["x"], "x", 5, None, [], [{"text": "3"}]])
async def test_server_without_token_ids(choices: Any) -> None:
    pages = {COMPLETIONS: ScriptedAnswer([event(choices=choices)])}
    backend = await found(pages, model_list("m"))
    assert backend.dialect == Dialect(takes_ids=True, returns_ids=False)


async def test_tokenizer_of_another_form_is_another_tokenizer() -> None:
    pages = {COMPLETIONS: ScriptedAnswer([event(choices=[{"prompt_token_ids": 5}])])}
    with pytest.raises(ConfigError, match="has another tokenizer"):
        await found(pages, model_list("m"))


@pytest.mark.parametrize(("name", "names_ids"), [("token_id:5", True), ("3", False)])
async def test_tokens_of_logprobs_are_named_by_ids_where_the_server_does(
    name: str, names_ids: bool
) -> None:
    logprobs = {"tokens": [name], "token_logprobs": [-0.1], "top_logprobs": [{name: -0.1}]}
    choice = {"text": "3", "token_ids": [5], "logprobs": logprobs}
    pages = {COMPLETIONS: ScriptedAnswer([event(choices=[choice])])}
    backend = await found(pages, model_list("m"))
    assert backend.dialect == Dialect(True, True, names_ids)


async def test_sglang_tells_the_rest_of_its_capacity_on_a_page() -> None:
    """Its metrics and its models tell memory and context."""
    card = ScriptedAnswer([b'{"data": [{"id": "m", "max_model_len": 512}]}'])
    pages = {
        COMPLETIONS: TEXT,
        "/metrics": ScriptedAnswer([b"sglang:max_total_num_tokens 9000\n"]),
        "/get_server_info": page(max_total_num_tokens=8_000, max_running_requests=48),
    }
    backend = await found(pages, card)
    assert backend.capacity == Capacity(9_000, 0, 48, 512)
    assert backend.has_metrics
