"""Endpoints and objectives from Kubernetes' API, as a server with its wire format gives them."""

import asyncio
import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge

from observability.exposition import Part
from services.picker.config import PickerConfig
from services.picker.core.inference_pool import (
    ObjectError,
    PoolSpec,
    is_api_url,
    read_objective,
    read_pod,
    read_pool,
)
from services.picker.links.kube.access import KubeAccess
from services.picker.links.kube.pool import InferencePoolSource
from services.picker.links.sources import EndpointSources
from services.picker.service import PickerService
from services.runtime.config import ConfigError, load
from services.runtime.tasks import background
from services.runtime.telemetry.scrape import metrics_over_http
from tests.picker.kube_server import OBJECTIVES, PODS, POOLS, KubeServer
from tests.reach import until

LABELS = {"app": "vllm"}
KUBECTL = Path(sys.executable).parent / "kubectl"  # a development dependency


def pool(*ports: int, **labels: str) -> dict[str, Any]:
    listed = [{"number": port} for port in ports or (8000,)]
    return {"spec": {"selector": {"matchLabels": labels or LABELS}, "targetPorts": listed}}


def pod(ip: str, ready: bool = True, leaving: bool = False, **labels: str) -> dict[str, Any]:
    metadata: dict[str, Any] = {"labels": labels or LABELS}
    if leaving:
        metadata["deletionTimestamp"] = "2026-11-26T20:00:00Z"
    conditions = [
        {"type": "Ready", "status": str(ready)},
        {"type": "Initialized", "status": "True"},
    ]
    return {"metadata": metadata, "status": {"podIP": ip, "conditions": conditions}}


def objective(priority: int | None, of: str = "vllm", **ref: str) -> dict[str, Any]:
    spec: dict[str, Any] = {"poolRef": {"name": of, **ref}}
    if priority is not None:
        spec["priority"] = priority
    return {"spec": spec}


def filled() -> KubeServer:
    """A pool of two ready pods, beside others."""
    server = KubeServer()
    server.put(POOLS, "vllm", pool())
    server.put(POOLS, "another", pool(9000, app="another"))
    server.put(PODS, "a", pod("10.0.0.1"))
    server.put(PODS, "b", pod("10.0.0.2"))
    server.put(PODS, "unready", pod("10.0.0.3", ready=False))
    server.put(PODS, "leaving", pod("10.0.0.4", leaving=True))
    server.put(PODS, "other", pod("10.0.0.5", app="another"))
    server.put(PODS, "pending", {"metadata": {"labels": LABELS}, "status": {"phase": "Pending"}})
    return server


@asynccontextmanager
async def following(url: str, **access: str) -> AsyncIterator[InferencePoolSource]:
    source = InferencePoolSource(KubeAccess(url, "vllm", "vllm", **access), lambda: None)
    async with background(source.run()):
        yield source


async def until_endpoints(source: InferencePoolSource, *endpoints: str) -> None:
    await until(lambda: source.endpoints == endpoints, 20)


async def test_pool_follows_its_pods_ports_and_selector(caplog: pytest.LogCaptureFixture) -> None:
    server = filled()
    async with server.serving() as url, following(url) as source:
        await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000")
        server.put(PODS, "unready", pod("10.0.0.3"))
        await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
        server.put(PODS, "a", pod("10.0.0.1", leaving=True))
        server.put(PODS, "b", pod("10.0.0.2", app="another"))  # its label goes
        await until_endpoints(source, "10.0.0.3:8000")
        server.delete(PODS, "unready")
        server.put(PODS, "six", pod("fd00::6"))
        await until_endpoints(source, "[fd00::6]:8000")
        server.put(POOLS, "vllm", pool(8000, 8001))
        await until_endpoints(source, "[fd00::6]:8000", "[fd00::6]:8001")
        server.put(POOLS, "vllm", pool(app="another"))
        await until_endpoints(source, "10.0.0.2:8000", "10.0.0.5:8000")
        server.delete(POOLS, "vllm")
        await until_endpoints(source)
        assert "the InferencePool vllm/vllm does not exist" in caplog.text
        server.put(POOLS, "vllm", pool(app="another"))
        await until_endpoints(source, "10.0.0.2:8000", "10.0.0.5:8000")


async def test_objectives_of_the_pool_have_priorities_before_those_of_the_settings() -> None:
    server = filled()
    server.put(OBJECTIVES, "batch", objective(-1))
    server.put(OBJECTIVES, "plain", objective(None))
    server.put(OBJECTIVES, "foreign", objective(7, of="another"))
    async with server.serving() as url:
        config = PickerConfig(
            pool="vllm/vllm", kube_api=url, objectives={"batch": 3, "plain": 3, "own": 4}
        )
        sources = EndpointSources(config, lambda _: None)
        assert sources.priority("batch") == 3
        async with background(sources.run()):
            await until(lambda: sources.priority("batch") == -1)
            named = ("plain", "own", "foreign", "")
            assert [sources.priority(name) for name in named] == [0, 4, 0, 0]
            server.put(OBJECTIVES, "batch", objective(-5))
            await until(lambda: sources.priority("batch") == -5)
            server.delete(OBJECTIVES, "batch")
            await until(lambda: sources.priority("batch") == 3)


