"""Certificates of the services of one deployment, signed by an authority of its own."""

import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from services.runtime.network.identity import Role, dns_name

ALL = "all"  # for a machine that runs every service
AUTHORITY = "ca"
AUTHORITY_TIMES = 10  # as long as its certificates
LOOPBACK = ("localhost", "127.0.0.1", "::1")
HOST = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")  # `*.` stands for any first label
SUFFIX = re.compile(r"[A-Za-z0-9._-]{1,40}")
EARLIER = timedelta(minutes=5)  # valid before now, for machines with slow clocks
BOTH_SIDES = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]


class Signed(NamedTuple):
    """A certificate and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make_certificates(
    folder: Path, days: int, hosts: Sequence[str] = (), more: Sequence[str] = ()
) -> Sequence[str]:
    """Writes NAME.pem and NAME.key of each role, of `all` and of `more`, ROLE-SUFFIX, signed by the
    authority in the folder, which is made if there is none. `hosts`: names and addresses that
    workers may announce, besides this machine's loopback address. Returns the names. Raises OSError
    and ValueError."""
    announced = [_host_name(host) for host in (*LOOPBACK, *hosts)]
    roles: dict[str, list[Role]] = {**{role: [role] for role in Role}, ALL: list(Role)}
    roles |= {name: roles[_base_name(name, roles)] for name in more}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    authority = _read(folder) or _make_authority(folder, days * AUTHORITY_TIMES)
    for name, held in roles.items():
        _write(folder, name, _make(name, held, announced, authority, days))
    return list(roles)


def _base_name(name: str, known: Iterable[str]) -> str:
    """The part before the dash. Raises ValueError if it is not known, or the rest is invalid."""
    base, _, suffix = name.partition("-")
    if base not in known:
        raise ValueError(f"{name!r} does not begin with a role and a dash: {', '.join(known)}")
    if not SUFFIX.fullmatch(suffix):
        raise ValueError(
            f"{name!r} needs 1 to 40 letters, digits, dots, dashes or underscores after {base}-"
        )
    return base


def _make_authority(folder: Path, days: int) -> Signed:
    key, name = ec.generate_private_key(ec.SECP256R1()), _named("foretoken authority")
    basic = x509.BasicConstraints(ca=True, path_length=0)
    certificate = (
        _begin(name, name, key, days).add_extension(basic, critical=True).sign(key, hashes.SHA256())
    )
    authority = Signed(certificate, key)
    _write(folder, AUTHORITY, authority)
    return authority


def _make(
    name: str,
    roles: Sequence[Role],
    announced: Sequence[x509.GeneralName],
    authority: Signed,
    days: int,
) -> Signed:
    key, signer = ec.generate_private_key(ec.SECP256R1()), authority.certificate.subject
    own = [x509.DNSName(dns_name(each)) for each in (*roles, None)]
    names = [*own, *(announced if Role.WORKER in roles else ())]
    certificate = (
        _begin(_named(name), signer, key, days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(BOTH_SIDES), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return Signed(certificate, key)


def _host_name(host: str) -> x509.GeneralName:
    """Raises ValueError if it is no name and no address."""
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if not HOST.fullmatch(host):
            raise ValueError(f"{host!r} is no host name and no IP address") from None
        return x509.DNSName(host)


def _begin(
    name: x509.Name, signer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(signer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + timedelta(days=days))
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _read(folder: Path) -> Signed | None:
    """The folder's authority; None if there is none. Raises ValueError for other files."""
    certificate, key = folder / f"{AUTHORITY}.pem", folder / f"{AUTHORITY}.key"
    if not (certificate.exists() or key.exists()):
        return None
    secret = load_pem_private_key(key.read_bytes(), None)
    if not isinstance(secret, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{key} is not a key that this command has made")
    return Signed(x509.load_pem_x509_certificate(certificate.read_bytes()), secret)


def _write(folder: Path, name: str, signed: Signed) -> None:
    """Replaces the files one after the other; a service uses a pair once both have changed."""
    secret = signed.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    for ending, content, mode in (
        ("key", secret, 0o600),
        ("pem", signed.certificate.public_bytes(Encoding.PEM), 0o644),
    ):
        path = folder / f"{name}.{ending}"
        new = path.with_suffix(f".{ending}.new")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content)
        new.replace(path)
