"""The LoRA adapters of a deployment: all workers of a model hold the same ones.

A worker takes part once it holds them, so that a request may be placed on any worker of its model.
After a restart of the scheduler, workers tell which ones they hold. An adapter that was unloaded
stays so until it is loaded again: a worker that was away meanwhile, or that starts with it, unloads
it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from protos.generated import scheduler_pb2
from services.runtime.errors import Code, InvalidArgument, ServiceError
from services.runtime.network.streams import Outbox

log = logging.getLogger(__name__)

MAX_NAME_CHARS, MAX_PATH_CHARS = 256, 4_096
MAX_ADAPTERS = 1_024  # of all models
MAX_UNLOADED = 4_096  # remembered, of all models
NO_ADAPTER = "model {model} has no adapter {name!r}"

Paths = dict[str, str]


@dataclass(slots=True)
class _Holder:
    """A worker's stream, what it holds, and the answers that are on their way, by seq. It takes
    part once it holds its model's adapters."""

    model: str
    outbox: Outbox[scheduler_pb2.Plan]
    held: Paths
    takes_part: bool = False
    asked: dict[int, asyncio.Future[Mapping[str, str]]] = field(default_factory=dict)


class AdapterRegistry:
    """Adapters by model and name, and the workers that hold them. `on_change` is called when the
    adapters that requests may use have changed."""

    def __init__(self, wait_s: float, on_change: Callable[[], None]):
        self._wait_s, self._on_change = wait_s, on_change
        self._wanted: dict[str, Paths] = {}  # by model
        # Model, name and folder of adapters that were unloaded, the oldest first.
        self._unloaded: dict[tuple[str, str, str], None] = {}
        self._holders: dict[str, _Holder] = {}  # by link
        self._seq = 0
        self._changing = asyncio.Lock()

    def usable(self) -> list[scheduler_pb2.Adapter]:
        """The adapters that all workers of their model hold, among those that take part.
        O(adapters · workers)."""
        return [
            scheduler_pb2.Adapter(model=model, name=name, path=path)
            for model, paths in self._wanted.items()
            if (holders := [each for each in self._of_model(model) if each.takes_part])
            for name, path in paths.items()
            if all(holder.held.get(name) == path for holder in holders)
        ]

    # Workers

    def attach(
        self, link: str, hello: scheduler_pb2.WorkerHello, outbox: Outbox[scheduler_pb2.Plan]
    ) -> asyncio.Future[Mapping[str, str]] | None:
        """A worker's stream has begun. If it lacks adapters, it is asked to hold them: the future
        has a sentence for each that it cannot. Adapters that only it knows are those of all, except
        unloaded ones, which it unloads, too."""
        held = {each.name: each.path for each in hello.adapters}
        holder = self._holders[link] = _Holder(hello.model, outbox, held)
        before = self._wanted.get(hello.model, {})
        known = {
            name: path
            for name, path in held.items()
            if (hello.model, name, path) not in self._unloaded
        }
        if unloaded := held.keys() - known.keys() - before.keys():
            text = "worker %s starts with adapters that were unloaded, and unloads them: %s"
            log.info(text, hello.worker_id, ", ".join(sorted(unloaded)))
        wanted = self._wanted[hello.model] = {**known, **before}
        if len(wanted) > len(before):
            for other in self._of_model(hello.model):
                if other is not holder:
                    self._ask(other, wanted)
        return self._ask(holder, wanted) if wanted != held else None

    def admit(self, link: str) -> None:
        """The worker takes part: adapters that it lacks cannot be used from now on."""
        self._holders[link].takes_part = True

    def all_hold(self, model: str, name: str) -> bool:
        """Whether workers of the model take part, and all of them hold the adapter."""
        holders = [holder for holder in self._of_model(model) if holder.takes_part]
        return bool(holders) and all(name in holder.held for holder in holders)

    def detach(self, link: str) -> None:
        """The stream has ended."""
        if holder := self._holders.pop(link, None):
            for answer in holder.asked.values():
                answer.cancel()

    def on_states(self, link: str, states: scheduler_pb2.AdapterStates) -> None:
        """A worker has answered."""
        if holder := self._holders.get(link):
            holder.held = {each.name: each.path for each in states.held}
            answer = holder.asked.pop(states.seq, None)
            if answer is not None and not answer.done():
                answer.set_result({each.name: each.message for each in states.errors})
            self._on_change()

    # Commands

    async def load(self, adapter: scheduler_pb2.Adapter) -> None:
        """Returns once all workers of the model hold the adapter. Raises ServiceError."""
        model, name, path = adapter.model, adapter.name, adapter.path
        for what, given, most in (("name", name, MAX_NAME_CHARS), ("path", path, MAX_PATH_CHARS)):
            if not 0 < len(given) <= most:
                raise InvalidArgument(what, f"an adapter's {what} has 1 to {most} characters")
        async with self._changing:
            before = self._wanted.get(model, {})
            if name in before:
                raise InvalidArgument(
                    "name", f"the adapter {name!r} is loaded from {before[name]}: unload it before"
                )
            if sum(map(len, self._wanted.values())) >= MAX_ADAPTERS:
                raise InvalidArgument("name", f"{MAX_ADAPTERS} adapters are loaded: unload one")
            if not self._of_model(model):
                raise ServiceError(Code.UNAVAILABLE, f"no worker of the model {model} is attached")
            # Workers that attach meanwhile are asked, too.
            self._wanted[model] = {**before, name: path}
            try:
                errors = await self._ask_all(model)
            except BaseException:
                self._withdraw(model, name)
                raise
            if reason := errors.get(name):
                self._withdraw(model, name)
                raise InvalidArgument("path", reason)
            self._unloaded.pop((model, name, path), None)
        log.info("adapter %s of %s is loaded from %s", name, model, path)

    async def unload(self, adapter: scheduler_pb2.Adapter) -> None:
        """Returns once no worker accepts requests with the adapter. Raises ServiceError."""
        model, name = adapter.model, adapter.name
        async with self._changing:
            if name not in self._wanted.get(model, {}):
                sentence = NO_ADAPTER.format(model=model, name=name[:MAX_NAME_CHARS])
                raise ServiceError(Code.NOT_FOUND, sentence)
            path = self._remove(model, name)
            self._unloaded[model, name, path] = None
            if len(self._unloaded) > MAX_UNLOADED:
                del self._unloaded[next(iter(self._unloaded))]
            self._on_change()  # first: gateways send no further requests
            await self._ask_all(model)
        log.info("adapter %s of %s is unloaded", name, model)

    # Messages

    def _of_model(self, model: str) -> list[_Holder]:
        return [holder for holder in self._holders.values() if holder.model == model]

    def _withdraw(self, model: str, name: str) -> None:
        """Makes no worker hold an adapter that one of them cannot hold; does not wait."""
        self._remove(model, name)
        for holder in self._of_model(model):
            self._ask(holder, self._wanted[model])

    def _remove(self, model: str, name: str) -> str:
        """Removes an adapter from those that workers are asked to hold. Returns its folder."""
        paths = self._wanted[model]
        self._wanted[model] = {each: path for each, path in paths.items() if each != name}
        return paths[name]

    async def _ask_all(self, model: str) -> Mapping[str, str]:
        """Sends its adapters to all workers of a model. Returns a sentence for each adapter that
        one of them cannot hold; workers that leave meanwhile do not count."""
        answers = [self._ask(holder, self._wanted[model]) for holder in self._of_model(model)]
        if not answers:
            return {}
        done, late = await asyncio.wait(answers, timeout=self._wait_s)
        if late:
            raise ServiceError(
                Code.UNAVAILABLE,
                f"{len(late)} of {len(answers)} workers have not answered in {self._wait_s:g} s",
            )
        found = [each.result() for each in done if not each.cancelled()]
        return {name: reason for errors in found for name, reason in errors.items()}

    def _ask(self, holder: _Holder, paths: Paths) -> asyncio.Future[Mapping[str, str]]:
        self._seq += 1
        answer = asyncio.get_running_loop().create_future()
        holder.asked[self._seq] = answer
        adapters = [scheduler_pb2.Adapter(name=name, path=path) for name, path in paths.items()]
        wanted = scheduler_pb2.AdapterSet(seq=self._seq, adapters=adapters)
        holder.outbox.put(scheduler_pb2.Plan(adapters=wanted))
        return answer
