"""The identity of a process towards the other services: mutual TLS with the role in the names of
its certificate, or tokens.

Each certificate has DNS names: `ROLE.foretoken.internal` for each of its roles, and
`foretoken.internal`. A client accepts a server that has the expected role; a server allows a client
the methods of its roles.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import grpc

from services.runtime.config import ConfigError, Settings
from services.runtime.network.tls_files import Material, read_material
from services.runtime.network.token_identity import TOKEN_NAME, TokenIdentity
from services.runtime.network.watched_files import WatchedFiles

DOMAIN = "foretoken.internal"
FILES = ("cert", "key", "ca")


class Role(StrEnum):
    """What a process of a deployment does. OPERATOR: a command of an operator."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    PREDICTOR = "predictor"
    ESTIMATOR = "estimator"
    BATCHER = "batcher"
    PICKER = "picker"
    OPERATOR = "operator"


def dns_name(role: Role | None) -> str:
    """The name in certificates of a role; of None: the one that all certificates have."""
    return f"{role}.{DOMAIN}" if role else DOMAIN


def roles_of(names: Iterable[str]) -> frozenset[Role]:
    """The roles among the names of a certificate."""
    given = set(names)
    return frozenset(role for role in Role if dns_name(role) in given)


def names_of(context: Any) -> tuple[str, ...]:
    """The DNS names and addresses in the verified certificate of a caller, or the name of its
    token; empty without either."""
    return _entries(context, "x509_subject_alternative_name") or _entries(context, TOKEN_NAME)


def peer_name(context: Any) -> str:
    """The name in the verified certificate of a caller: the common one, else the first of the
    others; or the name of its token. Empty without either."""
    names = (*_entries(context, "x509_common_name"), *names_of(context))
    return names[0] if names else ""


def _entries(context: Any, key: str) -> tuple[str, ...]:
    return tuple(entry.decode(errors="replace") for entry in context.auth_context().get(key, ()))


class TlsConfig(Settings):
    """Section `tls`: between the services of a deployment."""

    section: ClassVar[str] = "tls"

    # PEM files: this process's certificate chain, its key, and the authorities of the others'
    # certificates. They are read again when they change. All three, or none.
    cert: str = ""
    key: str = ""
    ca: str = ""
    # In place of certificates, where a mesh encrypts: a file of tokens, one a line, as ROLE:TOKEN,
    # shared with services of the role, or TOKEN, shared with all. A call carries the first for the
    # server's role, all are accepted. It is read again when it changes.
    token_file: str = ""
    # Listen beyond the loopback interface without TLS: anything that reaches a port is trusted.
    insecure: bool = False


NO_TLS = TlsConfig()


class Identity:
    """The certificate, key and authorities of this process, as the files are now."""

    def __init__(self, config: TlsConfig):
        """Raises ConfigError if a file is missing or wrong, or they do not belong together."""
        paths = [Path(getattr(config, name)) for name in FILES]
        self._files = WatchedFiles(paths, partial(_read, paths))

    def material(self) -> Material:
        """The same object until the files change."""
        return self._files.current()

    def server_credentials(self, mutual: bool = True) -> grpc.ServerCredentials:
        """They take the present files for each handshake. `mutual`: they demand a certificate of
        each client."""
        served = [self.material()]

        def find_changed() -> grpc.ServerCertificateConfiguration | None:
            now = self.material()
            if now is served[0]:
                return None
            served[0] = now
            return _server_configuration(now)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(served[0]),
            find_changed,  # type: ignore[arg-type]  # the stub lacks None, for no change
            require_client_authentication=mutual,
        )


AnyIdentity = Identity | TokenIdentity


@dataclass(frozen=True, slots=True)
class Protection:
    """How a server protects addresses that are no Unix sockets. `open`: they may be beyond the
    loopback interface without an identity. `mutual`: callers need one, too."""

    identity: AnyIdentity | None = None
    open: bool = False
    mutual: bool = True


LOOPBACK_ONLY = Protection()
FOR_CLIENTS = Protection(open=True, mutual=False)  # the service authenticates its clients itself


def open_identity(config: TlsConfig) -> AnyIdentity | None:
    """None without files. Raises ConfigError."""
    missing = [f"tls.{name}" for name in FILES if not getattr(config, name)]
    if len(missing) == len(FILES):
        return TokenIdentity(config.token_file, tuple(Role)) if config.token_file else None
    if config.token_file:
        raise ConfigError("tls.token_file replaces tls.cert, tls.key and tls.ca; leave it out")
    if missing:
        raise ConfigError(
            f"TLS needs tls.cert, tls.key and tls.ca; set {' and '.join(missing)}, too"
        )
    return Identity(config)


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def _read(paths: Sequence[Path]) -> Material:
    """Raises ConfigError."""
    cert, key, ca = paths
    return read_material(cert, key, ca, map(dns_name, Role))


def _server_configuration(now: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], now.ca)
