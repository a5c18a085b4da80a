"""A scheduler that leads is killed, drained or stopped under load: the standby replaces it, and
every answer is complete and right."""

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from foretoken import AsyncClient
from tests.redis_server import PASSWORD, running_redis
from tests.system.faults.killed_processes import answer
from tests.system.faults.standby_processes import (
    BACK_S,
    SchedulerProcess,
    StandbySystem,
    eventually,
)

PROMPTS = [f"Tell me about the number {number}." for number in range(24)]
TOKENS = 800  # at least 4 s


@pytest.fixture
def system(redis_program: str, tmp_path: Path) -> Iterator[StandbySystem]:
    with running_redis(redis_program, tmp_path) as redis:
        system = StandbySystem(redis, tmp_path)
        try:
            yield system
        finally:
            system.stop()
    output = system.output.read_text()
    assert "Traceback" not in output
    assert PASSWORD not in output


async def answers(client: AsyncClient) -> list[list[int]]:
    return await asyncio.gather(*(answer(client, prompt, TOKENS) for prompt in PROMPTS))


async def replaced(
    system: StandbySystem, expected: list[list[int]], end: Callable[[SchedulerProcess], None]
) -> SchedulerProcess:
    """Ends the leader by `end` while requests run, and checks the answers. Returns the former
    leader once the other leads both workers, and prints how long that took."""
    leader, standby = await system.leader_and_standby()
    async with AsyncClient(system.grpc) as client:
        running = asyncio.ensure_future(answers(client))
        await asyncio.sleep(0.5)
        end(leader)
        leads_s = await eventually(lambda: standby.leads)
        more_s = await eventually(lambda: standby.leads_both_workers)
        print(f"the standby leads after {leads_s:.2f} s, and both workers {more_s:.2f} s later")
        assert await running == expected
    assert await asyncio.to_thread(standby.value, "scheduler_leads") == 1
    return leader


async def expected_answers(system: StandbySystem) -> list[list[int]]:
    await system.wait_for_gateway()
    await system.leader_and_standby()
    async with AsyncClient(system.grpc) as client:
        return await answers(client)


@pytest.mark.slow
async def test_killed_leader_is_replaced_and_no_request_is_lost(system: StandbySystem):
    expected = await expected_answers(system)
    assert [len(tokens) for tokens in expected] == [TOKENS] * len(PROMPTS)
    former = await replaced(system, expected, lambda leader: leader.process.kill())
    former.start()  # as a standby, which then replaces its successor
    assert not former.leads
    await replaced(system, expected, lambda leader: leader.process.kill())
    assert former.leads


@pytest.mark.slow
async def test_drained_leader_hands_over(system: StandbySystem):
    expected = await expected_answers(system)
    former = await replaced(
        system, expected, lambda leader: leader.process.send_signal(signal.SIGTERM)
    )
    assert await asyncio.to_thread(former.process.wait, BACK_S) == 0


@pytest.mark.slow
async def test_stopped_leader_is_replaced_and_exits_when_it_continues(system: StandbySystem):
    expected = await expected_answers(system)
    former = await replaced(
        system, expected, lambda leader: leader.process.send_signal(signal.SIGSTOP)
    )
    former.process.send_signal(signal.SIGCONT)
    assert await asyncio.to_thread(former.process.wait, BACK_S) == 1
    assert "this scheduler leads no more" in system.output.read_text()
