"""Compiles constraints outside the gateway's process, each distinct one once."""

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable
from dataclasses import asdict, dataclass

from cachetools import LRUCache

from gateway.grammars.compiling.frames import FrameReader, Message, Setup, encode_frame
from gateway.grammars.compiling.limits import GrammarLimits
from gateway.grammars.compiling.turns import TenantQueues
from gateway.types.constraint import CompiledGrammar, Constraint
from gateway.types.errors import RefusalReason, RequestRefused
from services.runtime.errors import Code, InvalidArgument, ServiceError

log = logging.getLogger(__name__)

MODULE = "gateway.grammars.compiling.process"
CHUNK = 2**16
ENTRY_BYTES = 500  # of a cached grammar besides its text
TYPICAL_COMPILE_S = 0.01  # to compute a refused request's retry time
BUSY = "the compiler of grammars is too busy; retry later"
ENDED = "the compiler of grammars ended unexpectedly; retry later"
NO_GRAMMAR = CompiledGrammar("")
UNSUPPORTED = "structured output is not available with this model's tokenizer: {fault}"


@dataclass(frozen=True, slots=True)
class Compiled:
    """The outcome of a compilation: the grammar, or a sentence with the fault."""

    grammar: CompiledGrammar = NO_GRAMMAR
    fault: str = ""

    @property
    def size_bytes(self) -> int:
        return ENTRY_BYTES + len(self.grammar.text) + len(self.fault)


@dataclass(slots=True, eq=False)
class _Job:
    tenant: str
    constraint: Constraint
    done: asyncio.Future[Compiled]
    slow: bool = False
    retried: bool = False  # the process ended while it ran


