"""Forecasts asked of the predictor. Nobody waits long: history stands in, and the better forecast
is taken whenever it comes."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf
from typing import TypeVar

import grpc
from grpc import aio

from observability.logs import concerning
from protos.generated import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.core import Outcome, Request
from services.forecast import Forecast
from services.runtime.backoff import Backoff
from services.runtime.codecs.common import decode_forecast
from services.scheduler.codec import encode_forecast_input
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import events as ev
from services.scheduler.links.breaker import Breaker, BreakerPhase
from services.scheduler.links.delivery import RETRIES
from services.scheduler.links.fallback import History
from services.scheduler.links.interface import MOST_KEPT, MOST_PER_CALL, Owner, sentence

log = logging.getLogger(__name__)
V = TypeVar("V")

REFRESH_S = 1.0  # no request waits for a shared forecast to be renewed


@dataclass(frozen=True, slots=True)
class Question:
    """A request whose forecast is asked for, and when history answers if nobody else does."""

    request: Request
    asked_s: float
    due_s: float


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why there is none; `lives` when the predictor only can't take what it was asked."""

    why: str
    lives: bool = False


LATE = NoAnswer("it takes longer than forecast_timeout_s")


class Forecasts:
    """At most one call is under way; what is asked meanwhile goes into the next.

    A question is answered by its deadline, at once while the breaker is open: by the predictor,
    or else by history. It is put all the same, for as long as its answer may come late, and that
    answer replaces history's. Other than by a call, better forecasts come unasked (Improve).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        predictor: "predictor_pb2_grpc.PredictorAsyncStub",
        owner: Owner,
        traceparent: Callable[[str], str] = lambda _: "",
    ):
        self._config = config
        self._predictor = predictor
        self._owner = owner
        self._traceparent = traceparent
        self._history = History()
        pauses = Backoff(config.forecast_pause_s, config.forecast_pause_max_s)
        self._breaker = Breaker(config.forecast_failures_max, pauses)
        self._tell_phase()
        self._texts: OrderedDict[str, common_pb2.PromptText] = OrderedDict()
        self._questions: OrderedDict[str, Question] = OrderedDict()  # for the next call
        self._unanswered: OrderedDict[str, Question] = OrderedDict()  # by their deadlines
        self._caps: OrderedDict[str, int] = OrderedDict()  # max_tokens of those asked about
        self._asked = asyncio.Event()
        self._awaited = asyncio.Event()

    # What the service calls; none of these waits

    def keep_text(self, request_id: str, text: common_pb2.PromptText) -> None:
        """Hold a prompt's text until its forecast is asked; dropped right after."""
        _put_bounded(self._texts, request_id, text)

    def forget(self, request_id: str) -> None:
        """The request was refused, or has ended."""
        for kept in (self._texts, self._questions, self._unanswered, self._caps):
            kept.pop(request_id, None)

    def ask(self, requests: Iterable[Request]) -> None:
        now = _now()
        waits_s = (
            self._config.forecast_timeout_s if self._breaker.phase is BreakerPhase.CLOSED else 0.0
        )
        for request in requests:
            question = Question(request, now, now + waits_s)
            _put_bounded(self._questions, request.request_id, question)
            _put_bounded(self._caps, request.request_id, request.max_tokens)
            self._unanswered[request.request_id] = question
        self._asked.set()
        self._awaited.set()

    def learn(self, outcome: Outcome) -> None:
        self._history.learn(outcome)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask_loop())
            tasks.create_task(self._deadline_loop())
            tasks.create_task(self._improve_loop())

    # Calls

    async def _ask_loop(self) -> None:
        while True:
            while not self._questions:
                self._asked.clear()
                await self._asked.wait()
            await asyncio.sleep(self._breaker.wait_s(_now()))
            if questions := self._take_questions():
                await self._put(questions)

    def _take_questions(self) -> list[Question]:
        """Those whose answer would still be taken, the oldest first."""
        oldest_s = _now() - self._config.forecast_late_s
        names = list(islice(self._questions, MOST_PER_CALL))
        taken = [self._questions.pop(name) for name in names]
        for question in taken:
            if question.asked_s < oldest_s:
                self._texts.pop(question.request.request_id, None)
        return [q for q in taken if q.asked_s >= oldest_s]

    async def _put(self, questions: Sequence[Question]) -> None:
        """One call, failed at its deadline, and given up after `forecast_late_s`."""
        self._turn(self._breaker.asked())
        requests = [q.request for q in questions]
        call = asyncio.ensure_future(self._call(requests, self._config.forecast_late_s))
        try:
            await asyncio.wait({call}, timeout=self._config.forecast_timeout_s)
            in_time = call.done()
            if not in_time:
                self._failed(questions, "late", LATE)
            forecasts = _decoded(await call, requests)
        finally:
            call.cancel()
        if not isinstance(forecasts, NoAnswer):
            self._answered(forecasts, in_time)
        elif in_time:
            self._failed(questions, "failed", forecasts)

    async def _call(
        self, requests: Sequence[Request], timeout_s: float
    ) -> Sequence[common_pb2.Forecast] | NoAnswer:
        inputs = [
            encode_forecast_input(
                r, self._texts.pop(r.request_id, None), self._traceparent(r.request_id)
            )
            for r in requests
        ]
        message = predictor_pb2.ForecastRequest(inputs=inputs)
        try:
            answer = await self._predictor.Forecast(message, timeout=timeout_s)
        except aio.AioRpcError as error:
            code: grpc.StatusCode = error.code()
            return NoAnswer(sentence(error), code is grpc.StatusCode.INVALID_ARGUMENT)
        if len(answer.forecasts) != len(requests):
            return NoAnswer(f"{len(answer.forecasts)} forecasts for {len(requests)} requests")
        return answer.forecasts

    def _answered(self, forecasts: Sequence[tuple[str, Forecast]], in_time: bool) -> None:
        self._turn(self._breaker.answered() if in_time else self._breaker.late(_now()))
        known = sum(self._unanswered.pop(name, None) is None for name, _ in forecasts)
        self._owner.metrics.forecasts_replaced.labels("late").inc(known)
        self._owner.dispatch(ev.Forecasted(tuple(forecasts)))

    def _failed(self, questions: Sequence[Question], reason: str, said: NoAnswer) -> None:
        """Those who wait for this call wait no longer; once the breaker opens, nobody does."""
        breaker, whose = self._breaker, self._whose(questions)
        with concerning(whose, self._traceparent(whose)):
            self._turn(breaker.answered() if said.lives else breaker.failed(_now()), said.why)
        if self._breaker.phase is not BreakerPhase.CLOSED:
            questions = [*questions, *self._unanswered.values()]
        self._stand_in(questions, reason)

    @staticmethod
    def _whose(questions: Sequence[Question]) -> str:
        """The request that a call was about; of many, nobody's."""
        return questions[0].request.request_id if len(questions) == 1 else ""

    def _turn(self, breaker: Breaker, why: str = "") -> None:
        if why:
            log.info("no forecast: %s", why)
        if breaker.phase is BreakerPhase.OPEN and self._breaker.phase is BreakerPhase.CLOSED:
            log.warning("the predictor does not answer (%s); until it does, history does", why)
        elif (
            breaker.phase is BreakerPhase.CLOSED and self._breaker.phase is not BreakerPhase.CLOSED
        ):
            log.warning("the predictor answers again")
        self._breaker = breaker
        self._tell_phase()

    def _tell_phase(self) -> None:
        for phase in BreakerPhase:
            self._owner.metrics.breaker.labels(phase.value).set(phase is self._breaker.phase)

    # History

    async def _deadline_loop(self) -> None:
        while True:
            self._awaited.clear()
            first = next(iter(self._unanswered.values()), None)
            left_s = first.due_s - _now() if first else inf
            if left_s > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(left_s if first else None):
                        await self._awaited.wait()
            else:
                self._stand_in_for_due()

    def _stand_in_for_due(self) -> None:
        now = _now()
        due = list(takewhile(lambda q: q.due_s <= now, self._unanswered.values()))
        self._stand_in([q for q in due if q.due_s > q.asked_s], "late")
        self._stand_in([q for q in due if q.due_s == q.asked_s], "open")

    def _stand_in(self, questions: Iterable[Question], reason: str) -> None:
        """Answer from history what has no answer yet."""
        names = (q.request.request_id for q in questions)
        asked = [self._unanswered.pop(name).request for name in names if name in self._unanswered]
        if asked:
            self._owner.metrics.fallbacks.labels(reason).inc(len(asked))
            answers = tuple((r.request_id, self._history.forecast(r)) for r in asked)
            self._owner.dispatch(ev.Forecasted(answers))

    # Better forecasts

    async def refresh(self) -> bool:
        """Renew the forecasts that whole populations share; whether they are as new as can be."""
        requests = self._owner.state.shared_representatives()[:MOST_PER_CALL]
        if not requests:
            return True
        if self._breaker.phase is not BreakerPhase.CLOSED:
            return False
        forecasts = _shared(await self._call(requests, REFRESH_S))
        if isinstance(forecasts, NoAnswer):
            log.info("shared forecasts are not renewed: %s", forecasts.why)
            return False
        self._owner.dispatch(ev.Refreshed(forecasts))
        return True

    async def _improve_loop(self) -> None:
        """Follow the predictor's second thoughts; while it is away there are none."""
        failures = 0
        while True:
            try:
                async for message in self._predictor.Improve(predictor_pb2.ImproveRequest()):
                    failures = 0
                    self._improved(message)
            except aio.AioRpcError as error:
                log.info("no better forecasts: %s", sentence(error))
            await asyncio.sleep(RETRIES.after_s(failures))
            failures += 1

    def _improved(self, message: predictor_pb2.ImprovedForecasts) -> None:
        """Of requests that are known here still; an answer that can't be is left out."""
        try:
            better = tuple(
                (name, decode_forecast(forecast, self._caps[name]))
                for name, forecast in zip(message.request_ids, message.forecasts, strict=True)
                if name in self._caps
            )
        except ValueError as error:
            log.warning("a better forecast is none: %s", error)
            return
        if better:
            self._owner.metrics.forecasts_replaced.labels("improved").inc(len(better))
            self._owner.dispatch(ev.Forecasted(better))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _decoded(
    answer: Sequence[common_pb2.Forecast] | NoAnswer, requests: Sequence[Request]
) -> list[tuple[str, Forecast]] | NoAnswer:
    """By request, each cut at what it may have."""
    if isinstance(answer, NoAnswer):
        return answer
    pairs = zip(answer, requests, strict=True)
    try:
        return [(r.request_id, decode_forecast(m, r.max_tokens)) for m, r in pairs]
    except ValueError as error:
        return NoAnswer(str(error))


def _shared(
    answer: Sequence[common_pb2.Forecast] | NoAnswer,
) -> tuple[Forecast, ...] | NoAnswer:
    """Those of whole populations, cut nowhere: requests of all lengths share them."""
    if isinstance(answer, NoAnswer):
        return answer
    try:
        return tuple(decode_forecast(m) for m in answer if m.shared_key)
    except ValueError as error:
        return NoAnswer(str(error))


def _put_bounded(kept: OrderedDict[str, V], name: str, value: V) -> None:
    """The oldest makes room."""
    kept[name] = value
    if len(kept) > MOST_KEPT:
        kept.popitem(last=False)
