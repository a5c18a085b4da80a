"""Messages between a scheduler and its batcher: candidates and arrangements.

Decoding validates all columns, also against each other, before it returns.
"""

from collections.abc import Sequence
from dataclasses import fields
from math import isfinite

import numpy as np

from protos.generated import batcher_pb2
from services.forecast import MAX_FORECAST_TOKENS, MAX_POINTS, Floats, Ints
from services.forecasttable import ForecastTable
from services.policies.decision import Decision
from services.policies.preset import CHOICES, Preset
from services.policies.snapshot import FLOATS, NOWHERE, Candidates, RequestColumns, WorkerSnapshot
from services.runtime.codecs.common import decode_cost_model, encode_cost_model
from services.runtime.errors import InvalidArgument

MAX_FORECASTS = 262_144  # rows of a mirrored table, 2.6 kB each: about 64 default queues
MAX_INT = 2**32 - 1  # the largest row, token or block number; sums of all stay exact
MAX_KV_TOKENS = 2**40
WEIGHT_TOLERANCE = 2e-6  # of a sum of 1; twice that of Forecast, for another order of summation
MAX_WORKER = 2**24  # the largest number of a worker: attachments of a scheduler; counted by number
MAX_ROW = 2**24  # the largest row of a request; policies have columns by row
_MINIMA = {"home": NOWHERE, "priority": -(2**31)}  # of integer columns; 0 for others
_MAXIMA = {"home": MAX_WORKER}  # MAX_INT for others


def encode_hello(preset: Preset) -> batcher_pb2.ArrangeMessage:
    choices = {name: str(getattr(preset, name)) for name in CHOICES}
    hello = batcher_pb2.ArrangeHello(preset=preset.name, choices=choices, params=preset.params)
    return batcher_pb2.ArrangeMessage(hello=hello)


def decode_hello(message: batcher_pb2.ArrangeHello) -> Preset:
    """Raises InvalidArgument for an unknown choice or parameter."""
    missing = [name for name in CHOICES if name not in message.choices]
    if missing:
        raise InvalidArgument("hello.choices", f"{', '.join(missing)} missing")
    choices = {name: message.choices[name] for name in CHOICES}
    try:
        return Preset(message.preset, **choices, params=dict(message.params))
    except ValueError as error:
        raise InvalidArgument("hello", str(error)) from None


class SentForecasts:
    """The rows of a forecast table that one stream's peer has received, so that each version of a
    row is sent once."""

    def __init__(self, table: ForecastTable):
        self._table = table
        self._versions: dict[int, int] = {}

    def unsent(self, rows: Ints) -> list[batcher_pb2.ForecastRow]:
        """Messages for the rows that the peer does not have in the current version."""
        unsent = []
        for row in np.unique(rows).tolist():
            edition = self._table.edition(row)
            if self._versions.get(row) != edition:
                self._versions[row] = edition
                points, weights = self._table.points_of(row)
                unsent.append(
                    batcher_pb2.ForecastRow(
                        row=row, points=points.tolist(), weights=weights.tolist()
                    )
                )
        return unsent


def encode_candidates(candidates: Candidates, sent: SentForecasts) -> batcher_pb2.ArrangeMessage:
    jobs = candidates.jobs
    message = batcher_pb2.Candidates(
        round=candidates.round,
        now=candidates.now,
        rows=_ints(candidates.rows),
        is_running=candidates.is_running.astype(np.uint8).tobytes(),
        key=_floats(candidates.key),
        queue_key=_floats(candidates.queue_key),
        columns={
            each.name: (_floats if each.name in FLOATS else _ints)(getattr(jobs, each.name))
            for each in fields(RequestColumns)
        },
        workers=[_encode_worker(worker) for worker in candidates.workers],
        forecasts=sent.unsent(jobs.forecast),
        cached=_ints(candidates.cached.reshape(-1)),
        numbers=candidates.numbers,
        notes={name: _floats(column) for name, column in candidates.notes.items()},
    )
    return batcher_pb2.ArrangeMessage(candidates=message)


