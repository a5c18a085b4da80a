"""Prompts → features in time for a forecast, or none and why."""

import asyncio
import logging
from collections.abc import Callable, Sequence

from services.predictor.encoder.gathering import Busy, Gatherer
from services.predictor.encoder.packing import pack
from services.predictor.interface import Features, Prompt

log = logging.getLogger(__name__)

Found = tuple[Features, bytes]
"""Features, and how the log keeps them."""


class Reader:
    """Reads a batch of prompts through the gatherer within `timeout_s`.

    `missed` is told the reason for each prompt that has to be forecast without features: busy,
    timeout, failed (the extraction raised) or broken (features that hold no numbers). A prompt cut
    off by the deadline is not read later: the queue would only grow.
    """

    def __init__(self, gatherer: Gatherer, timeout_s: float, missed: Callable[[str], None]):
        self._gatherer = gatherer
        self._timeout_s = timeout_s
        self._missed = missed
        self._failure_said = False

    async def run(self) -> None:
        await self._gatherer.run()

    async def read(self, prompts: Sequence[Prompt | None]) -> list[Found | None]:
        """One a prompt, in order; None for those without text, and for those missed."""
        tasks = [
            None if prompt is None else asyncio.ensure_future(self._gatherer.extract(prompt))
            for prompt in prompts
        ]
        given = [task for task in tasks if task]
        try:
            if given:
                await asyncio.wait(given, timeout=self._timeout_s)
            return [self._found(task) if task else None for task in tasks]
        finally:
            for task in given:
                task.cancel()

    def _found(self, task: "asyncio.Task[Features]") -> Found | None:
        if not task.done():
            self._missed("timeout")
        elif (error := task.exception()) is None:
            return self._packed(task.result())
        elif isinstance(error, Busy):
            self._missed("busy")
        else:
            self._miss("failed", error)
        return None

    def _packed(self, features: Features) -> Found | None:
        try:
            return features, pack(features)
        except ValueError as error:
            self._miss("broken", error)
            return None

    def _miss(self, reason: str, error: BaseException) -> None:
        self._missed(reason)
        if not self._failure_said:
            self._failure_said = True
            log.warning(
                "a prompt could not be read (%s): it is forecast by history; this is said once",
                error,
                exc_info=error,
            )
