"""Learns output lengths and step times beside vLLM's loop: a thread that never delays a step."""

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeVar

from foretoken.vllm.lengths import PENDING_MAX, Asked, Lengths
from services.core import LiveAnswers, Outcome
from services.costs import CostModel, StepTiming
from services.estimator.state import EstimatorState
from services.forecast import Forecast
from services.scheduler.core import events as ev

log = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the loggers below its own

UNREAD_MAX = 1_024  # prompts waiting for a forecast; the oldest are dropped
TIMINGS_MAX = 4_096
SWITCH_S = 0.0005  # interpreter switch interval: vLLM's loop answers while this thread computes
CHECK_S = 0.05  # between two looks at outcomes and timings
FIT_COST_S = 2.0  # between two fits of step times
ENGINE = "vllm"

Item = TypeVar("Item")


class Learner:
    """The thread. Its inputs never wait; `pop_news` and `pop_cost` return what is there.

    A prompt that waits behind UNREAD_MAX others gets no forecast here; the scheduler expects
    max_tokens of it.
    """

    def __init__(self, lengths: Lengths):
        self._lengths = lengths
        self._costs = EstimatorState(refit_interval_s=FIT_COST_S)
        self._asked: deque[Asked] = deque(maxlen=UNREAD_MAX)
        self._outcomes: deque[Outcome] = deque(maxlen=PENDING_MAX)
        self._cut_short: deque[str] = deque(maxlen=PENDING_MAX)
        self._timings: deque[StepTiming] = deque(maxlen=TIMINGS_MAX)
        self._news: deque[ev.Forecasted | ev.Refreshed] = deque(maxlen=PENDING_MAX)
        self._cost: deque[CostModel] = deque(maxlen=1)
        self._live: deque[Sequence[LiveAnswers]] = deque(maxlen=1)
        self._wake = threading.Event()
        self._stopping = False
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="foretoken-learner", daemon=True)

    def start(self) -> None:
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._lengths.start(self._news.append)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended, after one fit at most."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        self._lengths.stop()

    def ask(self, asked: Asked) -> None:
        self._asked.append(asked)
        self._wake.set()

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes.extend(outcomes)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests ended without a complete answer."""
        self._cut_short.extend(request_ids)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Replaces the answers that have not ended."""
        self._live.append(answers)

    def timed(self, timing: StepTiming) -> None:
        self._timings.append(timing)

    def pop_news(self) -> list[ev.Forecasted | ev.Refreshed]:
        """Forecasts of requests, some of which may have ended, and newer versions of forecasts that
        the requests of a population share."""
        return _pop_all(self._news)

    def pop_cost(self) -> CostModel | None:
        """The newest cost model since the last call."""
        found = _pop_all(self._cost)
        return found[-1] if found else None

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(CHECK_S)
            self._wake.clear()
            try:
                self._turn()
            except Exception:
                if not self._failed:
                    log.exception("foretoken cannot learn from this work (logged once)")
                self._failed = True

    def _turn(self) -> None:
        asked = _pop_all(self._asked)
        if asked and (forecasts := self._lengths.forecast(asked)):
            self._announce(forecasts)
        if outcomes := _pop_all(self._outcomes):
            self._lengths.learn(outcomes)
        if cut_short := _pop_all(self._cut_short):
            self._lengths.forget(cut_short)
        for live in _pop_all(self._live):
            self._lengths.observe_live(live)
        now = time.monotonic()
        self._lengths.refit(now)
        if timings := _pop_all(self._timings):
            observed = self._costs.observe(ENGINE, timings, now=now)
            cost = self._costs.model(ENGINE)
            if observed.changed and cost:
                self._cost.append(cost)

    def _announce(self, forecasts: Sequence[tuple[str, Forecast]]) -> None:
        self._news.append(ev.Forecasted(tuple(forecasts)))
        if shared := {f.shared_key: f for _, f in forecasts if f.shared_key}:
            self._news.append(ev.Refreshed(tuple(shared.values())))


def _pop_all(items: "deque[Item]") -> list[Item]:
    return [items.popleft() for _ in range(len(items))]
