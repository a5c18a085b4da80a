"""What a scheduler and a batcher of its own say to each other: contests and arrangements.

Nothing a message says is trusted: columns are checked against one another before any is used.
"""

from dataclasses import fields
from typing import get_type_hints

import numpy as np

from protos import batcher_pb2
from services.forecast import MAX_POINTS, Floats, ForecastTable, Ints
from services.policies.decision import Decision
from services.policies.preset import CHOICES, Preset
from services.policies.snapshot import Contest, Jobs, Worker
from services.runtime.codec import decode_cost_model, encode_cost_model
from services.runtime.errors import InvalidArgument

_FLOATS = frozenset(name for name, kind in get_type_hints(Jobs).items() if kind == Floats)
MOST_FORECASTS = 1_048_576  # rows of a mirrored table: more than a scheduler ever queues


def encode_hello(preset: Preset) -> batcher_pb2.ArrangeMessage:
    choices = {name: str(getattr(preset, name)) for name in CHOICES}
    hello = batcher_pb2.ArrangeHello(preset=preset.name, choices=choices, params=preset.params)
    return batcher_pb2.ArrangeMessage(hello=hello)


def decode_hello(message: batcher_pb2.ArrangeHello) -> Preset:
    """Raises InvalidArgument where a choice or a number is unknown here."""
    missing = [name for name in CHOICES if name not in message.choices]
    if missing:
        raise InvalidArgument("hello.choices", f"{', '.join(missing)} missing")
    choices = {name: message.choices[name] for name in CHOICES}
    try:
        return Preset(message.preset, **choices, params=dict(message.params))
    except ValueError as error:
        raise InvalidArgument("hello", str(error)) from None


class Telling:
    """What one stream's other end has been told of a forecast table: each row once."""

    def __init__(self, table: ForecastTable):
        self._table = table
        self._told: dict[int, int] = {}

    def news(self, rows: Ints) -> list[batcher_pb2.ForecastRow]:
        """Those of these rows that are not there as they are now."""
        news = []
        for row in np.unique(rows).tolist():
            edition = self._table.edition(row)
            if self._told.get(row) != edition:
                self._told[row] = edition
                points, weights = self._table.points_of(row)
                news.append(
                    batcher_pb2.ForecastRow(
                        row=row, points=points.tolist(), weights=weights.tolist()
                    )
                )
        return news


def encode_contest(contest: Contest, telling: Telling) -> batcher_pb2.ArrangeMessage:
    jobs = contest.jobs
    message = batcher_pb2.Contest(
        round=contest.round,
        now=contest.now,
        rows=_ints(contest.rows),
        runs=contest.runs.astype(np.uint8).tobytes(),
        key=_floats(contest.key),
        line=_floats(contest.line),
        columns={
            each.name: (_floats if each.name in _FLOATS else _ints)(getattr(jobs, each.name))
            for each in fields(Jobs)
        },
        seats=[_encode_seat(worker) for worker in contest.workers],
        forecasts=telling.news(jobs.forecast),
    )
    return batcher_pb2.ArrangeMessage(contest=message)


def decode_contest(message: batcher_pb2.Contest, table: ForecastTable) -> Contest:
    """A contest, its new forecasts written to the table; raises InvalidArgument."""
    for told in message.forecasts:
        _put(table, told)
    rows = _read(message.rows, np.int64, "rows")
    count = len(rows)
    columns = {}
    for each in fields(Jobs):
        kind = np.float64 if each.name in _FLOATS else np.int64
        name = f"columns[{each.name!r}]"
        columns[each.name] = _parallel(_read(message.columns[each.name], kind, name), count, name)
    known = columns["forecast"]
    if count and not (known.min() >= 0 and known.max() < table.rows):
        raise InvalidArgument("columns['forecast']", "names a row that was never told")
    return Contest(
        message.round,
        message.now,
        rows,
        _parallel(_read(message.runs, np.uint8, "runs"), count, "runs") > 0,
        _parallel(_read(message.key, np.float64, "key"), count, "key"),
        _parallel(_read(message.line, np.float64, "line"), count, "line"),
        Jobs(**columns),
        tuple(_decode_seat(seat) for seat in message.seats),
    )


def encode_decision(decision: Decision) -> batcher_pb2.Arrangement:
    return batcher_pb2.Arrangement(
        round=decision.round,
        portions=[
            batcher_pb2.Portion(
                worker=share.worker,
                run=share.run.tolist(),
                limits=share.limits.tolist(),
                pause=share.pause.tolist(),
                victims=share.victims.tolist(),
                peak_tokens=share.peak_tokens,
            )
            for share in decision.shares
        ],
        next_s=decision.next_s,
        not_before_s=decision.not_before_s,
    )


def _put(table: ForecastTable, told: batcher_pb2.ForecastRow) -> None:
    points, weights = np.array(told.points), np.array(told.weights)
    sound = (
        1 <= len(points) <= MAX_POINTS
        and len(points) == len(weights)
        and bool(np.all(np.diff(points) > 0))
        and bool(np.all(weights > 0))
        and bool(np.all(np.isfinite(points)))
        and abs(float(weights.sum()) - 1) < 1e-6
        and told.row < MOST_FORECASTS
    )
    if not sound:
        raise InvalidArgument("forecasts", f"row {told.row} is no distribution")
    table.put(told.row, points, weights)


def _encode_seat(worker: Worker) -> batcher_pb2.Seat:
    return batcher_pb2.Seat(
        number=worker.number,
        model=worker.model,
        kv_tokens=worker.kv_tokens,
        block_tokens=worker.block_tokens,
        places=worker.places,
        reach_tokens=worker.reach_tokens,
        shared_blocks=worker.shared_blocks,
        cost=encode_cost_model("", worker.cost),
    )


def _decode_seat(message: batcher_pb2.Seat) -> Worker:
    if not message.block_tokens:
        raise InvalidArgument("seats", "block_tokens must be positive")
    return Worker(
        message.number,
        message.model,
        message.kv_tokens,
        message.block_tokens,
        message.places,
        message.reach_tokens,
        decode_cost_model(message.cost),
        message.shared_blocks,
    )


def _ints(values: Ints) -> bytes:
    return values.astype("<i8", copy=False).tobytes()


def _floats(values: Floats) -> bytes:
    return values.astype("<f8", copy=False).tobytes()


def _read(data: bytes, kind: type[np.generic], name: str) -> np.ndarray:
    size = np.dtype(kind).itemsize
    if len(data) % size:
        raise InvalidArgument(name, f"is no array of {size}-byte elements")
    return np.frombuffer(data, np.dtype(kind).newbyteorder("<")).astype(kind, copy=False)


def _parallel(values: np.ndarray, count: int, name: str) -> np.ndarray:
    if len(values) != count:
        raise InvalidArgument(name, f"must have {count} rows, got {len(values)}")
    return values
