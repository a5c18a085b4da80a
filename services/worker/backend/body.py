"""BackendBody: the thread between the worker's service and a server. It has an event loop of its
own, so that neither waits for the other.

Commands change the requests (requests.py); after each batch of commands, requests begin and cease
to run at the server (calls.py). A request that the server refuses for lack of capacity, or loses,
is reported as evicted: it waits in the scheduler's queue again, with the tokens that it has, and
continues at whichever worker the scheduler chooses.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import uvloop
from tokenizers import Tokenizer

from services.runtime.bounded_dict import BoundedDict
from services.worker.backend.availability import Availability
from services.worker.backend.calls import BackendCalls
from services.worker.backend.capacity import Load, Window, limits_of
from services.worker.backend.client import BackendClient
from services.worker.backend.config import BackendConfig
from services.worker.backend.discovery import Backend
from services.worker.backend.monitor import BackendMonitor
from services.worker.backend.pace import Pace
from services.worker.backend.requests import Arrival, BackendRequests
from services.worker.config import WorkerConfig
from services.worker.engine.mailbox import (
    AddPrompt,
    ApplyPlan,
    AttachScheduler,
    Call,
    CloseStream,
    Command,
    DetachScheduler,
    GatewayCommand,
    Inbox,
    Listener,
    OpenStream,
    Perform,
    QueryDrained,
    RefuseRequest,
    Reset,
    ReturnReports,
    SchedulerCommand,
    Stop,
)
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.prompt import Prompt

log = logging.getLogger(__name__)

INTERVAL_S = 0.25  # between two reports of all running requests; also a measured interval
EXPIRE_S = 5.0  # between two checks for prompts and plans that waited too long
MOST_FAILED = 8_192  # requests with counted failures


class BackendBody:
    """Carries out commands for one server; its calls tell what becomes of requests (`Outcomes`)."""

    def __init__(
        self,
        config: WorkerConfig,
        backend: BackendConfig,
        tokenizer: Tokenizer,
        requests: BackendRequests,
        availability: Availability,
        inbox: Inbox,
        post: Callable[[Call], None],
        listener: Listener,
    ):
        self._config, self._settings = config, backend
        self._tokenizer, self._eos_ids = tokenizer, requests.limits.eos_ids
        self._requests, self._availability = requests, availability
        self._inbox, self._post, self._listener = inbox, post, listener
        self._window = Window(requests.limits.max_running)
        self._pace = Pace()
        self._calls: BackendCalls | None = None  # while the server is up
        self._attempts = BoundedDict[str, int](MOST_FAILED)  # failed, since the last token
        self._fresh: list[NewToken] = []  # of this turn of the loop
        self._attached = False
        self._reported_window = 0
        self._streams: set[str] = set()  # open streams of gateways
        self._since_s = time.monotonic()

    def run(self) -> None:
        """Runs until `Stop`. Raises ConfigError for a server that cannot be used."""
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(changed.set)

        self._inbox.on_put = wake
        url = self._settings.urls[self._config.local_rank]
        async with BackendClient(url, self._settings) as client, asyncio.TaskGroup() as tasks:
            self._tasks, self._client = tasks, client
            self._monitor = BackendMonitor(
                client, self._settings, self._tokenizer, self._config.model_name,
                self._on_up, self._on_down, self._on_load,
            )  # fmt: skip
            others = [tasks.create_task(self._monitor.run()), tasks.create_task(self._tick())]
            await self._handle_until_stop(changed)
            for task in others:
                task.cancel()
            self._cut_all()

    async def _handle_until_stop(self, changed: asyncio.Event) -> None:
        while True:
            changed.clear()
            commands = self._inbox.pop_all(0.0)
            for command in commands:
                if isinstance(command, Stop):
                    return
                self._handle(command)
            self._carry_out()
            await changed.wait()

    async def _tick(self) -> None:
        """Measures and reports at intervals, also that nothing runs."""
        expire_s = 0.0
        while True:
            await asyncio.sleep(INTERVAL_S)
            now = time.monotonic()
            timings = self._pace.end_interval(now)
            if self._requests.running or timings or self._reported_window != self._window.size:
                self._requests.record_interval(timings)
            if now >= expire_s:
                expire_s = now + EXPIRE_S
                self._requests.expire(now)
            self._carry_out()
            if self._requests.is_drained(now):
                self._post(lambda: self._listener.on_drained())

    def _carry_out(self) -> None:
        """Lets requests begin and cease to run at the server, and reports what happened."""
        changes = self._requests.pop_changes()
        if self._calls:
            for request_id in changes.cut:
                self._calls.cut(request_id)
                self._pace.on_ended(request_id)
            for sequence in changes.begin:
                self._calls.begin(sequence)
        self._flush()
        if self._attached and (report := self._requests.report(self._window.size)):
            self._reported_window = self._window.size
            self._post(lambda: self._listener.on_report(report))

    def _flush(self) -> None:
        """Sends the tokens of this turn of the loop."""
        if tokens := self._fresh:
            self._fresh = []
            self._post(lambda: self._listener.on_tokens(tokens))

    # Commands

    def _handle(self, command: Command) -> None:
        match command:
            case QueryDrained(answer):
                drained = self._requests.is_drained(time.monotonic())
                self._post(lambda: answer(drained))
            case AddPrompt() | RefuseRequest() | OpenStream() | CloseStream():
                self._handle_gateway(command)
            case Perform(work):
                work()
            case Stop():
                raise AssertionError("Stop ends the loop")
            case _:
                self._handle_scheduler(command)

    def _handle_gateway(self, command: GatewayCommand) -> None:
        requests = self._requests
        match command:
            case AddPrompt(prompt):
                if refusal := requests.receive(prompt, time.monotonic()):
                    self._post(lambda: self._listener.on_refusal(prompt, refusal))
            case RefuseRequest(request_id):
                requests.refuse(request_id)
            case OpenStream(origin):
                self._streams.add(origin)
            case CloseStream(origin):
                self._streams.discard(origin)
                if not self._attached:
                    requests.keep_only(self._streams)

    def _handle_scheduler(self, command: SchedulerCommand) -> None:
        requests = self._requests
        match command:
            case ApplyPlan(plan):
                self._deliver(requests.apply_plan(plan, time.monotonic()))
            case AttachScheduler(on_attached):
                self._attached = self._calls is not None
                held = requests.attach()
                self._post(lambda: on_attached(held))
            case DetachScheduler(on_detached):
                self._attached = False
                requests.keep_only(self._streams)
                self._post(on_detached)
            case ReturnReports(reports):
                requests.return_reports(reports)
            case Reset():
                requests.restart(requests.limits)

    # The server

    def _on_up(self, backend: Backend) -> None:
        limits = limits_of(self._config, backend.capacity, self._eos_ids)
        self._requests.restart(limits)
        self._window = Window(limits.max_running)
        self._calls = BackendCalls(
            self._client, backend, self._tokenizer, min(self._eos_ids),
            self._settings.longest_pause_s, self._tasks, self,
        )  # fmt: skip
        about = f"{backend.model} at {self._client.url}"
        memory = f"{limits.kv_blocks * limits.block_tokens} KV tokens"
        log.info(
            "%s: %s, at most %d requests; %s", about, memory, limits.max_running, backend.dialect
        )
        start = f"{time.monotonic() - self._since_s:.1f} s until its backend answered"
        self._post(lambda: self._availability.set_up(limits, about, start))

    def _on_down(self) -> None:
        """Its requests begin again at other workers, from the tokens that their gateways have."""
        self._since_s = time.monotonic()
        self._cut_all()
        self._calls = None
        self._attached = False
        self._requests.restart(self._requests.limits)
        self._post(self._availability.set_down)

    def _on_load(self, load: Load) -> None:
        self._window.on_load(self._requests.at_server, load.waiting)

    def _cut_all(self) -> None:
        if self._calls:
            self._calls.cut_all()
        self._pace = Pace(time.monotonic())

    # What becomes of requests there

    def on_sent(self, request_id: str, context_tokens: int) -> None:
        self._pace.on_sent(request_id, context_tokens, time.monotonic())

    def on_arrivals(self, request_id: str, arrivals: Sequence[Arrival]) -> None:
        self._pace.on_tokens(request_id, len(arrivals), time.monotonic())
        self._attempts.pop(request_id, None)
        self._deliver(self._requests.add(request_id, arrivals))

    def on_refused(self, request_id: str, why: str) -> None:
        self._pace.on_ended(request_id)
        if sequence := self._requests.fail(request_id):
            prompt = sequence.prompt
            self._post(lambda: self._listener.on_refusal(prompt, why))
        self._carry_out()

    def on_busy(self, request_id: str, why: str) -> None:
        self._window.on_refused(self._requests.at_server - 1)
        self._requests.record_interval(())  # the window has changed
        self._give_back(request_id, why)

    def on_lost(self, request_id: str, why: str) -> None:
        self._monitor.suspect()
        self._give_back(request_id, why)

    def _give_back(self, request_id: str, why: str) -> None:
        """Lets the scheduler queue a request again, unless it has failed too often."""
        self._pace.on_ended(request_id)
        failed = self._attempts.get(request_id, 0) + 1
        self._attempts[request_id] = failed
        if failed < self._settings.attempts:
            self._requests.evict(request_id)
        elif sequence := self._requests.fail(request_id):
            self._attempts.pop(request_id, None)
            self._post_error(sequence.prompt, sequence.output_tokens, f"{why} ({failed} attempts)")
        self._carry_out()

    def _post_error(self, prompt: Prompt, offset: int, message: str) -> None:
        log.warning("%s", message, extra={"request_id": prompt.request_id})
        self._post(lambda: self._listener.on_error(prompt, offset, message))

    def _deliver(self, tokens: Sequence[NewToken]) -> None:
        """Sends tokens at the end of this turn of the loop, with those of other requests."""
        if not tokens:
            return
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._carry_out)
        self._fresh.extend(tokens)
