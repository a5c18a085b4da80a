"""Assembles a worker from its configuration: engine, runner, service and attachment."""

import asyncio
import logging

import transformers
from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from protos.generated import worker_pb2_grpc
from services.runtime.channel import connect
from services.runtime.main import Unit
from services.runtime.server import Mount
from services.runtime.startup import Laps, process_age_s
from services.worker.attachment import Attachment
from services.worker.codec import encode_hello
from services.worker.config import WorkerConfig
from services.worker.engine.profile import profile, profile_swaps
from services.worker.engine.ranks import Ranks
from services.worker.engine.runner import EngineRunner
from services.worker.metrics import WorkerMetrics
from services.worker.parallel.loading import load_engine
from services.worker.service import WorkerService
from services.worker.spans import WorkerSpans

log = logging.getLogger(__name__)

RANK_CHECK_S = 1.0  # between two checks of the ranks, also of an idle worker


def build(config: WorkerConfig, registry: CollectorRegistry, laps: Laps, tracing: Tracing) -> Unit:
    """Raises ValueError with a sentence if the model cannot be served."""
    transformers.utils.logging.disable_progress_bar()
    engine = load_engine(config, laps.lap)
    limit_s = config.profile_s
    swaps = profile_swaps(engine, limit_s) if limit_s else []
    timings = profile(engine, limit_s) if limit_s else []
    laps.lap("profile")
    hello = encode_hello(config, engine, timings, swaps, str(laps))
    log.info(
        "%s: %s, %d KV tokens, %s; up in %.1f s: %s",
        config.model_name,
        engine.model.placement,
        hello.kv_tokens,
        engine.model.forward_name,
        process_age_s(),
        laps,
    )
    metrics = WorkerMetrics(registry, engine.state, engine.phases, engine.host_block_bytes)
    runner = EngineRunner(engine, metrics)
    spans = WorkerSpans(tracing.service(config.section))
    service = WorkerService(runner, config.outbox_tokens, spans)
    channel = connect(config.scheduler_address)
    attachment = Attachment(config, channel, runner, hello, spans)

    async def run() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(runner.run())
                tasks.create_task(attachment.run())
                tasks.create_task(_watch_ranks(engine.ranks))
        finally:
            engine.ranks.close()
            await channel.close()

    mount = Mount("foretoken.v1.Worker", worker_pb2_grpc.add_WorkerServicer_to_server, service)
    return Unit([mount], run, attachment.drain)


async def _watch_ranks(ranks: Ranks) -> None:
    """Raises RanksApart once a rank is gone, even if the engine is idle."""
    while True:
        ranks.check()
        await asyncio.sleep(RANK_CHECK_S)
