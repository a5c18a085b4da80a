"""`foretoken epp` behind a real Envoy, which deploy/envoy/envoy.yaml configures, in front of two
real servers. The tests share them, in order: the last one stops a server."""

import json
import re
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import create_connection
from typing import Any

import grpc
import pytest
import yaml
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc

from foretoken.running.certificates import make_certificates
from foretoken.running.ports import free_ports
from protos.generated import ext_proc_pb2, telemetry_pb2, telemetry_pb2_grpc
from services.runtime.healthcheck import check
from services.runtime.network.identity import TlsConfig
from tests.clients.conftest import SCRIPTS, Run
from tests.live import ROOT, Live, command, environment, serving, wait_for

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

CONFIG = ROOT / "deploy/envoy/envoy.yaml"
SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
Python = Callable[[str], Path]


@contextmanager
def running(*words: str | Path, log: Path) -> Iterator[subprocess.Popen[str]]:
    with log.open("w") as output:
        process = subprocess.Popen(
            list(map(str, words)),
            stdout=output,
            stderr=output,
            text=True,
            env=environment(),
            cwd=ROOT,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def accepts(port: int) -> bool:
    try:
        create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def post(url: str, content: dict[str, Any], headers: Mapping[str, str] | None = None) -> Any:
    request = urllib.request.Request(
        url, json.dumps(content).encode(), {"content-type": "application/json", **(headers or {})}
    )
    return urllib.request.urlopen(request, timeout=60)


@dataclass
class Gateway:
    """Envoy at `url`, the picker at `picker`, and the servers behind it."""

    url: str
    picker: str
    endpoints: Path
    servers: list[Live]
    log: Path

    def addresses(self) -> list[str]:
        return [server.http.removeprefix("http://") for server in self.servers]

    def list_endpoints(self, *addresses: str) -> None:
        self.endpoints.write_text(f"endpoints = {json.dumps(addresses)}\n")

    def metric(self, name: str) -> float:
        with grpc.insecure_channel(self.picker) as channel:
            stub = telemetry_pb2_grpc.TelemetryStub(channel)
            text: str = stub.Scrape(telemetry_pb2.ScrapeRequest(), timeout=10).text
        values = re.findall(rf"^foretoken_picker_{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return float(values[0]) if values else 0.0

    def post(self, path: str, content: dict[str, Any], **headers: str) -> Any:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return post(self.url + path, content, named)

    def complete(self, prompt: str = "Count from 3 to 12.\n", **fields: Any) -> Any:
        return self.post("/v1/completions", {"model": "demo", "prompt": prompt, **fields})

    def refused(self, path: str, content: dict[str, Any], **headers: str) -> Any:
        with pytest.raises(urllib.error.HTTPError) as caught:
            self.post(path, content, **headers)
        return caught.value


def warm_up(server: Live) -> None:
    for number in range(3):
        body = {"prompt": f"Count from {number} to 40.\n", "max_tokens": 80, "stream": number > 1}
        with post(f"{server.http}/v1/completions", {"model": "demo", **body}) as reply:
            reply.read()


def envoy_config(ports: dict[int, int], folder: Path) -> Path:
    """The documented configuration with other ports."""
    text = CONFIG.read_text()
    for documented, port in ports.items():
        assert f"port_value: {documented}}}" in text
        text = text.replace(f"port_value: {documented}}}", f"port_value: {port}}}")
    path = folder / "envoy.yaml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def gateway(python: Python, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("envoy")
    envoy = python("envoy").parent / "envoy"
    listen, picker = free_ports(2)
    with ExitStack() as stack:
        servers = [stack.enter_context(serving("--gateways", "0")) for _ in range(2)]
        for server in servers:  # the picker learns speeds, and the first answers are slower
            warm_up(server)
        endpoints, log = folder / "endpoints.toml", folder / "picker.log"
        made = Gateway(f"http://127.0.0.1:{listen}", f"127.0.0.1:{picker}", endpoints, servers, log)
        made.list_endpoints(*made.addresses())
        first, second = (int(address.rpartition(":")[2]) for address in made.addresses())
        ports = {8080: listen, 9002: picker, 8001: first, 8002: second}
        options = ["--endpoints-file", str(endpoints), "--address", made.picker]
        settings = ["--set", "picker.source_interval_s=0.1"]
        objectives = ["--set", 'picker.objectives={"batch": -1}']
        epp = command("epp", *options, *settings, *objectives)
        stack.enter_context(running(*epp, log=log))
        wait_for(lambda: accepts(picker), 60)
        arguments = ("-c", envoy_config(ports, folder), "--concurrency", "1")
        stack.enter_context(
            running(envoy, *arguments, "--use-dynamic-base-id", log=folder / "envoy.log")
        )
        wait_for(lambda: accepts(listen), 30)
        wait_for(lambda: made.metric('endpoints{health="ready"}') == 2, 30)
        yield made


def test_answers_are_whole_streamed_or_not_and_learned(gateway: Gateway) -> None:
    counted = " ".join(map(str, range(3, 13)))
    expected: dict[str, Any] = {
        "prompt": "Count from 3 to 12.\n",
        "temperature": 0,
        "max_tokens": 40,
    }
    answer = json.load(gateway.complete(**expected))
    assert answer["choices"][0]["text"].strip() == counted
    tokens = answer["usage"]["completion_tokens"]
    with gateway.complete(**expected, stream=True) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line[6:].strip() for line in reply if line.startswith(b"data: ")]
    assert lines.pop() == b"[DONE]"
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines).strip() == counted
    wait_for(lambda: gateway.metric('ended_total{result="complete"}') == 2)
    assert gateway.metric("output_tokens_total") >= tokens + 2
    assert gateway.metric("time_to_first_token_seconds_count") == 1
    assert gateway.metric("requests_in_flight") == 0
    with urllib.request.urlopen(f"{gateway.url}/v1/models", timeout=30) as reply:
        assert json.load(reply)["data"][0]["id"] == "demo"

    long = {"model": "demo", "prompt": "Hello, world. " * 20_000}  # 280 kB, in several chunks
    with gateway.post("/tokenize", long) as reply:
        through = json.load(reply)
    with post(f"{gateway.servers[0].http}/tokenize", long) as reply:
        assert json.load(reply) == through

    with grpc.insecure_channel(gateway.picker) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        state = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
    assert state.status == health_pb2.HealthCheckResponse.SERVING


