"""The board: one snapshot of the fleet for all who look at it, and what stays the same."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from math import isfinite

from gateway.gateway import Gateway
from gateway.sessions.recent import WINDOW_S
from protos.generated import scheduler_pb2
from services.policies.rows import presets_of
from services.runtime.errors import ServiceError

REFRESH_S = 0.5  # viewers ask each second; what is younger is told again
MOST_WORKERS = 256  # shown one by one; of more, their number

Told = Mapping[str, object]


class Board:
    """Asks the scheduler while somebody looks, at most every REFRESH_S however many they are.

    A snapshot costs O(workers); its JSON is written once for all. Where the scheduler does not
    answer, what it last said is told, with its age.
    """

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._asking = asyncio.Lock()
        self._view = scheduler_pb2.FleetView()
        self._told_s: float | None = None  # when the scheduler last answered
        self._made_s = -REFRESH_S
        self._body = b""

    async def body(self) -> bytes:
        """JSON that is no older than REFRESH_S. Who comes while it is being made waits for it."""
        async with self._asking:
            if not self._body or time.monotonic() - self._made_s >= REFRESH_S:
                await self._ask()
                self._made_s = time.monotonic()
                self._body = json.dumps(self._snapshot(self._made_s)).encode()
        return self._body

    async def _ask(self) -> None:
        try:
            self._view = await self._gateway.ask_fleet()
            self._told_s = time.monotonic()
        except ServiceError:
            pass  # the age of what is told says so

    def _snapshot(self, now_s: float) -> Told:
        gateway, view = self._gateway, self._view
        kept = gateway.recent.by_class(now_s)
        workers = sorted(view.workers, key=lambda worker: worker.worker_id)
        return {
            "ready": gateway.ready,
            "draining": gateway.draining,
            "age_s": None if self._told_s is None else round(now_s - self._told_s, 3),
            "preset": view.policy,
            "queued": view.queued,
            "running": sum(worker.running for worker in view.workers),
            "live": gateway.live,
            "drain_s": _finite(view.drain_s),
            "worker_count": len(view.workers),
            "workers": [_worker(worker) for worker in workers[:MOST_WORKERS]],
            "window_s": WINDOW_S,
            "classes": {name: asdict(counts) for name, counts in sorted(kept.items())},
        }


def about(gateway: Gateway, presets: Sequence[Told]) -> Told:
    """What the page needs once: the model, the SLA classes a request can name, and the presets
    that ship, of which the board names the one that is on."""
    config = gateway.config
    return {
        "model": config.model_name,
        "max_context_tokens": gateway.max_context_tokens,
        "default_class": config.default_sla,
        "classes": {
            name: {budget: _finite(value) for budget, value in budgets.model_dump().items()}
            for name, budgets in config.sla_classes.items()
        },
        "presets": presets,
    }


@cache
def shipped_presets() -> Sequence[Told]:
    """Name and purpose of each."""
    return [{"name": name, "about": preset.about} for name, preset in presets_of().items()]


def _worker(worker: scheduler_pb2.WorkerInfo) -> Told:
    return {
        "id": worker.worker_id,
        "model": worker.model,
        "running": worker.running,
        "kv_tokens": worker.kv_tokens,
        "held_tokens": worker.held_tokens,
        "block_tokens": worker.block_tokens,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity; here it always means that there is no limit, or none in sight."""
    return value if isfinite(value) else None