async def test_lists_come_in_pages() -> None:
    server = filled()
    for number in range(600):
        server.put(PODS, f"p{number:03}", pod(f"10.1.{number // 250}.{number % 250}"))
    async with server.serving() as url, following(url) as source:
        await until(lambda: len(source.endpoints) == 602, 20)
        assert server.asked["list", PODS] == 3


async def test_a_watch_that_breaks_off_continues_at_its_version() -> None:
    server = filled()
    async with server.serving() as url, following(url) as source:
        await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000")
        await until(lambda: server.asked["watch", PODS] == 1)
        for number in range(3):
            server.cut()
            server.put(PODS, "c", pod(f"10.0.9.{number}"))
            await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000", f"10.0.9.{number}:8000")
        assert server.asked["list", PODS] == 1


@pytest.mark.slow
async def test_a_version_that_is_gone_lists_again(caplog: pytest.LogCaptureFixture) -> None:
    server = filled()
    async with server.serving() as url, following(url) as source:
        await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000")
        await until(lambda: server.asked["watch", PODS] == 1)
        server.cut()
        server.delete(PODS, "a")
        server.put(PODS, "b", pod("10.0.0.7"))
        server.compact()
        await until_endpoints(source, "10.0.0.7:8000")
        assert server.asked["list", PODS] == 2
        # A bookmark is a version to continue at.
        lists = server.asked["list", PODS]
        await until(lambda: server.asked["watch", PODS] >= 3)
        server.bookmark()
        server.compact()
        await asyncio.sleep(0.1)  # the bookmarks are on their way
        server.cut()
        server.put(PODS, "b", pod("10.0.0.8"))
        await until_endpoints(source, "10.0.0.8:8000")
        assert server.asked["list", PODS] == lists
    assert "too old" not in caplog.text


async def test_endpoints_stay_while_the_api_is_away(caplog: pytest.LogCaptureFixture) -> None:
    server = filled()
    async with server.serving() as url:
        source = InferencePoolSource(KubeAccess(url, "vllm", "vllm"), lambda: None)
        task = asyncio.create_task(source.run())
        await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000")
    try:
        await until(lambda: "(pods): " in caplog.text)
        await asyncio.sleep(0.5)
        assert source.endpoints == ("10.0.0.1:8000", "10.0.0.2:8000")
        server.delete(PODS, "a")
        async with server.serving():
            await until_endpoints(source, "10.0.0.2:8000")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    said = [line for line in caplog.messages if "(pods)" in line]
    assert [line.endswith("the earlier ones stay") for line in said] == [True, False]


async def test_a_rotated_token_is_read_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server, token = filled(), tmp_path / "token"
    server.tokens = {"first"}
    token.write_text("first\n")
    async with server.serving() as url, following(url, token_file=str(token)) as source:
        await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000")
        await until(lambda: server.asked["watch", PODS] > 0)
        server.tokens = {"second"}
        server.delete(PODS, "a")
        await until_endpoints(source, "10.0.0.2:8000")  # the open watch goes on
        server.cut()
        server.delete(PODS, "b")
        await until(lambda: "(pods): Unauthorized; the earlier ones stay" in caplog.text)
        assert source.endpoints == ("10.0.0.2:8000",)
        token.write_text("second\n")
        await until_endpoints(source)


async def test_what_the_api_forbids_is_said(caplog: pytest.LogCaptureFixture) -> None:
    server = filled()
    server.forbidden = {PODS}
    async with server.serving() as url, following(url) as source:
        await until(lambda: '(pods): pods is forbidden: User "epp" cannot' in caplog.text)
        server.forbidden.clear()
        await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000")


async def test_credentials_of_the_pod_reach_an_api_with_tls(
    tmp_path: Path, openssl_program: str
) -> None:
    key, ca = tmp_path / "key.pem", tmp_path / "ca.crt"
    made = [openssl_program, "req", "-x509", "-newkey", "ec"]
    made += ["-pkeyopt", "ec_paramgen_curve:prime256v1"]
    named = ["-nodes", "-subj", "/CN=kube", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(ca)]
    await asyncio.to_thread(
        subprocess.run, [*made, *named, *files], check=True, capture_output=True
    )
    (tmp_path / "token").write_text("own")
    (tmp_path / "namespace").write_text("vllm\n")
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(ca, key)
    server = filled()
    server.tokens = {"own"}
    async with server.serving(tls):
        given = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(server.port),
        }
        access = KubeAccess.find(PickerConfig(pool="vllm"), given, tmp_path)
        source = InferencePoolSource(access, lambda: None)
        async with background(source.run()):
            await until_endpoints(source, "10.0.0.1:8000", "10.0.0.2:8000")


