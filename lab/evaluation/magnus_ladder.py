"""Magnus' ladder: what each thing known of a request takes off the error (papers/004, Table II).

UILO  the user input's length is the forecast;
RAFT  a random forest a task, on the user input's length;
INST  one forest over all tasks, on the instruction's embedding folded to 4 values and the length;
USIN  INST and the user input's embedding folded to 16.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.ensemble import RandomForestRegressor

from lab.data.rows import Row
from services.predictor.encoder.extract import split_prompt
from services.predictor.interface import Features
from services.predictor.models.forest import INSTRUCTION_VALUES, USER_INPUT_VALUES, fold
from services.predictor.models.spread import Floats

Forecasts = dict[str, Floats]  # a rung's forecasts, in tokens
Ladder = dict[str, dict[str, float]]  # of a group of rows, each rung's error in tokens

Chosen = NDArray[np.bool_] | slice

TREES = 100
LEAF_MIN = 5  # rows; whole trees on one number only learn the noise
COLUMNS_A_SPLIT = 0.5  # of them, so that the length does not make every split
TRAIN_A_TASK = 5_000  # rows at most; the paper has 2,000 and 500
TEST_A_TASK = 500
_PIECES = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Requests:
    """What the ladder stands on; n rows each: embeddings [n, dim], lengths in tokens [n]."""

    tasks: Sequence[str]
    user_input_tokens: Floats
    output_tokens: Floats
    instruction: NDArray[np.float32]
    user_input: NDArray[np.float32]


def requests_of(rows: Sequence[Row], features: Sequence[Features]) -> Requests:
    """A task is a row's whole `task`: to translate one way is a task, the other way another."""
    return Requests(
        [row.task for row in rows],
        np.array([user_input_tokens(row) for row in rows], np.float64),
        np.array([row.output_tokens for row in rows], np.float64),
        np.stack([f.instruction[-1] for f in features]),
        np.stack([f.user_input[-1] for f in features]),
    )


def some_of_each_task(rows: Sequence[Row], most: int, seed: int) -> list[Row]:
    """At most `most` rows of a task, a seeded choice, so that no task outweighs the others."""
    taken: Counter[str] = Counter()
    chosen = []
    for i in np.random.default_rng(seed).permutation(len(rows)):
        taken[rows[i].task] += 1
        if taken[rows[i].task] <= most:
            chosen.append(rows[i])
    return chosen


def user_input_tokens(row: Row) -> int:
    """The row's input tokens less its instruction's, which are its words and marks: so short and
    common a text has one token for each."""
    instruction, _ = split_prompt("", row.prompt)
    return max(row.input_tokens - len(_PIECES.findall(instruction)), 1)


def climb(train: Requests, test: Requests, seed: int = 0) -> Forecasts:
    """Each rung's forecasts of the test rows, in the order of the ladder."""
    length, test_length = (r.user_input_tokens[:, None] for r in (train, test))
    told, test_told = (
        np.hstack([fold(r.instruction, INSTRUCTION_VALUES), r.user_input_tokens[:, None]])
        for r in (train, test)
    )
    meant, test_meant = (fold(r.user_input, USER_INPUT_VALUES) for r in (train, test))
    forest = _Forest(train.output_tokens, seed)
    return {
        "UILO": test.user_input_tokens,
        "RAFT": _a_task_each(train.tasks, test.tasks, length, test_length, forest),
        "INST": forest.forecast(told, test_told),
        "USIN": forest.forecast(np.hstack([told, meant]), np.hstack([test_told, test_meant])),
    }


def rmse_of(forecasts: Forecasts, true: Floats, chosen: NDArray[np.bool_]) -> dict[str, float]:
    """Each rung's root mean square error in tokens, over the chosen rows."""
    return {
        rung: float(np.sqrt(np.mean((values - true)[chosen] ** 2)))
        for rung, values in forecasts.items()
    }


@dataclass(frozen=True)
class _Forest:
    output_tokens: Floats
    seed: int

    def forecast(self, inputs: Floats, test: Floats, chosen: Chosen = slice(None)) -> Floats:
        forest = RandomForestRegressor(
            TREES,
            min_samples_leaf=LEAF_MIN,
            max_features=COLUMNS_A_SPLIT,
            n_jobs=-1,
            random_state=self.seed,
        )
        forest.fit(inputs[chosen], self.output_tokens[chosen])
        return np.asarray(forest.predict(test), np.float64)


def _a_task_each(
    tasks: Sequence[str], test_tasks: Sequence[str], length: Floats, test: Floats, forest: _Forest
) -> Floats:
    """A task that no row trained has the forest of all of them."""
    of, test_of = np.array(tasks), np.array(test_tasks)
    out = np.empty(len(test))
    for task in np.unique(test_of):
        own = of == task
        asked = test_of == task
        out[asked] = forest.forecast(length, test[asked], own if own.any() else slice(None))
    return out
