"""Runs a complete evaluation: from names of files and predictors to its result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.data.examples import ReportProgress, prompt_of
from lab.data.rows import Row
from lab.evaluation.judge import PROMPTLESS, Judgement, PredictorEvaluator
from lab.evaluation.magnus_ladder import (
    MAX_TEST_ROWS_PER_TASK,
    MAX_TRAIN_ROWS_PER_TASK,
    Ladder,
    Requests,
    ladder_forecasts,
    requests_of,
    rmse_of,
    sample_rows_per_task,
)
from lab.evaluation.prepare import PreparedData, open_store, prepare, read_split
from lab.evaluation.report import EvaluationResult, draws_agree, read_json
from lab.evaluation.timing import MakeExtractor
from services.predictor.interface import Options
from services.predictor.models.oracle import SOURCE as ORACLE
from services.predictor.predictors import PREDICTORS, build

Open = Callable[[str], MakeExtractor]  # encoder name → factory of extractors that share it


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate, and how.

    predictors: names; empty for all. rows: limit per file, 0 for all.
    max_tokens: for requests without a cap. online: outcomes learned from a set not trained on.
    earlier: an earlier report, for its in-domain tau.
    """

    train: Sequence[str]
    data: Sequence[str]
    predictors: Sequence[str] = ()
    encoder: str = ""
    cache: str = ""
    rows: int = 0
    max_tokens: int = 4096
    online: int = 1000
    ladder: bool = True
    seed: int = 0
    earlier: Path | None = None


def evaluate(
    evaluation: Evaluation, open_encoder: Open, progress: ReportProgress
) -> EvaluationResult:
    """Evaluates the predictors. Raises ValueError for invalid input. The encoder is opened only if
    a predictor reads prompts."""
    names = _require_known([*dict.fromkeys(evaluation.predictors)] or [*PREDICTORS])
    earlier = read_json(evaluation.earlier) if evaluation.earlier else []
    rows = read_split(evaluation.train, evaluation.data, evaluation.rows, evaluation.seed)
    fresh = open_encoder(evaluation.encoder) if set(names) - PROMPTLESS else None
    store = open_store(evaluation.cache, evaluation.encoder) if fresh else None
    material = prepare(
        rows, fresh() if fresh else None, store, evaluation.max_tokens, evaluation.seed, progress
    )
    return EvaluationResult(
        judgements=_judged(evaluation, names, material, fresh, progress),
        draws=draws_agree(rows.judged),
        ladders=_ladders(material, evaluation.seed, progress)
        if fresh and evaluation.ladder
        else {},
        earlier=earlier,
    )


def _require_known(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in PREDICTORS:
            known = ", ".join(sorted(PREDICTORS))
            raise ValueError(f"unknown predictor {name!r}; known: {known}")
    return names


def _judged(
    evaluation: Evaluation,
    names: Sequence[str],
    material: PreparedData,
    fresh: MakeExtractor | None,
    progress: ReportProgress,
) -> list[Judgement]:
    bench = PredictorEvaluator(
        material.train,
        material.sets,
        evaluation.max_tokens,
        evaluation.online,
        evaluation.seed,
        fresh,
        progress,
    )
    found: list[Judgement] = []
    for name in names:
        make = partial(build, name, Options())
        found += bench.judge_oracle() if name == ORACLE else bench.judge(name, make)
    return found


def _ladders(material: PreparedData, seed: int, progress: ReportProgress) -> dict[str, Ladder]:
    """Ladder of each data set and of its tasks; the key "" holds all sets together.

    Tasks are sampled to similar sizes, as in the paper.
    """
    progress("Magnus' ladder", 0, 0)
    trained = sample_rows_per_task(material.rows.train, MAX_TRAIN_ROWS_PER_TASK, seed)
    all_judged = [row for part in material.sets for row in part.rows]
    judged = sample_rows_per_task(all_judged, MAX_TEST_ROWS_PER_TASK, seed)
    test = _requests(judged, material)
    forecasts = ladder_forecasts(_requests(trained, material), test, seed)
    data, tasks = np.array([r.data for r in judged]), np.array([r.task for r in judged])

    def rmse(chosen: NDArray[np.bool_]) -> dict[str, float]:
        return rmse_of(forecasts, test.output_tokens, chosen)

    found: dict[str, Ladder] = {"": {"": rmse(np.full(len(judged), True))}}
    for name in np.unique(data):
        own = data == name
        of_tasks = {str(task): rmse(own & (tasks == task)) for task in np.unique(tasks[own])}
        found[str(name)] = {"": rmse(own)} | of_tasks
    return found


def _requests(rows: Sequence[Row], material: PreparedData) -> Requests:
    return requests_of(rows, [material.features[prompt_of(row)] for row in rows])
