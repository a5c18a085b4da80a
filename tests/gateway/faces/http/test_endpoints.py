"""Status endpoints, /tokenize and /detokenize, /docs, and errors of paths and methods."""

import asyncio
import re
from collections.abc import AsyncIterator
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import pytest

from gateway.faces.http.unserved import find_similar
from tests.chromium import browsing
from tests.gateway.gateway_fakes import Harness, demo_text, run_harness, tokens_of
from tests.gateway.gateway_fixtures import STOP

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/")
DOCS = files("gateway.faces.docs").joinpath("static")
CHAT = [{"role": "user", "content": "sort the words"}]


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: tokens_of("123")) as running:
        yield running


async def test_status_endpoints_answer(harness: Harness) -> None:
    for path, content in (
        ("/version", {"version": version("foretoken")}),
        ("/ping", {"status": "ok", "models": {"demo": "ok"}}),
        ("/load", {"server_load": 0}), ("/health", {"status": "ok", "models": {"demo": "ok"}}),
    ):  # fmt: skip
        reply = await harness.http("GET", path)
        assert (reply.status, reply.json) == (200, content)
    assert (await harness.http("POST", "/ping", {})).status == 200
    harness.scheduler.streams[-1].put_nowait(harness.scheduler.fleet([]))
    await harness.until(lambda: not harness.gateway.ready)
    for method in ("GET", "POST"):
        assert (await harness.http(method, "/ping")).status == 503


async def test_load_counts_running_choices() -> None:
    async with run_harness() as harness:  # the worker sends no tokens
        request = {"prompt": "1,", "n": 2, "stream": True}
        pending = asyncio.ensure_future(harness.http("POST", "/v1/completions", request))
        await harness.until(lambda: len(harness.worker.prompts) == 2)
        assert (await harness.http("GET", "/load")).json == {"server_load": 2}
        for prompt in harness.worker.prompts:
            harness.worker.send(prompt.request_id, 0, [40], STOP)
        await pending
        assert (await harness.http("GET", "/load")).json == {"server_load": 0}


async def test_root_lists_the_endpoints(harness: Harness) -> None:
    content = (await harness.http("GET", "/")).json
    assert (content["name"], content["version"]) == ("foretoken", version("foretoken"))
    apis = ("/v1/responses", "/v1/responses/{response_id}", "/v1/messages")
    assert {*PATHS, *apis, "/health", "/metrics", "/version"} <= content["endpoints"].keys()
    assert all(content["endpoints"].values())
    for place in ("docs", "openapi", "ui"):
        assert (await harness.http("GET", content[place])).status == 200


@pytest.mark.parametrize(
    ("path", "similar"),
    [
        ("/chat/completions", ["/v1/chat/completions"]),
        ("/v1/v1/models", ["/v1/models"]),
        ("/v1/chat/completion", ["/v1/chat/completions"]),
        ("/v1/model", ["/v1/models"]),
        ("/v1/chat", ["/v1/chat/completions"]),
        ("/tokenise", ["/tokenize"]),
        ("/v1/responses", []),
        ("/v1/embedding", []),
        ("/models/", ["/v1/models"]),
        ("/zzz", []),
        ("//", []),
        ("/" + "x" * 100_000, []),
    ],
)
def test_similar_paths_are_suggested(path: str, similar: list[str]) -> None:
    assert list(find_similar(path, PATHS))[: len(similar)] == similar
    assert similar or not find_similar(path, PATHS)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("/v1/responses/resp_1/compact", "use /v1/responses and /v1/responses/{id}"),
        ("/pooling", "this server has no pooling models; use /v1/embeddings"),
        ("/v1/batches", "batches are off; start the server with --batch-folder FOLDER"),
        ("/generate", "use /v1/completions"),
        ("/api/tags", "use /v1/models"),
    ],
)
async def test_known_endpoint_of_another_server_names_a_replacement(
    harness: Harness, path: str, advice: str
) -> None:
    reply = await harness.http("POST", path, {})
    assert reply.status == 404
    assert reply.json["error"]["message"] == f"POST {path} is not served: {advice}"


async def test_websocket_is_refused_by_name(harness: Harness) -> None:
    offer = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    reply = await harness.http("GET", "/v1/realtime?model=demo", headers=offer)
    assert reply.status == 404
    assert "WebSockets and the Realtime API are not supported" in reply.json["error"]["message"]


async def test_unknown_path_is_404_and_wrong_method_is_405(harness: Harness) -> None:
    reply = await harness.http("POST", "/chat/completions", {})
    assert reply.status == 404
    assert reply.json["error"] == {
        "message": "POST /chat/completions is not served: did you mean /v1/chat/completions?",
        "type": "invalid_request_error", "param": None, "code": None,
    }  # fmt: skip
    assert (
        ": GET / lists the endpoints"
        in (await harness.http("GET", "/zzz")).json["error"]["message"]
    )
    assert len((await harness.http("GET", "/" + "x" * 9_000)).text) < 400
    for method, path, allowed in (
        ("GET", "/v1/completions", {"POST"}), ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/tokenize", {"POST"}), ("PATCH", "/health", {"GET", "HEAD"}),
    ):  # fmt: skip
        reply = await harness.http(method, path)
        assert (reply.status, {*reply.headers["allow"].split(", ")}) == (405, allowed)
        assert reply.json["error"]["type"] == "invalid_request_error"
        message = f"{path} does not allow {method}; use {reply.headers['allow']}"
        assert reply.json["error"]["message"] == message


