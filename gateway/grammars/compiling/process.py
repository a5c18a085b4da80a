"""`python -m gateway.grammars.compiling.process` compiles constraints, each in a forked process.

The tokenizer is read once. A constraint that takes too much time or memory, or that crashes the
compiler, ends only its own process. The first message on stdin is a `Setup`; each further one is a
job with an `id`, or `{"id": …, "kill": true}`. Answers on stdout have the job's id and `grammar`
with `least_tokens`, `fault`, `slow`: the job takes long and now runs at low priority, or `starved`:
it had too little of the processor. The end of stdin ends everything.
"""

import gc
import os
import resource
import selectors
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from llguidance import LLTokenizer

from gateway.grammars.compiling.compilation import compile_and_measure, make_index
from gateway.grammars.compiling.frames import FrameReader, Message, Setup, encode_frame
from gateway.grammars.faults import GrammarFault
from gateway.grammars.token_index import TokenIndex
from gateway.types.constraint import Constraint, ConstraintKind

SLOW_NICE = 10  # generation and other constraints come first
LIFE_FACTOR = 20  # the longest life of a job, in limits of its processor time
CHUNK = 2**16
STATM = Path("/proc/self/statm")  # pages of this process
STDIN, STDOUT, STDERR = 0, 1, 2
TOO_LONG = "takes more than {limit_s:g} s to compile; make it simpler"
TOO_LARGE = "needs too much memory or is nested too deeply; make it simpler"


@dataclass(slots=True)
class Job:
    """A process that compiles one constraint."""

    id: int
    pid: int
    pipe: int  # ends with the process
    slow_at_s: float
    output: bytearray = field(default_factory=bytearray)


class CompilerServer:
    """Runs the jobs of one parent process."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._tokenizer = LLTokenizer(
            setup.tokenizer, n_vocab=setup.vocabulary_tokens, eos_token=setup.eos_ids
        )
        self._index = make_index(self._tokenizer)
        self._jobs: dict[int, Job] = {}  # by pipe
        self._selector = selectors.DefaultSelector()
        self._selector.register(STDIN, selectors.EVENT_READ)

    def run(self, frames: FrameReader, waiting: list[Message]) -> None:
        """Serves until stdin ends. `waiting`: messages that arrived with the setup."""
        for message in waiting:
            self._handle(message)
        while True:
            for key, _ in self._selector.select(self._find_timeout()):
                data = os.read(key.fd, CHUNK)
                if key.fd == STDIN:
                    if not data:
                        return self._kill_all()
                    for message in frames.feed(data):
                        self._handle(message)
                elif data:
                    self._jobs[key.fd].output += data
                else:
                    self._finish(self._jobs[key.fd])
            self._slow_down(time.monotonic())

    def _handle(self, message: Message) -> None:
        if "kill" in message:
            for job in self._jobs.values():
                if job.id == message["id"]:
                    os.kill(job.pid, signal.SIGKILL)
            return
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reading)
            _compile(message, writing, self._tokenizer, self._index, self._setup)
        os.close(writing)
        slow_at_s = time.monotonic() + self._setup.slow_s
        if message["slow"]:
            slow_at_s = inf
            os.setpriority(os.PRIO_PROCESS, pid, SLOW_NICE)
        self._jobs[reading] = Job(message["id"], pid, reading, slow_at_s)
        self._selector.register(reading, selectors.EVENT_READ)

    def _finish(self, job: Job) -> None:
        self._selector.unregister(job.pipe)
        os.close(job.pipe)
        del self._jobs[job.pipe]
        _, status = os.waitpid(job.pid, 0)
        if status == 0:
            _write(STDOUT, bytes(job.output))
            return
        ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        if ended_by == signal.SIGALRM:
            _write(STDOUT, encode_frame({"id": job.id, "starved": True}))
            return
        timed_out = ended_by == signal.SIGPROF
        fault = TOO_LONG.format(limit_s=self._setup.limit_s) if timed_out else TOO_LARGE
        _write(STDOUT, encode_frame({"id": job.id, "fault": fault}))

    def _find_timeout(self) -> float | None:
        first = min((job.slow_at_s for job in self._jobs.values()), default=inf)
        return None if first == inf else max(0.0, first - time.monotonic())

    def _slow_down(self, now_s: float) -> None:
        for job in self._jobs.values():
            if job.slow_at_s <= now_s:
                job.slow_at_s = inf
                os.setpriority(os.PRIO_PROCESS, job.pid, SLOW_NICE)
                _write(STDOUT, encode_frame({"id": job.id, "slow": True}))

    def _kill_all(self) -> None:
        for job in self._jobs.values():
            os.kill(job.pid, signal.SIGKILL)


def _compile(
    message: Message, writing: int, tokenizer: LLTokenizer, index: TokenIndex, setup: Setup
) -> None:
    """In the forked process: writes the answer and ends the process."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)  # a client must not fill the log with panics
    _limit(setup)
    answer: dict[str, Any] = {"id": message["id"]}
    try:
        grammar = compile_and_measure(_read_constraint(message), tokenizer, index)
        answer |= {"grammar": grammar.text, "least_tokens": grammar.least_tokens}
    except GrammarFault as fault:
        answer["fault"] = str(fault)
    except (MemoryError, RecursionError):
        answer["fault"] = TOO_LARGE
    except BaseException:  # a panic of the compiler
        os._exit(1)
    _write(writing, encode_frame(answer))
    os._exit(0)


def _limit(setup: Setup) -> None:
    """Limits the memory of this process, where the system tells it, and its time: that of the
    processor, so that a busy machine makes no constraint a fault, and as a backstop its life."""
    if STATM.exists():
        most = int(STATM.read_text().split()[0]) * resource.getpagesize() + setup.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, setup.limit_s)
    signal.setitimer(signal.ITIMER_REAL, LIFE_FACTOR * setup.limit_s)


def _read_constraint(message: Message) -> Constraint:
    return Constraint(
        ConstraintKind(message["kind"]),
        message["source"],
        message.get("whitespace"),
        after=message.get("after", ()),
    )


def _write(to: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(to, view) :]


def _read_setup(frames: FrameReader) -> Iterator[Message]:
    """The messages up to the one that follows the setup's last byte, at least the setup."""
    while data := os.read(STDIN, CHUNK):
        if messages := list(frames.feed(data)):
            yield from messages
            return


def main() -> None:
    frames = FrameReader()
    messages = list(_read_setup(frames))
    if not messages:
        return
    try:
        server = CompilerServer(Setup(**messages[0]))
    except Exception as error:  # of llguidance: a kind of tokenizer that it does not know
        _write(STDOUT, encode_frame({"fault": " ".join(str(error).split())[:500]}))
        return
    _write(STDOUT, encode_frame({"ready": True}))
    gc.freeze()  # the collector does not copy what forked processes share
    server.run(frames, messages[1:])


if __name__ == "__main__":
    main()
