"""Tokens: which calls need one, how they change, and files that are refused."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode

from foretoken.running.certificates import make_certificates
from services.runtime.config import ConfigError
from services.runtime.healthcheck import check
from services.runtime.network.connector import PLAIN, Connector
from services.runtime.network.identity import Protection, TlsConfig, open_identity
from services.runtime.network.leader_channel import SCHEDULER
from services.runtime.network.token_identity import TOKEN_KEY, TokenIdentity
from services.runtime.server import Mount, listening
from tests.runtime.identity.echo import (
    ECHO,
    METHODS,
    READY,
    STREAM,
    SUBMIT,
    call,
    echoing,
    refusal,
    settings,
)

FIRST, SECOND, OTHER = ("a" * 32, "b" * 64, "c" * 32)
HEALTH = "/grpc.health.v1.Health/"
SHORT = ".* must have 32 or more letters and digits"
UNKNOWN_ROLE = (
    ".* names no role before the colon, which is one of batcher, estimator, gateway, operator, "
    "picker, predictor, scheduler, worker; a token itself has no colon"
)


def write(path: Path, *tokens: str, mode: int = 0o600) -> Path:
    path.write_text("\n".join((*tokens, "")))
    path.chmod(mode)
    return path


def token_of(path: Path) -> TokenIdentity:
    found = open_identity(TlsConfig(token_file=str(path)))
    assert isinstance(found, TokenIdentity)
    return found


@pytest.mark.parametrize(
    ("given", "status"),
    [(FIRST, StatusCode.OK), (OTHER, StatusCode.UNAUTHENTICATED), ("", StatusCode.UNAUTHENTICATED)],
)
async def test_every_method_but_health_needs_the_token(
    tmp_path: Path, given: str, status: StatusCode
) -> None:
    client = Connector(token_of(write(tmp_path / "given", given))) if given else PLAIN
    async with echoing(token_of(write(tmp_path / "token", FIRST))) as server:
        channel = client.connect(address := f"127.0.0.1:{server.port}")
        for method in METHODS:
            expected = StatusCode.OK if method.startswith(HEALTH) else status
            assert await call(channel, method) is expected, method
        await channel.close()
        assert await asyncio.to_thread(check, address) == "SERVING"


async def test_refusal_says_what_is_wrong_with_the_token(tmp_path: Path) -> None:
    clients = {"none": PLAIN, "another one": Connector(token_of(write(tmp_path / "x", OTHER)))}
    async with echoing(token_of(write(tmp_path / "token", FIRST))) as server:
        for found, client in clients.items():
            channel = client.connect(f"127.0.0.1:{server.port}")
            assert await refusal(channel) == (
                f"{SUBMIT} needs a token of tls.token_file; the call has {found}"
            )
            await channel.close()


async def test_rotation_refuses_no_call_and_streams_go_on(tmp_path: Path) -> None:
    """The server learns the next token first, then the client sends it, then the old one goes."""
    at_server, at_client = tmp_path / "server", tmp_path / "client"
    async with echoing(token_of(write(at_server, FIRST))) as server:
        client = Connector(token_of(write(at_client, FIRST)))
        channel: Any = client.connect(f"127.0.0.1:{server.port}")
        stream = channel.stream_stream(STREAM)()
        assert await stream.read() == READY
        for path, tokens in (
            (at_server, (FIRST, SECOND)),
            (at_client, (SECOND,)),
            (at_server, (SECOND,)),
        ):
            write(path, *tokens)
            assert await call(channel) is StatusCode.OK
        write(at_client, FIRST)
        assert await call(channel) is StatusCode.UNAUTHENTICATED
        await stream.write(b"m")
        assert await stream.read() == b"m"
        stream.cancel()
        await channel.close()


async def test_unix_sockets_need_no_token(tmp_path: Path) -> None:
    address, identity = f"unix:{tmp_path}/s", token_of(write(tmp_path / "token", FIRST))
    async with echoing(identity, address):
        channel = PLAIN.connect(address)
        assert await call(channel) is StatusCode.OK
        await channel.close()


async def test_leader_is_found_with_a_token(tmp_path: Path) -> None:
    """gRPC itself watches the health of several addresses, without the token."""
    identity = token_of(write(tmp_path / "token", FIRST))
    mount, protection = Mount(SCHEDULER, ECHO.add, ECHO.servicer), Protection(identity)
    serve = partial(listening, [mount], "127.0.0.1:0", protection=protection)
    async with serve(serving=False) as standby, serve() as leader:
        addresses = ",".join(f"127.0.0.1:{each.port}" for each in (standby, leader))
        channel = Connector(identity).connect_to_leader(addresses)
        assert await call(channel) is StatusCode.OK
        await channel.close()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot be read: No such file or directory"),
        ("", r"must have 1 to 64 tokens, one a line, got 0"),
        ("\n \n", r"must have 1 to 64 tokens, one a line, got 0"),
        ("\n".join([FIRST] * 65), r"must have 1 to 64 tokens, one a line, got 65"),
        ("a" * 31, "must have 32 or more letters and digits; `openssl rand -hex 32` makes one"),
        (f"{FIRST}\n\n{'é' * 32}", f"line 3 of {SHORT}"),
        (f"{FIRST} {FIRST}", f"line 1 of {SHORT}"),
        (f"worker:\n{FIRST}", f"line 1 of {SHORT}"),
        (f"gateway:{FIRST}\nworker:{FIRST[1:]}", f"line 2 of {SHORT}"),
        (f"{FIRST}\nwroker:{SECOND}", f"line 2 of {UNKNOWN_ROLE}"),
        (f"wroker={FIRST}", f"line 1 of {SHORT}"),
        (f":{FIRST}", f"line 1 of {UNKNOWN_ROLE}"),
        (f"gateway:worker:{FIRST}", f"line 1 of {UNKNOWN_ROLE}"),
        *(
            (f"{SECOND}\nworker{sign}{FIRST}", "line 2 of .* has no colon after its role")
            for sign in ("=", "/", " ")
        ),
        (f"worker/:{FIRST}", "the name after the role in line 1 of .* must be a host name, an add"),
        (f"worker/a b:{FIRST}", "the name after the role in line 1 of .* must be a host name"),
        *(
            (f"{one}{FIRST}\n\n{other}{FIRST}", "lines 1 and 3 of .* have one token for different ")
            for one, other in (("worker:", "gateway:"), ("", "worker:"), ("worker/a:", "worker/b:"))
        ),
        ("a" * 17_000, "has more than 16384 bytes"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, content: str | None, sentence: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        write(path, content)
    with pytest.raises(ConfigError, match=rf"^tls\.token_file: .*{sentence}") as raised:
        token_of(path)
    assert FIRST not in str(raised.value)


def test_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "token", FIRST, mode=0o644)
    with pytest.raises(ConfigError, match=rf"^tls\.token_file: each user .* run `chmod o= {path}`"):
        token_of(path)
    path.chmod(0o440)
    assert token_of(path).find(FIRST)


def test_wrong_change_of_the_file_leaves_the_earlier_tokens(tmp_path: Path) -> None:
    identity = token_of(path := write(tmp_path / "token", FIRST))
    write(path, SECOND, mode=0o644)
    assert identity.find(FIRST) and not identity.find(SECOND)
    path.unlink()
    assert identity.find(FIRST)
    write(path, SECOND, mode=0o644)
    assert identity.find(FIRST)
    path.chmod(0o600)
    assert identity.find(SECOND) and not identity.find(FIRST)
    assert identity.metadata(None) == [(TOKEN_KEY, SECOND)]


def test_token_and_certificates_exclude_each_other(tmp_path: Path) -> None:
    make_certificates(tmp_path, 1)
    both = settings(tmp_path, "worker", token_file=str(write(tmp_path / "token", FIRST)))
    with pytest.raises(ConfigError, match=r"^tls\.token_file replaces tls\.cert, "):
        open_identity(both)


async def test_token_allows_addresses_beyond_loopback(tmp_path: Path) -> None:
    async with echoing(token_of(write(tmp_path / "token", FIRST)), "0.0.0.0:0") as server:
        assert server.port
