"""Request ids, API keys, HEAD, CORS, and the answer to cancelled requests."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.config import GatewayConfig
from gateway.faces.grpc.service import mount
from gateway.faces.http.middleware import RequestGuard
from gateway.faces.http.serve import serving_http
from gateway.types.api_keys import name_keys
from protos.generated import (
    gateway_pb2,
    gateway_pb2_grpc,
    scheduler_pb2,
    telemetry_pb2,
    telemetry_pb2_grpc,
)
from services.runtime.config import ConfigError, load
from services.runtime.network.channel import connect
from services.runtime.server import listening
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of
from tests.observability.tracing.otlp import WrittenSpans

KEY, OTHER = "sk-correct-horse-battery", "sk-staple"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
BODY = {"prompt": "1,", "max_tokens": 3}
MADE = re.compile(r"[0-9a-f]{32}")


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: tokens_of("123")) as running:
        yield running


@pytest.fixture
async def locked() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: tokens_of("123"), api_keys=(KEY, OTHER)) as running:
        yield running


async def test_request_id_is_echoed_if_valid_else_generated(harness: Harness) -> None:
    for path, body, status in (
        ("/v1/completions", BODY, 200), ("/v1/completions", {**BODY, "stream": True}, 200),
        ("/v1/completions", {}, 400), ("/v1/none", None, 404), ("/v1/completions", None, 405),
        ("/health", None, 200),
    ):  # fmt: skip
        method = "POST" if body is not None else "GET"
        for given, echoed in (
            ("my-id/1", True), ("x" * 128, True), ("x" * 129, False), ("two words", False),
            ("é", False), ("", False),
        ):  # fmt: skip
            reply = await harness.http(method, path, body, {"x-request-id": given})
            content = reply.headers["x-request-id"]
            assert reply.status == status
            assert content == given if echoed else MADE.fullmatch(content)
    ids = {(await harness.http("GET", "/health")).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


async def test_log_lines_and_span_carry_request_id_and_key_name(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from observability import logs

    content: list[tuple[str, ...]] = []
    spans = WrittenSpans()
    async with run_harness(lambda _: tokens_of("1"), spans=spans, api_keys=(KEY,)) as harness:
        parse = harness.gateway.intake._parser.parse

        def parsing(*given: Any) -> Any:
            content.append(logs._context.get())
            return parse(*given)

        monkeypatch.setattr(harness.gateway.intake._parser, "parse", parsing)
        headers = {**WITH_KEY, "x-request-id": "mine"}
        assert (await harness.http("POST", "/v1/completions", BODY, headers)).status == 200
        request = harness.scheduler.requests[0]
    ((_, _, known, name),) = content
    assert (known, name) == ("mine", request.tenant)
    assert name.startswith("key-")
    assert spans.all[0].attributes["foretoken.client.request_id"] == "mine"
    assert spans.all[0].attributes["foretoken.client.key"] == name


@pytest.mark.parametrize(
    ("fields", "tenant"),
    [({}, "key-"), ({"user": "ann"}, "ann"), ({"cache_salt": "salt"}, "salt")],
)
async def test_key_name_is_the_tenant_of_requests_without_user(
    locked: Harness, fields: dict[str, str], tenant: str
) -> None:
    reply = await locked.http("POST", "/v1/completions", {**BODY, **fields}, WITH_KEY)
    assert reply.status == 200
    assert locked.scheduler.requests[0].tenant.startswith(tenant)


async def test_prefix_salt_is_that_of_the_key_unless_the_key_shares() -> None:
    async def salts(**config: Any) -> list[str]:
        async with run_harness(
            lambda _: tokens_of("123"), api_keys=(KEY, OTHER), **config
        ) as harness:
            for key in (KEY, OTHER, KEY):
                bearer = {"authorization": f"Bearer {key}"}
                for salt in ("", "mine"):
                    body = {**BODY, "cache_salt": salt}
                    reply = await harness.http("POST", "/v1/completions", body, bearer)
                    assert reply.status == 200
            return [prompt.cache_salt for prompt in harness.worker.prompts]

    own, own_named, other, other_named, *again = await salts()
    assert len({own, own_named, other, other_named, "", "mine"}) == 6
    assert again == [own, own_named]
    assert await salts(shared_prefixes=("*",)) == ["", "mine"] * 3
    names = [name.name for name in name_keys((KEY, OTHER))]
    assert await salts(shared_prefixes=names[:1]) == ["", "mine", other, other_named, "", "mine"]


async def test_missing_key_is_401_before_the_body_is_read(locked: Harness) -> None:
    for method, path in (
        ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("GET", "/v1/models"),
        ("GET", "/v1/models/demo"), ("POST", "/tokenize"), ("POST", "/detokenize"),
        ("GET", "/ui/board"), ("GET", "/ui/about"), ("GET", "/ui/why/x"), ("GET", "/nowhere"),
        ("GET", "//v1/models"), ("GET", "/v1/../health/"), ("HEAD", "/v1/models"),
    ):  # fmt: skip
        body = b"no JSON" if method == "POST" else None
        reply = await locked.http(method, path, body)
        assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer"), path
        assert MADE.fullmatch(reply.headers["x-request-id"])
        if method != "HEAD":
            error = reply.json["error"]
            assert error.pop("message").startswith("You didn't provide an API key.")
            assert error == {"type": "invalid_request_error", "param": None, "code": None}


async def test_wrong_key_has_openai_s_error(
    locked: Harness, caplog: pytest.LogCaptureFixture
) -> None:
    for header in (f"Bearer {KEY}x", "bearer sk-0123456789-none", f"Bearer {KEY[:-1]}"):
        reply = await locked.http("GET", "/v1/models", headers={"authorization": header})
        assert reply.status == 401
        error = reply.json["error"]
        assert re.match(r"Incorrect API key provided: \*{4}\S{4}\. ", error.pop("message"))
        assert error == {
            "type": "invalid_request_error", "param": None, "code": "invalid_api_key",
        }  # fmt: skip
        assert header[7:-4] not in reply.text
    warned = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert [each.getMessage() for each in warned] == ["127.0.0.1 sent a wrong API key"] * 3


async def test_every_configured_key_is_accepted(locked: Harness) -> None:
    for key in (KEY, OTHER):
        headers = {"authorization": f"Bearer {key}"}
        for path in ("/v1/models", "/ui/board", "/ui/about"):
            assert (await locked.http("GET", path, headers=headers)).status == 200
        assert (await locked.http("POST", "/v1/completions", BODY, headers)).status == 200


OPEN = ("/health", "/ping", "/version", "/", "/docs", "/openapi.json", "/ui/", "/ui/page.js")


async def test_open_paths_need_no_key(locked: Harness) -> None:
    for path in (*OPEN, "/docs/docs.js", "/metrics", "/load"):
        assert (await locked.http("GET", path)).status == 200, path
    async with run_harness(
        lambda _: tokens_of("1"), api_keys=(KEY,), metrics_open=False
    ) as harness:
        for path in ("/metrics", "/load"):
            assert (await harness.http("GET", path)).status == 401
            assert (await harness.http("GET", path, headers=WITH_KEY)).status == 200
        for path in OPEN:
            assert (await harness.http("GET", path)).status == 200, path


async def test_key_file_is_reloaded(tmp_path: Path) -> None:
    from gateway.types.api_keys import hash_key

    path = tmp_path / "keys"
    path.write_text(f"ann:{hash_key(KEY)}\n")
    async with run_harness(lambda _: tokens_of("1"), api_key_file=str(path)) as harness:
        assert (await harness.http("POST", "/v1/completions", BODY, WITH_KEY)).status == 200
        assert harness.scheduler.requests[0].tenant == "ann"
        path.write_text(f"bob:{hash_key(OTHER)} # the only key\n")
        harness.front.keyring._checked_s -= 2
        assert (await harness.http("POST", "/v1/completions", BODY, WITH_KEY)).status == 401


def metadata(*key: str) -> tuple[tuple[str, str], ...]:
    return tuple(("authorization", f"Bearer {each}") for each in key)


async def test_grpc_requires_the_key_in_metadata(locked: Harness) -> None:
    channel = connect(locked.grpc_address)
    gateway, request = gateway_pb2_grpc.GatewayStub(channel), gateway_pb2.GenerateRequest()
    request.prompt = "1,"
    models, why = gateway_pb2.ListModelsRequest(), scheduler_pb2.WhyRequest(request_id="x")
    scrape = telemetry_pb2_grpc.TelemetryStub(channel).Scrape
    wrong = metadata("sk-0123456789-none")
    for given in ((), wrong):
        for call in (
            gateway.ListModels(models, metadata=given),
            gateway.Why(why, metadata=given),
            scrape(telemetry_pb2.ScrapeRequest(), metadata=given),
        ):
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert "0123" not in (caught.value.details() or "")
            assert MADE.fullmatch(dict(caught.value.initial_metadata())["x-request-id"])
        with pytest.raises(aio.AioRpcError) as caught:
            async for _ in gateway.Generate(request, metadata=given):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not locked.scheduler.requests
    good = metadata(KEY)
    assert (await gateway.ListModels(models, metadata=good)).models[0].name == "demo"
    await scrape(telemetry_pb2.ScrapeRequest(), metadata=good)
    assert [each async for each in gateway.Generate(request, metadata=good)]
    assert locked.scheduler.requests[0].tenant.startswith("key-")
    health: Any = health_pb2_grpc.HealthStub(channel)
    assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
    await channel.close()


async def test_metrics_over_a_unix_socket_need_no_key(locked: Harness, tmp_path: Path) -> None:
    address = f"unix:{tmp_path / 'g.sock'}"
    async with listening([mount(locked.front)], address, parts=locked.front.parts):
        channel = connect(address)
        stub = telemetry_pb2_grpc.TelemetryStub(channel)
        assert "foretoken_" in (await stub.Scrape(telemetry_pb2.ScrapeRequest())).text
        with pytest.raises(aio.AioRpcError):
            await gateway_pb2_grpc.GatewayStub(channel).ListModels(gateway_pb2.ListModelsRequest())
        await channel.close()


async def test_grpc_sends_the_request_id_as_initial_metadata(harness: Harness) -> None:
    channel = connect(harness.grpc_address)
    stub = gateway_pb2_grpc.GatewayStub(channel)
    for prompt in ("1,", ""):  # the second one is an error
        request = gateway_pb2.GenerateRequest(prompt=prompt)
        for given, echoed in (("my-id", True), ("a b", False)):
            call = stub.Generate(request, metadata=(("x-request-id", given),))
            content = str(dict(await call.initial_metadata())["x-request-id"])
            assert content == given if echoed else MADE.fullmatch(content)
            call.cancel()
    listing = stub.ListModels(gateway_pb2.ListModelsRequest())
    assert MADE.fullmatch(str(dict(await listing.initial_metadata())["x-request-id"]))
    await listing
    await channel.close()


async def test_head_equals_get_without_a_body(harness: Harness) -> None:
    for path in ("/health", "/ping", "/version", "/v1/models", "/load", "/", "/docs", "/ui/",
                 "/openapi.json", "/nowhere", "/v1/models/none"):  # fmt: skip
        get, head = await harness.http("GET", path), await harness.http("HEAD", path)
        assert (head.status, head.text) == (get.status, ""), path
        assert head.headers["content-type"] == get.headers["content-type"]
        assert head.headers["content-length"] == get.headers["content-length"] != "0"
    assert (await harness.http("HEAD", "/metrics")).status == 200
    assert (await harness.http("HEAD", "/v1/completions")).status == 405


ORIGIN = {"origin": "https://page.example"}
PREFLIGHT = {
    **ORIGIN,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-foretoken-sla",
}


async def test_cors_is_disabled_by_default(harness: Harness) -> None:
    reply = await harness.http("GET", "/health", headers=ORIGIN)
    assert not [name for name in reply.headers if name.startswith("access-control")]
    reply = await harness.http("OPTIONS", "/v1/completions", headers=PREFLIGHT)
    assert (reply.status, reply.json["error"]["type"]) == (405, "invalid_request_error")


async def test_cors_allows_named_origins_with_credentials() -> None:
    origins = ("https://page.example", "http://127.0.0.1:3000")
    async with run_harness(
        lambda _: tokens_of("1"), cors_origins=origins, api_keys=(KEY,)
    ) as harness:
        allowed = await harness.http("OPTIONS", "/v1/completions", headers=PREFLIGHT)
        assert allowed.status == 200
        headers = allowed.headers
        assert headers["access-control-allow-origin"] == "https://page.example"
        assert headers["access-control-allow-credentials"] == "true"
        assert "x-foretoken-sla" in headers["access-control-allow-headers"]
        assert "POST" in headers["access-control-allow-methods"]
        refused = await harness.http(
            "GET", "/v1/models", headers=ORIGIN
        )  # the page can read the error
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == "https://page.example"
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
        other = {**PREFLIGHT, "origin": "https://other.example"}
        reply = await harness.http("OPTIONS", "/v1/completions", headers=other)
        assert (reply.status, reply.json["error"]["param"]) == (400, None)
        assert "access-control-allow-origin" not in reply.headers


async def test_cors_wildcard_has_no_credentials() -> None:
    async with run_harness(lambda _: tokens_of("1"), cors_origins="*") as harness:
        reply = await harness.http("POST", "/v1/completions", BODY, ORIGIN)
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "*")
        assert "access-control-allow-credentials" not in reply.headers


@pytest.mark.parametrize(
    "origin", ["page.example", "https://page.example/", "https://", "", "null"]
)
def test_invalid_cors_origin_is_a_config_error(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"gateway\.cors_origins: .* is not an origin"):
        load(GatewayConfig, {"cors_origins": f"https://page.example,{origin}"})


async def answered(port: int) -> bytes:
    """The complete answer to an endless request, after its server has ended."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\n\r\n")
    try:
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize("streams", [False, True])
async def test_cancelled_request_gets_an_answer(streams: bool) -> None:
    begun = asyncio.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if streams:
            headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        begun.set()
        await asyncio.Event().wait()

    async with serving_http(RequestGuard(endless), "127.0.0.1", 0) as port:
        answer = asyncio.ensure_future(answered(port))
        await begun.wait()
    content = (await answer).decode()
    assert "500" not in content.split("\r\n")[0] and "Internal Server Error" not in content
    assert "x-request-id: mine" in content
    assert '"code": "unavailable"' in content.replace('"code":"', '"code": "')
    if streams:
        assert (
            content.startswith("HTTP/1.1 200") and "data: 1\n\n" in content and "data: {" in content
        )
    else:
        assert content.startswith("HTTP/1.1 503") and "retry-after: 1" in content
