"""Network policies allow the connections that the settings name, and no others."""

from collections.abc import Iterator, Mapping
from itertools import product

import pytest

from tests.kubernetes.resolved import (
    FLEETS,
    OVERLAYS,
    Object,
    labels,
    name,
    of_kind,
    ours,
    pod,
    ports,
    selects,
    settings,
    workloads,
)

Edge = tuple[str, str, int]  # from a workload to a workload's port
OUTSIDE: Mapping[str, str] = {"app": "another"}  # labels of a pod of the namespace


def named(overlay: str) -> Iterator[Edge]:
    """The connections that the settings name. Every gateway also connects to the workers."""
    by_name = {name(each): each for each in workloads(overlay)}
    for each in ours(overlay):
        for key, value in settings(overlay, each).items():
            host, _, port = value.removeprefix("redis://").rpartition(":")
            if host.partition(".")[0] in by_name and not key.endswith("_ADVERTISE"):
                yield name(each), host, int(port)
    yield "gateway", "worker", ports(by_name["worker"])["grpc"]


def opened(rule: Object, target: Mapping[str, int]) -> set[int]:
    """The numbers of the ports that a rule opens at a pod with ports `target`."""
    if "ports" not in rule:
        return set(target.values())
    found = {each["port"] for each in rule["ports"]}
    return {number for key, number in target.items() if key in found or number in found}


def applies(peers: list[Object] | None, to: Mapping[str, str]) -> bool:
    """Whether a rule's `from` or `to` includes a pod of the same namespace with these labels."""
    if peers is None:
        return True
    own = [each["podSelector"] for each in peers if "namespaceSelector" not in each]
    return any(selects(each, to) for each in own)


def allowed(overlay: str, source: Mapping[str, str], target: Object) -> set[int]:
    """The ports of the target that a pod with the labels `source` reaches."""
    into, out = labels(pod(target)), set[int]()
    incoming = set[int]()
    for policy in of_kind(overlay, "NetworkPolicy"):
        spec = policy["spec"]
        if selects(spec["podSelector"], into):
            for rule in spec.get("ingress", ()):
                if applies(rule.get("from"), source):
                    incoming |= opened(rule, ports(target))
        if selects(spec["podSelector"], source):
            for rule in spec.get("egress", ()):
                if applies(rule.get("to"), into):
                    out |= opened(rule, ports(target))
    governed = any(
        selects(each["spec"]["podSelector"], source) and "Egress" in each["spec"]["policyTypes"]
        for each in of_kind(overlay, "NetworkPolicy")
        if "policyTypes" in each["spec"]
    )
    return incoming & out if governed else incoming


def reached(overlay: str) -> set[Edge]:
    """Every connection between two workloads that the policies allow, but those to the gateway,
    which is open to all."""
    return {
        (name(source), name(target), port)
        for source, target in product(workloads(overlay), repeat=2)
        if name(target) != "gateway"
        for port in allowed(overlay, labels(pod(source)), target)
    }


@pytest.mark.parametrize("overlay", FLEETS)
def test_policies_allow_the_connections_of_the_settings_and_no_others(overlay: str):
    assert reached(overlay) == set(named(overlay))
    shared = {("gateway", "limits", 6379)} if overlay == "gpu-fleet" else set()
    assert set(named(overlay)) >= shared
    assert len(set(named(overlay))) == 7 + len(shared)


@pytest.mark.parametrize("overlay", FLEETS)
def test_another_pod_reaches_the_gateway_s_public_ports_only(overlay: str):
    found = {name(each): allowed(overlay, OUTSIDE, each) for each in workloads(overlay)}
    assert found.pop("gateway") == {8000, 50051}
    assert set().union(*found.values()) == set()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_is_denied_what_no_policy_allows_in_both_directions(overlay: str):
    for each in workloads(overlay):
        types = {
            direction
            for policy in of_kind(overlay, "NetworkPolicy")
            if selects(policy["spec"]["podSelector"], labels(pod(each)))
            for direction in policy["spec"].get("policyTypes", ())
        }
        assert types == {"Ingress", "Egress"}


def test_picker_reaches_the_pool_s_pods_names_and_the_api():
    [policy] = of_kind("gateway-api", "NetworkPolicy")
    [pool] = of_kind("gateway-api", "InferencePool")
    reached, names, api = policy["spec"]["egress"]
    [peer] = reached["to"]
    assert peer["podSelector"] == pool["spec"]["selector"]
    assert {each["port"] for each in names["ports"]} == {53}
    assert {each["port"] for each in api["ports"]} == {443, 6443} and "to" not in api


def test_prometheus_reaches_the_metrics_of_every_service():
    [policy] = [e for e in of_kind("gpu-fleet", "NetworkPolicy") if name(e) == "monitoring"]
    [rule] = policy["spec"]["ingress"]
    for each in ours("gpu-fleet"):
        assert selects(policy["spec"]["podSelector"], labels(pod(each)))
        assert opened(rule, ports(each)) == {ports(each)["metrics"]}
