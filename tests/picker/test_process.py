"""`foretoken epp` as a process: TLS for its proxy, and the count of invalid messages."""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from foretoken.running.certificates import make_certificates
from foretoken.running.ports import free_ports
from protos.generated import ext_proc_pb2_grpc, telemetry_pb2, telemetry_pb2_grpc
from services.runtime.healthcheck import check
from services.runtime.network.identity import Role, TlsConfig, dns_name
from tests.live import ROOT, command, environment, wait_for
from tests.picker.test_exchange import request_body

pytestmark = pytest.mark.slow

ENDPOINT = ("--endpoint", "127.0.0.1:9")  # refuses connections
TLS = ("--set", "picker.tls=true")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsConfig:
    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder, 1)
    cert, key = (str(folder / f"{Role.PICKER}.{end}") for end in ("pem", "key"))
    return TlsConfig(cert=cert, key=key, ca=str(folder / "ca.pem"))


@pytest.fixture(scope="module")
def address(files: TlsConfig) -> Iterator[str]:
    """A picker that serves by TLS."""
    [port] = free_ports(1)
    made = f"127.0.0.1:{port}"
    given = [f"tls.{name}={getattr(files, name)}" for name in ("cert", "key", "ca")]
    sets = [word for each in given for word in ("--set", each)]
    words = command("epp", *ENDPOINT, *TLS, "--address", made, *sets)
    with ExitStack() as stack:
        process = subprocess.Popen(words, env=environment(), cwd=ROOT)
        stack.callback(process.wait)
        stack.callback(process.terminate)
        wait_for(lambda: check(made, files).endswith("SERVING"), 60)
        yield made


def ending(channel: grpc.Channel) -> tuple[grpc.StatusCode, str]:
    """How a stream ends that begins with a body."""
    stub: Any = ext_proc_pb2_grpc.ExternalProcessorStub(channel)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Process(iter([request_body(b"{}")]), timeout=20))
    error: Any = caught.value
    return error.code(), error.details()


def test_tls_needs_no_certificate_of_the_proxy_and_invalid_messages_are_counted(
    address: str, files: TlsConfig
) -> None:
    trusted = grpc.ssl_channel_credentials(Path(files.ca).read_bytes())
    options = [("grpc.ssl_target_name_override", dns_name(Role.PICKER))]
    with grpc.secure_channel(address, trusted, options) as channel:
        status, sentence = ending(channel)
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert sentence.startswith("request_body: must follow request_headers; set processing_mode")
        stub: Any = telemetry_pb2_grpc.TelemetryStub(channel)
        text = stub.Scrape(telemetry_pb2.ScrapeRequest(), timeout=20).text
    counted = "foretoken_picker_invalid_messages_total{"
    assert f'{counted}method="Process",field="request_body"}} 1.0' in text
    with grpc.insecure_channel(address) as channel:
        assert ending(channel)[0] is grpc.StatusCode.UNAVAILABLE


def test_tls_without_its_files_is_refused() -> None:
    words = command("epp", *ENDPOINT, *TLS)
    ended = subprocess.run(
        words, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == 2
    assert ended.stderr == "foretoken picker: picker.tls: set tls.cert, tls.key and tls.ca, too\n"
