"""Mutual TLS between services: roles, methods, changes of certificates, and settings."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from grpc import StatusCode, aio

from foretoken.running.certificates import ALL, make_certificates
from services.runtime.config import ConfigError
from services.runtime.healthcheck import main as healthcheck
from services.runtime.network.authorisation import ALLOWED, SERVICE
from services.runtime.network.connector import PLAIN, Connector
from services.runtime.network.identity import Protection, Role, TlsConfig, open_identity
from services.runtime.server import listening
from tests.runtime.identity.echo import (
    DECLARED,
    ECHO,
    METHODS,
    READY,
    STREAM,
    call,
    echoing,
    identity,
    refusal,
    settings,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certs")
    make_certificates(made, 1)
    return made


@pytest.fixture(scope="module")
def wrong_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates, a key with a passphrase, an expired certificate, and an empty file."""
    made = tmp_path_factory.mktemp("wrong")
    make_certificates(made, 1)
    (made / "empty").touch()
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "old")])
    now, day = datetime.now(UTC), timedelta(days=1)
    old = x509.CertificateBuilder(name, name, key.public_key(), 1, now - 2 * day, now - day)
    (made / "old.pem").write_bytes(old.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    for file, encryption in (
        ("old.key", NoEncryption()),
        ("secret.key", BestAvailableEncryption(b"secret")),
    ):
        content = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
        (made / file).write_bytes(content)
    return made


def test_each_declared_method_has_a_rule() -> None:
    """And each rule of ours is for a method that there is."""
    assert {method for method in ALLOWED if method.startswith(SERVICE)} == DECLARED


async def test_each_role_may_call_its_methods_only(folder: Path) -> None:
    async with echoing(identity(folder, Role.WORKER)) as server, AsyncExitStack() as stack:
        for role in Role:
            connector = Connector(identity(folder, role))
            channel = connector.connect(f"127.0.0.1:{server.port}", Role.WORKER)
            stack.push_async_callback(channel.close)
            for method, roles in METHODS.items():
                expected = StatusCode.OK if role in roles else StatusCode.PERMISSION_DENIED
                assert await call(channel, method) is expected, (role, method)


def without_certificate(address: str, folder: Path) -> aio.Channel:
    secured = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    options = [("grpc.ssl_target_name_override", "worker.foretoken.internal")]
    return aio.secure_channel(address, secured, options=options)


# Channels of callers by the address, the folder of certificates, and that of another deployment.
STRANGERS: dict[str, Callable[[str, Path, Path], Any]] = {
    "plain": lambda address, _, __: PLAIN.connect(address),
    "no certificate": lambda address, own, _: without_certificate(address, own),
    "another deployment": lambda address, _, other: Connector(identity(other, ALL)).connect(
        address, Role.WORKER
    ),
    "other server": lambda address, own, _: Connector(identity(own, ALL)).connect(
        address, Role.SCHEDULER
    ),
}


@pytest.mark.parametrize("kind", STRANGERS)
async def test_strangers_are_refused(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    foreign = tmp_path_factory.mktemp("foreign")
    make_certificates(foreign, 1)
    async with echoing(identity(folder, Role.WORKER)) as server:
        channel = STRANGERS[kind](f"127.0.0.1:{server.port}", folder, foreign)
        # Without a deadline: the failed handshake ends the calls, however long it takes.
        calls = [call(channel, method, timeout_s=None) for method in METHODS]
        assert set(await asyncio.gather(*calls)) == {StatusCode.UNAVAILABLE}
        await channel.close()


async def test_refusal_names_the_roles(folder: Path) -> None:
    async with echoing(identity(folder, Role.WORKER)) as server:
        connector = Connector(identity(folder, Role.WORKER))
        channel = connector.connect(f"127.0.0.1:{server.port}")
        assert await refusal(channel, f"{SERVICE}Predictor/Observe") == (
            "/foretoken.v1.Predictor/Observe is for the role picker or scheduler; the certificate "
            "has worker"
        )
        await channel.close()


async def test_unix_sockets_need_no_certificate(folder: Path, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    protection = Protection(identity(folder, Role.WORKER))
    async with listening([ECHO], address, protection=protection):
        for connector in (PLAIN, Connector(identity(folder, Role.GATEWAY))):
            channel = connector.connect(address, Role.WORKER)
            assert await call(channel) is StatusCode.OK
            await channel.close()


async def test_changed_certificates_are_used_and_streams_go_on(tmp_path: Path) -> None:
    make_certificates(tmp_path, 1)
    async with echoing(identity(tmp_path, ALL)) as server:
        address = f"127.0.0.1:{server.port}"
        channel: Any = Connector(identity(tmp_path, ALL)).connect(address, Role.WORKER)
        late = Connector(identity(tmp_path, ALL))
        messages: asyncio.Queue[bytes] = asyncio.Queue()

        async def sent() -> AsyncIterator[bytes]:
            while True:
                yield await messages.get()

        stream: AsyncIterator[bytes] = aiter(channel.stream_stream(STREAM)(sent()))
        assert await anext(stream) == READY
        for name in ("ca.pem", "ca.key"):
            (tmp_path / name).unlink()  # the next authority is another one
        messages.put_nowait(b"before")
        assert await anext(stream) == b"before"
        make_certificates(tmp_path, 1)
        assert await call(channel) is StatusCode.OK
        assert await call(late.connect(address, Role.WORKER)) is StatusCode.OK
        messages.put_nowait(b"after")
        assert await anext(stream) == b"after"
        await channel.close()


def test_files_that_do_not_belong_together_are_left_until_they_do(tmp_path: Path) -> None:
    make_certificates(tmp_path, 1)
    found = identity(tmp_path, Role.WORKER)
    first = found.material()
    assert found.material() is first
    key, later = tmp_path / "worker.key", (tmp_path / "gateway.key").read_bytes()
    earlier = key.read_bytes()
    key.write_bytes(later)
    assert found.material() is first
    key.unlink()
    assert found.material() is first
    key.write_bytes(earlier)
    assert found.material() == first


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"key": "none.key"}, "tls.key: .*/none.key cannot be read: No such file or directory"),
        ({"cert": "."}, "tls.cert: .* cannot be read: Is a directory"),
        ({"key": "gateway.key"}, "tls.key: .*/gateway.key is not the key of the certificate in "),
        ({"key": "empty"}, "tls.cert and tls.key: .* are no certificate and key in PEM"),
        ({"cert": "worker.key"}, "tls.cert and tls.key: .* are no certificate and key in PEM"),
        ({"ca": "ca.key"}, "tls.ca: .*/ca.key has no certificate in PEM"),
        ({"ca": "empty"}, "tls.ca: .*/empty has no certificate in PEM"),
        ({"key": "secret.key"}, "tls.key: the key has a passphrase; write it to the file without"),
        ({"cert": "old.pem", "key": "old.key"}, "tls.cert: .*/old.pem is valid from .* to .* only"),
        (
            {"cert": "ca.pem", "key": "ca.key"},
            "tls.cert: .*/ca.pem has no role: it needs a DNS name such as batcher.foretoken.intern",
        ),
    ],
)
def test_wrong_files_are_refused(
    wrong_files: Path, given: Mapping[str, str], sentence: str
) -> None:
    files = {"cert": "worker.pem", "key": "worker.key", "ca": "ca.pem", **given}
    paths = {name: str(wrong_files / file) for name, file in files.items()}
    config = TlsConfig.model_validate(paths)
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        open_identity(config)


