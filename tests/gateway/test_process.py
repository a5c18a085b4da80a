"""`python -m gateway` as a process: one-line errors and two-stage shutdown."""

import asyncio
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from foretoken import AsyncClient, DeadlineExceeded, ForetokenError, Unavailable
from foretoken.running.ports import free_port
from gateway.config import GatewayConfig
from gateway.requests.text import Text
from protos.generated import common_pb2 as common
from services.runtime.config import ConfigError, load
from services.runtime.server import listening
from tests.gateway.gateway_fakes import (
    FakeScheduler,
    FakeWorker,
    demo_folder,
    scheduler_mount,
    tokens_of,
    worker_mount,
)

pytestmark = pytest.mark.slow


async def start(**settings: object) -> Process:
    given = {"model": demo_folder(), "grpc_port": 0, "http_port": 0, **settings}
    sets = [part for k, v in given.items() for part in ("--set", f"gateway.{k}={v}")]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", *sets, stdout=PIPE, stderr=PIPE
    )


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("no_such", "1", "unknown config key gateway.no_such"),
        ("max_session", "1", "did you mean max_sessions?"),
        ("max_sessions", "0", "gateway.max_sessions: "),
        ("http_port", "70000", "gateway.http_port: "),
        (
            "model",
            "./no/such/folder",
            "gateway.model: the folder does not exist; pass a model's fol",
        ),
        ("sla_classes", '{"gold": {"ttft_s": -1}}', "gateway.sla_classes.gold.ttft_s: "),
        ("sla_classes", '{"gold": {"speed": 1}}', "gateway.sla_classes.gold.speed: "),
        ("default_sla", "gold", "names no class of sla_classes: interactive, standard, batch"),
    ],
)
def test_config_mistake_is_a_one_line_error(key: str, value: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Text(load(GatewayConfig, {key: value}).model)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_grpc_address_is_built_from_host_and_port() -> None:
    assert load(GatewayConfig, {"host": "::1", "grpc_port": "7"}).address == "[::1]:7"
    assert load(GatewayConfig, {"grpc_port": "7"}).address == "127.0.0.1:7"
    assert load(GatewayConfig, {"address": "unix:/tmp/x"}).address == "unix:/tmp/x"


def test_model_name_defaults_to_its_folder(tmp_path: Path) -> None:
    assert load(GatewayConfig, {"model": str(tmp_path)}).model_name == tmp_path.name
    assert load(GatewayConfig, {"model": "org/name"}).model_name == "org/name"
    assert load(GatewayConfig, {"served_model_name": "best"}).model_name == "best"


async def test_port_in_use_is_a_one_line_error_with_status_2() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        process = await start(http_port=port)
        _, errors = await process.communicate()
    (line,) = errors.decode().strip().splitlines()
    assert process.returncode == 2
    assert line.startswith(f"foretoken gateway: cannot listen on 127.0.0.1:{port} for HTTP")


@asynccontextmanager
async def running(**settings: object) -> Any:
    """A gateway process between fakes, with a request after the arrival of its first token."""
    async with AsyncExitStack() as stack:
        worker, scheduler, port = FakeWorker(), FakeScheduler(), free_port()
        work = await stack.enter_async_context(listening([worker_mount(worker)], "127.0.0.1:0"))
        schedule = await stack.enter_async_context(
            listening([scheduler_mount(scheduler)], "127.0.0.1:0")
        )
        scheduler.worker_address = f"127.0.0.1:{work.port}"
        address = f"127.0.0.1:{schedule.port}"
        process = await start(scheduler_address=address, grpc_port=port, **settings)
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{port}"))
        try:
            pending = await first_token(client, worker)
            yield process, client, worker, pending
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()


async def first_token(client: AsyncClient, worker: FakeWorker) -> "asyncio.Task[Any]":
    async with asyncio.timeout(120):
        while True:
            try:
                await client.models()
                break
            except Unavailable:
                await asyncio.sleep(0.1)
        pending = asyncio.create_task(client.complete("12"))
        while not worker.prompts:  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(0.01)
    worker.send(worker.prompts[0].request_id, 0, tokens_of("1"))
    return pending


async def test_first_sigterm_drains() -> None:
    async with running() as (process, client, worker, pending):
        process.send_signal(signal.SIGTERM)
        with pytest.raises(Unavailable):
            while True:
                with suppress(DeadlineExceeded):  # admitted before the signal arrived
                    await client.complete("12", timeout_s=0.2)
        assert process.returncode is None
        name = worker.prompts[0].request_id
        worker.send(name, 1, tokens_of("2"), common.FINISH_REASON_STOP)
        assert (await pending).text == "12"
        assert await process.wait() == 0


async def test_second_sigterm_stops_at_once() -> None:
    async with running() as (process, _, _, pending):
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        assert process.returncode is None
        process.send_signal(signal.SIGTERM)
        with pytest.raises(ForetokenError):
            await pending
        assert await asyncio.wait_for(process.wait(), 20) == 0
