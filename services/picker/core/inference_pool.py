"""What the picker reads of Kubernetes' objects: an InferencePool, its pods and its
InferenceObjectives. Pure.

Objects are those of the API, as parsed JSON. The API server has checked them against their
schemas; what they lack nevertheless is an error with a sentence.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeGuard
from urllib.parse import urlsplit

from services.picker.core.endpoints import is_port

Object = Mapping[str, Any]

POOL_GROUP = "inference.networking.k8s.io"
POOL_RULE = "must be NAMESPACE/NAME, or NAME in a pod of the pool's namespace"
API_RULE = "must be https://HOST[:PORT], or http://… of a loopback address"
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


class ObjectError(ValueError):
    """An object that cannot be used, in one sentence."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """`selector` is the label selector of the pods, as the API takes it; each pod has one endpoint
    on each of `ports`."""

    selector: str
    ports: tuple[int, ...]


def split_pool(text: str) -> tuple[str, str]:
    """Namespace, empty if it is not given, and name of `[NAMESPACE/]NAME`. Raises ValueError."""
    namespace, slash, name = text.rpartition("/")
    if not NAME.fullmatch(name) or bool(slash) != bool(NAME.fullmatch(namespace)):
        raise ValueError(POOL_RULE)
    return namespace, name


def is_api_url(text: str) -> bool:
    """Whether `text` is the URL of an API that a token may be sent to."""
    try:
        url = urlsplit(text)
        host, port = url.hostname or "", url.port
    except ValueError:
        return False
    if port == 0 or not host or url.query or url.fragment or url.username is not None:
        return False
    return url.scheme == "https" or (url.scheme == "http" and _is_loopback(host))


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def read_pool(item: Object) -> PoolSpec:
    """Raises ObjectError."""
    spec = item.get("spec") or {}
    labels = (spec.get("selector") or {}).get("matchLabels") or {}
    ports = [each.get("number") for each in spec.get("targetPorts") or ()]
    if not labels:  # an empty selector is that of every pod of the namespace
        raise ObjectError("its selector has no matchLabels")
    if not ports or not all(is_port(str(port)) for port in ports):
        raise ObjectError("its targetPorts are no list of port numbers")
    selector = ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return PoolSpec(selector, tuple(dict.fromkeys(ports)))


def read_pod(item: Object) -> str:
    """The IP address of a pod that is ready and not terminating; empty for others."""
    status = item.get("status") or {}
    ip = status.get("podIP")
    ready = any(
        each.get("type") == "Ready" and each.get("status") == "True"
        for each in status.get("conditions") or ()
    )
    leaves = "deletionTimestamp" in item["metadata"]
    return ip if ready and not leaves and _is_ip(ip) else ""


def _is_ip(value: object) -> TypeGuard[str]:
    try:
        return isinstance(value, str) and bool(ip_address(value))
    except ValueError:
        return False


def read_objective(item: Object, pool: str) -> int | None:
    """The priority of an objective of this pool, 0 if it states none; None for other pools'."""
    spec = item.get("spec") or {}
    of = spec.get("poolRef") or {}
    if of.get("name") != pool or of.get("group", POOL_GROUP) != POOL_GROUP:
        return None
    priority = spec.get("priority", 0)
    return priority if isinstance(priority, int) else 0
