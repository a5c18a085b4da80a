"""The data of the board: one snapshot of a model's fleet, shared by all viewers."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from math import isfinite

from gateway.gateway import Gateway
from gateway.sessions.sla_window import WINDOW_S
from protos.generated import scheduler_pb2
from services.policies.preset import presets
from services.runtime.errors import ServiceError

REFRESH_S = 0.5  # viewers poll each second; a younger snapshot is sent again
MAX_WORKERS = 256  # listed; beyond, only their number is shown
WORKER_FIELDS = ("model", "running", "kv_tokens", "held_tokens", "block_tokens")

Json = Mapping[str, object]


class Board:
    """Queries the scheduler on demand, at most once per REFRESH_S for any number of viewers.

    A snapshot costs O(workers) and is encoded once. If the scheduler does not answer, the board
    shows its last answer and that answer's age.
    """

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._lock = asyncio.Lock()
        self._view = scheduler_pb2.FleetView()
        self._answered_s: float | None = None  # when the scheduler last answered
        self._encoded_s = -REFRESH_S
        self._body = b""

    async def body(self) -> bytes:
        """JSON at most REFRESH_S old. Concurrent calls wait for the same snapshot."""
        async with self._lock:
            if not self._body or time.monotonic() - self._encoded_s >= REFRESH_S:
                await self._query()
                self._encoded_s = time.monotonic()
                self._body = json.dumps(self._snapshot(self._encoded_s)).encode()
        return self._body

    async def _query(self) -> None:
        try:
            self._view = await self._gateway.get_fleet()
            self._answered_s = time.monotonic()
        except ServiceError:
            pass  # the age of the last answer grows

    def _snapshot(self, now_s: float) -> Json:
        gateway, view = self._gateway, self._view
        classes = gateway.sla_window.by_class(now_s)
        workers = sorted(view.workers, key=lambda worker: worker.worker_id)
        return {
            "ready": gateway.ready,
            "draining": gateway.draining,
            "age_s": None if self._answered_s is None else round(now_s - self._answered_s, 3),
            "preset": view.policy,
            "queued": view.queued,
            "running": sum(worker.running for worker in view.workers),
            "live": gateway.live,
            "arriving": gateway.arriving,
            "drain_s": _finite_or_none(view.drain_s),
            "worker_count": len(view.workers),
            "workers": [_encode_worker(worker) for worker in workers[:MAX_WORKERS]],
            "window_s": WINDOW_S,
            "classes": {name: asdict(counts) for name, counts in sorted(classes.items())},
        }


def describe_server(gateway: Gateway, models: Sequence[str], presets: Sequence[Json]) -> Json:
    """What the page loads once for a model: its name, those of all `models`, the SLA classes and
    the shipped presets."""
    config = gateway.config
    return {
        "model": config.model_name,
        "models": models,
        "max_context_tokens": gateway.max_context_tokens,
        "default_class": config.default_sla,
        "classes": {
            name: {budget: _finite_or_none(value) for budget, value in budgets.model_dump().items()}
            for name, budgets in config.sla_classes.items()
        },
        "presets": presets,
    }


@cache
def shipped_presets() -> Sequence[Json]:
    """Name and description of each preset."""
    return [{"name": name, "about": preset.about} for name, preset in presets().items()]


def _encode_worker(worker: scheduler_pb2.WorkerInfo) -> Json:
    return {"id": worker.worker_id, **{name: getattr(worker, name) for name in WORKER_FIELDS}}


def _finite_or_none(value: float) -> float | None:
    """None for infinity, which means no limit and does not exist in JSON."""
    return value if isfinite(value) else None
