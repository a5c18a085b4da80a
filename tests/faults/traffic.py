"""Requests with known answers: of every kind, some long, some within a grammar, some cancelled."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from random import Random

from foretoken import AsyncClient
from foretoken.client.answers import Choice
from foretoken.client.errors import ForetokenError
from tests.faults.validation import Delivery
from tests.system.faults.killed_processes import GREEDY, IN_WORDS, PROMPTS
from tests.system.mixed_load import LoadRequest, load_requests

USERS = 16  # each sends a request after the other
ANSWERED_S = 240.0  # a request without an end by then is lost
AFTER_REFUSAL_S = 1.0
SHORT = 60  # requests
LONG = 400  # tokens


def _long_requests() -> Iterator[LoadRequest]:
    for number, prompt in enumerate(PROMPTS):
        turns = ({"role": "user", "content": prompt},)
        yield LoadRequest(turns, {**GREEDY, "max_tokens": LONG})
        yield LoadRequest(turns, {**IN_WORDS, "seed": number, "max_tokens": LONG // 2})
        yield LoadRequest(turns, {**GREEDY, "max_tokens": LONG}, cancels_after=20 * number + 1)


@cache
def fault_requests() -> Sequence[LoadRequest]:
    """All different requests. The expected answer of each is that of an undisturbed run."""
    return (*load_requests()[:SHORT], *_long_requests())


async def deliver(client: AsyncClient, number: int, cancels: bool = True) -> Delivery:
    """Sends a request and returns what came, whatever happens. `cancels`: if it is one of those
    that are cancelled."""
    request, clock = fault_requests()[number], asyncio.get_running_loop().time
    choices = [Choice() for _ in range(request.choices)]
    arrivals_s: list[list[float]] = [[] for _ in choices]
    cancels_after = cancels and request.cancels_after
    cancelled, ended, status, message = False, True, "", ""
    stream = client.generate(
        messages=request.turns,
        sla=request.sla,
        cache_salt=request.tenant,
        **request.sampling,
    )
    try:
        async with asyncio.timeout(ANSWERED_S):
            async for chunk in stream:
                choices[chunk.index].add(chunk)
                if chunk.token_ids:
                    arrivals_s[chunk.index].append(clock())
                if cancels_after and len(choices[0].token_ids) >= cancels_after:
                    cancelled = choices[0].finish_reason is None
                    stream.cancel()
    except TimeoutError:
        ended = False
    except ForetokenError as error:
        status, message = type(error).__name__, str(error)
    by_text = "stop" in request.sampling
    return Delivery(number, choices, by_text, cancelled, ended, status, message, arrivals_s)


class Traffic:
    """USERS that send requests in random order until `stop`, or until `most` have been answered."""

    def __init__(self, address: str, seed: int, most: int):
        self.deliveries: list[Delivery] = []
        self._address, self._chance, self._left = address, Random(seed), most
        self._over = False

    def stop(self) -> None:
        """Each user receives its last answer."""
        self._over = True

    async def run(self) -> None:
        async with asyncio.TaskGroup() as users:
            for _ in range(USERS):
                users.create_task(self._use())

    async def _use(self) -> None:
        async with AsyncClient(self._address) as client:
            while not self._over and self._left > 0:
                self._left -= 1
                delivery = await deliver(client, self._chance.randrange(len(fault_requests())))
                self.deliveries.append(delivery)
                if delivery.status:
                    self._left += 1
                    await asyncio.sleep(AFTER_REFUSAL_S)


async def undisturbed_answers(
    address: str, numbers: Iterable[int] | None = None
) -> Mapping[int, Sequence[Choice]]:
    """The complete answers to the requests of these numbers, or to all. Raises AssertionError if
    one is refused."""
    left = iter(range(len(fault_requests())) if numbers is None else numbers)
    answers: dict[int, Sequence[Choice]] = {}

    async def use() -> None:
        async with AsyncClient(address) as client:
            for number in left:
                delivery = await deliver(client, number, cancels=False)
                assert delivery.ended and not delivery.status, delivery
                answers[number] = delivery.choices

    async with asyncio.TaskGroup() as users:
        for _ in range(USERS):
            users.create_task(use())
    return answers
