"""Runs the batches of a folder behind all other requests.

Lines have the loosest SLA class and the last priority, so that the scheduler runs them on capacity
that nothing else uses, and preempts them for anything else.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from secrets import token_hex
from uuid import uuid4

from gateway.admission.caller import bind_caller
from gateway.faces.http.batches.lane import Lane, LaneLimits
from gateway.faces.http.batches.progress import (
    AnswerLines,
    InputLimits,
    check_input,
    close_all,
    read_lines,
)
from gateway.faces.http.batches.records import (
    BatchRecord,
    Counts,
    FileRecord,
    LineError,
    Purpose,
    Status,
)
from gateway.faces.http.batches.store import ID_BYTES, BatchStore
from gateway.faces.http.offline.lines import (
    Line,
    encode_answer,
    encode_fault,
    encode_unanswered,
)
from gateway.faces.http.offline.requests import (
    PreparedRequest,
    Urgency,
    answer,
    prepare,
    retry_refused,
)
from gateway.front import Front
from gateway.types.sla_classes import find_loosest
from services.runtime.errors import ServiceError
from services.runtime.tasks import background, root_cause, run_to_completion

log = logging.getLogger(__name__)

LAST_PRIORITY = 2**31 - 1
WATCH_S = 0.05  # between two looks at the other requests of this process
POLL_S = 0.5  # between two looks at the folder, and at what stops a batch
SAVE_S = 1.0  # between two counts on disk
ACTIVE = 4  # batches that run at a time, so that a long one does not hold up the others
PATIENCE_S = 3600.0  # for a line that the server is too busy for
STORAGE_RETRY_S = 10.0  # between two attempts to write the record of a batch
STOPPED = {
    Status.EXPIRED: ("batch_expired", "the batch expired before this line was answered"),
    Status.CANCELLED: ("batch_cancelled", "the batch was cancelled before this line was answered"),
}


async def run_batches(front: Front) -> None:
    """Runs until cancelled, in one of the processes that share the folder."""
    if not front.config.batch_folder:
        return
    runner = BatchRunner(front, BatchStore(front.config.batch_folder))
    while True:
        with runner.store.runner_lock() as mine:
            if mine:
                await runner.run()
        await asyncio.sleep(POLL_S)


class BatchRunner:
    """Runs all batches of a store that have not ended."""

    def __init__(self, front: Front, store: BatchStore):
        self.front, self.store = front, store
        config = front.config
        self.limits = InputLimits(config.batch_lines, config.max_body_bytes)
        idle = config.batch_idle_in_flight
        if config.replicas > 1:  # requests of other gateways are not seen here
            idle = config.batch_in_flight
        limits = LaneLimits(config.batch_in_flight, idle, config.batch_quiet_s)
        self.lane = Lane(limits, time.monotonic())
        self.begun = asyncio.Semaphore(idle)  # lines that are read and not yet answered
        self.reading = asyncio.Lock()  # other requests are tokenized in between
        self.urgency = Urgency(find_loosest(config.slas), LAST_PRIORITY)

    async def run(self) -> None:
        """Runs batches until the server drains."""
        running: dict[str, asyncio.Task[None]] = {}
        await asyncio.to_thread(self.store.remove_parts)
        async with asyncio.TaskGroup() as group, background(self._watch_others()):
            while not self.front.first.draining:
                running = {key: task for key, task in running.items() if not task.done()}
                listed = await self._list_batches()
                for batch in reversed(listed):  # the oldest first
                    if len(running) < ACTIVE and not batch.ended and batch.id not in running:
                        task = group.create_task(self._run_guarded(batch))
                        running[batch.id] = task
                await asyncio.sleep(POLL_S)

    async def _list_batches(self) -> list[BatchRecord]:
        """No batches while the folder cannot be read."""
        try:
            return await asyncio.to_thread(self.store.list_batches)
        except OSError as error:
            log.warning("the folder of batches cannot be read: %s", error)
            await asyncio.sleep(STORAGE_RETRY_S)
            return []

    async def _watch_others(self) -> None:
        while True:
            await self.lane.update(self._others_run(), time.monotonic())
            await asyncio.sleep(WATCH_S)

    def _others_run(self) -> bool:
        """Whether a choice is live that is not of a batch. O(live choices)."""
        tables = (gateway.sessions.table for gateway in self.front.gateways.values())
        return any(each.request.client.priority < LAST_PRIORITY for t in tables for each in t)

    async def _run_guarded(self, batch: BatchRecord) -> None:
        """A batch that fails, such as for a full disk, does not end the server. It begins again if
        even that cannot be stored."""
        bind_caller("", batch.owner)
        run = BatchRun(self, batch)
        try:
            try:
                await run.run()
            except Exception as error:
                await run.fail(root_cause(error))
        except Exception as error:
            log.warning("%s cannot be stored, and begins again: %s", batch.id, error)
            await asyncio.sleep(STORAGE_RETRY_S)


class BatchRun:
    """One batch from its present status to its end, or to the drain of the server."""

    def __init__(self, runner: BatchRunner, batch: BatchRecord):
        self._runner, self._store = runner, runner.store
        self._batch = batch
        self._folder = self._store.batch_path(batch.id)
        self._outcome: Status | None = None  # why it stops early

    async def run(self) -> None:
        batch = self._batch
        if batch.status is Status.VALIDATING:
            await self._validate()
        if self._batch.status in (Status.IN_PROGRESS, Status.CANCELLING):
            await self._answer_lines()
        if self._batch.status is Status.FINALIZING:
            await self._adopt_files()

    async def fail(self, cause: BaseException) -> None:
        """Ends the batch with the answers that it has. Raises OSError if that cannot be stored."""
        fault = self._explain(cause)
        if self._batch.status is Status.VALIDATING:
            return await self._enter(Status.FAILED, errors=[fault])
        if self._batch.status is not Status.FINALIZING:
            output, errors = await self._open_answers()
            await asyncio.to_thread(close_all, output, errors)
            done = self._count(output, errors)
            await self._finalize((output, errors), done, Status.FAILED, [fault])
        return await self._adopt_files()

    def _explain(self, cause: BaseException) -> LineError:
        if not isinstance(cause, OSError):
            log.error("%s failed", self._batch.id, exc_info=cause)
            return LineError("internal", "internal error; see the server's log for details")
        log.warning("%s failed: %s", self._batch.id, cause)
        if cause.filename == str(self._store.input_path(self._batch)):
            return LineError("missing_file", f"the input file cannot be read: {cause.strerror}")
        return LineError("storage_error", f"answers cannot be stored: {cause.strerror}")

    async def _validate(self) -> None:
        path = self._store.input_path(self._batch)
        if not path.exists():
            gone = LineError("missing_file", "the input file was deleted")
            return await self._enter(Status.FAILED, errors=[gone])
        count, errors = await asyncio.to_thread(
            check_input, path, self._batch.endpoint, self._runner.limits
        )
        if errors:
            return await self._enter(Status.FAILED, errors=errors, counts=Counts(count))
        return await self._enter(Status.IN_PROGRESS, counts=Counts(count))

    async def _answer_lines(self) -> None:
        path = self._store.input_path(self._batch)
        output, errors = await self._open_answers()
        try:
            if not await self._must_stop():
                async with asyncio.TaskGroup() as group:
                    answering = group.create_task(self._submit_lines(path, output, errors))
                    watching = group.create_task(self._watch(answering, output, errors))
                    await asyncio.wait({answering})
                    watching.cancel()
            done, left = self._count(output, errors), 0
            if self._outcome:
                left = await asyncio.to_thread(self._add_unanswered, path, output, errors)
                done = replace(done, failed=done.failed + left)
            elif done.completed + done.failed < done.total:
                return  # the server drains, and continues the batch when it runs again
        finally:
            await asyncio.to_thread(close_all, output, errors)
        outcome = self._outcome or Status.COMPLETED
        await self._finalize((output, errors), done, outcome, unanswered=left)

    async def _open_answers(self) -> tuple[AnswerLines, AnswerLines]:
        """The answers and the errors so far."""
        return await asyncio.to_thread(
            lambda: (AnswerLines(self._folder / "output"), AnswerLines(self._folder / "errors"))
        )

    async def _finalize(
        self,
        written: tuple[AnswerLines, AnswerLines],
        done: Counts,
        outcome: Status,
        faults: Sequence[LineError] = (),
        unanswered: int = 0,
    ) -> None:
        """Names the files of the answers before they are made: a restart makes the same ones."""
        makes_files = not self._batch.is_of_messages
        output_id, error_id = (
            self._new_id(makes_files and bool(lines.answered)) for lines in written
        )
        await self._enter(
            Status.FINALIZING,
            counts=done,
            outcome=outcome,
            errors=faults,
            output_file_id=output_id,
            error_file_id=error_id,
            unanswered=unanswered,
        )

    async def _submit_lines(self, path: Path, output: AnswerLines, errors: AnswerLines) -> None:
        """Returns when each line is answered, or when it is cancelled."""
        runner = self._runner
        answered = output.answered | errors.answered
        async with asyncio.TaskGroup() as group:
            lines = read_lines(path, runner.limits)
            while line := await asyncio.to_thread(next, lines, None):
                if line.custom_id in answered:
                    continue
                await runner.begun.acquire()
                task = group.create_task(self._answer_line(line, output, errors))
                task.add_done_callback(lambda _: runner.begun.release())

    async def _answer_line(self, line: Line, output: AnswerLines, errors: AnswerLines) -> None:
        runner, request_id = self._runner, uuid4().hex
        line_id = f"batch_req_{token_hex(ID_BYTES)}"
        bind_caller(request_id, self._batch.owner)
        try:
            async with runner.reading:
                prepared = await retry_refused(partial(self._prepare, line), PATIENCE_S)
            attempt = partial(answer, prepared, prepared.encode)
            running = partial(retry_refused, attempt, PATIENCE_S)
            body = await runner.lane.run(prepared.choices, running)
        except ServiceError as error:
            if runner.front.first.draining:
                return  # the line is answered when the server runs again
            fault = encode_fault(line_id, line.custom_id, request_id, error, line.url)
            errors.add(line.custom_id, fault)
        else:
            output.add(line.custom_id, encode_answer(line_id, line.custom_id, request_id, body))

    async def _prepare(self, line: Line) -> PreparedRequest:
        runner = self._runner
        await runner.front.first.intake.wait_for_turn(runner.urgency.sla_class)
        return await prepare(runner.front, line.url, line.body, runner.urgency)

    async def _watch(
        self, answering: "asyncio.Task[None]", output: AnswerLines, errors: AnswerLines
    ) -> None:
        """Saves the counts, and cancels the lines once the batch must stop."""
        saved_s = time.monotonic()
        while not await self._must_stop():
            if time.monotonic() - saved_s >= SAVE_S:
                saved_s = time.monotonic()
                await self._save(replace(self._batch, counts=self._count(output, errors)))
            await asyncio.sleep(POLL_S)
        answering.cancel()

    async def _must_stop(self) -> bool:
        """Whether the batch expires, is cancelled, or the server drains; sets what it becomes."""
        batch = self._batch
        if time.time() >= batch.expires_at:
            self._outcome = Status.EXPIRED
        elif await asyncio.to_thread(self._store.is_cancelled, batch.id):
            self._outcome = Status.CANCELLED
            if batch.status is not Status.CANCELLING:
                await self._enter(Status.CANCELLING)
        return self._outcome is not None or self._runner.front.first.draining

    def _count(self, output: AnswerLines, errors: AnswerLines) -> Counts:
        return Counts(self._batch.counts.total, len(output.answered), len(errors.answered))

    def _add_unanswered(self, path: Path, output: AnswerLines, errors: AnswerLines) -> int:
        """The number of lines without an answer; they are errors, unless the input was deleted."""
        assert self._outcome is not None
        code, message = STOPPED[self._outcome]
        if not path.exists():
            done = self._count(output, errors)
            return max(0, done.total - done.completed - done.failed)
        left = 0
        for line in read_lines(path, self._runner.limits):
            if line.custom_id not in output.answered and line.custom_id not in errors.answered:
                line_id = f"batch_req_{token_hex(ID_BYTES)}"
                errors.add(
                    line.custom_id, encode_unanswered(line_id, line.custom_id, code, message)
                )
                left += 1
        return left

    async def _adopt_files(self) -> None:
        """Idempotent: a restarted server does what is left of it."""
        if not self._batch.is_of_messages:
            await asyncio.to_thread(self._move_files)
        await self._enter(self._batch.outcome)

    def _move_files(self) -> None:
        batch = self._batch
        for name, file_id in (("output", batch.output_file_id), ("errors", batch.error_file_id)):
            if file_id:
                record = FileRecord(
                    file_id, batch.owner, 0, int(time.time()), f"{batch.id}_{name}.jsonl",
                    Purpose.OUTPUT,
                )  # fmt: skip
                self._store.adopt_file(self._folder / name, record)
            else:
                (self._folder / name).unlink(missing_ok=True)

    async def _enter(self, status: Status, **changes: object) -> None:
        await self._save(self._batch.to(status, time.time(), **changes))

    async def _save(self, batch: BatchRecord) -> None:
        """Writes the record. A cancelled task waits for its write: a later one must replace it."""
        await run_to_completion(asyncio.to_thread(self._store.save, batch))
        self._batch = batch

    @staticmethod
    def _new_id(wanted: bool) -> str | None:
        return f"file-{token_hex(ID_BYTES)}" if wanted else None
