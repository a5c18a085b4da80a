"""Reads the PEM files of section `tls`, with a sentence for each mistake in them."""

import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from services.runtime.config import ConfigError


@dataclass(frozen=True, slots=True)
class Material:
    """The content of the files: the certificate chain, its key, and the authorities."""

    cert: bytes
    key: bytes
    ca: bytes


def read_material(cert: Path, key: Path, ca: Path, names: Iterable[str]) -> Material:
    """The files' content. Raises ConfigError unless they belong together, the certificate is valid
    now, and it has one of the DNS `names`."""
    given = Material(_read("cert", cert), _read("key", key), _read("ca", ca))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(ca)
    except ssl.SSLError:
        raise ConfigError(f"tls.ca: {ca} has no certificate in PEM") from None
    try:
        context.load_cert_chain(cert, key, password=_refuse_passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            message = f"tls.key: {key} is not the key of the certificate in {cert}"
        else:
            message = f"tls.cert and tls.key: {cert} and {key} are no certificate and key in PEM"
        raise ConfigError(message) from None
    _check_certificate(cert, given.cert, set(names))
    return given


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tls.{name}: {path} cannot be read: {error.strerror}") from None


def _refuse_passphrase() -> NoReturn:
    raise ConfigError("tls.key: the key has a passphrase; write it to the file without one")


def _check_certificate(path: Path, content: bytes, names: set[str]) -> None:
    from cryptography import x509  # here: only processes with TLS pay for its import

    certificate = x509.load_pem_x509_certificates(content)[0]
    first, last = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if not first <= datetime.now(UTC) <= last:
        raise ConfigError(f"tls.cert: {path} is valid from {first} to {last} only")
    given, uris = [], []
    with suppress(x509.ExtensionNotFound):
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        given = found.get_values_for_type(x509.DNSName)
        uris = found.get_values_for_type(x509.UniformResourceIdentifier)
    if not names & set(given):
        # gRPC for Python compares no URI of a server's certificate.
        only = f"; {uris[0]} alone is not enough: gRPC checks servers by DNS names" if uris else ""
        raise ConfigError(
            f"tls.cert: {path} has no role: it needs a DNS name such as {min(names)}, as the "
            f"certificates of `foretoken certs` have{only}"
        )
