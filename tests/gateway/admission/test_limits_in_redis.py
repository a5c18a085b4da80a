"""Limits of API keys that several gateways share in a real Redis: its outages, gateways that are
gone, and requests that are cancelled."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from gateway.admission.key_limits import Grant, KeyLimiter
from gateway.admission.reservations import open_reservations
from gateway.admission.shared_limits import SharedLimits
from gateway.config import GatewayConfig
from gateway.types.api_keys import name_keys
from gateway.types.errors import KeyLimitReached, RefusalReason
from gateway.types.key_limits import KeyLimits
from services.runtime.config import ConfigError
from services.runtime.tasks import background
from tests.gateway.gateway_fakes import Harness, Reply, run_harness, tokens_of
from tests.reach import until
from tests.redis_server import PASSWORD, RedisServer, running_redis, url

ANSWER_S = 10.0  # this machine may be busy
API_KEY = "sk-limited-0123456789"


@pytest.fixture(scope="module")
def server(redis_program: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with running_redis(redis_program, tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(autouse=True)
def emptied(server: RedisServer, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Begins with an empty Redis, and asserts that no log record has its password."""
    server.client.flushall()
    caplog.set_level(logging.INFO)
    yield
    assert PASSWORD not in caplog.text


@asynccontextmanager
async def sharing(
    server: RedisServer, limits: KeyLimits, wait_s: float = ANSWER_S
) -> AsyncIterator[SharedLimits]:
    """A gateway that shares the limits of ada."""
    shared = SharedLimits(KeyLimiter({"ada": limits}), url(server.port), "test", wait_s, 1)
    async with background(shared.run()):
        await until(lambda: shared.shared)
        yield shared


@asynccontextmanager
async def two_sharing(
    server: RedisServer, limits: KeyLimits
) -> AsyncIterator[tuple[SharedLimits, SharedLimits]]:
    async with sharing(server, limits) as one, sharing(server, limits) as other:
        await until(lambda: one._gateways == other._gateways == 2)
        yield one, other


async def attempt(shared: SharedLimits, *tokens: int) -> Grant | RefusalReason:
    try:
        grant = await shared.reserve("ada", tokens or (1,), 0.0)
    except KeyLimitReached as refusal:
        assert str(refusal).startswith("API key ada ")
        return refusal.reason
    assert grant is not None
    return grant


async def admitted(shared: SharedLimits, *tokens: int) -> Grant:
    """The grant of a request that is admitted sooner or later."""
    async with asyncio.timeout(10):
        while True:
            grant = await attempt(shared, *tokens)
            if isinstance(grant, Grant):
                return grant
            await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("limits", "tokens", "admits", "reason"),
    [
        (KeyLimits(requests_per_minute=3), 1, 3, RefusalReason.KEY_REQUESTS),
        (KeyLimits(tokens_per_minute=300), 100, 3, RefusalReason.KEY_TOKENS),
        (KeyLimits(concurrent_requests=3), 1, 3, RefusalReason.KEY_CONCURRENCY),
        (KeyLimits(queued_tokens=300), 100, 3, RefusalReason.KEY_QUEUE),
        (KeyLimits(queued_tokens=300), 900, 1, RefusalReason.KEY_QUEUE),
        (KeyLimits(sla_classes=("batch",)), 1, 10, None),
    ],
)
async def test_two_gateways_admit_what_one_may(
    server: RedisServer, limits: KeyLimits, tokens: int, admits: int, reason: RefusalReason | None
) -> None:
    async with two_sharing(server, limits) as both:
        results = await asyncio.gather(*(attempt(each, tokens) for each in both for _ in range(5)))
    refused = [result for result in results if not isinstance(result, Grant)]
    assert refused == [reason] * (10 - admits)


async def test_what_a_request_did_not_use_is_free_at_the_other_gateway(
    server: RedisServer,
) -> None:
    limits = KeyLimits(tokens_per_minute=300, concurrent_requests=2, queued_tokens=300)
    async with two_sharing(server, limits) as (one, other):
        grant = await admitted(one, 200, 100)
        assert await attempt(other, 300) is RefusalReason.KEY_QUEUE
        for choice in (0, 1):
            grant.start(choice, 0.0)
        await until(lambda: not server.client.hget(one._own, "queued:ada"))
        assert await attempt(other, 300) is RefusalReason.KEY_TOKENS
        grant.settle(50, 0.0)
        left = (await admitted(other, 100)).usage.headers(0.0)["x-ratelimit-remaining-tokens"]
        assert 150 <= int(left) <= 200  # 300 - 50 - 100, and what was refilled


async def test_a_forecast_changes_what_is_free_at_the_other_gateway(server: RedisServer) -> None:
    limits = KeyLimits(tokens_per_minute=300, queued_tokens=300)
    async with two_sharing(server, limits) as (one, other):
        grant = await admitted(one, 200, 100)
        assert await attempt(other, 100) is RefusalReason.KEY_QUEUE
        grant.expect(0, 20, 0.0)
        second = await admitted(other, 150)
        grant.expect(0, 200, 0.0)  # 150 more than there are
        await until(lambda: server.client.hget(one._own, "queued:ada") == b"300")
        second.start(0, 0.0)
        for choice in (0, 1):
            grant.start(choice, 0.0)
        await until(lambda: not server.client.hget(one._own, "queued:ada"))
        assert await attempt(other, 10) is RefusalReason.KEY_TOKENS
        grant.settle(20, 0.0)
        left = (await admitted(other, 10)).usage.headers(0.0)["x-ratelimit-remaining-tokens"]
        assert 120 <= int(left) < 290  # 300 - 20 - 150 - 10, and what was refilled


