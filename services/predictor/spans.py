"""What the predictor did for traced requests, as spans: what it told at once, and what it read."""

from collections import OrderedDict
from collections.abc import Sequence

from observability.tracing import REQUEST_ID, Spans, Value
from protos.generated import predictor_pb2
from services.predictor.serving.forecaster import Answer, Read

MOST_UNREAD = 4_096  # traced requests whose prompts may still be read; the oldest makes room


class PredictorSpans:
    """Costs a look at a flag where tracing is off."""

    def __init__(self, spans: Spans):
        self._spans = spans
        self._unread: OrderedDict[str, str] = OrderedDict()  # by request: what it's traced under

    def answered(
        self,
        inputs: Sequence[predictor_pb2.ForecastInput],
        answers: Sequence[Answer],
        since_s: float,
        now_s: float,
    ) -> None:
        """One call: an answer an input."""
        if not self._spans.on:
            return
        for message, answer in zip(inputs, answers, strict=True):
            if not message.traceparent:
                continue
            about: dict[str, Value] = {
                REQUEST_ID: message.request_id,
                "foretoken.forecast.source": answer.made.given.source,
                "foretoken.forecast.stage": answer.stage,
                "foretoken.forecast.batch": len(inputs),
            }
            self._spans.record("foretell", message.traceparent, since_s, now_s, about)
            self._unread[message.request_id] = message.traceparent
            if len(self._unread) > MOST_UNREAD:
                self._unread.popitem(last=False)

    def read(self, read: Read, now_s: float) -> None:
        """Prompts were read, and better forecasts are on their way."""
        if not self._unread:
            return
        for (request_id, forecast), since_s in zip(read.better, read.since_s, strict=True):
            parent = self._unread.pop(request_id, "")
            about = {REQUEST_ID: request_id, "foretoken.forecast.source": forecast.source}
            self._spans.record("read", parent, since_s, now_s, about)
