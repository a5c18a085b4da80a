"""Runs a complete evaluation: from names of files and predictors to its result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.data.examples import ReportProgress, prompt_of
from lab.evaluation.judge import PROMPTLESS, Judgement, PredictorEvaluator
from lab.evaluation.magnus_ladder import (
    MAX_TEST_ROWS_PER_TASK,
    MAX_TRAIN_ROWS_PER_TASK,
    Ladder,
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
from services.predictor.predictors import PREDICTORS, build, require_known

OpenEncoder = Callable[[str], MakeExtractor]  # name → factory of extractors that share it


@dataclass(frozen=True)
class Evaluation:
    """Settings of an evaluation.

    train, data: files to train on and to evaluate. predictors: names; empty for all. rows: limit
    per file, 0 for all. max_tokens: of requests without a cap. online: outcomes learned from a set
    that is not trained on. earlier: an earlier report, for its in-domain tau.
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
    evaluation: Evaluation, open_encoder: OpenEncoder, progress: ReportProgress
) -> EvaluationResult:
    """Evaluates the predictors. Raises ValueError for invalid input. The encoder is opened only if
    a predictor reads prompts."""
    names = [*dict.fromkeys(evaluation.predictors)] or [*PREDICTORS]
    for name in names:
        require_known(name)
    earlier = read_json(evaluation.earlier) if evaluation.earlier else []
    rows = read_split(evaluation.train, evaluation.data, evaluation.rows, evaluation.seed)
    make_extractor = open_encoder(evaluation.encoder) if set(names) - PROMPTLESS else None
    extractor = make_extractor() if make_extractor else None
    store = open_store(evaluation.cache, evaluation.encoder) if extractor else None
    data = prepare(rows, extractor, store, evaluation.max_tokens, evaluation.seed, progress)
    evaluator = PredictorEvaluator(
        data.train,
        data.sets,
        evaluation.max_tokens,
        evaluation.online,
        evaluation.seed,
        make_extractor,
        progress,
    )
    judgements: list[Judgement] = []
    for name in names:
        make = partial(build, name, Options())
        judgements += evaluator.judge_oracle() if name == ORACLE else evaluator.judge(name, make)
    return EvaluationResult(
        judgements=judgements,
        draws=draws_agree(rows.judged),
        ladders=_ladders(data, evaluation.seed, progress)
        if extractor and evaluation.ladder
        else {},
        earlier=earlier,
    )


def _ladders(data: PreparedData, seed: int, progress: ReportProgress) -> dict[str, Ladder]:
    """Returns the ladder of each data set and of its tasks; the key "" holds all sets together.

    Tasks are sampled to similar sizes, as in the paper.
    """
    progress("Magnus' ladder", 0, 0)
    trained = sample_rows_per_task(data.rows.train, MAX_TRAIN_ROWS_PER_TASK, seed)
    all_judged = [row for part in data.sets for row in part.rows]
    judged = sample_rows_per_task(all_judged, MAX_TEST_ROWS_PER_TASK, seed)
    train, test = (
        requests_of(rows, [data.features[prompt_of(row)] for row in rows])
        for rows in (trained, judged)
    )
    forecasts = ladder_forecasts(train, test, seed)
    sets, tasks = np.array([r.data for r in judged]), np.array([r.task for r in judged])

    def rmse(chosen: NDArray[np.bool_]) -> dict[str, float]:
        return rmse_of(forecasts, test.output_tokens, chosen)

    ladders: dict[str, Ladder] = {"": {"": rmse(np.full(len(judged), True))}}
    for name in np.unique(sets):
        in_set = sets == name
        by_task = {str(task): rmse(in_set & (tasks == task)) for task in np.unique(tasks[in_set])}
        ladders[str(name)] = {"": rmse(in_set)} | by_task
    return ladders
