"""A gateway's stream to an address that another worker process has taken over."""

import asyncio
from pathlib import Path

from foretoken import AsyncClient
from services.runtime.server import listening
from tests.gateway.gateway_fakes import FakeWorker, Harness, tokens_of, worker_mount
from tests.gateway.gateway_fixtures import IDS, STOP, WORDS
from tests.gateway.gateway_fixtures import client as client
from tests.gateway.gateway_fixtures import harness as harness


def send_fleet(harness: Harness, address: str, epoch: int) -> None:
    harness.scheduler.worker_address, harness.scheduler.epoch = address, epoch
    harness.scheduler.streams[-1].put_nowait(harness.scheduler.fleet([address]))


async def test_stream_follows_a_later_process_at_the_same_address(
    harness: Harness, client: AsyncClient, tmp_path: Path
) -> None:
    """The earlier one still serves its connections, as one that is cut off from the scheduler."""
    path, earlier, later = tmp_path / "w", FakeWorker(), FakeWorker()
    address = f"unix:{path}"
    async with listening([worker_mount(earlier)], address):
        send_fleet(harness, address, 1)
        await harness.until(lambda: address in harness.gateway.sessions.peers.fleet.addresses)
        pending = asyncio.ensure_future(client.complete("1,"))
        await harness.until(lambda: bool(earlier.prompts))
        name = earlier.prompts[0].request_id
        send_fleet(harness, address, 1)  # the same process
        earlier.send(name, 0, IDS[:2])
        await harness.until(lambda: harness.gateway.metrics.generation_tokens._value.get() == 2)
        assert earlier.opened == 1
        path.rename(tmp_path / "earlier")
        async with listening([worker_mount(later)], address):
            send_fleet(harness, address, 2)
            await harness.until(lambda: bool(later.prompts))
            earlier.send(name, 2, tokens_of("nonsense"), STOP)
            again = later.prompts[0]
            assert list(again.token_ids[again.prompt_tokens :]) == IDS[:2]
            later.send(again.request_id, 2, IDS[2:], STOP)
            assert (await pending).text == WORDS
        assert (earlier.opened, later.opened) == (1, 1)
