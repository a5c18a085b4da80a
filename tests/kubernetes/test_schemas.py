"""Every object of every overlay follows its schema."""

import copy
from typing import Any

import kubernetes_validate
import pytest

from tests.kubernetes.custom_resources import is_custom, mistakes
from tests.kubernetes.resolved import OVERLAYS, Object, name, resolved, workloads

VERSIONS = ("1.30", kubernetes_validate.latest_version())  # the oldest that deploy/README.md names


def check(item: Object) -> None:
    """Raises ValidationError unless Kubernetes accepts the object, without unknown fields."""
    for version in VERSIONS:
        kubernetes_validate.validate(dict(item), version, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_follows_its_schema(overlay: str):
    for item in resolved(overlay):
        if is_custom(item):
            assert not mistakes(item), name(item)
        else:
            check(item)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_has_one_name_and_the_namespace(overlay: str):
    seen = [(item["kind"], name(item)) for item in resolved(overlay)]
    assert len(set(seen)) == len(seen)
    spaced = [item for item in resolved(overlay) if item["kind"] != "Namespace"]
    assert len({item["metadata"]["namespace"] for item in spaced}) == 1


def test_schema_check_rejects_an_unknown_field_and_a_wrong_type():
    broken: Any = copy.deepcopy(workloads("one-node")[0])
    broken["spec"]["template"]["spec"]["terminationGraceSeconds"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
        check(broken)
    broken = copy.deepcopy(workloads("one-node")[0])
    broken["spec"]["template"]["spec"]["containers"][0]["command"] = "python"
    with pytest.raises(kubernetes_validate.ValidationError):
        check(broken)


def test_custom_resource_check_rejects_an_unknown_field():
    [monitor] = [each for each in resolved("gpu-fleet") if each["kind"] == "ServiceMonitor"]
    broken: Any = copy.deepcopy(monitor)
    broken["spec"]["endpoints"][0]["prot"] = broken["spec"]["endpoints"][0].pop("port")
    assert len(mistakes(broken)) == 2
