"""Admits new requests to tokenization a few at a time, behind the tokens of running answers.

All work shares one event loop, and tokenization is its most expensive part: a thousand requests
that arrive together would block all tokens for one long turn.
"""

import asyncio
from collections import deque
from math import inf

from gateway.types.errors import RefusalReason, RequestRefused

CALM_TURNS = 4  # loop turns without tokens; gRPC needs two or three to deliver a waiting message


class TokenizationQueue:
    """Admits requests for `burst_s`, one per turn of the loop. The next burst begins after
    `CALM_TURNS` consecutive turns without tokens, or after `hold_s`: tokens go first, but delay
    requests by at most `hold_s`.

    A request that finds the queue free passes at once, without a turn of the loop.
    """

    def __init__(self, max_waiting: int, hold_s: float, burst_s: float, max_wait_s: float = inf):
        self._max_waiting, self._hold_s, self._burst_s = max_waiting, hold_s, burst_s
        self._max_wait_s = max_wait_s
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()  # with arrival time
        self._free = True
        self._turns = self._calm_turns = 0  # since the last admission; without tokens
        self._turns_since_s = 0.0  # time of the first of these turns
        self._burst_since_s = 0.0

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._waiting)

    def check(self) -> None:
        """Raises RequestRefused if the queue is full, or if the next request has waited for more
        than `max_wait_s`: a request that joins the queue now would wait about as long, which is
        also the retry time. O(1), amortized."""
        while self._waiting and self._waiting[0][0].done():  # a cancelled request has left
            self._waiting.popleft()
        if not self._waiting:
            return
        waited_s = asyncio.get_running_loop().time() - self._waiting[0][1]
        if len(self._waiting) >= self._max_waiting or waited_s > self._max_wait_s:
            message = f"{len(self._waiting)} requests wait for tokenization"
            raise RequestRefused(RefusalReason.ARRIVING, message, waited_s)

    def on_tokens(self) -> None:
        """Tokens were received in this turn of the loop."""
        self._calm_turns = 0

    async def wait_for_turn(self) -> None:
        """Returns in order of arrival. Raises RequestRefused."""
        if self._free:
            self._burst_since_s = asyncio.get_running_loop().time()
            self._begin_turns()
            return
        self.check()
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append((turn, loop.time()))
        await turn

    def _begin_turns(self) -> None:
        self._free, self._turns, self._calm_turns = False, 0, 0
        asyncio.get_running_loop().call_soon(self._on_turn)

    def _on_turn(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._turns == 0:
            self._turns_since_s = now_s
        self._turns += 1
        self._calm_turns += 1
        held = self._turns >= CALM_TURNS and now_s - self._turns_since_s >= self._hold_s
        if self._calm_turns >= CALM_TURNS or held:
            self._burst_since_s = now_s
            self._admit_next()
        elif self._waiting and now_s - self._burst_since_s < self._burst_s:
            self._admit_next()
        else:
            loop.call_soon(self._on_turn)

    def _admit_next(self) -> None:
        while self._waiting:
            turn, _ = self._waiting.popleft()
            if not turn.done():  # a cancelled request has left
                turn.set_result(None)
                self._begin_turns()
                return
        self._free = True
