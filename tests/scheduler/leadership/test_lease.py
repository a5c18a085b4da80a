"""The lease in a real Redis, and candidates that keep it: expiry, release, outages, lost data."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from services.runtime.config import ConfigError, load
from services.runtime.errors import UnrecoverableError
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership.keeper import (
    SOLE,
    LeaseKeeper,
    LeaseUnavailable,
    open_leadership,
)
from services.scheduler.leadership.redis_lease import RedisLease
from tests.reach import until
from tests.redis_server import PASSWORD, RedisServer, running_redis, url

pytestmark = pytest.mark.slow

LEASE_S = 0.5
KEPT_S = 1.0  # of the candidates' lease; a busy machine does not stop a process for so long
LIMIT_S = 5.0  # of a call
NAME = "test"


@pytest.fixture
def server(redis_program: str, tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(redis_program, tmp_path) as server:
        yield server


@asynccontextmanager
async def leases(server: RedisServer, *tokens: str) -> AsyncIterator[list[RedisLease]]:
    opened = [RedisLease(url(server.port), NAME, token, LEASE_S) for token in tokens]
    try:
        yield opened
    finally:
        for each in opened:
            await each.close()


async def taken(lease: RedisLease, token: str) -> None:
    """Claims as a standby until the lease is the token's."""
    async with asyncio.timeout(30):
        while await lease.claim(False, LIMIT_S) != token:  # noqa: ASYNC110 - Redis has no event
            await asyncio.sleep(0.05)


async def test_one_of_two_candidates_gets_the_lease(server):
    async with leases(server, "a", "b") as (a, b):
        await taken(a, "a")
        assert await b.claim(False, LIMIT_S) == "a"
        assert await a.claim(True, LIMIT_S) == "a"
        assert 0 < server.client.pttl(f"{{{NAME}}}:lease") <= LEASE_S * 1000


async def test_lease_is_free_after_its_time(server):
    async with leases(server, "a", "b") as (a, b):
        await taken(a, "a")
        await taken(b, "b")
        assert await a.claim(True, LIMIT_S) == "b"


async def test_lease_is_released_by_its_holder_only(server):
    async with leases(server, "a", "b") as (a, b):
        await taken(a, "a")
        server.client.persist(f"{{{NAME}}}:lease")
        await b.release(LIMIT_S)
        assert await b.claim(False, LIMIT_S) == "a"
        await a.release(LIMIT_S)
        assert await b.claim(False, LIMIT_S) == "b"


async def test_redis_that_lost_its_data_gives_the_lease_to_the_leader_only(server):
    async with leases(server, "a", "b") as (a, b):
        await taken(a, "a")
        server.client.flushall()
        assert await b.claim(False, LIMIT_S) == ""
        assert await a.claim(True, LIMIT_S) == "a"
        assert await b.claim(False, LIMIT_S) == "a"


async def test_redis_that_restarts_gives_the_lease_to_the_leader_only(server):
    """Its data may be older than the last renewal."""
    async with leases(server, "a", "b") as (a, b):
        await taken(a, "a")
        server.kill()
        await asyncio.sleep(LEASE_S + 0.1)  # the lease that it remembers has expired
        server.start()
        assert await b.claim(False, LIMIT_S) == ""
        assert await a.claim(True, LIMIT_S) == "a"
        await taken(b, "b")


async def test_lease_of_another_name_is_separate(server):
    async with leases(server, "a") as (a,):
        await taken(a, "a")
        other = RedisLease(url(server.port), "other", "b", LEASE_S)
        assert await other.claim(True, LIMIT_S) == "b"
        await other.close()


async def test_absent_redis_is_a_sentence_without_the_password(server):
    async with leases(server, "a") as (a,):
        server.kill()
        with pytest.raises(LeaseUnavailable, match=rf"the lease {NAME} on redis://127\.0\.0\.1:"):
            await a.claim(False, LIMIT_S)
        with pytest.raises(LeaseUnavailable) as caught:
            await a.release(LIMIT_S)
        assert PASSWORD not in str(caught.value)


