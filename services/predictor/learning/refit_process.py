"""Runs a refit in a separate process at low priority.

`python -m services.predictor.learning.refit_process FOLDER PARENT_PID` is that process. The refit
and its result are pickles in a private folder. They are written in chunks, because pickling holds
the interpreter lock and forecasts must be answered in between.
"""

import asyncio
import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from services.predictor.blend.content import Refit, Refitted
from services.predictor.serving.executor import CpuBudgetedExecutor

NICE = 10  # forecasts and token generation come first
TASK, RESULT = "task", "result"  # files in the folder
_PORTION = 64  # examples, about 1 MB, under 1 ms
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class FitFailed(Exception):
    """The fit ended without a result; the message has the reason."""


async def run_in_process(refit: Refit, timeout_s: float) -> Refitted:
    """Returns the result of `refit.run()`, run in a new process that returns all its memory.

    The process is killed at the timeout and when this coroutine is cancelled. Raises FitFailed.
    """
    with TemporaryDirectory(prefix="foretoken-fit-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            await asyncio.to_thread(write_task, folder, refit)
            await _run(folder, timeout_s)
            return await asyncio.to_thread(read_result, folder)
        except (OSError, pickle.PickleError) as error:
            raise FitFailed(f"{type(error).__name__}: {error}") from error


async def run_on_executor(executor: CpuBudgetedExecutor, refit: Refit) -> Refitted:
    """Runs the refit on the executor, for fits shorter than a process start. Raises FitFailed."""
    try:
        return await executor.run(refit.run)
    except (ValueError, ArithmeticError) as error:
        raise FitFailed(f"{type(error).__name__}: {error}") from error


async def _run(folder: Path, timeout_s: float) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.predictor.learning.refit_process", str(folder), str(os.getpid())),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches only the parent, which kills the child
        env=os.environ | _ONE_THREAD,
    )
    try:
        async with asyncio.timeout(timeout_s):
            _, stderr = await process.communicate()
    except TimeoutError:
        raise FitFailed(f"the fit took longer than {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        last = (stderr.decode(errors="replace").strip().splitlines() or ["no output"])[-1]
        raise FitFailed(f"the fit process ended with status {process.returncode}: {last[:300]}")


def write_task(folder: Path, refit: Refit) -> None:
    examples = refit.examples
    with (folder / TASK).open("wb") as file:
        pickle.dump(replace(refit, examples=()), file, pickle.HIGHEST_PROTOCOL)
        for start in range(0, len(examples), _PORTION):
            pickle.dump(examples[start : start + _PORTION], file, pickle.HIGHEST_PROTOCOL)


def read_task(folder: Path) -> Refit:
    refit: Refit
    refit, *portions = _load_all(folder / TASK)
    return replace(refit, examples=tuple(chain.from_iterable(portions)))


def write_result(folder: Path, refitted: Refitted) -> None:
    """Writes each model as a separate pickle."""
    with (folder / RESULT).open("wb") as file:
        pickle.dump(replace(refitted, models={}), file, pickle.HIGHEST_PROTOCOL)
        for name, model in refitted.models.items():
            pickle.dump((name, model), file, pickle.HIGHEST_PROTOCOL)


def read_result(folder: Path) -> Refitted:
    refitted: Refitted
    refitted, *models = _load_all(folder / RESULT)
    return replace(refitted, models=dict(models))


def _load_all(path: Path) -> Iterator[Any]:
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
            sys.exit("the parent process has ended")

    write_result(folder, read_task(folder).run(tick))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
