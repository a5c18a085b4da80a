"""Addresses that a worker may announce by its certificate or token."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from operator import contains
from pathlib import Path

import pytest
from grpc import StatusCode
from prometheus_client import CollectorRegistry

from foretoken.running.certificates import make_certificates
from protos.generated import scheduler_pb2_grpc
from services.runtime.errors import InvalidArgument
from services.runtime.network.connector import Connector
from services.runtime.network.identity import AnyIdentity, Protection, Role
from services.runtime.network.token_identity import TokenIdentity
from services.runtime.server import Mount, listening
from services.scheduler.links.announced import check_announced
from tests.reach import until
from tests.runtime.identity.echo import identity
from tests.scheduler.served import NAME, Live, running

NAMES = ("worker.foretoken.internal", "Worker-0", "*.pods", "10.0.0.7", "fd00::7")
FROM, FROM_V6 = "ipv4:10.0.0.9:50", "ipv6:%5Bfd00::9%5D:50"
LOCAL, LOCAL_V6 = "ipv4:127.0.0.1:50", "ipv6:%5B::1%5D:50"


@pytest.mark.parametrize(
    ("address", "names", "peer"),
    [
        ("any:1", (), "in-process"),
        ("unix:/w", (), "unix:"),
        ("worker-0:1", NAMES, FROM),
        ("WORKER-0:1", NAMES, FROM),
        ("worker-7.pods:1", NAMES, FROM),
        ("10.0.0.7:1", NAMES, FROM),
        ("[fd00:0::7]:1", NAMES, FROM),
        ("unix:/w", NAMES, LOCAL),
        ("unix:/w", NAMES, LOCAL_V6),
    ],
)
def test_announced_addresses(address: str, names: Sequence[str], peer: str) -> None:
    check_announced(address, names, peer)


@pytest.mark.parametrize(
    ("address", "names", "peer", "sentence"),
    [
        (
            "worker-1:1",
            NAMES,
            FROM,
            "does not let it announce 'worker-1', only *.pods, 10.0.0.7, ",
        ),
        ("worker-0.evil:1", NAMES, FROM, "'worker-0.evil'"),
        ("a.b.pods:1", NAMES, FROM, "'a.b.pods'"),
        ("pods:1", NAMES, FROM, "'pods'"),
        (".pods:1", NAMES, FROM, "'.pods'"),
        ("10.0.0.9:1", NAMES, FROM, "'10.0.0.9'"),
        ("[fd00::8]:1", NAMES, FROM, "'fd00::8'"),
        ("worker-0", NAMES, FROM, "''"),
        ("unix:/w", NAMES, FROM, "unix:/w is on another machine; give host:port"),
        ("unix:/w", NAMES, FROM_V6, "unix:/w is on another machine; give host:port"),
    ],
)
def test_other_addresses_are_refused(
    address: str, names: Sequence[str], peer: str, sentence: str
) -> None:
    with pytest.raises(InvalidArgument) as raised:
        check_announced(address, names, peer)
    assert raised.value.field == "address"
    assert sentence in raised.value.message


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certs")
    make_certificates(made, 1, ["worker-0.pods", "10.0.0.7"])
    return made


@asynccontextmanager
async def attaching(scheduler: AnyIdentity, worker: AnyIdentity) -> AsyncIterator[Live]:
    """A scheduler, reached by a worker's certificate or token."""
    add = scheduler_pb2_grpc.add_SchedulerServicer_to_server
    async with running() as live:
        mount = Mount(NAME, add, live.service)
        async with listening([mount], "127.0.0.1:0", protection=Protection(scheduler)) as server:
            channel = Connector(worker).connect(f"127.0.0.1:{server.port}", Role.SCHEDULER)
            stub = scheduler_pb2_grpc.SchedulerStub(channel)
            yield Live(live.service, CollectorRegistry(), channel, stub, live.texts)
            await channel.close()


async def test_worker_attaches_with_the_hosts_of_its_certificate_only(folder: Path) -> None:
    scheduler, worker = identity(folder, Role.SCHEDULER), identity(folder, Role.WORKER)
    await check_attaching(scheduler, worker, ("worker-0.pods", "10.0.0.7", "127.0.0.1"))


async def test_worker_attaches_with_the_host_that_names_its_token_only(tmp_path: Path) -> None:
    for name, line in (("s", f"worker/*.0.pods:{'w' * 32}"), ("w", "w" * 32)):
        (tmp_path / name).touch(0o600)
        (tmp_path / name).write_text(line)
    scheduler, worker = (TokenIdentity(str(tmp_path / name), tuple(Role)) for name in "sw")
    await check_attaching(scheduler, worker, ("worker-0.0.pods",))


async def check_attaching(
    scheduler: AnyIdentity, worker: AnyIdentity, hosts: Sequence[str]
) -> None:
    """Whether a worker attaches with these hosts, and with no others."""
    async with attaching(scheduler, worker) as live:
        for host in hosts:
            stream = live.worker(host, address=f"{host}:50061")
            await until(partial(contains, live.service.state.workers, host))
            stream.leave()
            await stream.reading
        for host in ("worker-1.pods", "10.0.0.8"):
            refused = live.worker("other", address=f"{host}:50061")
            await refused.reading
            assert refused.ended and refused.ended.code() is StatusCode.INVALID_ARGUMENT
            assert f"does not let it announce '{host}'" in (refused.ended.details() or "")
        assert "other" not in live.service.state.workers