def decode_candidates(message: batcher_pb2.Candidates, table: ForecastTable) -> Candidates:
    """The candidates; writes their new forecasts to the table. Raises InvalidArgument."""
    if not isfinite(message.now):
        raise InvalidArgument("now", "must be finite")
    for forecast in message.forecasts:
        _write_forecast(table, forecast)
    rows = _read_ints(message.rows, "rows", most=MAX_ROW)
    count = len(rows)
    if len(np.unique(rows)) < count:
        raise InvalidArgument("rows", "must be unique")
    unknown = message.columns.keys() - {each.name for each in fields(RequestColumns)}
    if unknown:
        raise InvalidArgument("columns", f"unknown: {', '.join(sorted(unknown))}")
    columns = {
        each.name: _read_column(message, each.name, count) for each in fields(RequestColumns)
    }
    known = np.unique(columns["forecast"]).tolist()
    if not all(row < table.rows and table.edition(row) for row in known):
        raise InvalidArgument("columns['forecast']", "names a row without a forecast")
    workers = _decode_workers(message.workers)
    runs = _parallel(_read(message.is_running, np.uint8, "is_running"), count, "is_running") > 0
    if np.any(columns["home"][runs] == NOWHERE):
        raise InvalidArgument("is_running", "a running request must have a home")
    return Candidates(
        message.round,
        message.now,
        rows,
        runs,
        _parallel(_read_floats(message.key, "key"), count, "key"),
        _parallel(_read_floats(message.queue_key, "queue_key"), count, "queue_key"),
        RequestColumns(**columns),
        workers,
        _read_cached(message.cached, count, len(workers)),
        dict(message.numbers),
        {
            name: _parallel(_read_floats(data, name), count, f"notes[{name!r}]")
            for name, data in message.notes.items()
        },
    )


def _read_column(message: batcher_pb2.Candidates, column: str, count: int) -> np.ndarray:
    name = f"columns[{column!r}]"
    if column not in message.columns:
        raise InvalidArgument("columns", f"{column} is missing")
    data = message.columns[column]
    if column in FLOATS:
        return _parallel(_read_floats(data, name), count, name)
    bounds = _MINIMA.get(column, 0), _MAXIMA.get(column, MAX_INT)
    return _parallel(_read_ints(data, name, *bounds), count, name)


def _read_cached(data: bytes, rows: int, workers: int) -> Ints:
    cached = _read_ints(data, "cached")
    if len(cached) not in (0, rows * workers):
        raise InvalidArgument("cached", "must have one number per row and worker, or none")
    return cached.reshape((rows, workers) if len(cached) else (0, 0))


def encode_decision(decision: Decision) -> batcher_pb2.Arrangement:
    return batcher_pb2.Arrangement(
        round=decision.round,
        workers=[
            batcher_pb2.WorkerDecision(
                worker=share.worker,
                run=share.run.tolist(),
                limits=share.limits.tolist(),
                pause=share.pause.tolist(),
                victims=share.victims.tolist(),
                peak_tokens=share.peak_tokens,
                lockstep=share.lockstep,
            )
            for share in decision.workers
        ],
        next_s=decision.next_s,
        not_before_s=decision.not_before_s,
        explanations=batcher_pb2.WaitExplanations(
            rows=decision.explanations.rows.tolist(),
            reasons=decision.explanations.reasons.tolist(),
            first_values=decision.explanations.first_values.tolist(),
            second_values=decision.explanations.second_values.tolist(),
        ),
        numbers=decision.numbers,
        notes={name: _floats(column) for name, column in decision.notes.items()},
    )