class GrammarCompiler:
    """Compiles constraints while `run` runs, in a process that starts with the first one.

    Equal concurrent constraints of a tenant are compiled once. Results, faults too, are cached
    within a byte budget. At most `quick_jobs` run at once. A job that takes longer than `slow_s`
    goes on at low priority, beside at most `slow_jobs` like it, and the next one starts; if there
    are as many, it is stopped and begins again when one of them has ended.

    Tenants take turns, among quick and among slow jobs, and none has all places of either: beside
    one that sends expensive constraints without pause, another's starts at once, and beside several
    of them it waits at most `slow_s` for each. Used from one event loop.
    """

    def __init__(self, limits: GrammarLimits, make_setup: Callable[[], Setup]):
        """`make_setup` returns the process' first message; it runs in a thread."""
        self._limits, self._make_setup = limits, make_setup
        self._cache: LRUCache[bytes, Compiled] = LRUCache(
            limits.cache_bytes, lambda compiled: compiled.size_bytes
        )
        self._pending: dict[tuple[str, bytes], asyncio.Future[Compiled]] = {}
        self._waiting = TenantQueues[_Job]()
        self._held = TenantQueues[_Job]()  # known to be slow
        self._running: dict[int, _Job] = {}
        self._wanted = asyncio.Event()
        self._process: Process | None = None  # ready for jobs
        self._unsupported: Compiled | None = None  # the fault of every constraint
        self._last_id = 0

    async def compile(self, constraint: Constraint, tenant: str = "") -> CompiledGrammar:
        """The grammar of a tenant's constraint. Raises InvalidArgument naming its field,
        RequestRefused if too many others wait, or another ServiceError."""
        compiled = self._unsupported or self._cache.get(constraint.digest)
        if compiled is None:
            self._check_size(constraint)
            compiled = await self._join(constraint, tenant)
        if compiled.fault:
            raise InvalidArgument(constraint.field_name, compiled.fault)
        return compiled.grammar

    def knows(self, constraint: Constraint) -> bool:
        """Whether `compile` returns at once."""
        return self._unsupported is not None or constraint.digest in self._cache

    async def run(self) -> None:
        """Runs the process from the first constraint on, and again if it ends, until cancelled."""
        while True:
            await self._wanted.wait()
            try:
                ready = await self._run_process()
            except OSError as error:
                log.error("the compiler of grammars cannot start: %s", error)
                ready = False
            self._recover(ready)

    # Jobs

    def _check_size(self, constraint: Constraint) -> None:
        size, most = constraint.size_bytes, self._limits.max_source_bytes
        if size > most:
            sentence = f"at most {most} bytes, got {size}; make it shorter"
            raise InvalidArgument(constraint.field_name, sentence)

    async def _join(self, constraint: Constraint, tenant: str) -> Compiled:
        """The result of a new job, or of one of this tenant that already compiles the same."""
        key = tenant, constraint.digest
        done = self._pending.get(key)
        if done is None:
            done = self._pending[key] = self._enqueue(constraint, tenant)
            done.add_done_callback(lambda _: self._pending.pop(key))
        try:
            async with asyncio.timeout(self._limits.wait_s):
                return await asyncio.shield(done)
        except TimeoutError:
            raise ServiceError(Code.UNAVAILABLE, BUSY, 1.0) from None

    def _enqueue(self, constraint: Constraint, tenant: str) -> asyncio.Future[Compiled]:
        self._check_room(tenant)
        done: asyncio.Future[Compiled] = asyncio.get_running_loop().create_future()
        done.add_done_callback(_retrieve)
        self._waiting.push(tenant, _Job(tenant, constraint, done))
        self._wanted.set()
        self._start_jobs()
        return done

    def _check_room(self, tenant: str) -> None:
        own = self._waiting.count(tenant) + self._held.count(tenant)
        every = len(self._waiting) + len(self._held)
        if own >= self._limits.max_waiting_per_tenant:
            message, waiting = f"{own} grammars of this tenant wait for compilation", own
        elif every >= self._limits.max_waiting:
            message, waiting = f"{every} grammars wait for compilation", every
        else:
            return
        raise RequestRefused(RefusalReason.GRAMMAR, message, waiting * TYPICAL_COMPILE_S)

    def _start_jobs(self) -> None:
        if self._process is not None:
            self._start_from(self._waiting, self._process, False, self._limits.quick_jobs)
            self._start_from(self._held, self._process, True, self._limits.slow_jobs)

    def _start_from(
        self, queues: TenantQueues[_Job], process: Process, slow: bool, places: int
    ) -> None:
        """Starts jobs while there are places; one is never the last of a tenant that has others."""
        while self._count(slow) < places:
            job = queues.pop(lambda tenant: self._count(slow, tenant) < max(1, places - 1))
            if job is None:
                return
            if known := self._cache.get(job.constraint.digest):  # another tenant's equal job ended
                self._finish(job, known)
            else:
                self._start(process, job)

    def _start(self, process: Process, job: _Job) -> None:
        self._last_id += 1
        self._running[self._last_id] = job
        constraint = job.constraint
        message = {
            "id": self._last_id,
            "kind": constraint.kind,
            "source": constraint.source,
            "whitespace": constraint.whitespace,
            "after": [*constraint.after],
            "slow": job.slow,
        }
        _send(process, message)

    def _count(self, slow: bool, tenant: str | None = None) -> int:
        """Running jobs, of one tenant or of all."""
        jobs = (job for job in self._running.values() if tenant in (None, job.tenant))
        return sum(job.slow == slow for job in jobs)

    def _on_slow(self, process: Process, job_id: int) -> None:
        job, places = self._running[job_id], self._limits.slow_jobs
        full = self._count(slow=True) >= places
        if full or self._count(slow=True, tenant=job.tenant) >= max(1, places - 1):
            _send(process, {"id": job_id, "kill": True})
            self._held.push(job.tenant, self._running.pop(job_id))
        job.slow = True

    def _finish(self, job: _Job, compiled: Compiled) -> None:
        if compiled.size_bytes <= self._cache.maxsize:
            self._cache[job.constraint.digest] = compiled
        if not job.done.done():
            job.done.set_result(compiled)

    def _fail(self, job: _Job, why: str) -> None:
        """Ends a job without a result to keep: another attempt may succeed."""
        if not job.done.done():
            job.done.set_exception(ServiceError(Code.UNAVAILABLE, why, 1.0))

    # The process

    async def _run_process(self) -> bool:
        """Starts the process and handles its messages until it ends. Whether it was ready."""
        setup = await asyncio.to_thread(self._make_setup)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", MODULE),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,  # Ctrl-C reaches only the parent, which ends the child
        )
        try:
            assert process.stdout is not None
            _send(process, asdict(setup))
            frames = FrameReader()
            while data := await process.stdout.read(CHUNK):
                for message in frames.feed(data):
                    self._handle(process, message)
            return self._process is not None
        finally:
            self._process = None
            if process.returncode is None:
                process.kill()
            await process.wait()

    def _handle(self, process: Process, message: Message) -> None:
        if "ready" in message:
            self._process = process
        elif "id" not in message:
            self._unsupported = Compiled(fault=UNSUPPORTED.format(fault=message["fault"]))
        elif message["id"] in self._running:  # else it was stopped meanwhile
            if "slow" in message:
                self._on_slow(process, message["id"])
            elif "starved" in message:
                self._fail(self._running.pop(message["id"]), BUSY)
            else:
                job = self._running.pop(message["id"])
                self._finish(job, _read_result(message))
        self._start_jobs()

    def _recover(self, ready: bool) -> None:
        """The process has ended: its jobs wait for the next one, each once. If it was never
        ready, they fail."""
        ended = [*self._running.values()]
        jobs = [*ended, *self._waiting, *self._held]
        for group in (self._running, self._waiting, self._held):
            group.clear()
        self._wanted.clear()
        for job in jobs:
            if job.done.done():
                continue
            if self._unsupported:
                job.done.set_result(self._unsupported)
            elif job.retried or not ready:
                self._fail(job, ENDED)
            else:
                job.slow, job.retried = False, job in ended
                self._waiting.push(job.tenant, job)
                self._wanted.set()


def _send(process: Process, message: Message) -> None:
    """Writes a message without waiting: the setup, and then few, each of limited size."""
    assert process.stdin is not None
    process.stdin.write(encode_frame(message))


def _read_result(message: Message) -> Compiled:
    if "fault" in message:
        return Compiled(fault=message["fault"])
    return Compiled(CompiledGrammar(message["grammar"], message["least_tokens"]))


def _retrieve(done: asyncio.Future[Compiled]) -> None:
    """Marks an exception as retrieved: its waiters may all have gone."""
    if not done.cancelled():
        done.exception()
