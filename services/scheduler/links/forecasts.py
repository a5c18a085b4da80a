"""Asks the predictor for forecasts. History answers when the predictor is late, and the predictor's
forecast replaces it whenever it arrives."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, takewhile
from math import inf

import grpc
from grpc import aio

from observability.logs import log_context
from protos.generated import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.core import Outcome, Request
from services.forecast import Forecast
from services.runtime.bounded_dict import BoundedDict
from services.runtime.codecs.common import decode_forecast
from services.runtime.network.backoff import Backoff
from services.runtime.network.breaker import Breaker, BreakerPhase
from services.runtime.network.delivery import (
    MAX_KEPT,
    MAX_PER_CALL,
    describe,
    follow,
)
from services.runtime.network.streams import ResponseStream
from services.scheduler.codec import encode_forecast_input
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import events as ev
from services.scheduler.links.fallback import History
from services.scheduler.observe.metrics import SchedulerMetrics

log = logging.getLogger(__name__)

REFRESH_S = 1.0  # no request waits for a refresh of shared forecasts
MAX_WARNING_CHARS = 512


@dataclass(frozen=True, slots=True)
class Question:
    """A request for a forecast; history answers at `due_s`."""

    request: Request
    asked_s: float
    due_s: float


@dataclass(frozen=True, slots=True)
class NoAnswer:
    """Why a call gave no forecasts. `alive`: the predictor works, but refused this call."""

    why: str
    alive: bool = False


LATE = NoAnswer("no answer within forecast_timeout_s")


class Forecasts:
    """At most one call is pending; questions that arrive meanwhile go into the next.

    A question is answered by its deadline (at once while the breaker is open), by the predictor or
    by history. It is sent to the predictor in any case, as long as a late answer is still useful;
    that answer replaces history's. Improved forecasts also arrive unasked, on the Improve stream.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        predictor: "predictor_pb2_grpc.PredictorAsyncStub",
        metrics: SchedulerMetrics,
        dispatch: ev.Dispatch,
        shared_representatives: Callable[[], Sequence[Request]],
        traceparent: Callable[[str], str] = lambda _: "",
    ):
        """`shared_representatives` returns one live request for each population forecast in use;
        `traceparent` the parent of a request's forecast spans, empty if untraced."""
        self._config = config
        self._predictor = predictor
        self._metrics = metrics
        self._dispatch = dispatch
        self._shared_representatives = shared_representatives
        self._traceparent = traceparent
        self._history = History()
        pauses = Backoff(config.forecast_pause_s, config.forecast_pause_max_s)
        self._breaker = Breaker(config.forecast_failures_max, pauses)
        self._publish_breaker()
        self._texts = BoundedDict[str, common_pb2.PromptText](MAX_KEPT)
        self._questions = BoundedDict[str, Question](MAX_KEPT)  # for the next call
        self._max_tokens = BoundedDict[str, int](MAX_KEPT)  # of requests that were asked about
        self._unanswered: dict[str, Question] = {}  # by deadline
        self._asked = asyncio.Event()
        self._awaited = asyncio.Event()
        self.warning = ""  # what does not work at the predictor

    # Called by the service; none of these waits

    def keep_text(self, request_id: str, text: common_pb2.PromptText) -> None:
        """Keeps a prompt's text until its forecast is asked."""
        self._texts[request_id] = text

    def forget(self, request_id: str) -> None:
        """The request was refused or has ended."""
        self._texts.pop(request_id, None)
        self._questions.pop(request_id, None)
        self._unanswered.pop(request_id, None)
        self._max_tokens.pop(request_id, None)

    def ask(self, requests: Iterable[Request]) -> None:
        now = _now()
        closed = self._breaker.phase is BreakerPhase.CLOSED
        wait_s = self._config.forecast_timeout_s if closed else 0.0
        for request in requests:
            question = Question(request, now, now + wait_s)
            self._questions[request.request_id] = question
            self._max_tokens[request.request_id] = request.max_tokens
            self._unanswered[request.request_id] = question
        self._asked.set()
        self._awaited.set()

    def learn(self, outcome: Outcome) -> None:
        self._history.learn(outcome)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask_loop())
            tasks.create_task(self._deadline_loop())
            tasks.create_task(follow(self._open_improve, self._improved, "improved forecasts"))

    # Calls

    async def _ask_loop(self) -> None:
        while True:
            while not self._questions:
                self._asked.clear()
                await self._asked.wait()
            await asyncio.sleep(self._breaker.wait_s(_now()))
            if questions := self._pop_questions():
                await self._send(questions)

    def _pop_questions(self) -> list[Question]:
        """The oldest questions with an answer that is still useful."""
        oldest_s = _now() - self._config.forecast_late_s
        names = list(islice(self._questions, MAX_PER_CALL))
        popped = [self._questions.pop(name) for name in names]
        for question in popped:
            if question.asked_s < oldest_s:
                self._texts.pop(question.request.request_id, None)
        return [q for q in popped if q.asked_s >= oldest_s]

    async def _send(self, questions: Sequence[Question]) -> None:
        """One call. It counts as failed at its deadline, and is cancelled after
        `forecast_late_s`."""
        self._set_breaker(self._breaker.called())
        requests = [q.request for q in questions]
        call = asyncio.ensure_future(self._call(requests, self._config.forecast_late_s))
        try:
            await asyncio.wait({call}, timeout=self._config.forecast_timeout_s)
            in_time = call.done()
            if not in_time:
                self._failed(questions, "late", LATE)
            forecasts = _decode(await call, requests)
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
            return NoAnswer(describe(error), code is grpc.StatusCode.INVALID_ARGUMENT)
        if len(answer.forecasts) != len(requests):
            return NoAnswer(f"{len(answer.forecasts)} forecasts for {len(requests)} requests")
        return answer.forecasts

    def _answered(self, forecasts: Sequence[tuple[str, Forecast]], in_time: bool) -> None:
        self._set_breaker(self._breaker.answered() if in_time else self._breaker.late(_now()))
        replaced = sum(self._unanswered.pop(name, None) is None for name, _ in forecasts)
        self._metrics.forecasts_replaced.labels("late").inc(replaced)
        self._dispatch(ev.Forecasted(tuple(forecasts)))

    def _failed(self, questions: Sequence[Question], reason: str, answer: NoAnswer) -> None:
        """History answers the questions of this call; all questions once the breaker opens."""
        breaker = self._breaker
        subject = questions[0].request.request_id if len(questions) == 1 else ""
        with log_context(subject, self._traceparent(subject)):
            breaker = breaker.answered() if answer.alive else breaker.failed(_now())
            self._set_breaker(breaker, answer.why)
        if self._breaker.phase is not BreakerPhase.CLOSED:
            questions = [*questions, *self._unanswered.values()]
        self._answer_from_history(questions, reason)

    def _set_breaker(self, breaker: Breaker, why: str = "") -> None:
        if why:
            log.info("no forecast from the predictor: %s", why)
        before, self._breaker = self._breaker.phase, breaker
        if breaker.phase is BreakerPhase.OPEN and before is BreakerPhase.CLOSED:
            log.warning("the predictor does not answer (%s); history forecasts until it does", why)
        elif breaker.phase is BreakerPhase.CLOSED and before is not BreakerPhase.CLOSED:
            log.warning("the predictor answers again")
        self._publish_breaker()

    def _publish_breaker(self) -> None:
        for phase in BreakerPhase:
            self._metrics.breaker.labels(phase.value).set(phase is self._breaker.phase)

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
                self._answer_due()

    def _answer_due(self) -> None:
        now = _now()
        due = list(takewhile(lambda q: q.due_s <= now, self._unanswered.values()))
        self._answer_from_history([q for q in due if q.due_s > q.asked_s], "late")
        self._answer_from_history([q for q in due if q.due_s == q.asked_s], "open")

    def _answer_from_history(self, questions: Iterable[Question], reason: str) -> None:
        """Answers those of these questions that have no answer yet."""
        names = (q.request.request_id for q in questions)
        asked = [self._unanswered.pop(name).request for name in names if name in self._unanswered]
        if asked:
            self._metrics.fallbacks.labels(reason).inc(len(asked))
            answers = tuple((r.request_id, self._history.forecast(r)) for r in asked)
            self._dispatch(ev.Forecasted(answers))

    # Better forecasts

    async def refresh(self) -> bool:
        """Refreshes the forecasts that whole populations share. Returns whether they are
        current."""
        requests = self._shared_representatives()[:MAX_PER_CALL]
        if not requests:
            return True
        if self._breaker.phase is not BreakerPhase.CLOSED:
            return False
        forecasts = _shared(await self._call(requests, REFRESH_S))
        if isinstance(forecasts, NoAnswer):
            log.info("shared forecasts are not refreshed: %s", forecasts.why)
            return False
        self._dispatch(ev.Refreshed(forecasts))
        return True

    async def _open_improve(self) -> ResponseStream[predictor_pb2.ImprovedForecasts]:
        self.warning = ""  # a predictor that has one begins with it
        return self._predictor.Improve(predictor_pb2.ImproveRequest())

    def _improved(self, message: predictor_pb2.ImprovedForecasts) -> None:
        """Applies improved forecasts of requests that are still known, or keeps a warning."""
        if message.HasField("warning"):
            self.warning = message.warning[:MAX_WARNING_CHARS]
            return
        try:
            better = tuple(
                (name, decode_forecast(forecast, self._max_tokens[name]))
                for name, forecast in zip(message.request_ids, message.forecasts, strict=True)
                if name in self._max_tokens
            )
        except ValueError as error:
            log.warning("improved forecasts are invalid and ignored: %s", error)
            return
        if better:
            self._metrics.forecasts_replaced.labels("improved").inc(len(better))
            self._dispatch(ev.Forecasted(better))


def _now() -> float:
    return asyncio.get_running_loop().time()


def _decode(
    answer: Sequence[common_pb2.Forecast] | NoAnswer, requests: Sequence[Request]
) -> list[tuple[str, Forecast]] | NoAnswer:
    """Forecasts by request, each truncated at its max_tokens."""
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
    """Population forecasts, not truncated: requests with any max_tokens share them."""
    if isinstance(answer, NoAnswer):
        return answer
    try:
        return tuple(decode_forecast(m) for m in answer if m.shared_key)
    except ValueError as error:
        return NoAnswer(str(error))
