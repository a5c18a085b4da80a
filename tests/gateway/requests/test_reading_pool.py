"""The job pool: order, limits, cancellation, and the thread that large jobs leave free."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from gateway.requests.reading_pool import LARGE_BYTES, ReadingPool
from gateway.types.errors import RefusalReason, RequestRefused
from tests.reach import until

LARGE = LARGE_BYTES + 1


@dataclass
class BlockingJobs:
    """Jobs that run until released, and a record of their start and end."""

    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    gates: dict[str, threading.Event] = field(default_factory=dict)

    def work(self, name: str) -> Callable[[], str]:
        gate = self.gates.setdefault(name, threading.Event())

        def do() -> str:
            self.begun.append(name)
            assert gate.wait(30)
            self.ended.append(name)
            return name.upper()

        return do

    def release(self, *names: str) -> None:
        for name in names or tuple(self.gates):
            self.gates[name].set()


@pytest.fixture
async def jobs() -> AsyncIterator[BlockingJobs]:
    jobs = BlockingJobs()
    yield jobs
    jobs.release()


def begin(pool: ReadingPool, jobs: BlockingJobs, name: str, size: int = 1) -> "asyncio.Task[str]":
    return asyncio.ensure_future(pool.run(jobs.work(name), size))


async def test_reading_pool_returns_results_and_errors_without_blocking_the_loop(
    jobs: BlockingJobs,
) -> None:
    pool = ReadingPool(1, 8, 100)
    job = begin(pool, jobs, "a")
    await until(lambda: jobs.begun == ["a"])  # the loop is not blocked
    assert not job.done()
    jobs.release()
    assert await job == "A"

    def fail() -> None:
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        await pool.run(fail)
    assert await pool.run(lambda: threading.current_thread().name) == "reading-1"
    pool.close()


async def test_reading_pool_runs_jobs_in_order_of_arrival(jobs: BlockingJobs) -> None:
    pool = ReadingPool(1, 8, 100)
    running = [begin(pool, jobs, name) for name in "abcd"]
    await until(lambda: pool.waiting == 3)
    jobs.release()
    assert await asyncio.gather(*running) == ["A", "B", "C", "D"]
    assert jobs.begun == jobs.ended == ["a", "b", "c", "d"]
    pool.close()


async def test_reading_pool_keeps_a_thread_free_of_large_jobs(jobs: BlockingJobs) -> None:
    pool = ReadingPool(2, 8, 10**9)
    large = [begin(pool, jobs, name, LARGE) for name in ("l1", "l2", "l3")]
    await until(lambda: jobs.begun == ["l1"])
    for name in ("s1", "s2"):
        jobs.work(name)
    jobs.release("s1", "s2")
    assert await begin(pool, jobs, "s1") == "S1"
    assert await begin(pool, jobs, "s2") == "S2"
    assert (jobs.begun, jobs.ended, pool.waiting) == (["l1", "s1", "s2"], ["s1", "s2"], 2)
    jobs.release("l1", "l2", "l3")
    await asyncio.gather(*large)
    assert jobs.begun[-2:] == ["l2", "l3"]
    pool.close()


async def test_reading_pool_with_one_thread_runs_large_jobs(jobs: BlockingJobs) -> None:
    pool = ReadingPool(1, 8, 10**9)
    job = begin(pool, jobs, "l", LARGE)
    await until(lambda: jobs.begun == ["l"])
    jobs.release()
    assert await job == "L"
    pool.close()


async def test_reading_pool_refuses_a_job_above_the_queue_limit(jobs: BlockingJobs) -> None:
    pool = ReadingPool(1, 2, 100)
    running = [begin(pool, jobs, name) for name in "abc"]
    await until(lambda: pool.waiting == 2)
    with pytest.raises(
        RequestRefused, match="2 prompts of 2 bytes wait for tokenization"
    ) as caught:
        await pool.run(jobs.work("d"))
    assert (caught.value.reason, caught.value.retry_after_s) == (RefusalReason.READING, 1.0)
    jobs.release()
    await asyncio.gather(*running)
    assert await pool.run(jobs.work("d")) == "D"
    pool.close()


async def test_reading_pool_limits_waiting_bytes_except_for_the_first_job(
    jobs: BlockingJobs,
) -> None:
    pool = ReadingPool(1, 8, 100)
    running = [begin(pool, jobs, "a", 1000)]
    await until(lambda: jobs.begun == ["a"])
    running.append(begin(pool, jobs, "b", 1000))
    await until(lambda: pool.waiting == 1)
    with pytest.raises(RequestRefused, match="1 prompts of 1000 bytes wait"):
        await pool.run(jobs.work("c"), 1)
    jobs.release()
    await asyncio.gather(*running)
    pool.close()


async def test_reading_pool_frees_the_place_of_a_cancelled_job(jobs: BlockingJobs) -> None:
    pool = ReadingPool(1, 1, 100)
    first, second = begin(pool, jobs, "a"), begin(pool, jobs, "b", 60)
    await until(lambda: pool.waiting == 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    third = begin(pool, jobs, "c", 60)
    await until(lambda: pool.waiting == 1)
    first.cancel()  # a running job finishes; its result is dropped
    with pytest.raises(asyncio.CancelledError):
        await first
    assert jobs.begun == ["a"]
    jobs.release()
    assert await third == "C"
    assert jobs.begun == jobs.ended == ["a", "c"]
    pool.close()
