"""What schedulers and pickers may send: checked before any of it is used. Pure."""

from collections.abc import Sequence

from protos.generated import predictor_pb2
from services.core import MAX_LIVE_ANSWERS
from services.forecast import MAX_FORECAST_TOKENS
from services.predictor.learning.records import MAX_NAME_CHARS
from services.runtime.border import check_name
from services.runtime.errors import InvalidArgument

MAX_PER_CALL = 1_024  # inputs of one Forecast; outcomes, live answers and ended ids of one Observe


def check_forecast(request: predictor_pb2.ForecastRequest) -> None:
    """Raises InvalidArgument, which names the field. O(inputs)."""
    _require_at_most("inputs", len(request.inputs))
    for i, message in enumerate(request.inputs):
        where = f"inputs[{i}]"
        _require_named(where, message.model, message.application)
        for field in ("request_id", "traceparent"):
            check_name(f"{where}.{field}", getattr(message, field), least=0)
        if not 1 <= message.max_tokens <= MAX_FORECAST_TOKENS:
            sentence = f"must be 1 to {MAX_FORECAST_TOKENS}, got {message.max_tokens}"
            raise InvalidArgument(f"{where}.max_tokens", sentence)


def check_observed(request: predictor_pb2.ObserveOutcomesRequest) -> None:
    """Raises InvalidArgument, which names the field. Single outcomes that cannot be true are left
    out elsewhere. O(outcomes + live answers)."""
    _require_at_most("outcomes", len(request.outcomes))
    _check_live(request.live)
    _require_at_most("ended_ids", len(request.ended_ids))
    for name in request.ended_ids:
        check_name("ended_ids", name)
    check_name("reporter", request.reporter, least=0)


def _check_live(live: Sequence[predictor_pb2.LiveAnswers]) -> None:
    _require_at_most("live", len(live))
    answers = sum(len(message.output_tokens) for message in live)
    if answers > MAX_LIVE_ANSWERS:
        raise InvalidArgument("live", f"at most {MAX_LIVE_ANSWERS} answers, got {answers}")
    for i, message in enumerate(live):
        _require_named(f"live[{i}]", message.model, message.application)
        if max(message.output_tokens, default=0) > MAX_FORECAST_TOKENS:
            raise InvalidArgument(f"live[{i}].output_tokens", f"at most {MAX_FORECAST_TOKENS}")


def _require_at_most(field: str, count: int) -> None:
    if count > MAX_PER_CALL:
        raise InvalidArgument(field, f"at most {MAX_PER_CALL} per call, got {count}")


def _require_named(where: str, model: str, application: str) -> None:
    if max(len(model), len(application)) > MAX_NAME_CHARS:
        raise InvalidArgument(
            where, f"model and application names have at most {MAX_NAME_CHARS} characters"
        )
