"""Names that objects use for one another exist: ports, pods, ConfigMaps, volumes, metrics."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from observability.metrics.catalogue import CATALOGUE
from observability.prometheus.records import GROUPS, OBJECTIVE_RATIO
from services.picker.links.kube.pool import OBJECTIVES, PODS, POOLS
from tests.kubernetes.resolved import (
    FOLDER,
    OVERLAYS,
    ROOT,
    Object,
    container,
    labels,
    name,
    of_kind,
    pod,
    ports,
    resolved,
    selects,
    settings,
    workloads,
)

RECORDED = re.compile(r"foretoken:[\w:]+")
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")


def selected(overlay: str, selector: Object) -> list[Object]:
    return [each for each in workloads(overlay) if selects(selector, labels(pod(each)))]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_name_ports_of_the_pods_that_they_select(overlay: str):
    for service in of_kind(overlay, "Service"):
        [target] = selected(overlay, {"matchLabels": service["spec"]["selector"]})
        for each in service["spec"]["ports"]:
            assert ports(target)[each["targetPort"]] == each["port"], name(service)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_workloads_select_their_own_pods_only(overlay: str):
    for each in workloads(overlay):
        assert selected(overlay, each["spec"]["selector"]) == [each]
        if each["kind"] == "StatefulSet":
            names = [name(service) for service in of_kind(overlay, "Service")]
            assert each["spec"]["serviceName"] in names


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_budgets_and_policies_select_pods(overlay: str):
    for each in of_kind(overlay, "PodDisruptionBudget"):
        assert len(selected(overlay, each["spec"]["selector"])) == 1
    for each in of_kind(overlay, "NetworkPolicy"):
        assert selected(overlay, each["spec"]["podSelector"]), name(each)


def named_ports(probe: Object) -> Iterator[int | str]:
    for kind in ("grpc", "tcpSocket", "httpGet"):
        if kind in probe:
            yield probe[kind]["port"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_has_three_probes_of_its_own_ports(overlay: str):
    for each in workloads(overlay):
        known = ports(each)
        for kind in PROBES:
            probe = container(each)[kind]
            found = list(named_ports(probe))
            assert found or probe["exec"]["command"]
            assert all(port in known or port in known.values() for port in found), name(each)
            assert probe["timeoutSeconds"] > 1 and probe["periodSeconds"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_restricted(overlay: str):
    """The profile `restricted` of Kubernetes' Pod Security Standards, and a read-only root."""
    for each in workloads(overlay):
        spec = pod(each)["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        own = container(each)["securityContext"]
        assert own["readOnlyRootFilesystem"] and not own["allowPrivilegeEscalation"]
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert not spec["enableServiceLinks"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_container_requests_cpu_and_memory_and_limits_memory(overlay: str):
    for each in workloads(overlay):
        resources = container(each)["resources"]
        assert set(resources["requests"]) >= {"cpu", "memory"}
        assert "memory" in resources["limits"] and "cpu" not in resources["limits"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_mounts_have_volumes(overlay: str):
    for each in workloads(overlay):
        claims = [name(claim) for claim in each["spec"].get("volumeClaimTemplates", ())]
        volumes = [volume["name"] for volume in pod(each)["spec"].get("volumes", ())]
        mounted = [mount["name"] for mount in container(each).get("volumeMounts", ())]
        assert sorted(mounted) == sorted([*claims, *volumes])


def test_only_the_scheduler_has_a_fixed_number_of_replicas():
    """A number in a manifest would undo an autoscaler's with every `kubectl apply`."""
    for overlay in OVERLAYS:
        fixed = [each for each in workloads(overlay) if "replicas" in each["spec"]]
        scheduler = [each for each in workloads(overlay) if name(each) == "scheduler"]
        assert fixed == scheduler
        for each in scheduler:
            assert each["spec"]["replicas"] == 1
            assert each["spec"]["strategy"] == {"type": "Recreate"}


def test_service_monitor_finds_a_metrics_port_of_every_service_of_ours():
    [monitor] = of_kind("gpu-fleet", "ServiceMonitor")
    [endpoint] = monitor["spec"]["endpoints"]
    found = [
        name(service)
        for service in of_kind("gpu-fleet", "Service")
        if selects(monitor["spec"]["selector"], labels(service))
        and endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
    ]
    expected = {"gateway", "scheduler", "worker", "predictor", "estimator", "batcher"}
    assert set(found) == expected
    [relabel] = endpoint["relabelings"]
    jobs = {relabel["replacement"].replace("$1", each) for each in found}
    scrapes = yaml.safe_load((ROOT / "observability/prometheus/prometheus.yml").read_text())
    named = {job["job_name"] for job in scrapes["scrape_configs"]}
    assert jobs == named - {"collector"}, "alerts know these names"


def test_dashboards_and_rules_are_the_committed_files():
    data = {
        file: text
        for each in of_kind("gpu-fleet", "ConfigMap")
        for file, text in each["data"].items()
        if file.endswith((".json", ".yml"))
    }
    folder = ROOT / "observability"
    committed = [*folder.glob("grafana/*.json"), folder / "prometheus/rules.yml"]
    committed.append(folder / "prometheus/alerts.yml")
    assert data == {path.name: path.read_text() for path in committed}
    [rule] = of_kind("gpu-fleet", "PrometheusRule")
    groups: list[Any] = []
    for file in ("rules.yml", "alerts.yml"):
        groups += yaml.safe_load(data[file])["groups"]
    assert rule["spec"]["groups"] == groups


def test_no_object_is_too_large_for_kubectl_apply():
    """kubectl keeps a copy of an object in an annotation; all annotations have 256 KiB."""
    for overlay in OVERLAYS:
        for item in resolved(overlay):
            assert len(yaml.safe_dump(dict(item))) < 200 * 2**10, name(item)


def test_autoscalers_scale_workloads_by_metrics_of_the_adapter():
    adapter = yaml.safe_load((FOLDER / "components/autoscaling/adapter.yaml").read_text())["rules"]
    recorded = {record.name for records in GROUPS.values() for record in records}
    served = {each["name"]["as"]: each for each in adapter["external"]}
    for each in served.values():
        # The adapter drops a metric without series, and autoscalers then never scale down.
        assert each["seriesQuery"] == OBJECTIVE_RATIO.name
        assert set(RECORDED.findall(each["metricsQuery"])) <= recorded
        assert each["metricsQuery"].endswith(" or vector(0)")
    pods = {each["seriesQuery"].partition("{")[0] for each in adapter["custom"]}
    assert pods <= {metric.family for metrics in CATALOGUE.values() for metric in metrics}
    existing = {(each["kind"], name(each)) for each in workloads("gpu-fleet")}
    for scaler in of_kind("gpu-fleet", "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert (target["kind"], target["name"]) in existing
        for metric in scaler["spec"]["metrics"]:
            match metric["type"]:
                case "External":
                    assert metric["external"]["metric"]["name"] in served
                case "Pods":
                    assert metric["pods"]["metric"]["name"] in pods
                case other:
                    assert other == "Resource"


def test_pool_route_and_picker_name_each_other():
    [pool] = of_kind("gateway-api", "InferencePool")
    [route] = of_kind("gateway-api", "HTTPRoute")
    [gateway] = of_kind("gateway-api", "Gateway")
    services = {name(each): each for each in of_kind("gateway-api", "Service")}
    assert [each["name"] for each in route["spec"]["parentRefs"]] == [name(gateway)]
    [rule] = route["spec"]["rules"]
    assert [each["name"] for each in rule["backendRefs"]] == [name(pool)]
    picker = pool["spec"]["endpointPickerRef"]
    assert picker["port"]["number"] in [
        e["port"] for e in services[picker["name"]]["spec"]["ports"]
    ]
    [epp] = workloads("gateway-api")
    own = settings("gateway-api", epp)
    assert f"{own['FORETOKEN_PICKER_DRAIN_S']}s" == rule["timeouts"]["request"], "of an answer"
    assert own["FORETOKEN_PICKER_POOL"] == name(pool), "in the namespace of its pod"
    for each in of_kind("gateway-api", "InferenceObjective"):
        assert each["spec"]["poolRef"] == {"name": name(pool)}


def test_only_the_picker_has_a_token_and_may_read_what_it_asks_for():
    for overlay in OVERLAYS:
        spaces = [pod(each)["spec"] for each in workloads(overlay)]
        tokens = [each["automountServiceAccountToken"] for each in spaces]
        assert tokens == [overlay == "gateway-api"] * len(tokens)
    [account] = of_kind("gateway-api", "ServiceAccount")
    [role] = of_kind("gateway-api", "Role")
    [binding] = of_kind("gateway-api", "RoleBinding")
    [epp] = workloads("gateway-api")
    assert pod(epp)["spec"]["serviceAccountName"] == name(account)
    assert binding["roleRef"]["name"] == name(role) and binding["roleRef"]["kind"] == "Role"
    subject = {"kind": "ServiceAccount", "name": name(account)}
    assert binding["subjects"] == [subject | {"namespace": account["metadata"]["namespace"]}]
    allowed = {
        (group, resource)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if rule["verbs"] == ["list", "watch"]
    }
    paths = [path.split("/") for path in (POOLS, OBJECTIVES)]
    asked = {(group, resource) for _, _, group, _, _, _, resource in paths}
    assert allowed == {("", PODS.rpartition("/")[2]), *asked}
