"""Admits new requests to tokenization a few at a time, behind the tokens of running answers.

All work shares one event loop, and tokenization is its most expensive part: a thousand requests
that arrive together would block all tokens for one long turn.
"""

import asyncio
from collections import OrderedDict
from math import inf

from gateway.types.errors import RefusalReason, RequestRefused

CALM_TURNS = 4  # loop turns without tokens; gRPC needs two or three to deliver a waiting message
# A burst has at least so many. On a busy event loop one turn takes longer than `burst_s`, and one
# request per `hold_s` would be ten per second.
BURST_REQUESTS = 4


class TokenizationQueue:
    """Admits requests for `burst_s`, one per turn of the loop, and at least `burst_requests`. The
    next burst begins after `CALM_TURNS` consecutive turns without tokens, or after `hold_s`: tokens
    go first, but delay requests by at most `hold_s`.

    A request that finds the queue free passes at once, without a turn of the loop. A cancelled
    request leaves the queue at once.
    """

    def __init__(
        self,
        max_waiting: int,
        hold_s: float,
        burst_s: float,
        max_wait_s: float = inf,
        burst_requests: int = BURST_REQUESTS,
    ):
        self._max_waiting, self._hold_s, self._max_wait_s = max_waiting, hold_s, max_wait_s
        self._burst_s, self._min_burst = burst_s, burst_requests
        self._waiting: OrderedDict[asyncio.Future[None], float] = OrderedDict()  # arrival times
        self.free = True  # whether a request would pass at once
        self._turns = self._calm_turns = 0  # since the last admission; without tokens
        self._turns_since_s = 0.0  # time of the first of these turns
        self._burst_since_s = 0.0
        self._burst_requests = 0

    @property
    def waiting(self) -> int:
        """Number of queued requests."""
        return len(self._waiting)

    def check(self) -> None:
        """Raises RequestRefused if the queue is full, or if the next request has waited for more
        than `max_wait_s`: a request that joins the queue now would wait about as long, which is
        also the retry time. O(1)."""
        if not self._waiting:
            return
        waited_s = asyncio.get_running_loop().time() - next(iter(self._waiting.values()))
        if len(self._waiting) >= self._max_waiting or waited_s > self._max_wait_s:
            message = f"{len(self._waiting)} requests wait for tokenization"
            raise RequestRefused(RefusalReason.ARRIVING, message, waited_s)

    def on_tokens(self) -> None:
        """Tokens were received in this turn of the loop."""
        self._calm_turns = 0

    async def wait_for_turn(self) -> None:
        """Returns in order of arrival. Raises RequestRefused."""
        loop = asyncio.get_running_loop()
        if self.free:
            self._begin_burst(loop.time())
            self._begin_turns()
            return
        self.check()
        turn = loop.create_future()
        self._waiting[turn] = loop.time()
        try:
            await turn
        finally:
            self._waiting.pop(turn, None)  # of a cancelled request

    def _begin_burst(self, now_s: float) -> None:
        self._burst_since_s, self._burst_requests = now_s, 0

    def _begin_turns(self) -> None:
        self.free, self._turns, self._calm_turns = False, 0, 0
        self._burst_requests += 1
        asyncio.get_running_loop().call_soon(self._on_turn)

    def _on_turn(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._turns == 0:
            self._turns_since_s = now_s
        self._turns += 1
        self._calm_turns += 1
        held = self._turns >= CALM_TURNS and now_s - self._turns_since_s >= self._hold_s
        bursts = now_s - self._burst_since_s < self._burst_s
        if self._calm_turns >= CALM_TURNS or held:
            self._begin_burst(now_s)
            self._admit_next()
        elif self._waiting and (bursts or self._burst_requests < self._min_burst):
            self._admit_next()
        else:
            loop.call_soon(self._on_turn)

    def _admit_next(self) -> None:
        while self._waiting:
            turn, _ = self._waiting.popitem(last=False)
            if not turn.done():  # a cancelled request has left
                turn.set_result(None)
                self._begin_turns()
                return
        self.free = True
