"""Magnus' ablation: forecast error by the inputs used (Cheng et al., ICWS 2024, Table II).

UILO: the user input's length is the forecast.
RAFT: a random forest per task, on the user input's length.
INST: one forest over all tasks, on the instruction embedding in 4 values and the length.
USIN: INST plus the user input's embedding in 16 values.
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
from services.predictor.models.forest import INSTRUCTION_VALUES, USER_INPUT_VALUES, fold_vectors
from services.predictor.models.spread import Floats

Forecasts = dict[str, Floats]  # forecasts in tokens by method
Ladder = dict[str, dict[str, float]]  # error in tokens by group of rows and method

Chosen = NDArray[np.bool_] | slice

TREES = 100
LEAF_MIN = 5  # rows; full-depth trees on one input overfit
COLUMNS_PER_SPLIT = 0.5  # share of columns per split, so that the length does not dominate
MAX_TRAIN_ROWS_PER_TASK = 5_000  # the paper uses 2,000 and 500
MAX_TEST_ROWS_PER_TASK = 500
_PIECES = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class Requests:
    """Inputs of the ablation for n rows: embeddings [n, dim], lengths in tokens [n]."""

    tasks: Sequence[str]
    user_input_tokens: Floats
    output_tokens: Floats
    instruction: NDArray[np.float32]
    user_input: NDArray[np.float32]


def requests_of(rows: Sequence[Row], features: Sequence[Features]) -> Requests:
    """Builds the inputs. A task is a row's complete `task`, so each translation direction is a
    task."""
    return Requests(
        [row.task for row in rows],
        np.array([user_input_tokens(row) for row in rows], np.float64),
        np.array([row.output_tokens for row in rows], np.float64),
        np.stack([f.instruction[-1] for f in features]),
        np.stack([f.user_input[-1] for f in features]),
    )


def sample_rows_per_task(rows: Sequence[Row], limit: int, seed: int) -> list[Row]:
    """Returns a seeded sample of at most `limit` rows per task."""
    counts: Counter[str] = Counter()
    chosen = []
    for i in np.random.default_rng(seed).permutation(len(rows)):
        counts[rows[i].task] += 1
        if counts[rows[i].task] <= limit:
            chosen.append(rows[i])
    return chosen


def user_input_tokens(row: Row) -> int:
    """Returns the row's input tokens minus the instruction's, estimated by words and marks."""
    instruction, _ = split_prompt("", row.prompt)
    return max(row.input_tokens - len(_PIECES.findall(instruction)), 1)


def ladder_forecasts(train: Requests, test: Requests, seed: int = 0) -> Forecasts:
    """Returns forecasts of the test rows by each method, in the order of the table."""
    length, test_length = (r.user_input_tokens[:, None] for r in (train, test))
    inst, test_inst = (
        np.hstack([fold_vectors(r.instruction, INSTRUCTION_VALUES), r.user_input_tokens[:, None]])
        for r in (train, test)
    )
    usin, test_usin = (fold_vectors(r.user_input, USER_INPUT_VALUES) for r in (train, test))
    forest = _Forest(train.output_tokens, seed)
    return {
        "UILO": test.user_input_tokens,
        "RAFT": _forest_per_task(train.tasks, test.tasks, length, test_length, forest),
        "INST": forest.forecast(inst, test_inst),
        "USIN": forest.forecast(np.hstack([inst, usin]), np.hstack([test_inst, test_usin])),
    }


def rmse_of(forecasts: Forecasts, true: Floats, chosen: NDArray[np.bool_]) -> dict[str, float]:
    """Returns the root mean square error in tokens of each method over the chosen rows."""
    return {
        method: float(np.sqrt(np.mean((values - true)[chosen] ** 2)))
        for method, values in forecasts.items()
    }


@dataclass(frozen=True)
class _Forest:
    output_tokens: Floats
    seed: int

    def forecast(self, inputs: Floats, test: Floats, chosen: Chosen = slice(None)) -> Floats:
        forest = RandomForestRegressor(
            TREES,
            min_samples_leaf=LEAF_MIN,
            max_features=COLUMNS_PER_SPLIT,
            n_jobs=-1,
            random_state=self.seed,
        )
        forest.fit(inputs[chosen], self.output_tokens[chosen])
        return np.asarray(forest.predict(test), np.float64)


def _forest_per_task(
    tasks: Sequence[str], test_tasks: Sequence[str], length: Floats, test: Floats, forest: _Forest
) -> Floats:
    """Forecasts by the forest of each task; unknown tasks use a forest of all rows."""
    forecasts = np.empty(len(test))
    for task in np.unique(test_tasks):
        train_rows, test_rows = np.array(tasks) == task, np.array(test_tasks) == task
        chosen = train_rows if train_rows.any() else slice(None)
        forecasts[test_rows] = forest.forecast(length, test[test_rows], chosen)
    return forecasts
