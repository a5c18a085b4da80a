"""A refit on its way to the process that runs it, and its result on the way back.

Pickles in a folder of ours that nobody else can read, and in portions: turning objects into bytes
holds the interpreter, and forecasts are made meanwhile.
"""

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from services.predictor.blend.content import Refit, Refitted

TASK, RESULT = "task", "result"  # files in the folder
_PORTION = 64  # examples, about 1 MB, under 1 ms


def write_task(folder: Path, refit: Refit) -> None:
    examples = refit.examples
    with (folder / TASK).open("wb") as file:
        pickle.dump(replace(refit, examples=()), file, pickle.HIGHEST_PROTOCOL)
        for start in range(0, len(examples), _PORTION):
            pickle.dump(examples[start : start + _PORTION], file, pickle.HIGHEST_PROTOCOL)


def read_task(folder: Path) -> Refit:
    refit: Refit
    refit, *portions = _all(folder / TASK)
    return replace(refit, examples=tuple(each for portion in portions for each in portion))


def write_result(folder: Path, refitted: Refitted) -> None:
    """Each model by itself."""
    with (folder / RESULT).open("wb") as file:
        pickle.dump(replace(refitted, models={}), file, pickle.HIGHEST_PROTOCOL)
        for name, model in refitted.models.items():
            pickle.dump((name, model), file, pickle.HIGHEST_PROTOCOL)


def read_result(folder: Path) -> Refitted:
    refitted: Refitted
    refitted, *models = _all(folder / RESULT)
    return replace(refitted, models=dict(models))


def _all(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)
            except EOFError:
                return
