"""Between the batcher's columns and their messages. Nothing a message says is trusted."""

from collections.abc import Sequence

import numpy as np

from protos import batcher_pb2, common_pb2
from services.batcher.group import Columns, Decision, GroupView
from services.forecast import MOST_TOKENS, Forecast, ForecastTable, Ints
from services.runtime.codec import decode_forecast
from services.runtime.errors import InvalidArgument


def decode_forecasts(messages: Sequence[common_pb2.Forecast]) -> list[Forecast]:
    return [_decode_forecast(f"forecasts[{i}]", message) for i, message in enumerate(messages)]


def _decode_forecast(field: str, message: common_pb2.Forecast) -> Forecast:
    try:
        return decode_forecast(message)
    except ValueError as error:
        raise InvalidArgument(field, str(error)) from None


def decode_group(
    i: int, message: batcher_pb2.Group, table: ForecastTable, forecasts: int
) -> GroupView:
    """A group's columns over the call's forecasts; raises InvalidArgument naming the field."""
    return GroupView(
        message.kv_tokens,
        message.max_running,
        _decode_columns(f"groups[{i}].running", message.running, forecasts),
        _decode_columns(f"groups[{i}].queued", message.queued, forecasts),
        table,
    )


def _decode_columns(field: str, message: batcher_pb2.Candidates, forecasts: int) -> Columns:
    columns = {
        "prompt_tokens": _column(message.prompt_tokens),
        "output_tokens": _column(message.output_tokens),
        "max_tokens": _column(message.max_tokens),
        "forecast": _column(message.forecast),
    }
    rows = len(columns["prompt_tokens"])
    for name, values in columns.items():
        if len(values) != rows:
            raise InvalidArgument(f"{field}.{name}", f"must have {rows} rows, got {len(values)}")
        most = forecasts - 1 if name == "forecast" else MOST_TOKENS
        _require_below(f"{field}.{name}", values, most)
    return Columns(*columns.values())


def _column(values: Sequence[int]) -> Ints:
    return np.fromiter(values, np.int64, len(values))


def _require_below(field: str, values: Ints, most: int) -> None:
    if len(values) and values.max() > most:
        raise InvalidArgument(field, f"must be at most {most}, got {values.max()}")


def encode_decision(worker_id: str, decision: Decision) -> batcher_pb2.Batch:
    return batcher_pb2.Batch(
        worker_id=worker_id,
        admit=decision.admit,
        peak_tokens=decision.peak_tokens,
        wait_reason=decision.wait.reason if decision.wait else "",
    )
