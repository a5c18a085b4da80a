"""Where outcomes come from: the API key and the scheduler, as they are stored and left out."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from grpc import aio

from foretoken.running.certificates import make_certificates
from protos.generated import common_pb2, predictor_pb2, predictor_pb2_grpc
from services.runtime.network.connector import Connector
from services.runtime.network.identity import AnyIdentity, Identity, Protection, Role, TlsConfig
from services.runtime.network.token_identity import TokenIdentity
from services.runtime.outcomelog import Row
from services.runtime.outcomelog.config import LogConfig
from services.runtime.outcomelog.sqlite import SqliteLog
from services.runtime.server import Mount, listening
from tests.predictor.predictor_serving import ADD, NAME, ended, predicting
from tests.reach import until


@pytest.fixture
def log(tmp_path: Path) -> LogConfig:
    return LogConfig(path=str(tmp_path / "outcomes.sqlite"))


def reported(name: str, key: str, reporter: str) -> predictor_pb2.ObserveOutcomesRequest:
    outcome = ended(name, 5, key_name=key)
    return predictor_pb2.ObserveOutcomesRequest(outcomes=[outcome], reporter=reporter)


async def sources(log: LogConfig) -> list[tuple[str, str]]:
    """The API key and the reporting process of each outcome."""
    kept = SqliteLog.open(log.path, 100)
    payloads = [entry.row.payload for entry in await kept.read("", 100)]
    await kept.close()
    records = map(predictor_pb2.OutcomeRecord.FromString, payloads)
    return [(each.key_name, each.reporter) for each in records]


async def test_outcomes_of_a_source_are_left_out_and_stay_in_the_log(log: LogConfig) -> None:
    given = [("ada", "s-1"), ("bob", "s-1"), ("bob", "s-2")]
    async with predicting(log=log) as running:
        for i, (key, reporter) in enumerate(given):
            await running.stub.Observe(reported(f"r{i}", key, reporter))
    kept = SqliteLog.open(log.path, 100)
    old = predictor_pb2.OutcomeRecord(
        model="demo", output_tokens=7, max_tokens=9, reason=common_pb2.FINISH_REASON_STOP
    )
    await kept.append([Row("outcome", 1, old.SerializeToString())])
    await kept.close()
    left_out: tuple[str, ...]
    for left_out, learned in ((), 4), (("ada",), 3), (("ada", "s-2"), 2), (("bob",), 2):
        again = log.model_copy(update={"leave_out": left_out})
        async with predicting(log=again) as running:
            await until(lambda: running.value("log_delivered_total") == 4)
            assert running.value("outcomes_total", learnt="yes") == learned
            assert running.value("outcomes_total", learnt="no") == 4 - learned
    assert await sources(log) == [*given, ("", "")]


async def test_own_outcomes_that_are_left_out_are_answered_at_once(log: LogConfig) -> None:
    async with predicting(log=log.model_copy(update={"leave_out": ("ada",)})) as running:
        assert (await running.stub.Observe(reported("a", "ada", "s"))).version == 0
        assert (await running.stub.Observe(reported("b", "bob", "s"))).version == 1


def certificates(folder: Path, name: str) -> tuple[Identity, Identity]:
    """Those of a predictor and of the scheduler of that name."""
    make_certificates(folder, 1, more=["scheduler-blue"])

    def identity(name: str) -> Identity:
        cert, key = (str(folder / f"{name}.{kind}") for kind in ("pem", "key"))
        return Identity(TlsConfig(cert=cert, key=key, ca=str(folder / "ca.pem")))

    return identity(Role.PREDICTOR), identity(name)


def tokens(folder: Path, owner: str) -> tuple[TokenIdentity, TokenIdentity]:
    """Those of a predictor, with the owner of the scheduler's, and of a scheduler."""
    folder.mkdir()
    for name, line in (("predictor", f"{owner}:{'s' * 32}"), ("scheduler", "s" * 32)):
        (folder / name).touch(0o600)
        (folder / name).write_text(line)
    predictor, scheduler = (
        TokenIdentity(str(folder / name), tuple(Role)) for name in ("predictor", "scheduler")
    )
    return predictor, scheduler


Identities = Callable[[Path], tuple[AnyIdentity, AnyIdentity]]


@pytest.mark.parametrize(
    ("identities", "reporter"),
    [
        (partial(certificates, name="scheduler"), "scheduler"),
        (partial(certificates, name="scheduler-blue"), "scheduler-blue"),
        (partial(tokens, owner="scheduler/chat-1"), "chat-1"),
        (partial(tokens, owner="scheduler"), "someone"),
    ],
)
async def test_name_in_a_certificate_or_of_a_token_replaces_that_in_the_message(
    log: LogConfig, tmp_path: Path, identities: Identities, reporter: str
) -> None:
    at_predictor, at_scheduler = identities(tmp_path / "identities")
    async with predicting(log=log) as running:
        mount = Mount(NAME, ADD, running.service)
        protection = Protection(at_predictor)
        async with listening([mount], "127.0.0.1:0", protection=protection) as server:
            connector = Connector(at_scheduler)
            channel: aio.Channel = connector.connect(f"127.0.0.1:{server.port}", Role.PREDICTOR)
            stub = predictor_pb2_grpc.PredictorStub(channel)
            await stub.Observe(reported("a", "ada", "someone"))
            await channel.close()
    assert await sources(log) == [("ada", reporter)]
