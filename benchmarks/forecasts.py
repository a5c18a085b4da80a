"""Cost of forecasts without the encoder: members, blend, retrieval, and conditioning on progress.

    python -m benchmarks.forecasts [--json FILE] [--quick]

Medians with their spread, one PyTorch thread. The blend is fitted on generated requests with the
default encoder's dimension; `foretoken evaluate` times forecasts of real prompts with the encoder.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.report import Figure, figure, parser, show, write
from benchmarks.harness.timing import time_calls
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
    options = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    repeats = 20 if options.quick else 300
    rng = np.random.default_rng(0)
    blend = _blend(rng, 100 if options.quick else 2_000)
    queries = [_query(rng) for _ in range(repeats)]
    frames = [Frame.from_queries([query]) for query in queries]

    def time_member(member: Member) -> Figure:
        return time_calls(lambda i: member.spread(frames[i]), repeats)

    figures = {name: time_member(member) for name, member in blend.members.items()}
    for known in ("new", "known"):
        figures[f"blend, {known} prompt"] = time_calls(
            lambda i: blend.forecast([queries[i]]), repeats
        )
    figures |= _retrieval(rng, repeats, 2_000 if options.quick else REMEMBERED)
    show("A forecast without its encoder", ("call", "ms"), list(figures.items()))
    progress = _progress(rng, repeats)
    show(f"{IN_PROGRESS} requests in progress", ("call", "µs per request"), list(progress.items()))
    times_ms = {name: each.values for name, each in figures.items()}
    write(options.json, {"ms": times_ms, "us": {n: e.values for n, e in progress.items()}})


def _retrieval(rng: np.random.Generator, repeats: int, remembered: int) -> dict[str, Figure]:
    index = EmbeddingIndex(remembered)
    topics = rng.normal(size=(TOPICS, 2 * DIM)).astype(np.float32)

    def vectors(count: int) -> NDArray[np.float32]:
        near = topics[rng.integers(0, TOPICS, count)] + 0.7 * rng.normal(size=(count, 2 * DIM))
        return np.asarray(near / np.linalg.norm(near, axis=1, keepdims=True), np.float32)

    for _ in range(remembered // 1_000):
        index.add(vectors(1_000), rng.integers(1, 900, 1_000).tolist())
    new = vectors(repeats)
    return {
        f"retrieval over {remembered:,}": time_calls(
            lambda i: index.find(new[[i]]).spread(), repeats
        ),
        f"remember one of {remembered:,}": time_calls(
            lambda i: index.add(new[[i]], [5.0]), repeats
        ),
    }


def _progress(rng: np.random.Generator, repeats: int) -> dict[str, Figure]:
    forecasts = [
        from_lengths(rng.lognormal(5, 1, 200).tolist(), 4_096, "x") for _ in range(IN_PROGRESS)
    ]
    table = _make_table(forecasts)
    # Row i of the table holds forecast i: the table has as many rows as there are forecasts.
    rows, caps = np.arange(IN_PROGRESS), np.full(IN_PROGRESS, 4_096)
    generated = rng.integers(0, 300, IN_PROGRESS)
    calls: dict[str, Callable[[int], object]] = {
        "build the table": lambda _: _make_table(forecasts),
        "mean given progress": lambda _: table.mean(rows, generated, caps),
        "draw given progress": lambda _: table.sample(rng, rows, generated, caps),
    }
    return {
        name: figure([ms * 1e3 / IN_PROGRESS for ms in time_calls(call, repeats).values])
        for name, call in calls.items()
    }


def _make_table(forecasts: Sequence[Forecast]) -> ForecastTable:
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
    no_instruction = np.zeros((LAYERS, DIM), np.float32)
    numbers = rng.random(len(NUMBERS)).astype(np.float32)
    return Query("m", "chat", 30, 4_096, Features(no_instruction, user_input, words, numbers))


if __name__ == "__main__":
    main()
