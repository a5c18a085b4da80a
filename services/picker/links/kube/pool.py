"""InferencePoolSource: endpoints and objectives of an InferencePool, from Kubernetes' API."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from services.picker.core.inference_pool import (
    POOL_GROUP,
    PoolSpec,
    read_objective,
    read_pod,
    read_pool,
)
from services.picker.links.kube.access import KubeAccess
from services.picker.links.kube.api import Collection, KubeApi
from services.picker.links.kube.mirror import Mirror
from services.runtime.network.channel import host_port
from services.runtime.tasks import background

log = logging.getLogger(__name__)

POOLS = f"/apis/{POOL_GROUP}/v1/namespaces/{{}}/inferencepools"
OBJECTIVES = "/apis/inference.networking.x-k8s.io/v1alpha2/namespaces/{}/inferenceobjectives"
PODS = "/api/v1/namespaces/{}/pods"
NO_POOL = PoolSpec("", ())  # of a pool that does not exist


class InferencePoolSource:
    """`endpoints`: one for each ready pod of the pool and each of its target ports. `objectives`:
    priorities by name. Both are empty until they are known, and stay while the API is away; a pool
    that is deleted has no endpoints."""

    def __init__(self, access: KubeAccess, changed: Callable[[], None]):
        """`changed` is called when either may have changed. Raises ValueError for a file that holds
        no certificates."""
        self.endpoints: tuple[str, ...] = ()
        self._access, self._changed = access, changed
        self._api = KubeApi(access)
        self._spec: PoolSpec | None = None  # not known yet
        self._selector_changed = asyncio.Event()
        self._pods: Mirror[str] | None = None  # those of the current selector
        named = {"fieldSelector": f"metadata.name={access.pool}"}
        self._pools = Mirror(
            self._api,
            "InferencePool",
            Collection(POOLS.format(access.namespace), named),
            read_pool,
            self._on_pool,
        )
        self._objectives = Mirror(
            self._api,
            "InferenceObjectives",
            Collection(OBJECTIVES.format(access.namespace)),
            partial(read_objective, pool=access.pool),
            changed,
        )

    @property
    def objectives(self) -> Mapping[str, int]:
        return self._objectives.values

    async def run(self) -> None:
        """Follows the API until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._pools.run())
                tasks.create_task(self._objectives.run())
                tasks.create_task(self._follow_pods())
        finally:
            await self._api.close()

    async def _follow_pods(self) -> None:
        """Follows the pods of the pool's selector, and of each later one."""
        while True:
            await self._selector_changed.wait()
            self._selector_changed.clear()
            if self._spec is None or not self._spec.selector:
                continue
            selected = {"labelSelector": self._spec.selector}
            pods = Collection(PODS.format(self._access.namespace), selected)
            self._pods = Mirror(self._api, "pods", pods, read_pod, self._on_pods)
            async with background(self._pods.run()):
                await self._selector_changed.wait()

    def _on_pool(self) -> None:
        before, spec = self._spec, self._pools.values.get(self._access.pool, NO_POOL)
        if spec == before:
            return
        self._spec = spec
        if spec is NO_POOL:
            name = f"{self._access.namespace}/{self._access.pool}"
            log.warning("the InferencePool %s does not exist: it has no endpoints", name)
            self._publish(())
        if before is None or before.selector != spec.selector:
            self._pods = None  # the earlier endpoints stay until the new pods are known
            self._selector_changed.set()
        self._on_pods()

    def _on_pods(self) -> None:
        if self._spec is not None and self._pods is not None and self._pods.known:
            addresses = sorted(filter(None, self._pods.values.values()))
            ports = self._spec.ports
            self._publish(tuple(host_port(ip, port) for ip in addresses for port in ports))

    def _publish(self, endpoints: tuple[str, ...]) -> None:
        if endpoints != self.endpoints:
            self.endpoints = endpoints
            self._changed()
