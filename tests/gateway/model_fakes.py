"""A front for several models, each with a fake scheduler and a fake worker, on real sockets."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from gateway.config import GatewayConfig
from gateway.faces.app import build_app
from gateway.faces.grpc.service import mount
from gateway.faces.http.serve import serving_http
from gateway.front import Front
from gateway.types.model_entry import ModelEntry
from observability.tracing import NO_SPANS, Spans
from protos.generated import worker_pb2
from services.runtime.network.channel import connect
from services.runtime.server import listening
from services.runtime.tasks import background
from tests.gateway.gateway_fakes import (
    FakeScheduler,
    FakeWorker,
    Harness,
    demo_folder,
    scheduler_mount,
    tokens_of,
    worker_mount,
)


@dataclass
class Models:
    """A front, the fakes of each model by name, and the addresses for clients."""

    fakes: Mapping[str, Harness]
    front: Front

    @property
    def first(self) -> Harness:
        return next(iter(self.fakes.values()))

    async def http(self, *request: Any) -> Any:
        return await self.first.http(*request)


def _script(text: str) -> Callable[[worker_pb2.Prompt], Sequence[int]]:
    return lambda _: tokens_of(text)


@asynccontextmanager
async def run_models(
    answers: Mapping[str, str],
    spans: Spans = NO_SPANS,
    workerless: Collection[str] = (),
    **config: Any,
) -> AsyncIterator[Models]:
    """Serves the models by name; each answers every prompt with its text, or as the test says if
    the text is empty. The workers of `workerless` are not attached to their schedulers."""
    async with AsyncExitStack() as stack:
        made: dict[str, tuple[FakeScheduler, FakeWorker, Any, Any]] = {}
        for name, text in answers.items():
            scheduler = FakeScheduler(model=name)
            worker = FakeWorker(_script(text) if text else None)
            work = await stack.enter_async_context(listening([worker_mount(worker)], "127.0.0.1:0"))
            plan = await stack.enter_async_context(
                listening([scheduler_mount(scheduler)], "127.0.0.1:0")
            )
            scheduler.worker_address = "" if name in workerless else f"127.0.0.1:{work.port}"
            made[name] = scheduler, worker, plan, work
        entries = {
            name: ModelEntry(model=demo_folder(), scheduler_address=f"127.0.0.1:{plan.port}")
            for name, (_, _, plan, _) in made.items()
        }
        settings = GatewayConfig(models=entries, **config)
        front = Front(settings, connect, connect, connect, spans=spans)
        await stack.enter_async_context(background(front.run()))
        web = serving_http(build_app(front), "127.0.0.1", 0, settings)
        port = await stack.enter_async_context(web)
        server = await stack.enter_async_context(
            listening([mount(front)], "127.0.0.1:0", parts=front.parts)
        )
        grpc, http = f"127.0.0.1:{server.port}", f"http://127.0.0.1:{port}"
        fakes = {
            name: Harness(scheduler, worker, front, plan, work, grpc, http, stack)
            for name, (scheduler, worker, plan, work) in made.items()
        }
        running = Models(fakes, front)
        awaited = [each for name, each in front.gateways.items() if name not in workerless]
        await running.first.until(lambda: all(each.ready for each in awaited))
        yield running