# --- settings


def test_scheduler_without_a_lease_leads_alone():
    assert open_leadership(load(SchedulerConfig)) is SOLE
    assert SOLE.leads


def test_unusable_lease_url_is_a_sentence_without_the_url():
    config = load(SchedulerConfig, {"lease_url": f"redis://:{PASSWORD}@:port"})
    with pytest.raises(ValueError, match=r"^scheduler\.lease_url is not of the form") as caught:
        open_leadership(config)
    assert PASSWORD not in str(caught.value)
    with pytest.raises(ConfigError, match=r"scheduler\.lease_s"):
        load(SchedulerConfig, {"lease_s": "0"})


# --- candidates


class Candidate:
    """A running keeper, and the error that ended it."""

    def __init__(self, port: int, address: str):
        chosen = {"address": address, "lease_url": url(port), "lease_s": str(KEPT_S)}
        keeper = open_leadership(load(SchedulerConfig, chosen))
        assert isinstance(keeper, LeaseKeeper)
        self.keeper = keeper
        self.error: UnrecoverableError | None = None
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        try:
            await self.keeper.run()
        except UnrecoverableError as error:
            self.error = error


@asynccontextmanager
async def candidates(server: RedisServer, *addresses: str) -> AsyncIterator[list[Candidate]]:
    async with AsyncExitStack() as stack:
        running = [Candidate(server.port, address) for address in addresses]
        for each in running:
            stack.callback(each.task.cancel)
        yield running
    await asyncio.gather(*(each.task for each in running), return_exceptions=True)


async def leader_of(running: list[Candidate]) -> tuple[Candidate, Candidate]:
    """The leader and the standby, once there is a leader."""
    await until(lambda: any(each.keeper.leads for each in running), 30)
    leader, standby = sorted(running, key=lambda each: not each.keeper.leads)
    assert not standby.keeper.leads
    return leader, standby


async def test_standby_knows_the_leader_and_follows_its_release(server):
    async with candidates(server, "host:1", "host:2") as running:
        leader, standby = await leader_of(running)
        await leader.keeper.wait()
        await until(lambda: standby.keeper.leader == leader.keeper.leader, 30)
        await leader.keeper.release()
        assert not leader.keeper.leads
        await standby.keeper.wait()
        assert standby.keeper.leads
        await leader.task
        assert leader.error is None
        assert standby.keeper.changes == 2


async def test_leader_that_ends_without_release_is_replaced(server):
    async with candidates(server, "host:1", "host:2") as running:
        leader, standby = await leader_of(running)
        leader.task.cancel()
        with suppress(asyncio.CancelledError):
            await leader.task
        await standby.keeper.wait()
        assert standby.keeper.leads
        assert not leader.keeper.leads


async def test_leader_without_redis_is_deposed_and_the_standby_waits(server, caplog):
    async with candidates(server, "host:1", "host:2") as running:
        leader, standby = await leader_of(running)
        server.kill()
        await leader.task
        assert str(leader.error) == (
            f"this scheduler leads no more: the lease was not renewed within {KEPT_S:g} s; "
            "restart it as a standby"
        )
        assert not standby.task.done()
        assert not standby.keeper.leads
        server.start()
        await standby.keeper.wait()
        assert standby.keeper.leads
    assert "waiting as a standby" in caplog.text


async def test_leader_keeps_the_lease_through_a_loss_of_data(server):
    async with candidates(server, "host:1", "host:2") as running:
        leader, standby = await leader_of(running)
        for _ in range(3):
            server.client.flushall()
            await asyncio.sleep(KEPT_S)
            assert leader.keeper.leads
            assert not standby.keeper.leads


async def test_deposed_leader_names_its_successor(server):
    async with candidates(server, "host:1") as [leader]:
        await leader.keeper.wait()
        server.client.set("{foretoken:scheduler}:lease", "host:9 token")
        await leader.task
        assert "the one at host:9 holds the lease" in str(leader.error)
