"""Roles of tokens: methods by role, changes of roles, and files for all services."""

from contextlib import AsyncExitStack
from itertools import permutations
from pathlib import Path

import pytest
from grpc import StatusCode

from foretoken.commands.tokens import make_token_files
from services.runtime.network.authorisation import SERVICE, callers_of
from services.runtime.network.connector import Connector
from services.runtime.network.identity import Role, TlsConfig, open_identity
from services.runtime.network.token_identity import TokenIdentity
from tests.runtime.identity.echo import METHODS, STREAM, SUBMIT, call, echoing, refusal

PLAIN_TOKEN = "p" * 32
SERVING = (Role.SCHEDULER, Role.WORKER, Role.PREDICTOR, Role.ESTIMATOR, Role.BATCHER)


def secret_of(role: Role) -> str:
    return f"{role:x<32}"


def opened(path: Path) -> TokenIdentity:
    found = open_identity(TlsConfig(token_file=str(path)))
    assert isinstance(found, TokenIdentity)
    return found


def written(path: Path, *lines: str) -> TokenIdentity:
    path.touch(0o600)
    path.write_text("\n".join(lines))
    return opened(path)


def server_lines() -> list[str]:
    return [*(f"{role}/{role}-1:{secret_of(role)}" for role in Role), PLAIN_TOKEN]


async def test_each_role_may_call_its_methods_only(tmp_path: Path) -> None:
    """A caller with a token for all may call all methods."""
    server_identity = written(tmp_path / "server", *server_lines())
    async with echoing(server_identity) as server, AsyncExitStack() as stack:
        for role in (*Role, None):
            secret = secret_of(role) if role else PLAIN_TOKEN
            for given in (secret, f"worker:{secret}"):
                client = Connector(written(tmp_path / "client", given))
                channel = client.connect(f"127.0.0.1:{server.port}", Role.WORKER)
                stack.push_async_callback(channel.close)
                for method, roles in METHODS.items():
                    is_allowed = role is None or role in roles
                    expected = StatusCode.OK if is_allowed else StatusCode.PERMISSION_DENIED
                    assert await call(channel, method) is expected, (role, method)


async def test_refusal_names_the_roles(tmp_path: Path) -> None:
    async with echoing(written(tmp_path / "server", *server_lines())) as server:
        client = Connector(written(tmp_path / "client", secret_of(Role.WORKER)))
        channel = client.connect(f"127.0.0.1:{server.port}")
        assert await refusal(channel, f"{SERVICE}Predictor/Observe") == (
            "/foretoken.v1.Predictor/Observe is for the role picker or scheduler; the token has "
            "worker"
        )
        await channel.close()


async def test_roles_follow_the_file(tmp_path: Path) -> None:
    """A change that is wrong leaves the earlier roles."""
    secret, path = secret_of(Role.GATEWAY), tmp_path / "server"
    async with echoing(written(path, f"worker:{secret}")) as server:
        client = Connector(written(tmp_path / "client", secret))
        channel = client.connect(f"127.0.0.1:{server.port}")
        assert await call(channel, STREAM) is StatusCode.PERMISSION_DENIED
        written(path, f"gateway: {secret}")
        assert await call(channel, STREAM) is StatusCode.OK
        path.write_text(f"wroker:{secret}")
        assert await call(channel, STREAM) is StatusCode.OK
        written(path, f"gateway:{PLAIN_TOKEN}")
        assert await call(channel, STREAM) is StatusCode.UNAUTHENTICATED
        await channel.close()


async def test_token_is_sent_to_services_of_its_role_only(tmp_path: Path) -> None:
    """The first one; to a service of an unknown role, the one for all."""
    own = secret_of(Role.GATEWAY)
    others = [f"{role}:{secret_of(role)}" for role in (Role.SCHEDULER, Role.WORKER)]
    path = tmp_path / "client"
    async with echoing(written(tmp_path / "server", f"gateway:{own}")) as server:
        address = f"127.0.0.1:{server.port}"
        client = Connector(written(path, others[0], f"worker:{own}", others[1]))
        channels = [client.connect_to_peer(peer) for peer in (f"worker={address}", address)]
        statuses = [await call(channel, STREAM) for channel in channels]
        assert statuses == [StatusCode.OK, StatusCode.UNAUTHENTICATED]
        assert await refusal(channels[1]) == (
            f"{SUBMIT} needs a token of tls.token_file; the call has none"
        )
        written(path, others[0], own)
        assert {await call(channel, STREAM) for channel in channels} == {StatusCode.OK}
        for channel in channels:
            await channel.close()


async def test_each_service_takes_its_callers_with_their_tokens(tmp_path: Path) -> None:
    make_token_files(tmp_path)
    identities = {role: opened(tmp_path / f"{role}.tokens") for role in Role}
    for server_role in SERVING:
        own = {m: roles for m, roles in METHODS.items() if f".{server_role.title()}/" in m}
        async with echoing(identities[server_role]) as server, AsyncExitStack() as stack:
            for role, identity in identities.items():
                channel = Connector(identity).connect(f"127.0.0.1:{server.port}", server_role)
                stack.push_async_callback(channel.close)
                known = role in callers_of(server_role) or server_role in callers_of(role)
                refused = StatusCode.PERMISSION_DENIED if known else StatusCode.UNAUTHENTICATED
                for method, roles in own.items():
                    expected = StatusCode.OK if role in roles else refused
                    assert await call(channel, method) is expected, (role, method)


def test_service_knows_no_token_by_which_others_take_it_for_its_caller(tmp_path: Path) -> None:
    make_token_files(tmp_path)
    for role, other in permutations(Role, 2):
        at_other = opened(tmp_path / f"{other}.tokens")
        for line in (tmp_path / f"{role}.tokens").read_text().splitlines():
            partner, secret = line.split(":")
            found = at_other.find(secret)
            assert (found and found.role) == (role if partner == other else None)


def test_files_of_all_services_are_made_once(tmp_path: Path) -> None:
    make_token_files(folder := tmp_path / "tokens")
    before = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(before) == {f"{role}.tokens" for role in Role}
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}
    (folder / "gateway.tokens").unlink()
    with pytest.raises(FileExistsError, match=r"scheduler\.tokens exists"):
        make_token_files(folder)
    after = {path.name: path.read_text() for path in folder.iterdir()}
    assert {**after, "gateway.tokens": before["gateway.tokens"]} == before
