"""The mailbox between event loop and engine thread: typed commands in, calls of a listener out."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from services.core import HeldRequest, Plan, Report
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.prompt import Prompt

Call = Callable[[], None]
OnError = Callable[[Prompt, int, str], None]  # the prompt, its next offset, a sentence
OnRefusal = Callable[[Prompt, str], None]  # the prompt, why it can never run here

MAX_UNDELIVERED = 4_096  # pending calls to the event loop; at this number the engine waits


@dataclass(frozen=True, slots=True)
class OpenStream:
    """A gateway has opened a stream: it sends prompts and reads their tokens."""

    origin: str


@dataclass(frozen=True, slots=True)
class CloseStream:
    """A gateway's stream is closed. Its tokens are lost. If no scheduler is attached that would
    cancel its requests, they are dropped."""

    origin: str


@dataclass(frozen=True, slots=True)
class AddPrompt:
    """Adds a prompt. If it can never run here, it ends with an error."""

    prompt: Prompt


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Reports a request with an invalid prompt as an error."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ApplyPlan:
    plan: Plan


@dataclass(frozen=True, slots=True)
class AttachScheduler:
    """A scheduler has attached. `on_attached` receives the held requests, for adoption. Reports
    follow; the first one contains what happened without a scheduler."""

    on_attached: Callable[[tuple[HeldRequest, ...]], None]


@dataclass(frozen=True, slots=True)
class DetachScheduler:
    """The scheduler is gone. No report follows `on_detached`. Requests continue within their
    budgets, and events are kept for the next scheduler."""

    on_detached: Call


@dataclass(frozen=True, slots=True)
class ReturnReports:
    """Returns reports that were not sent: the next report repeats their contents."""

    reports: tuple[Report, ...]


@dataclass(frozen=True, slots=True)
class Reset:
    """Drops all requests, because no scheduler has adopted them."""


@dataclass(frozen=True, slots=True)
class QueryDrained:
    """Calls `answer` with whether no request runs or is about to, after all earlier commands."""

    answer: Callable[[bool], None]


@dataclass(frozen=True, slots=True)
class Perform:
    """Calls `work` on the engine's thread, between two steps. It does not raise."""

    work: Call


@dataclass(frozen=True, slots=True)
class Stop:
    """Ends the thread after the current step."""


GatewayCommand = OpenStream | CloseStream | AddPrompt | RefuseRequest
SchedulerCommand = ApplyPlan | AttachScheduler | DetachScheduler | ReturnReports | Reset
Command = GatewayCommand | SchedulerCommand | QueryDrained | Perform | Stop


class Listener:
    """Receives results in the event loop. Each attribute is looked up when called."""

    def __init__(self) -> None:
        self.on_tokens: Callable[[list[NewToken]], None] = lambda _: None
        self.on_error: OnError = lambda *_: None
        self.on_refusal: OnRefusal = lambda *_: None
        self.on_report: Callable[[Report], None] = lambda _: None
        self.on_drained: Call = lambda: None  # no request runs or is about to


class Inbox:
    """Commands for the engine's thread. Any thread may `put`; only the engine's may `pop_all`."""

    def __init__(self) -> None:
        self.on_put: Call = lambda: None  # wakes an engine that waits otherwise than in `pop_all`
        self._commands: deque[Command] = deque()
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._commands)

    def put(self, command: Command) -> None:
        with self._changed:
            self._commands.append(command)
            self._changed.notify()
        self.on_put()

    def pop_all(self, wait_s: float) -> list[Command]:
        """Removes and returns all commands; if there are none, waits up to `wait_s` for some."""
        if not self._commands and not wait_s:
            return []
        with self._changed:
            if not self._commands:
                self._changed.wait(wait_s)
            commands = list(self._commands)
            self._commands.clear()
        return commands


class Outbox:
    """Calls for the event loop, which makes all pending ones in one turn. The engine's thread posts
    them; it waits while MAX_UNDELIVERED are pending."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop
        self._calls: deque[Call] = deque()
        self._wake_pending = False
        self._room = threading.Semaphore(MAX_UNDELIVERED)

    def post(self, call: Call) -> None:
        self._room.acquire()
        self._calls.append(call)
        if not self._wake_pending:
            self._wake_pending = True
            self._loop.call_soon_threadsafe(self.deliver)

    def deliver(self) -> None:
        """Makes all pending calls, in order."""
        self._wake_pending = False  # first: a call posted from here on wakes the loop again
        while self._calls:
            call = self._calls.popleft()
            self._room.release()
            call()