async def test_picker_reads_the_servers_of_a_pool() -> None:
    registry = CollectorRegistry()
    for name in ("num_requests_running", "num_requests_waiting"):
        Gauge(f"vllm:{name}", "Requests.", registry=registry).set(3)
    server = KubeServer()
    async with metrics_over_http("127.0.0.1", 0, [Part(registry)]) as port, server.serving() as url:
        config = PickerConfig(pool="vllm/vllm", kube_api=url)
        picker = PickerService(config, registry)
        async with background(picker.run()):
            server.put(POOLS, "vllm", pool(port))
            server.put(PODS, "a", pod("127.0.0.1"))
            await picker.ready()
            ready = registry.get_sample_value("foretoken_picker_endpoints", {"health": "ready"})
        assert ready == 1


async def test_kubectl_reads_the_test_s_server() -> None:
    """The server's lists and watches are those of Kubernetes to its own client, too."""
    server = filled()
    async with server.serving() as url:
        words = ["get", "pods", "-n", "vllm", "-l", "app=vllm", "--server", url]
        options = ["--output-watch-events", "--watch", "-o", "json", "--request-timeout", "20"]
        process = await asyncio.create_subprocess_exec(
            KUBECTL,
            *words,
            *options,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        seen, decoder, text = list[tuple[str, str]](), json.JSONDecoder(), ""
        deleted = False
        try:
            async with asyncio.timeout(20):
                while ("DELETED", "a") not in seen and (piece := await process.stdout.read(2**16)):
                    text = (text + piece.decode()).lstrip()
                    with suppress(json.JSONDecodeError):  # the rest is not complete yet
                        while text:
                            event, end = decoder.raw_decode(text)
                            seen.append((event["type"], event["object"]["metadata"]["name"]))
                            text = text[end:].lstrip()
                    if len(seen) == 5 and not deleted:
                        server.delete(PODS, "a")
                        deleted = True
        finally:
            process.kill()
            await process.wait()
    names = ["a", "b", "leaving", "pending", "unready"]
    assert seen == [*(("ADDED", name) for name in names), ("DELETED", "a")]


def test_wrong_access_is_explained(tmp_path: Path) -> None:
    for overrides, sentence in (
        ({"pool": "a/b/c"}, "must be NAMESPACE/NAME"),
        ({"pool": "/b"}, "must be NAMESPACE/NAME"),
        ({"pool": "Vllm"}, "must be NAMESPACE/NAME"),
        ({"kube_api": "http://10.0.0.1:80"}, "must be https://HOST"),
        ({"kube_api": "10.0.0.1"}, "must be https://HOST"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load(PickerConfig, overrides)
    inside = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    with pytest.raises(ConfigError, match="outside of a cluster; give --kube-api"):
        KubeAccess.find(PickerConfig(pool="a/b"), {}, tmp_path)
    with pytest.raises(ConfigError, match="mount the pod's service account"):
        KubeAccess.find(PickerConfig(pool="a/b"), inside, tmp_path)
    local = PickerConfig(pool="b", kube_api="http://127.0.0.1:8001/")
    with pytest.raises(ConfigError, match="write NAMESPACE/NAME"):
        KubeAccess.find(local, {}, tmp_path)
    (tmp_path / "namespace").write_text("a")
    assert KubeAccess.find(local, {}, tmp_path) == KubeAccess("http://127.0.0.1:8001", "a", "b")
    for file in ("token", "ca.crt"):
        (tmp_path / file).write_text("none")
    found = KubeAccess.find(PickerConfig(pool="b"), inside, tmp_path)
    assert (found.url, found.namespace) == ("https://10.0.0.1:443", "a")
    with pytest.raises(ValueError, match="no certificates can be read"):
        InferencePoolSource(found, lambda: None)


@pytest.mark.parametrize(
    ("url", "fits"),
    [
        ("https://kube.example.org", True),
        ("https://10.0.0.1:6443", True),
        ("http://localhost:8001", True),
        ("http://[::1]:8001", True),
        ("http://kube.example.org", False),
        ("https://user@kube.example.org", False),
        ("https://kube.example.org:99999", False),
        ("https://", False),
        ("ftp://localhost", False),
    ],
)
def test_tokens_go_to_tls_or_to_this_machine_only(url: str, fits: bool) -> None:
    assert is_api_url(url) is fits


def test_objects_are_read() -> None:
    assert read_pool(pool(8000, 8001, 8000, b="2", a="1")) == PoolSpec("a=1,b=2", (8000, 8001))
    empty: dict[str, Any] = {}
    for wrong in (empty, {"spec": empty}, pool(70_000)):
        with pytest.raises(ObjectError):
            read_pool(wrong)
    assert read_pod(pod("10.0.0.1")) == "10.0.0.1" and read_pod(pod("fd00::1")) == "fd00::1"
    away = (pod("10.0.0.1", ready=False), pod("10.0.0.1", leaving=True))
    for absent in (*away, pod(""), pod("10.0.0")):
        assert read_pod(absent) == ""
    group = "inference.networking.k8s.io"
    assert read_objective(objective(2, group=group), "vllm") == 2
    assert read_objective(objective(2, group="another.example.org"), "vllm") is None
    assert read_objective(objective(2), "another") is None
