"""Runs a refit in a separate process at low priority.

`python -m services.predictor.learning.refit_process FOLDER PARENT_PID` is that process. The refit
and its result travel as pickles in a private folder. They are written in chunks: pickling holds
the interpreter lock, and forecasts must be answered in between."""

import asyncio
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from services.predictor.blend.content import Refit, Refitted
from services.predictor.serving.executor import Desk

NICE = 10  # a forecast or a token that is due comes first
TASK, RESULT = "task", "result"  # files in the folder
_PORTION = 64  # examples, about 1 MB, under 1 ms
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class FitFailed(Exception):
    """The process ended without a result; a sentence that says how."""


async def run_apart(refit: Refit, timeout_s: float) -> Refitted:
    """The result of `refit.run()`. A process for each fit: it gives all its memory back.

    Killed when it takes longer, or when this is cancelled. Raises FitFailed.
    """
    with TemporaryDirectory(prefix="foretoken-fit-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            await asyncio.to_thread(write_task, folder, refit)
            await _run(folder, timeout_s)
            return await asyncio.to_thread(read_result, folder)
        except (OSError, pickle.PickleError) as error:
            raise FitFailed(f"{type(error).__name__}: {error}") from error


async def run_here(desk: Desk, refit: Refit) -> Refitted:
    """The same at the desk: for what takes no longer than to start a process. Raises FitFailed."""
    try:
        return await desk.run(refit.run)
    except (ValueError, ArithmeticError) as error:
        raise FitFailed(f"{type(error).__name__}: {error}") from error


async def _run(folder: Path, timeout_s: float) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.predictor.learning.refit_process", str(folder), str(os.getpid())),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches us alone, and we end it
        env=os.environ | _ONE_THREAD,
    )
    try:
        async with asyncio.timeout(timeout_s):
            _, said = await process.communicate()
    except TimeoutError:
        raise FitFailed(f"it took over {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = (said.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise FitFailed(f"it ended with status {process.returncode}: {last[:300]}")


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


def main(folder: Path, parent: int) -> None:
    os.nice(NICE)
    import torch

    torch.set_num_threads(1)

    def tick(share: float) -> None:
        if os.getppid() != parent:
            sys.exit("whoever asked for the fit is gone")

    write_result(folder, read_task(folder).run(tick))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
