"""New requests come in a few at a time, behind the tokens of those that are being answered.

All runs on one event loop, and reading a prompt is the dearest thing on it: a thousand requests
that came together would be read in one turn, and no token meanwhile.
"""

import asyncio
from collections import deque

from gateway.admission.door import Bar, Refused

CALM_TURNS = 4  # in which nothing was read: gRPC needs two or three for a message that is there


class Turnstile:
    """Lets requests in for `burst_s`, one a turn of the loop, then the next ones once `CALM_TURNS`
    turns in a row brought no tokens, or after `hold_s` of them: tokens go first, but never for
    ever.

    Whoever finds it free passes at once, without a turn of the loop.
    """

    def __init__(self, max_waiting: int, hold_s: float, burst_s: float):
        self._max_waiting, self._hold_s, self._burst_s = max_waiting, hold_s, burst_s
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()  # and since when
        self._free = True
        self._turns = self._calm_turns = 0  # since somebody passed; without tokens
        self._since_s = 0.0  # the first of them
        self._burst_since_s = 0.0

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    def check(self) -> None:
        """Raises Refused when as many wait as may, to be tried again after as long as the next of
        them has waited: who came now as the last would wait so long."""
        if len(self._waiting) >= self._max_waiting:
            message = f"{len(self._waiting)} requests wait to be read"
            waited_s = asyncio.get_running_loop().time() - self._waiting[0][1]
            raise Refused(Bar.ARRIVING, message, waited_s)

    def on_tokens(self) -> None:
        """Tokens were read in this turn of the loop."""
        self._calm_turns = 0

    async def enter(self) -> None:
        """Until it is one's turn, in the order of coming. Raises Refused."""
        if self._free:
            self._burst_since_s = asyncio.get_running_loop().time()
            self._pass()
            return
        self.check()
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append((turn, loop.time()))
        await turn

    def _pass(self) -> None:
        self._free, self._turns, self._calm_turns = False, 0, 0
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        if self._turns == 0:
            self._since_s = now_s
        self._turns += 1
        self._calm_turns += 1
        held = self._turns >= CALM_TURNS and now_s - self._since_s >= self._hold_s
        if self._calm_turns >= CALM_TURNS or held:
            self._burst_since_s = now_s
            self._let_in()
        elif self._waiting and now_s - self._burst_since_s < self._burst_s:
            self._let_in()
        else:
            loop.call_soon(self._turn)

    def _let_in(self) -> None:
        while self._waiting:
            turn, _ = self._waiting.popleft()
            if not turn.done():  # its client did not leave
                turn.set_result(None)
                self._pass()
                return
        self._free = True
