"""Forecasts of a predictor service, which a thread beside vLLM's loop asks."""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from foretoken.vllm.lengths import Asked, Decode, Deliver, Lengths, read_prompt
from protos.generated import common_pb2, predictor_pb2_grpc
from services.core import LiveAnswers, Outcome, Request
from services.forecast import Forecast
from services.runtime.bounded_dict import BoundedDict
from services.runtime.config import load
from services.runtime.network.connector import Connector
from services.runtime.network.identity import Role, TlsConfig, open_identity
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import events as ev
from services.scheduler.links.forecasts import Forecasts
from services.scheduler.links.outcomes import Outcomes
from services.scheduler.observe.metrics import SchedulerMetrics

log = logging.getLogger(f"vllm.{__name__}")

SHARED_MAX = 1_024  # populations with a shared forecast: models and applications
STOP_S = 5.0


class RemoteLengths(Lengths):
    """The scheduler's links to a predictor, in an event loop of their own. While the predictor is
    late or away, history answers; its forecast replaces that whenever it arrives. Outcomes wait
    until it is back.

    `decode` returns the text of token ids; without it no prompt is sent. `metrics` are those of the
    links.
    """

    def __init__(self, address: str, decode: Decode | None, metrics: SchedulerMetrics):
        self._address = address
        self._decode = decode
        self._metrics = metrics
        self._deliver: Deliver = lambda _: None
        self._live: Sequence[LiveAnswers] = ()
        self._links: Future[_Links] = Future()
        self._thread = threading.Thread(target=self._run, name="foretoken-predictor", daemon=True)

    def start(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._thread.start()
        self._links.result()

    def stop(self) -> None:
        self._call(lambda links: links.ended.set())
        self._thread.join(STOP_S)

    def forecast(self, asked: Sequence[Asked]) -> list[tuple[str, Forecast]]:
        """None at once: the predictor's or history's follow."""
        questions = [(each.request, self._text(each)) for each in asked]
        self._call(lambda links: links.ask(questions))
        return []

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        self._call(lambda links: links.learn(outcomes))

    def forget(self, request_ids: Sequence[str]) -> None:
        self._call(lambda links: links.forget(request_ids))

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        self._live = answers

    def _text(self, asked: Asked) -> common_pb2.PromptText | None:
        if self._decode is None:
            return None
        return common_pb2.PromptText(user_input=read_prompt(asked.prompt_ids, self._decode))

    def _call(self, act: "Callable[[_Links], None]") -> None:
        """In the loop's thread; nothing once it has ended."""
        links = self._links.result()
        if not links.loop.is_closed():
            links.loop.call_soon_threadsafe(act, links)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:
            log.exception("foretoken asks the predictor at %s no more", self._address)
            if not self._links.done():
                self._links.set_exception(error)

    async def _serve(self) -> None:
        connector = Connector(open_identity(load(TlsConfig)))
        channel = connector.connect(self._address, Role.PREDICTOR)
        try:
            stub = predictor_pb2_grpc.PredictorStub(channel)
            links = _Links(
                stub, lambda event: self._deliver(event), lambda: self._live, self._metrics
            )
            self._links.set_result(links)
            await links.run()
        finally:
            await channel.close()


class _Links:
    """Everything that belongs to the loop."""

    def __init__(
        self,
        stub: "predictor_pb2_grpc.PredictorAsyncStub",
        deliver: Deliver,
        live_answers: Callable[[], Sequence[LiveAnswers]],
        metrics: SchedulerMetrics,
    ):
        self.loop = asyncio.get_running_loop()
        self.ended = asyncio.Event()
        self._deliver = deliver
        self._asked = BoundedDict[str, Request](SHARED_MAX)
        self._shared = BoundedDict[str, Request](SHARED_MAX)  # a request for each shared forecast
        config = load(SchedulerConfig, {})
        self._forecasts = Forecasts(
            config, stub, metrics, self._dispatch, lambda: list(self._shared.values())
        )
        refresh = self._forecasts.refresh
        self._outcomes = Outcomes(
            config.refresh_interval_s, stub, live_answers, refresh, metrics, config.reporter
        )

    async def run(self) -> None:
        """Runs until `ended`."""
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._forecasts.run()),
                tasks.create_task(self._outcomes.run()),
            ]
            await self.ended.wait()
            for task in running:
                task.cancel()

    def ask(self, questions: Sequence[tuple[Request, common_pb2.PromptText | None]]) -> None:
        for request, text in questions:
            self._asked[request.request_id] = request
            if text is not None:
                self._forecasts.keep_text(request.request_id, text)
        self._forecasts.ask([request for request, _ in questions])

    def learn(self, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            self._asked.pop(outcome.request_id, None)
            self._forecasts.forget(outcome.request_id)
            self._forecasts.learn(outcome)
            self._outcomes.put(outcome)

    def forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._asked.pop(request_id, None)
            self._forecasts.forget(request_id)
            self._outcomes.put(request_id)

    def _dispatch(self, event: ev.Event) -> None:
        match event:
            case ev.Forecasted():
                for name, forecast in event.forecasts:
                    if forecast.shared_key and name in self._asked:
                        self._shared[forecast.shared_key] = self._asked[name]
                self._deliver(event)
            case ev.Refreshed():
                self._deliver(event)
            case _:
                raise TypeError(f"the predictor's links send no {type(event).__name__}")