def test_envoy_reaches_a_picker_by_tls_as_documented(
    gateway: Gateway, python: Python, tmp_path: Path
) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs, 1)
    listen, picker = free_ports(2)
    first, second = (int(address.rpartition(":")[2]) for address in gateway.addresses())
    path = envoy_config({8080: listen, 9002: picker, 8001: first, 8002: second}, tmp_path)
    text = (ROOT / "docs/epp.md").read_text()
    documented = re.search(
        r"^```yaml\n(transport_socket:\n.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    assert documented is not None
    config = yaml.safe_load(path.read_text())
    clusters = {each["name"]: each for each in config["static_resources"]["clusters"]}
    clusters["picker"] |= yaml.safe_load(documented[1].replace("certs/", f"{certs}/"))
    path.write_text(yaml.safe_dump(config))
    files = {"cert": "picker.pem", "key": "picker.key", "ca": "ca.pem"}
    tls = TlsConfig.model_validate({name: str(certs / file) for name, file in files.items()})
    given = ["picker.tls=true", *(f"tls.{name}={getattr(tls, name)}" for name in files)]
    sets = [word for each in given for word in ("--set", each)]
    endpoints = [word for each in gateway.addresses() for word in ("--endpoint", each)]
    epp = command("epp", *endpoints, "--address", f"127.0.0.1:{picker}", *sets)
    envoy = (python("envoy").parent / "envoy", "-c", path, "--concurrency", "1")
    with (
        running(*epp, log=tmp_path / "picker.log"),
        running(*envoy, "--use-dynamic-base-id", log=tmp_path / "envoy.log"),
    ):
        wait_for(lambda: check(f"127.0.0.1:{picker}", tls) == "SERVING" and accepts(listen), 60)
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 3}
        with post(f"http://127.0.0.1:{listen}/v1/completions", body) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == 3


