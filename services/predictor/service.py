"""The predictor's servicer: parse, forecast or learn, encode."""

from collections import Counter

from prometheus_client import CollectorRegistry

from protos import predictor_pb2, predictor_pb2_grpc
from services.predictor.config import PredictorConfig
from services.predictor.interface import Options, Query
from services.predictor.metrics import PredictorMetrics
from services.predictor.predictors import build
from services.runtime.codec import decode_outcome, encode_forecast
from services.runtime.errors import InvalidArgument

MOST_PER_CALL = 1_024  # what one Forecast or Observe message may carry
MOST_TOKENS = 2**24 - 1  # longer than any context there is; keeps a forecast table's arithmetic
MOST_NAME_CHARS = 256


class PredictorService(predictor_pb2_grpc.PredictorServicer):
    """Serves the predictor its config names; raises ValueError when there is none of that name."""

    def __init__(self, config: PredictorConfig, registry: CollectorRegistry):
        options = Options(config.window, config.application_min, config.populations_max)
        self._predictor = build(config.model, options)
        self._metrics = PredictorMetrics(registry)

    async def Forecast(
        self, request: predictor_pb2.ForecastRequest, context: object
    ) -> predictor_pb2.ForecastResponse:
        _require_few("inputs", len(request.inputs))
        batch = [_decode_query(i, message) for i, message in enumerate(request.inputs)]
        with self._metrics.forecast_seconds.time():
            forecasts = self._predictor.forecast(batch)
        for source, count in Counter(f.source for f in forecasts).items():
            self._metrics.forecasts.labels(source).inc(count)
        return predictor_pb2.ForecastResponse(forecasts=map(encode_forecast, forecasts))

    async def Observe(
        self, request: predictor_pb2.ObserveOutcomesRequest, context: object
    ) -> predictor_pb2.ObserveOutcomesResponse:
        _require_few("outcomes", len(request.outcomes))
        for i, message in enumerate(request.outcomes):
            _require_named(f"outcomes[{i}]", message.model, message.application)
            if message.output_tokens > MOST_TOKENS:
                raise InvalidArgument(f"outcomes[{i}].output_tokens", f"at most {MOST_TOKENS}")
        learnt = self._predictor.learn([decode_outcome(m) for m in request.outcomes])
        self._metrics.outcomes.labels("yes").inc(learnt)
        self._metrics.outcomes.labels("no").inc(len(request.outcomes) - learnt)
        return predictor_pb2.ObserveOutcomesResponse(version=self._predictor.version)


def _decode_query(i: int, message: predictor_pb2.ForecastInput) -> Query:
    _require_named(f"inputs[{i}]", message.model, message.application)
    if not 1 <= message.max_tokens <= MOST_TOKENS:
        raise InvalidArgument(
            f"inputs[{i}].max_tokens", f"must be 1 to {MOST_TOKENS}, got {message.max_tokens}"
        )
    return Query(
        model=message.model,
        application=message.application,
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        instruction=message.text.instruction,
        user_input=message.text.user_input,
    )


def _require_few(field: str, count: int) -> None:
    if count > MOST_PER_CALL:
        raise InvalidArgument(field, f"at most {MOST_PER_CALL} a call, got {count}")


def _require_named(where: str, model: str, application: str) -> None:
    if max(len(model), len(application)) > MOST_NAME_CHARS:
        raise InvalidArgument(where, f"a name has at most {MOST_NAME_CHARS} characters")