def test_all_files_are_needed() -> None:
    with pytest.raises(ConfigError, match=r"^TLS needs .*; set tls.key and tls.ca, too"):
        open_identity(TlsConfig(cert="worker.pem"))


async def test_addresses_beyond_loopback_need_protection(folder: Path) -> None:
    open_to_all = Protection(open=True)
    for address in ("0.0.0.0:0", "[::]:0"):
        with pytest.raises(ConfigError, match="nothing protects it"):
            async with listening([ECHO], address):
                pass
    for protection in (open_to_all, Protection(identity(folder, Role.WORKER))):
        async with listening([ECHO], "0.0.0.0:0", protection=protection) as server:
            assert server.port
    async with listening([ECHO], "localhost:0") as server:
        assert server.port


async def test_health_check_over_tls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with echoing(identity(folder, Role.WORKER)) as server:
        address = f"127.0.0.1:{server.port}"
        assert (await asyncio.to_thread(healthcheck, [address])).startswith("UNAVAILABLE")
        for name, value in settings(folder, Role.OPERATOR):
            if name in ("cert", "key", "ca"):
                monkeypatch.setenv(f"FORETOKEN_TLS_{name.upper()}", value)
        assert await asyncio.to_thread(healthcheck, [address]) == "SERVING"
        plain = await asyncio.to_thread(healthcheck, [address, "plain"])
        assert plain.startswith("UNAVAILABLE")
    assert healthcheck([address, "plane"]).startswith("usage")


def test_certificates_of_later_runs_have_the_same_authority(tmp_path: Path) -> None:
    names = make_certificates(tmp_path, 1)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(before) == 2 * (1 + len(names))
    assert (tmp_path / "ca.key").stat().st_mode & 0o077 == 0
    make_certificates(tmp_path, 1)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    same = {name for name, content in after.items() if before[name] == content}
    assert same == {"ca.pem", "ca.key"}
    (tmp_path / "ca.pem").unlink()
    with pytest.raises(OSError):
        make_certificates(tmp_path, 1)


HOSTS = {"worker-0", "*.pods", "localhost"}


def test_hosts_are_names_of_those_that_announce_them(tmp_path: Path) -> None:
    names = make_certificates(tmp_path, 1, ["worker-0", "*.pods", "10.0.0.7", "fd00::7"])
    for name in names:
        content = (tmp_path / f"{name}.pem").read_bytes()
        kind = x509.SubjectAlternativeName
        extensions = x509.load_pem_x509_certificate(content).extensions
        found = extensions.get_extension_for_class(kind).value
        hosts = HOSTS & set(found.get_values_for_type(x509.DNSName))
        addresses = set(map(str, found.get_values_for_type(x509.IPAddress)))
        announces = name in (Role.WORKER, ALL)
        assert hosts == (HOSTS if announces else set())
        assert addresses == ({"10.0.0.7", "fd00::7", "127.0.0.1", "::1"} if announces else set())


@pytest.mark.parametrize("host", ["a b", "", "http://a", "10.0.0.7:1", "a..b", "*"])
def test_wrong_hosts_are_refused(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValueError, match="is no host name and no IP address"):
        make_certificates(tmp_path, 1, [host])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["blue", "blue-1", "scheduler", "scheduler-", "scheduler-a/b"])
def test_wrong_names_of_further_certificates_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"^'{name}' (does not begin with a role|needs 1 to 40)"):
        make_certificates(tmp_path, 1, more=[name])
    assert not list(tmp_path.iterdir())
