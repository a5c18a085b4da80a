"""A whole evaluation: from names of files and predictors to findings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lab.data.examples import Tell, prompt_of
from lab.data.rows import Row
from lab.evaluation.judge import BLIND, Bench, Judgement
from lab.evaluation.magnus_ladder import (
    TEST_A_TASK,
    TRAIN_A_TASK,
    Ladder,
    Requests,
    climb,
    requests_of,
    rmse_of,
    some_of_each_task,
)
from lab.evaluation.prepare import Material, open_store, prepare, read_split
from lab.evaluation.report import Findings, draws_agree, read_json
from lab.evaluation.timing import Fresh
from services.predictor.interface import Options
from services.predictor.models.oracle import SOURCE as ORACLE
from services.predictor.predictors import PREDICTORS, build

Open = Callable[[str], Fresh]  # an encoder's name → what makes extractors that share it


@dataclass(frozen=True)
class Evaluation:
    """What to judge, and how.

    predictors: by name, all when empty. rows: at most so many of a file, 0 for all. max_tokens:
    of requests whose row tells no cap. online: outcomes learnt from of a set not trained on.
    earlier: an earlier report, whose in-domain tau stands beside the online one.
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


def evaluate(what: Evaluation, open_encoder: Open, tell: Tell) -> Findings:
    """Raises ValueError for a mistake of the user's. The encoder is opened only if one reads."""
    names = _known([*dict.fromkeys(what.predictors)] or [*PREDICTORS])
    earlier = read_json(what.earlier) if what.earlier else []
    rows = read_split(what.train, what.data, what.rows, what.seed)
    fresh = open_encoder(what.encoder) if set(names) - BLIND else None
    store = open_store(what.cache, what.encoder) if fresh else None
    material = prepare(rows, fresh() if fresh else None, store, what.max_tokens, what.seed, tell)
    return Findings(
        judgements=_judged(what, names, material, fresh, tell),
        draws=draws_agree(rows.judged),
        ladders=_ladders(material, what.seed, tell) if fresh and what.ladder else {},
        earlier=earlier,
    )


def _known(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if name not in PREDICTORS:
            known = ", ".join(sorted(PREDICTORS))
            raise ValueError(f"no predictor is called {name!r}; known: {known}")
    return names


def _judged(
    what: Evaluation, names: Sequence[str], material: Material, fresh: Fresh | None, tell: Tell
) -> list[Judgement]:
    bench = Bench(
        material.train, material.sets, what.max_tokens, what.online, what.seed, fresh, tell
    )
    found: list[Judgement] = []
    for name in names:
        made = partial(build, name, Options())
        found += bench.judge_oracle() if name == ORACLE else bench.judge(name, made)
    return found


def _ladders(material: Material, seed: int, tell: Tell) -> dict[str, Ladder]:
    """The ladder of each data set and of its tasks; all sets together by an empty name.

    As in the paper, no task has more rows than the others by much.
    """
    tell("Magnus' ladder", 0, 0)
    trained = some_of_each_task(material.rows.train, TRAIN_A_TASK, seed)
    all_judged = [row for part in material.sets for row in part.rows]
    judged = some_of_each_task(all_judged, TEST_A_TASK, seed)
    test = _requests(judged, material)
    forecasts = climb(_requests(trained, material), test, seed)
    data, tasks = np.array([r.data for r in judged]), np.array([r.task for r in judged])

    def rmse(chosen: NDArray[np.bool_]) -> dict[str, float]:
        return rmse_of(forecasts, test.output_tokens, chosen)

    found: dict[str, Ladder] = {"": {"": rmse(np.full(len(judged), True))}}
    for name in np.unique(data):
        own = data == name
        of_tasks = {str(task): rmse(own & (tasks == task)) for task in np.unique(tasks[own])}
        found[str(name)] = {"": rmse(own)} | of_tasks
    return found


def _requests(rows: Sequence[Row], material: Material) -> Requests:
    return requests_of(rows, [material.features[prompt_of(row)] for row in rows])
