"""WorkerHost without Ray: what the supervisor reads of its worker, and the worker's address."""

import re
from pathlib import Path

from foretoken.running.cluster.ray_host import WorkerHost
from services.runtime.network.channel import host_port

CHILD = "tests.foretoken.crashing_child"


async def read_all(host: WorkerHost) -> list[str]:
    found: list[str] = []
    while lines := await host.read():
        found += lines
    return found


async def started(does: str, address: str = "127.0.0.1:20123") -> WorkerHost:
    host = WorkerHost("127.0.0.1")
    await host.start(CHILD, {"worker": {"does": does, "address": address}}, {})
    return host


async def test_lines_end_after_the_last_one_whenever_they_are_read():
    host = await started("rejects-settings")
    assert await host.status() == 2
    await host._reading  # both lines and the end wait
    assert [line[1:] for line in await host.read()] == [
        "loading\n",
        "oretoken worker: the settings are invalid\n",
    ]
    assert await host.read() == [] == await host.read()


async def test_lines_that_are_read_one_by_one_are_the_same():
    host = await started("rejects-settings")
    assert len(await read_all(host)) == 2
    assert await host.status() == 2


def arguments(host: WorkerHost) -> str:
    return Path(f"/proc/{host._process.pid}/cmdline").read_text()


async def test_worker_keeps_its_address_on_its_node_and_gets_another_one_elsewhere():
    for address, kept in (("127.0.0.1:20123", True), ("10.0.0.1:20123", False)):
        host = await started("stays", address)
        try:
            await host.read()  # it runs
            found = re.search(r"worker\.address=(\S+?):(\d+)\0", arguments(host))
            assert found and found[1] == "127.0.0.1"
            assert (host_port(found[1], int(found[2])) == address) is kept
        finally:
            await host.kill()
            await read_all(host)