def _write_forecast(table: ForecastTable, message: batcher_pb2.ForecastRow) -> None:
    points, weights = np.array(message.points), np.array(message.weights)
    valid = (
        1 <= len(points) <= MAX_POINTS
        and len(points) == len(weights)
        and bool(np.all(np.diff(points) > 0))
        and points[0] > 0
        and points[-1] <= MAX_FORECAST_TOKENS
        and bool(np.all(weights > 0))
        and abs(float(weights.sum()) - 1) < WEIGHT_TOLERANCE
        and message.row < MAX_FORECASTS
    )
    if not valid:
        raise InvalidArgument(
            "forecasts", f"row {message.row} is not a distribution, or not below {MAX_FORECASTS}"
        )
    table.put(message.row, points, weights)


def _encode_worker(worker: WorkerSnapshot) -> batcher_pb2.WorkerSnapshot:
    return batcher_pb2.WorkerSnapshot(
        number=worker.number,
        model=worker.model,
        kv_tokens=worker.kv_tokens,
        block_tokens=worker.block_tokens,
        max_running=worker.max_running,
        reach_tokens=worker.reach_tokens,
        shared_blocks=worker.shared_blocks,
        cost=encode_cost_model("", worker.cost),
        adapter_slots=worker.adapter_slots,
        adapter_turn_steps=worker.adapter_turn_steps,
    )


def _decode_workers(messages: Sequence[batcher_pb2.WorkerSnapshot]) -> tuple[WorkerSnapshot, ...]:
    if len({message.number for message in messages}) < len(messages):
        raise InvalidArgument("workers", "numbers must be unique")
    if any(message.number > MAX_WORKER for message in messages):
        raise InvalidArgument("workers", f"numbers must be at most {MAX_WORKER}")
    return tuple(_decode_worker(message) for message in messages)


def _decode_worker(message: batcher_pb2.WorkerSnapshot) -> WorkerSnapshot:
    if not message.block_tokens:
        raise InvalidArgument("workers", "block_tokens must be positive")
    if message.kv_tokens > MAX_KV_TOKENS:
        raise InvalidArgument("workers", f"kv_tokens must be at most {MAX_KV_TOKENS}")
    cost = message.cost
    if not all(
        isfinite(value)
        for value in (cost.base_s, cost.prefill_token_s, cost.decode_seq_s, cost.context_token_s)
    ):
        raise InvalidArgument("workers", "cost must be finite")
    try:
        known = decode_cost_model(cost)
    except ValueError as error:
        raise InvalidArgument("workers", str(error)) from error
    return WorkerSnapshot(
        message.number,
        message.model,
        message.kv_tokens,
        message.block_tokens,
        message.max_running,
        message.reach_tokens,
        known,
        message.shared_blocks,
        adapter_slots=message.adapter_slots,
        adapter_turn_steps=message.adapter_turn_steps,
    )


def _ints(values: Ints) -> bytes:
    return values.astype("<i8", copy=False).tobytes()


def _floats(values: Floats) -> bytes:
    return values.astype("<f8", copy=False).tobytes()


def _read(data: bytes, kind: type[np.generic], name: str) -> np.ndarray:
    size = np.dtype(kind).itemsize
    if len(data) % size:
        raise InvalidArgument(name, f"has {len(data)} bytes, not a multiple of {size}")
    return np.frombuffer(data, np.dtype(kind).newbyteorder("<")).astype(kind, copy=False)


def _read_ints(data: bytes, name: str, least: int = 0, most: int = MAX_INT) -> Ints:
    values: Ints = _read(data, np.int64, name)
    if len(values) and not least <= values.min() <= values.max() <= most:
        raise InvalidArgument(name, f"must lie in [{least}, {most}]")
    return values


def _read_floats(data: bytes, name: str) -> Floats:
    values: Floats = _read(data, np.float64, name)
    if np.isnan(values).any():
        raise InvalidArgument(name, "must not be NaN")
    return values


def _parallel(values: np.ndarray, count: int, name: str) -> np.ndarray:
    if len(values) != count:
        raise InvalidArgument(name, f"must have {count} rows, got {len(values)}")
    return values


def decode_floats(data: bytes, name: str) -> tuple[float, ...]:
    return tuple(_read_floats(data, name).tolist())
