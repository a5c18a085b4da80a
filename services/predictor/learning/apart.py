"""Running a refit in a process of its own, at low priority."""

import asyncio
import os
import pickle
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from services.predictor.blend.content import Refit, Refitted
from services.predictor.learning.handover import read_result, write_task

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


async def _run(folder: Path, timeout_s: float) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "services.predictor.learning.fitter", str(folder), str(os.getpid())),
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