def picks(gateway: Gateway) -> list[float]:
    return [gateway.metric(f'picks_total{{endpoint="{each}"}}') for each in gateway.addresses()]


def test_requests_together_are_shared_by_both_servers(gateway: Gateway) -> None:
    answers: list[str] = []
    before = picks(gateway)

    def ask(number: int) -> None:
        reply = gateway.complete(f"Count from {number} to {number + 30}.\n", max_tokens=80)
        answers.append(json.load(reply)["choices"][0]["text"])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(answers) == 16
    more = [now - then for now, then in zip(picks(gateway), before, strict=True)]
    assert sum(more) == 16 and min(more) >= 3


def test_refusals_reach_the_client_with_a_time_to_retry(gateway: Gateway) -> None:
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 3}
    shed = gateway.refused(
        "/v1/completions", body, x_gateway_inference_objective="batch", x_llm_d_slo_ttft_ms="0.01"
    )
    assert (shed.code, shed.headers["retry-after"]) == (429, "1")
    assert "negative priority" in json.load(shed)["error"]["message"]
    wrong = gateway.refused("/v1/completions", body, x_llm_d_slo_ttft_ms="soon")
    assert wrong.code == 400 and "x-llm-d-slo-ttft-ms" in json.load(wrong)["error"]["message"]

    gateway.list_endpoints()
    wait_for(lambda: gateway.metric('endpoints{health="ready"}') == 0)
    none = gateway.refused("/v1/completions", body)
    assert (none.code, none.headers["retry-after"]) == (503, "1")
    gateway.list_endpoints(*gateway.addresses())
    wait_for(lambda: gateway.metric('endpoints{health="ready"}') == 2)
    assert json.load(gateway.complete(max_tokens=3))["usage"]["completion_tokens"] == 3


def test_a_client_that_leaves_ends_its_request(gateway: Gateway) -> None:
    reply = gateway.complete("Count from 1 to 500.\n", max_tokens=1_500, stream=True)
    reply.readline()
    reply.close()  # at once: a fast server ends the answer within a second
    wait_for(lambda: gateway.metric('ended_total{result="broken"}') == 1)
    assert gateway.metric("requests_in_flight") == 0


def test_a_dead_endpoint_costs_no_request(gateway: Gateway) -> None:
    assert gateway.servers[0].stop(signal.SIGTERM) == 0
    for _ in range(6):  # at once: Envoy tries the next endpoint of the list
        assert json.load(gateway.complete(max_tokens=3))["usage"]["completion_tokens"] == 3
    wait_for(lambda: gateway.metric('endpoints{health="lost"}') == 1)
    assert "is left out" in gateway.log.read_text()
    assert gateway.metric("requests_in_flight") == 0


def test_messages_equal_those_that_envoy_publishes(run: Run, python: Python) -> None:
    published = json.loads(run(python("envoy"), SCRIPTS / "ext_proc_fields.py"))
    for name, message in ext_proc_pb2.DESCRIPTOR.message_types_by_name.items():
        for each in message.fields:
            theirs = published["messages"][name][each.name]
            number, kind = each.number, each.type
            if theirs[1] == FieldDescriptor.TYPE_ENUM:
                kind = FieldDescriptor.TYPE_ENUM  # a number here: equal on the wire
            assert theirs == [number, kind], f"{name}.{each.name}"
    ours = {
        "BodySendMode": dict(ext_proc_pb2.BodySendMode.items()),
        "HeaderAppendAction": dict(ext_proc_pb2.HeaderValueOption.HeaderAppendAction.items()),
    }
    assert ours == published["enums"]
    assert published["service"] == SERVICE
