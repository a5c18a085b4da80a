"""What the server says of itself, tokens both ways, and errors of paths and methods."""

import asyncio
import re
from collections.abc import AsyncIterator
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import pytest

from gateway.faces.http.unserved import find_similar
from tests.chromium import browsing
from tests.gateway.gateway_fakes import House, demo_text, housing, tokens_of
from tests.gateway.gateway_fixtures import STOP

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/detokenize", "/")
DOCS = files("gateway.faces.http.docs").joinpath("static")
CHAT = [{"role": "user", "content": "sort the words"}]


@pytest.fixture
async def house() -> AsyncIterator[House]:
    async with housing(lambda _: tokens_of("123")) as made:
        yield made


async def test_small_answers(house: House) -> None:
    for path, told in (
        ("/version", {"version": version("foretoken")}), ("/ping", {"status": "ok"}),
        ("/load", {"server_load": 0}), ("/health", {"status": "ok"}),
    ):  # fmt: skip
        reply = await house.http("GET", path)
        assert (reply.status, reply.json) == (200, told)
    assert (await house.http("POST", "/ping", {})).status == 200
    house.scheduler.streams[-1].put_nowait(house.scheduler.fleet([]))
    await house.until(lambda: not house.gateway.ready)
    for method in ("GET", "POST"):
        assert (await house.http(method, "/ping")).status == 503


async def test_load_counts_choices_that_are_being_answered() -> None:
    async with housing() as house:  # its worker is silent
        request = {"prompt": "1,", "n": 2, "stream": True}
        asking = asyncio.ensure_future(house.http("POST", "/v1/completions", request))
        await house.until(lambda: len(house.worker.prompts) == 2)
        assert (await house.http("GET", "/load")).json == {"server_load": 2}
        for prompt in house.worker.prompts:
            house.worker.send(prompt.request_id, 0, [40], STOP)
        await asking
        assert (await house.http("GET", "/load")).json == {"server_load": 0}


async def test_the_root_says_where_to_look(house: House) -> None:
    told = (await house.http("GET", "/")).json
    assert (told["name"], told["version"]) == ("foretoken", version("foretoken"))
    assert {*PATHS, "/health", "/metrics", "/version"} <= told["endpoints"].keys()
    assert all(told["endpoints"].values())
    for place in ("docs", "openapi", "ui"):
        assert (await house.http("GET", told[place])).status == 200


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", ["/v1/chat/completions"]),
        ("/v1/v1/models", ["/v1/models"]),
        ("/v1/chat/completion", ["/v1/chat/completions"]),
        ("/v1/model", ["/v1/models"]),
        ("/tokenise", ["/tokenize"]),
        ("/v1/responses", []),
        ("/v1/embedding", []),
        ("/models/", ["/v1/models"]),
        ("/zzz", []),
        ("//", []),
        ("/" + "x" * 100_000, []),
    ],
)
def test_paths_that_may_have_been_meant(path: str, meant: list[str]) -> None:
    assert list(find_similar(path, PATHS))[: len(meant)] == meant
    assert meant or not find_similar(path, PATHS)


async def test_a_path_that_is_none_and_a_method_that_is_not_for_it(house: House) -> None:
    reply = await house.http("POST", "/chat/completions", {})
    assert reply.status == 404
    assert reply.json["error"] == {
        "message": "POST /chat/completions is not served: did you mean /v1/chat/completions?",
        "type": "invalid_request_error", "param": None, "code": None,
    }  # fmt: skip
    assert (
        ": GET / lists the endpoints" in (await house.http("GET", "/zzz")).json["error"]["message"]
    )
    assert len((await house.http("GET", "/" + "x" * 9_000)).text) < 400
    for method, path, allowed in (
        ("GET", "/v1/completions", {"POST"}), ("DELETE", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/tokenize", {"POST"}), ("PATCH", "/health", {"GET", "HEAD"}),
    ):  # fmt: skip
        reply = await house.http(method, path)
        assert (reply.status, {*reply.headers["allow"].split(", ")}) == (405, allowed)
        assert reply.json["error"]["type"] == "invalid_request_error"


async def test_a_prompt_and_back(house: House) -> None:
    text = "sort the words: é 漢字"
    reply = await house.http("POST", "/tokenize", {"model": "demo", "prompt": text})
    ids = demo_text().encode(text)
    assert reply.json == {
        "count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None,
    }  # fmt: skip
    spelled = {"prompt": "sort", "return_token_strs": True, "add_special_tokens": True}
    told = (await house.http("POST", "/tokenize", spelled)).json
    assert told["token_strs"] == [demo_text().backend.id_to_token(i) for i in told["tokens"]]
    back = await house.http("POST", "/detokenize", {"model": "demo", "tokens": ids})
    assert back.json == {"prompt": text}
    assert (await house.http("POST", "/detokenize", {"tokens": []})).json == {"prompt": ""}


async def test_a_conversation_as_it_is_answered(house: House) -> None:
    body: dict[str, Any] = {"messages": CHAT}
    plain = {"add_generation_prompt": True, "continue_final_message": False,
             "add_special_tokens": False, "chat_template_kwargs": {}}  # fmt: skip
    for asked in (body, {**body, **plain}):
        told = (await house.http("POST", "/tokenize", asked)).json
        assert told["tokens"] == demo_text().encode_chat(CHAT)
    await house.http("POST", "/v1/chat/completions", body)
    assert list(house.worker.prompts[0].token_ids) == told["tokens"]


async def test_more_than_fits_is_counted_too(house: House) -> None:
    reply = await house.http("POST", "/tokenize", {"prompt": "1," * 60_000})
    assert (reply.status, reply.json["count"]) == (200, 120_000)
    ids = reply.json["tokens"]
    back = await house.http("POST", "/detokenize", {"tokens": ids})
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
async def test_what_is_no_text_or_tokens(
    house: House, path: str, body: object, status: int, param: str | None, part: str
) -> None:
    reply = await house.http("POST", path, body)
    assert (reply.status, reply.json["error"]["param"]) == (status, param), reply.text
    assert part in reply.json["error"]["message"]


async def test_the_docs_need_nobody_else(house: House) -> None:
    page = await house.http("GET", "/docs")
    assert page.headers["content-security-policy"].startswith("default-src 'self'; ")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    for entry in DOCS.iterdir():
        text = entry.read_text()
        assert not re.search(r"https?://|\bsrc=.//|@import|eval\(|innerHTML", text), entry.name
        assert (await house.http("GET", f"/docs/{entry.name}")).text == text
    assert (await house.http("GET", "/docs/none.js")).status == 404


async def test_the_docs_show_each_endpoint_with_its_fields(
    house: House, chromium_program: str
) -> None:
    async with browsing(chromium_program) as browser, browser.tab() as tab:
        for scheme in ("light", "dark"):
            await tab.look(900, 900, scheme)
            await tab.open(f"{house.http_url}/docs")
            await tab.until("document.querySelectorAll('main section').length > 8")
        shown = await tab.text("main")
        links = await tab.value("document.querySelectorAll('nav li a').length")
        sections = await tab.value("document.querySelectorAll('main section').length")
    assert links == sections
    for part in (
        "POST /v1/chat/completions", "temperature", "stream_options", "GET /health",
        f"curl '{house.http_url}/v1/completions'", "-d '{\"tokens\":[1,2,3]}'",
    ):  # fmt: skip
        assert part in shown, part
