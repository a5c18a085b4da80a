"""Several gateways of one server: each answers, and the loss of one costs its connections only."""

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from foretoken import AsyncClient
from foretoken.client.errors import ForetokenError, Unauthenticated
from tests.live import Live
from tests.reach import until
from tests.system.faults.killed_processes import (
    PROMPTS,
    answer,
    answers,
    kill_process,
    pids,
    two_workers,
    wait_for_output,
)

pytestmark = pytest.mark.slow
CONNECTIONS = 32  # all of them to one gateway: once in 2 billion times
LONG = 1_800  # tokens; two seconds or more
ASKED = 12  # of each request about responses
KEY = "sk-known"
RUNNING = re.compile(r'foretoken_num_requests_running{.*gateway="(\S+)"} (\S+)')


def running(http: str) -> dict[str, int]:
    """Running requests by gateway."""
    text = urllib.request.urlopen(f"{http}/metrics", timeout=30).read().decode()
    return {name: int(float(count)) for name, count in RUNNING.findall(text)}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Path]]:
    """A live system of two gateways, and the file that holds its stderr."""
    chosen = (
        "--gateways=2",
        f"--api-key={KEY}",
        "--set",
        "worker.max_running=32",
        "--set",
        "gateway.metrics_wait_s=0.5",  # a scrape does not wait for the predictor
        "--kv-tokens=65536",
    )
    with two_workers(tmp_path_factory.mktemp("gateways"), *chosen) as (live, output):
        yield live, output
        assert live.stop() == 0
    assert "Traceback" not in output.read_text()


async def test_any_gateway_follows_a_background_response(
    system: tuple[Live, Path],
) -> None:
    """Each request has a connection of its own; the kernel spreads them over the gateways."""
    async with AsyncOpenAI(
        base_url=f"{system[0].http}/v1",
        api_key=KEY,
        max_retries=0,
        default_headers={"connection": "close"},
    ) as client:
        responses: Any = client.responses

        async def follow(response_id: str) -> list[Any]:
            events = await responses.retrieve(response_id, stream=True, starting_after=0)
            return [event async for event in events]

        stream = await responses.create(
            input="count to 9", background=True, stream=True, max_output_tokens=60
        )
        name = (await anext(aiter(stream))).response.id
        await stream.close()
        first, *others = await asyncio.gather(*(follow(name) for _ in range(ASKED)))
        assert others == [first] * len(others)
        text = first[-1].response.output_text
        assert text
        found = await asyncio.gather(*(responses.retrieve(name) for _ in range(ASKED)))
        assert {each.output_text for each in found} == {text}


async def test_loss_of_a_gateway_costs_its_connections_only(system: tuple[Live, Path]) -> None:
    live, output = system
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncClient(live.grpc, api_key=KEY))
            for _ in range(CONNECTIONS)
        ]
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(CONNECTIONS)]
        expected = await asyncio.gather(*(answer(clients[0], each, LONG) for each in PROMPTS))
        for _ in range(8):
            with pytest.raises(Unauthenticated):
                async with AsyncClient(live.grpc, api_key="sk-other") as stranger:
                    await answer(stranger, PROMPTS[0], 1)
        streams = [
            asyncio.ensure_future(answer(client, prompt, LONG))
            for client, prompt in zip(clients, prompts, strict=True)
        ]
        counts: dict[str, int] = {}

        def all_run() -> bool:
            counts.update(running(live.http))
            return sum(counts.values()) == CONNECTIONS

        await until(all_run, 20.0)
        lost = pids(live, "gateway")[0]
        await kill_process(live, "gateway")
        ended = await asyncio.gather(*streams, return_exceptions=True)
        await wait_for_output(output, "is back after")
        name = re.search(r"(gateway-\d) is back after", output.read_text())
        assert name and lost not in pids(live, "gateway")
        failed = [i for i, each in enumerate(ended) if isinstance(each, BaseException)]
        # One may have ended between the count and the kill.
        assert 0 < len(failed) <= counts[name[1]] < CONNECTIONS
        for i, each in enumerate(ended):
            if i in failed:
                assert isinstance(each, ForetokenError)
            else:
                assert each == expected[i % len(PROMPTS)]
        again = [await answers(client, 20) for client in clients]
        assert again == [again[0]] * CONNECTIONS
        await until(lambda: set(running(live.http)) == {"gateway-0", "gateway-1"}, 20.0)
