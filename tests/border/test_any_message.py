"""Messages with any value in any field, to every method of every server: the caller gets an answer
or a status that says what is wrong, and the server serves on."""

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pool import Default
from google.protobuf.message import Message
from grpc import StatusCode, aio
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.border.hostile import hostile
from tests.border.servers import COMMON, SERVERS, Target, aiter_of, multi_callable
from tests.examples import examples
from tests.worker.worker_fixtures import reference

DEFECTS = (StatusCode.UNKNOWN, StatusCode.INTERNAL, StatusCode.UNIMPLEMENTED)
ENDLESS = ("Improve", "Watch", "WatchCostModel")  # streams that the caller ends
ENDS_S = 20.0
MALFORMED = b"\xff\xff"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    reference("llama").save_pretrained(path)
    return path


class Served:
    """A server that runs while the module's tests run coroutines in its event loop."""

    def __init__(self, runner: asyncio.Runner, name: str, folder: Path):
        self._runner = runner
        self._over = asyncio.Event()
        self.target: Target
        runner.run(self._begin(name, folder))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self._runner.run(work)

    def end(self) -> None:
        self._runner.run(self._end())

    async def _begin(self, name: str, folder: Path) -> None:
        started = asyncio.Event()

        async def serve() -> None:  # in one task: that of a task group may not change
            async with SERVERS[name](folder) as self.target:
                started.set()
                await self._over.wait()

        self._serving = asyncio.create_task(serve())
        waiting = asyncio.create_task(started.wait())
        await asyncio.wait({self._serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            self._serving.result()

    async def _end(self) -> None:
        self._over.set()
        await self._serving


@pytest.fixture(scope="module", params=SERVERS)
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        made = Served(stack.enter_context(asyncio.Runner()), request.param, folder)
        stack.callback(made.end)
        yield made


def conversations(good: Sequence[Any]) -> st.SearchStrategy[list[Message | bytes]]:
    """A valid conversation with hostile messages in place of some, and then more of them."""
    each = [st.just(message) | hostile(message) for message in good]
    more = st.one_of([hostile(message) for message in good]) | st.just(MALFORMED)
    return st.tuples(st.tuples(*each), st.lists(more, max_size=2)).map(
        lambda two: [*two[0], *two[1]]
    )


async def ending(
    target: Target, path: str, messages: list[Message | bytes]
) -> tuple[StatusCode, str]:
    """The status and the sentence with which a conversation ends."""
    service, _, name = path.strip("/").partition("/")
    method = Default().FindServiceByName(service).methods_by_name[name]
    caller = multi_callable(target.channel, method)
    call = caller(aiter_of(messages) if method.client_streaming else messages[-1])
    try:
        async with asyncio.timeout(ENDS_S):
            if method.server_streaming:
                async for _ in call:
                    if name in ENDLESS:
                        break
            else:
                await call
    except aio.AioRpcError as error:
        if error.details() != "Internal error from Core":  # gRPC's, of a write after the end
            return error.code(), error.details() or ""
    finally:
        call.cancel()
    return StatusCode.OK, ""


async def attack(target: Target, sent: dict[str, list[Message | bytes]]) -> None:
    calls = {path: asyncio.create_task(ending(target, path, said)) for path, said in sent.items()}
    try:
        for said in sent.values():
            target.prepare(said)
        await target.serves()
    finally:
        for path, call in calls.items():
            if path.rpartition("/")[2] in ENDLESS:
                call.cancel()
        endings = await asyncio.gather(*calls.values(), return_exceptions=True)
    for path, ended in zip(calls, endings, strict=True):
        if isinstance(ended, tuple):
            assert ended[0] not in DEFECTS, (path, ended)
        elif not isinstance(ended, asyncio.CancelledError):
            raise ended


# Without a search for a shorter failure: it would start all of these conversations again.
@settings(max_examples=examples(60), phases=[Phase.explicit, Phase.generate])
@given(data=st.data())
def test_any_message_is_answered(served: Served, data: st.DataObject) -> None:
    target = served.target
    paths = data.draw(st.sets(st.sampled_from([*target.conversations, *COMMON]), min_size=1))
    sent = {p: data.draw(conversations(target.conversation(p))) for p in sorted(paths)}
    served.run(attack(target, sent))