async def test_a_cancelled_request_returns_what_it_took(server: RedisServer) -> None:
    async with sharing(server, KeyLimits(concurrent_requests=1)) as shared:
        asking = asyncio.ensure_future(shared.reserve("ada", (1,), 0.0))
        await asyncio.sleep(0)
        asking.cancel()
        grant = await admitted(shared)
        assert await attempt(shared) is RefusalReason.KEY_CONCURRENCY
        grant.settle(0, 0.0)
        await admitted(shared)


@pytest.mark.slow
async def test_requests_of_a_gateway_that_is_gone_are_free(server: RedisServer) -> None:
    limits = KeyLimits(concurrent_requests=2)
    async with two_sharing(server, limits) as (one, other):
        await admitted(one)
        await admitted(one)
        assert await attempt(other) is RefusalReason.KEY_CONCURRENCY
        counts = one._own
        server.client.delete(counts)  # as if it had expired
        await admitted(other)
        # The gateway was only late: it is back under another name, with its requests.
        await until(lambda: one.shared and one._own != counts)
        assert await attempt(other) is RefusalReason.KEY_CONCURRENCY
    assert not server.client.keys("{test}:gateway*")  # a gateway that stops leaves none


@pytest.mark.slow
async def test_gateways_keep_to_their_parts_while_redis_is_away(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Of 4 requests at a time, each of two gateways has 2."""
    async with two_sharing(server, KeyLimits(concurrent_requests=4)) as (one, other):
        grants = [await admitted(one) for _ in range(3)]
        server.kill()
        await admitted(other)
        await admitted(other)
        assert await attempt(other) is RefusalReason.KEY_CONCURRENCY
        await until(lambda: not one.shared)
        assert await attempt(one) is RefusalReason.KEY_CONCURRENCY  # it runs 3
        server.start()
        await until(lambda: one.shared and other.shared)
        assert await attempt(other) is RefusalReason.KEY_CONCURRENCY  # 5 of 4 run
        for grant in grants[:2]:
            grant.settle(0, 0.0)
        await admitted(other)
        assert await attempt(one) is RefusalReason.KEY_CONCURRENCY
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 2  # one of each gateway
    assert "each gateway keeps to 1/2 of the limits of API keys until it is back" in caplog.text
    assert "the gateways share the limits of API keys again" in caplog.text


async def test_a_redis_that_hangs_delays_no_request_for_long(server: RedisServer) -> None:
    async with sharing(server, KeyLimits(concurrent_requests=1), wait_s=0.05) as shared:
        server.stop()
        try:
            grant = await admitted(shared)
            assert not shared.shared
            assert await attempt(shared) is RefusalReason.KEY_CONCURRENCY
        finally:
            server.resume()
        await until(lambda: shared.shared)
        assert await attempt(shared) is RefusalReason.KEY_CONCURRENCY
        grant.settle(0, 0.0)
        await admitted(shared)


async def complete(harness: Harness) -> Reply:
    headers = {"authorization": f"Bearer {API_KEY}"}
    return await harness.http("POST", "/v1/completions", {"prompt": "1,"}, headers)


def shares(harness: Harness) -> bool:
    return bool(harness.front._reservations.shared)


async def shown(harness: Harness) -> str:
    """The value of the metric."""
    lines = (await harness.http("GET", "/metrics")).text.splitlines()
    [line] = [each for each in lines if each.startswith("foretoken_key_limits_shared{")]
    return line.rpartition(" ")[2]


async def test_two_servers_answer_as_many_requests_as_the_key_may_send(
    server: RedisServer,
) -> None:
    name = name_keys([API_KEY])[0].name
    settings: dict[str, Any] = {
        "api_keys": (API_KEY,), "key_limits": {name: KeyLimits(requests_per_minute=3)},
        "limits_url": url(server.port), "limits_wait_s": ANSWER_S,
    }  # fmt: skip
    one = run_harness(lambda _: tokens_of("123"), **settings)
    other = run_harness(lambda _: tokens_of("123"), **settings)
    async with one as first, other as second:
        for harness in (first, second):
            await until(partial(shares, harness))
            assert await shown(harness) == "1.0"
        replies = [await complete(each) for each in (first, second) * 3]
        assert sorted(each.status for each in replies) == [200] * 3 + [429] * 3
        assert replies[2].headers["x-ratelimit-remaining-requests"] == "0"
        assert "has used its limit of 3 requests a minute" in replies[-1].json["error"]["message"]
        server.kill()
        try:
            assert (await complete(second)).status in (200, 429)
            await until(lambda: not shares(second))
            assert await shown(second) == "0.0"
        finally:
            server.start()


def test_unusable_url_is_a_sentence_without_it() -> None:
    config = GatewayConfig(limits_url=f"redis://:{PASSWORD}@:port")
    with pytest.raises(ConfigError, match=r"^gateway\.limits_url is not of the form") as caught:
        open_reservations(config, KeyLimiter({}))
    assert PASSWORD not in str(caught.value)
    assert PASSWORD not in repr(config)
