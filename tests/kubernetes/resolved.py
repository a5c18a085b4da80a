"""The objects of deploy/kubernetes as `kubectl kustomize` resolves them, and their parts."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/kubernetes"
FLEETS = ("gpu-fleet", "one-node")  # overlays of the base
MODELS = {"small": "two-models", "large": "second-model"}  # overlays by the model that they serve
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
KUBECTL = str(Path(sys.executable).parent / "kubectl")  # a development dependency
REFERENCE = re.compile(r"\$\((\w+)\)")

Object = Mapping[str, Any]


@cache
def resolved(overlay: str) -> tuple[Object, ...]:
    """All objects of an overlay. Raises CalledProcessError for a mistake in it."""
    command = [KUBECTL, "kustomize", str(FOLDER / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, *kinds: str) -> list[Object]:
    """The objects of any of the kinds, in order."""
    return [each for each in resolved(overlay) if each["kind"] in kinds]


def name(item: Object) -> str:
    found: str = item["metadata"]["name"]
    return found


def labels(item: Object) -> Mapping[str, str]:
    found: Mapping[str, str] = item["metadata"].get("labels", {})
    return found


def workloads(overlay: str) -> list[Object]:
    return of_kind(overlay, "Deployment", "StatefulSet")


def pod(workload: Object) -> Object:
    """The pod's template: metadata and spec."""
    found: Object = workload["spec"]["template"]
    return found


def container(workload: Object) -> Object:
    """The only container of a workload's pods."""
    [found] = pod(workload)["spec"]["containers"]
    return dict(found)


def ports(workload: Object) -> dict[str, int]:
    """Numbers of the container's ports by name."""
    return {each["name"]: each["containerPort"] for each in container(workload)["ports"]}


def selects(selector: Object, of: Mapping[str, str]) -> bool:
    """Whether a label selector matches labels. An empty one matches all."""
    wanted = selector.get("matchLabels", {}).items()
    for each in selector.get("matchExpressions", ()):
        assert each["operator"] == "In", each
    sets = ((each["key"], each["values"]) for each in selector.get("matchExpressions", ()))
    return all(of.get(key) == value for key, value in wanted) and all(
        of.get(key) in values for key, values in sets
    )


def from_config_maps(overlay: str, workload: Object) -> dict[str, str]:
    """The variables that the container takes from whole ConfigMaps."""
    maps = {name(each): each["data"] for each in of_kind(overlay, "ConfigMap")}
    sources = container(workload).get("envFrom", ())
    return {k: v for each in sources for k, v in maps[each["configMapRef"]["name"]].items()}


def environment(overlay: str, workload: Object) -> dict[str, str]:
    """The container's environment in the first pod, without values of Secrets."""
    found = from_config_maps(overlay, workload)
    for each in container(workload).get("env", ()):
        if "value" in each:
            found[each["name"]] = REFERENCE.sub(lambda use: found[use[1]], each["value"])
        elif "fieldRef" in each["valueFrom"]:
            assert each["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
            found[each["name"]] = f"{name(workload)}-0"
    return found


def settings(overlay: str, workload: Object) -> dict[str, str]:
    """The variables of the environment that are settings of foretoken."""
    prefix = "FORETOKEN_"
    return {k: v for k, v in environment(overlay, workload).items() if k.startswith(prefix)}


def ours(overlay: str) -> Iterator[Object]:
    """The workloads that run foretoken's image."""
    for each in workloads(overlay):
        if container(each)["image"].rpartition(":")[0].rpartition("/")[2] == "foretoken":
            yield each


def program(workload: Object) -> str:
    """The service that the container runs: its command's last word, without `services.`."""
    command = container(workload)["command"]
    return str(command[-1]).removeprefix("services.")


def path_with_python() -> str:
    """A PATH with this environment's `python` before the others."""
    return f"{Path(sys.executable).parent}:{os.environ['PATH']}"
