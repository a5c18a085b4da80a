"""Certificates as SPIRE issues them: a SPIFFE ID, with DNS names or without."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from grpc import StatusCode

from foretoken.running.certificates import make_certificates
from services.runtime.config import ConfigError
from services.runtime.network.connector import Connector
from services.runtime.network.identity import Identity, Role, TlsConfig, dns_name, open_identity
from tests.runtime.identity.echo import call, echoing

SPIFFE_ID = "spiffe://example.org/ns/foretoken/sa/worker"


def issued(folder: Path, *names: str) -> Identity:
    """The identity of SPIRE's files, by the authority in the folder."""
    authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    signer = load_pem_private_key((folder / "ca.key").read_bytes(), None)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    uri = x509.UniformResourceIdentifier(SPIFFE_ID)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COUNTRY_NAME, "US")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([uri, *map(x509.DNSName, names)]), critical=False
        )
        .sign(signer, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "svid_key.pem").write_bytes(secret)
    (folder / "svid.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    (folder / "bundle.pem").write_bytes((folder / "ca.pem").read_bytes())
    files = {"cert": "svid.pem", "key": "svid_key.pem", "ca": "bundle.pem"}
    paths = {key: str(folder / file) for key, file in files.items()}
    found = open_identity(TlsConfig.model_validate(paths))
    assert isinstance(found, Identity)
    return found


async def test_certificate_with_dns_names_serves_and_calls(tmp_path: Path) -> None:
    make_certificates(tmp_path, 1)
    found = issued(tmp_path, dns_name(Role.WORKER), dns_name(None))
    async with echoing(found) as server:
        channel = Connector(found).connect(f"127.0.0.1:{server.port}", Role.WORKER)
        assert await call(channel, "/foretoken.v1.Scheduler/Attach") is StatusCode.OK
        assert await call(channel) is StatusCode.PERMISSION_DENIED
        await channel.close()


def test_certificate_without_dns_names_is_refused_at_start(tmp_path: Path) -> None:
    make_certificates(tmp_path, 1)
    sentence = f"needs a DNS name such as batcher.* {SPIFFE_ID} alone is not enough: gRPC checks "
    with pytest.raises(ConfigError, match=sentence):
        issued(tmp_path)
