"""Reading in threads: order, bounds, who leaves, and a lane that large texts leave free."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from gateway.admission.door import Bar, Refused
from gateway.requests.reading_pool import LARGE_BYTES, ReadingPool
from tests.reach import until

LARGE = LARGE_BYTES + 1


@dataclass
class Desk:
    """Work that lasts until it is let go; records what was begun."""

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
async def desk() -> AsyncIterator[Desk]:
    made = Desk()
    yield made
    made.release()


def begin(pool: ReadingPool, desk: Desk, name: str, size: int = 1) -> "asyncio.Task[str]":
    return asyncio.ensure_future(pool.run(desk.work(name), size))


async def test_the_loop_goes_on_and_results_and_errors_come_back(desk: Desk) -> None:
    pool = ReadingPool(1, 8, 100)
    reading = begin(pool, desk, "a")
    await until(lambda: desk.begun == ["a"])  # polled by the loop, which is free
    assert not reading.done()
    desk.release()
    assert await reading == "A"

    def fail() -> None:
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        await pool.run(fail)
    assert await pool.run(lambda: threading.current_thread().name) == "reading-1"
    pool.close()


async def test_they_are_read_in_the_order_of_coming(desk: Desk) -> None:
    pool = ReadingPool(1, 8, 100)
    readings = [begin(pool, desk, name) for name in "abcd"]
    await until(lambda: pool.waiting == 3)
    desk.release()
    assert await asyncio.gather(*readings) == ["A", "B", "C", "D"]
    assert desk.begun == desk.ended == ["a", "b", "c", "d"]
    pool.close()


async def test_large_texts_leave_a_thread_to_the_others(desk: Desk) -> None:
    pool = ReadingPool(2, 8, 10**9)
    large = [begin(pool, desk, name, LARGE) for name in ("l1", "l2", "l3")]
    await until(lambda: desk.begun == ["l1"])
    for name in ("s1", "s2"):
        desk.work(name)
    desk.release("s1", "s2")
    assert await begin(pool, desk, "s1") == "S1"
    assert await begin(pool, desk, "s2") == "S2"
    assert (desk.begun, desk.ended, pool.waiting) == (["l1", "s1", "s2"], ["s1", "s2"], 2)
    desk.release("l1", "l2", "l3")
    await asyncio.gather(*large)
    assert desk.begun[-2:] == ["l2", "l3"]
    pool.close()


async def test_one_thread_reads_large_texts_too(desk: Desk) -> None:
    pool = ReadingPool(1, 8, 10**9)
    reading = begin(pool, desk, "l", LARGE)
    await until(lambda: desk.begun == ["l"])
    desk.release()
    assert await reading == "L"
    pool.close()


async def test_as_many_wait_as_may_and_one_more_is_refused(desk: Desk) -> None:
    pool = ReadingPool(1, 2, 100)
    readings = [begin(pool, desk, name) for name in "abc"]
    await until(lambda: pool.waiting == 2)
    with pytest.raises(Refused, match="2 prompts of 2 bytes wait for tokenization") as caught:
        await pool.run(desk.work("d"))
    assert (caught.value.bar, caught.value.retry_after_s) == (Bar.READING, 1.0)
    desk.release()
    await asyncio.gather(*readings)
    assert await pool.run(desk.work("d")) == "D"
    pool.close()


async def test_texts_wait_up_to_their_bytes_but_a_first_one_always(desk: Desk) -> None:
    pool = ReadingPool(1, 8, 100)
    readings = [begin(pool, desk, "a", 1000)]
    await until(lambda: desk.begun == ["a"])
    readings.append(begin(pool, desk, "b", 1000))
    await until(lambda: pool.waiting == 1)
    with pytest.raises(Refused, match="1 prompts of 1000 bytes wait"):
        await pool.run(desk.work("c"), 1)
    desk.release()
    await asyncio.gather(*readings)
    pool.close()


async def test_who_leaves_gives_its_place_back(desk: Desk) -> None:
    pool = ReadingPool(1, 1, 100)
    first, second = begin(pool, desk, "a"), begin(pool, desk, "b", 60)
    await until(lambda: pool.waiting == 1)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    third = begin(pool, desk, "c", 60)
    await until(lambda: pool.waiting == 1)
    first.cancel()  # it is being read, which goes on; nobody waits for it
    with pytest.raises(asyncio.CancelledError):
        await first
    assert desk.begun == ["a"]
    desk.release()
    assert await third == "C"
    assert desk.begun == desk.ended == ["a", "c"]
    pool.close()
