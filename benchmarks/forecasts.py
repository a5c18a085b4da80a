"""The cost of forecasts without the encoder: members, blend, retrieval, and progress.

    python -m benchmarks.forecasts [--json FILE] [--quick]

Medians with their spread, one PyTorch thread. The blend is fitted on generated requests with the
default encoder's dimension; `evaluate` times forecasts of real prompts, encoder included.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.report import Figure, figure, options, show, write
from services.forecast import Forecast, from_lengths
from services.forecasttable import ForecastTable
from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.members import Member
from services.predictor.interface import LAYERS, NUMBERS, Example, Features, Options, Query
from services.predictor.models.frame import Frame
from services.predictor.models.retrieval import EmbeddingIndex
from services.predictor.predictors import build

DIM = 384
REMEMBERED, TOPICS = 50_000, 2_000
IN_PROGRESS = 256


def main() -> None:
    given = options("Milliseconds of a forecast, and microseconds of its conditioning.")
    torch.set_num_threads(1)
    repeats = 20 if given.quick else 300
    rng = np.random.default_rng(0)
    blend = _blend(rng, 100 if given.quick else 2_000)
    fresh = [_query(rng) for _ in range(repeats)]
    took = _members(blend, fresh)
    took["blend, new prompt"] = _each(lambda i: blend.forecast([fresh[i]]), repeats)
    took["blend, known prompt"] = _each(lambda i: blend.forecast([fresh[i]]), repeats)
    took |= _retrieval(rng, repeats, 2_000 if given.quick else REMEMBERED)
    show("A forecast without its encoder", ("what", "ms"), list(took.items()))
    progress = _progress(rng, repeats)
    show(f"{IN_PROGRESS} requests in progress", ("what", "µs a request"), list(progress.items()))
    figures = {name: each.values for name, each in took.items()}
    write(given.json, {"ms": figures, "us": {n: e.values for n, e in progress.items()}})


def _members(blend: ContentPredictor, fresh: Sequence[Query]) -> dict[str, Figure]:
    frames = [Frame.from_queries([query]) for query in fresh]

    def timed(member: Member) -> Figure:
        return _each(lambda i: member.spread(frames[i]), len(frames))

    return {name: timed(member) for name, member in blend.members.items()}


def _retrieval(rng: np.random.Generator, repeats: int, remembered: int) -> dict[str, Figure]:
    memory = EmbeddingIndex(remembered)
    topics = rng.normal(size=(TOPICS, 2 * DIM)).astype(np.float32)

    def vectors(count: int) -> NDArray[np.float32]:
        near = topics[rng.integers(0, TOPICS, count)] + 0.7 * rng.normal(size=(count, 2 * DIM))
        return np.asarray(near / np.linalg.norm(near, axis=1, keepdims=True), np.float32)

    for _ in range(remembered // 1_000):
        memory.add(vectors(1_000), rng.integers(1, 900, 1_000).tolist())
    asked = vectors(repeats)
    return {
        f"retrieval over {remembered:,}": _each(
            lambda i: memory.find(asked[[i]]).spread(), repeats
        ),
        f"remember one of {remembered:,}": _each(lambda i: memory.add(asked[[i]], [5.0]), repeats),
    }


def _progress(rng: np.random.Generator, repeats: int) -> dict[str, Figure]:
    forecasts = [
        from_lengths(rng.lognormal(5, 1, 200).tolist(), 4_096, "x") for _ in range(IN_PROGRESS)
    ]
    table = _laid(forecasts)
    # Interned into as many rows as there are, they stand in their order.
    which, caps = np.arange(IN_PROGRESS), np.full(IN_PROGRESS, 4_096)
    generated = rng.integers(0, 300, IN_PROGRESS)
    work: dict[str, Callable[[int], object]] = {
        "lay the table": lambda _: _laid(forecasts),
        "mean given progress": lambda _: table.mean(which, generated, caps),
        "draw given progress": lambda _: table.sample(rng, which, generated, caps),
    }
    return {
        name: figure([ms * 1e3 / IN_PROGRESS for ms in _each(do, repeats).values])
        for name, do in work.items()
    }


def _laid(forecasts: Sequence[Forecast]) -> ForecastTable:
    table = ForecastTable(len(forecasts))
    for forecast in forecasts:
        table.intern(forecast)
    return table


def _blend(rng: np.random.Generator, examples: int) -> ContentPredictor:
    blend = build("blend", Options())
    assert isinstance(blend, ContentPredictor)
    blend.learn([Example(_query(rng), int(rng.integers(1, 900))) for _ in range(examples)])
    blend.fit()
    return blend


def _query(rng: np.random.Generator) -> Query:
    user_input = rng.normal(size=(LAYERS, DIM)).astype(np.float32)
    user_input /= np.linalg.norm(user_input, axis=1, keepdims=True)
    words = np.unique(rng.integers(0, 5_000, 30)).astype(np.int32)
    nothing = np.zeros((LAYERS, DIM), np.float32)
    numbers = rng.random(len(NUMBERS)).astype(np.float32)
    return Query("m", "chat", 30, 4_096, Features(nothing, user_input, words, numbers))


def _each(do: Callable[[int], object], repeats: int) -> Figure:
    """Milliseconds per call."""
    took = []
    for i in range(repeats):
        started_s = time.perf_counter()
        do(i)
        took.append((time.perf_counter() - started_s) * 1e3)
    return figure(took)


if __name__ == "__main__":
    main()
