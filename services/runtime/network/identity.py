"""The identity of a process towards the other services: mutual TLS, with the role in the names.

Each certificate has DNS names: `ROLE.foretoken.internal` for each of its roles, and
`foretoken.internal`. A client accepts a server that has the expected role; a server allows a client
the methods of its roles.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import ClassVar

import grpc

from services.runtime.config import ConfigError, Settings
from services.runtime.network.tls_files import Material, read_material

log = logging.getLogger(__name__)

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


def roles_of(names: Iterable[bytes]) -> frozenset[Role]:
    """The roles among the names of a certificate."""
    given = set(names)
    return frozenset(role for role in Role if dns_name(role).encode() in given)


class TlsConfig(Settings):
    """Section `tls`: between the services of a deployment."""

    section: ClassVar[str] = "tls"

    # PEM files: this process's certificate chain, its key, and the authorities of the others'
    # certificates. They are read again when they change. All three, or none.
    cert: str = ""
    key: str = ""
    ca: str = ""
    # Listen beyond the loopback interface without TLS: anything that reaches a port is trusted.
    insecure: bool = False


NO_TLS = TlsConfig()


Stamp = Sequence[tuple[int, int, int]]  # inode, size and time of change of each file


class Identity:
    """The certificate, key and authorities of this process, as the files are now."""

    def __init__(self, config: TlsConfig):
        """Raises ConfigError if a file is missing or wrong, or they do not belong together."""
        self._paths = [Path(getattr(config, name)) for name in FILES]
        self._stamp = _look(self._paths)
        self._material = _read(self._paths)

    def material(self) -> Material:
        """The same object until the files change. Files that do not belong together, such as in the
        middle of a change, are ignored until the next change. Three `stat` calls without one."""
        stamp = _look(self._paths)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._material = _read(self._paths)
                log.info("the certificate in %s has changed", self._paths[0])
            except ConfigError as error:
                log.warning("the earlier certificate stays in use: %s", error)
        return self._material

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


@dataclass(frozen=True, slots=True)
class Protection:
    """How a server protects addresses that are no Unix sockets. `open`: they may be beyond the
    loopback interface without TLS. `mutual`: with TLS, clients need a certificate with a role."""

    identity: Identity | None = None
    open: bool = False
    mutual: bool = True


LOOPBACK_ONLY = Protection()
FOR_CLIENTS = Protection(open=True, mutual=False)  # the service authenticates its clients itself


def open_identity(config: TlsConfig) -> Identity | None:
    """None without files. Raises ConfigError."""
    missing = [f"tls.{name}" for name in FILES if not getattr(config, name)]
    if len(missing) == len(FILES):
        return None
    if missing:
        raise ConfigError(
            f"TLS needs tls.cert, tls.key and tls.ca; set {' and '.join(missing)}, too"
        )
    return Identity(config)


def channel_credentials(material: Material) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(material.ca, material.key, material.cert)


def _look(paths: Sequence[Path]) -> Stamp:
    """Empty if a file is missing."""
    try:
        states = [path.stat() for path in paths]
    except OSError:
        return ()
    return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in states]


def _read(paths: Sequence[Path]) -> Material:
    """Raises ConfigError."""
    cert, key, ca = paths
    return read_material(cert, key, ca, map(dns_name, Role))


def _server_configuration(now: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(now.key, now.cert)], now.ca)