async def test_tokenize_and_detokenize_are_inverse(harness: Harness) -> None:
    text = "sort the words: é 漢字"
    reply = await harness.http("POST", "/tokenize", {"model": "demo", "prompt": text})
    ids = demo_text().encode(text)
    assert reply.json == {
        "count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None,
    }  # fmt: skip
    spelled = {"prompt": "sort", "return_token_strs": True, "add_special_tokens": True}
    content = (await harness.http("POST", "/tokenize", spelled)).json
    assert content["token_strs"] == [demo_text().backend.id_to_token(i) for i in content["tokens"]]
    back = await harness.http("POST", "/detokenize", {"model": "demo", "tokens": ids})
    assert back.json == {"prompt": text}
    assert (await harness.http("POST", "/detokenize", {"tokens": []})).json == {"prompt": ""}


async def test_tokenize_renders_a_conversation_as_chat_does(harness: Harness) -> None:
    body: dict[str, Any] = {"messages": CHAT}
    plain = {"add_generation_prompt": True, "continue_final_message": False,
             "add_special_tokens": False, "chat_template_kwargs": {}}  # fmt: skip
    for fields in (body, {**body, **plain}):
        content = (await harness.http("POST", "/tokenize", fields)).json
        assert content["tokens"] == demo_text().encode_chat(CHAT)
    await harness.http("POST", "/v1/chat/completions", body)
    assert list(harness.worker.prompts[0].token_ids) == content["tokens"]


async def test_tokenize_accepts_more_than_the_context(harness: Harness) -> None:
    reply = await harness.http("POST", "/tokenize", {"prompt": "1," * 60_000})
    assert (reply.status, reply.json["count"]) == (200, 120_000)
    ids = reply.json["tokens"]
    back = await harness.http("POST", "/detokenize", {"tokens": ids})
    assert back.json == {"prompt": "1," * 60_000}


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "part"),
    [
        ("/tokenize", {}, 400, "prompt", "a prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, 400, "prompt", "not both"),
        ("/tokenize", {"prompt": 5}, 400, "prompt", "string"),
        ("/tokenize", {"prompt": ""}, 400, "prompt", "empty"),
        ("/tokenize", {"messages": []}, 400, "messages", "empty"),
        ("/tokenize", {"messages": "hi"}, 400, "messages", "list"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs", "bool"),
        ("/tokenize", {"prompt": "a", "model": "none"}, 404, "model", "not served"),
        ("/tokenize", b"{", 400, None, "not valid JSON"),
        ("/detokenize", {}, 400, "tokens", "required"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "greater"),
        ("/detokenize", {"tokens": [1.5]}, 400, "tokens", "integer"),
        ("/detokenize", {"tokens": [10**7]}, 400, "tokens", "outside the vocabulary"),
        ("/detokenize", {"tokens": [1], "model": "none"}, 404, "model", "not served"),
    ],
)
async def test_tokenize_and_detokenize_refuse_bad_input(
    harness: Harness, path: str, body: object, status: int, param: str | None, part: str
) -> None:
    reply = await harness.http("POST", path, body)
    assert (reply.status, reply.json["error"]["param"]) == (status, param), reply.text
    assert part in reply.json["error"]["message"]


async def test_docs_reference_no_other_server(harness: Harness) -> None:
    page = await harness.http("GET", "/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'self'; ")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for entry in DOCS.iterdir():
        text = entry.read_text()
        assert not re.search(r"https?://|\bsrc=.//|@import|eval\(|innerHTML", text), entry.name
        assert (await harness.http("GET", f"/docs/{entry.name}")).text == text
    assert (await harness.http("GET", "/docs/none.js")).status == 404


async def test_docs_show_each_endpoint_with_its_fields(
    harness: Harness, chromium_program: str
) -> None:
    async with browsing(chromium_program) as browser, browser.tab() as tab:
        for width, scheme in ((1280, "light"), (900, "dark"), (390, "light")):
            await tab.look(width, 900, scheme)
            await tab.open(f"{harness.http_url}/docs")
            await tab.until("document.querySelectorAll('main section').length > 8")
            assert await tab.value("document.documentElement.scrollWidth") == width
            cut = "filter((each) => each.scrollWidth > each.clientWidth)"
            tables = "[...document.querySelectorAll('.scroll')]"
            assert await tab.value(f"{tables}.{cut}.length") == 0
            await tab.shot(f"docs-{width}")
        shown = await tab.text("main")
        links = await tab.value("document.querySelectorAll('nav li a').length")
        sections = await tab.value("document.querySelectorAll('main section').length")
    assert links == sections
    for part in (
        "POST /v1/chat/completions", "temperature", "stream_options", "GET /health",
        f"curl '{harness.http_url}/v1/completions'", "-d '{\"tokens\":[1,2,3]}'",
        "0 to 2; 0 is greedy",
    ):  # fmt: skip
        assert part in shown, part
