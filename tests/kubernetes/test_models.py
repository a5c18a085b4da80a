"""Two models behind one gateway: their names, addresses and network policies agree."""

import os
from collections.abc import Mapping

import pytest

from gateway.config import GatewayConfig
from gateway.types.model_entry import ModelEntry
from services.runtime.config import ENV_PREFIX, check_environment, load
from services.runtime.main import ServedSettings
from services.scheduler.config import SchedulerConfig
from services.worker.config import WorkerConfig
from tests.kubernetes.resolved import (
    MODELS,
    Object,
    labels,
    name,
    of_kind,
    ours,
    pod,
    ports,
    program,
    resolved,
    selects,
    settings,
)

KINDS: Mapping[str, type[ServedSettings]] = {
    "gateway": GatewayConfig, "scheduler": SchedulerConfig, "worker": WorkerConfig,
}  # fmt: skip
NAMESPACE_NAME = "kubernetes.io/metadata.name"  # a label that Kubernetes sets


def workload(overlay: str, service: str) -> Object:
    [found] = [each for each in ours(overlay) if program(each) == service]
    return found


def namespace(overlay: str) -> Object:
    [found] = of_kind(overlay, "Namespace")
    return found


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch):
    """Loads the settings of a service's container."""

    def load_from(overlay: str, service: str) -> ServedSettings:
        for key in [each for each in os.environ if each.startswith(ENV_PREFIX)]:
            monkeypatch.delenv(key)
        for key, value in settings(overlay, workload(overlay, service)).items():
            monkeypatch.setenv(key, value)
        check_environment()
        return load(KINDS[service])

    return load_from


def test_only_the_first_overlay_has_a_gateway():
    assert [sorted(map(program, ours(overlay))) for overlay in MODELS.values()] == [
        ["batcher", "estimator", "gateway", "predictor", "scheduler", "worker"],
        ["batcher", "estimator", "predictor", "scheduler", "worker"],
    ]
    assert not [each for each in resolved(MODELS["large"]) if name(each).startswith("gateway-g")]


@pytest.mark.parametrize("model", MODELS)
def test_gateway_names_folder_and_scheduler_of_each_model(model: str, read) -> None:
    entry: ModelEntry = read("two-models", "gateway").models[model]
    overlay = MODELS[model]
    worker, scheduler = read(overlay, "worker"), read(overlay, "scheduler")
    assert (worker.served_model_name, worker.model) == (model, entry.model)
    host, _, port = entry.scheduler_address.rpartition(":")
    service, _, place = host.partition(".")
    assert place == ("" if overlay == "two-models" else name(namespace(overlay)))
    assert service in [name(each) for each in of_kind(overlay, "Service")]
    assert scheduler.address.rpartition(":")[2] == port
    assert worker.scheduler_address == f"scheduler:{port}"  # of its own namespace


def test_worker_of_another_namespace_advertises_a_name_that_the_gateway_resolves(read) -> None:
    overlay = MODELS["large"]
    worker = workload(overlay, "worker")
    advertised = read(overlay, "worker").advertise
    port = ports(worker)["grpc"]
    service = worker["spec"]["serviceName"]
    assert advertised == f"worker-0.{service}.{name(namespace(overlay))}:{port}"


@pytest.mark.parametrize("service", ["scheduler", "worker"])
def test_policies_of_both_namespaces_let_the_gateway_through(service: str) -> None:
    """Out of its namespace by one policy, into the other by another one."""
    gateway = workload("two-models", "gateway")
    here, there = namespace("two-models"), namespace(MODELS["large"])
    target = workload(MODELS["large"], service)
    grpc = ports(target)["grpc"]
    out = {
        port["port"]
        for policy in of_kind("two-models", "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], labels(pod(gateway)))
        for rule in policy["spec"].get("egress", ())
        for peer in rule.get("to", ())
        if "namespaceSelector" in peer
        and selects(peer["namespaceSelector"], labels(there))
        and selects(peer["podSelector"], labels(pod(target)))
        for port in rule["ports"]
    }
    assert grpc in out
    into = {
        port["port"]
        for policy in of_kind(MODELS["large"], "NetworkPolicy")
        if selects(policy["spec"]["podSelector"], labels(pod(target)))
        for rule in policy["spec"].get("ingress", ())
        for peer in rule["from"]
        if "namespaceSelector" in peer
        and selects(peer["namespaceSelector"], {NAMESPACE_NAME: name(here)})
        and selects(peer["podSelector"], labels(pod(gateway)))
        for port in rule["ports"]
    }
    assert into == {"grpc"}
