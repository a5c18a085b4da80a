"""Trace spans of the predictor: immediate forecasts and prompt reading."""

from collections.abc import Sequence

from observability.tracing import REQUEST_ID, Spans, Value
from protos.generated import predictor_pb2
from services.predictor.serving.forecaster import ImmediateForecast, ReadingResult
from services.runtime.bounded_dict import BoundedDict

MAX_UNREAD_SPANS = 4_096  # traced requests with unread prompts; the oldest is evicted


class PredictorSpans:
    """Records spans for traced requests. When tracing is off, a call costs one flag check."""

    def __init__(self, spans: Spans):
        self._spans = spans
        self._unread = BoundedDict[str, str](MAX_UNREAD_SPANS)  # traceparent by request id

    def record_forecasts(
        self,
        inputs: Sequence[predictor_pb2.ForecastInput],
        answers: Sequence[ImmediateForecast],
        began_s: float,
        now_s: float,
    ) -> None:
        """Records one Forecast call; `answers` has one entry per input."""
        if not self._spans.on:
            return
        for message, answer in zip(inputs, answers, strict=True):
            if not message.traceparent:
                continue
            attributes: dict[str, Value] = {
                REQUEST_ID: message.request_id,
                "foretoken.forecast.source": answer.pair.given.source,
                "foretoken.forecast.stage": answer.stage,
                "foretoken.forecast.batch": len(inputs),
            }
            self._spans.record("predict", message.traceparent, began_s, now_s, attributes)
            self._unread[message.request_id] = message.traceparent

    def record_reading(self, read: ReadingResult, now_s: float) -> None:
        """Records that prompts were read and their improved forecasts sent."""
        if not self._unread:
            return
        for (request_id, forecast), at_s in zip(read.improved, read.requested_at_s, strict=True):
            parent = self._unread.pop(request_id, "")
            attributes = {REQUEST_ID: request_id, "foretoken.forecast.source": forecast.source}
            self._spans.record("read", parent, at_s, now_s, attributes)
