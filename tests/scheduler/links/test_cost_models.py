"""Cost models from real estimators that stop and restart."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from protos.generated import common_pb2, estimator_pb2, estimator_pb2_grpc
from services.costs import BatchTiming, CostModel, Neighbours
from services.estimator.config import EstimatorConfig
from services.estimator.service import EstimatorService
from services.runtime.network.delivery import MAX_PER_CALL
from services.scheduler.core import events as ev
from services.scheduler.links.cost_models import merged
from tests.reach import until
from tests.scheduler.links.link_fixtures import Owner, estimator_at, running_peers, socket_in


def steps(*kinds: tuple[int, int, int], slower: float = 1.0) -> list[common_pb2.StepTiming]:
    """Steps of 4 ms, plus 0.1 ms per prompt's token, 1 ms a sequence."""
    return [
        common_pb2.StepTiming(
            prefill_tokens=p,
            decode_seqs=d,
            context_tokens=c,
            elapsed_s=slower * (0.004 + 0.0001 * p + 0.001 * d),
        )
        for p, d, c in kinds
    ]


READ = [(p, 0, p) for p in (16, 64, 256)]
DECODED = [(0, n, n * c) for n in (1, 4) for c in (9, 99)]
PROFILE = steps(*READ, *DECODED) * 2
DECODES = steps(*[(0, n, n * 50) for n in range(1, 17)])
SWAPS = [
    common_pb2.SwapTiming(direction=common_pb2.DIRECTION_UPLOAD, tokens=64, elapsed_s=64e-5)
] * 3


def estimator() -> EstimatorService:
    return EstimatorService(
        EstimatorConfig(refit_samples=8, refit_interval_s=0), CollectorRegistry()
    )


def costs(owner: Owner, worker_id: str = "w") -> list[CostModel]:
    costed = [e for e in owner.events if isinstance(e, ev.Costed)]
    return [e.cost for e in costed if e.worker_id == worker_id]


async def test_restarted_estimator_receives_profile_again(
    tmp_path: Path,
) -> None:
    owner = Owner()
    async with running_peers(owner, estimator=socket_in(tmp_path)) as peers:
        async with estimator_at(socket_in(tmp_path), estimator()):
            peers.cost_models.observe("w", PROFILE, SWAPS)
            await until(lambda: len(costs(owner)) == 1)
            peers.cost_models.observe("w", DECODES)
            await until(lambda: costs(owner)[-1].version == 2)
        async with estimator_at(socket_in(tmp_path), estimator()):
            peers.cost_models.observe("w", DECODES)
            await until(lambda: costs(owner)[-1].version == 1, 20)
    for model in costs(owner):
        assert model.prefill_token_s == pytest.approx(1e-4, rel=0.01)
        assert model.upload_token_s == pytest.approx(1e-5)


async def test_timings_are_delivered_after_outage(tmp_path: Path) -> None:
    owner = Owner()
    async with running_peers(owner, estimator=socket_in(tmp_path)) as peers:
        peers.cost_models.observe("w", PROFILE)
        for _ in range(4):
            peers.cost_models.observe("w", steps((0, 1, 9), (0, 2, 99), slower=1.5) * 8)
        registry = CollectorRegistry()
        service = EstimatorService(EstimatorConfig(refit_samples=8, refit_interval_s=0), registry)
        async with estimator_at(socket_in(tmp_path), service):
            seen = {"used": "yes"}
            expected = len(PROFILE) + 4 * 16
            await until(
                lambda: (
                    registry.get_sample_value("foretoken_estimator_samples_total", seen) == expected
                )
            )
            await until(lambda: bool(costs(owner)))
    assert owner.value("advice_dropped_total", kind="timings") == 0


async def test_reattached_worker_sends_new_profile(tmp_path: Path) -> None:
    owner = Owner()
    async with (
        estimator_at(socket_in(tmp_path), estimator()),
        running_peers(owner, estimator=socket_in(tmp_path)) as peers,
    ):
        peers.cost_models.observe("w", PROFILE)
        await until(lambda: len(costs(owner)) == 1)
        peers.cost_models.forget_worker("w")
        peers.cost_models.forget_worker("never seen")
        peers.cost_models.observe("w", [])  # no profile; the earlier model arrives
        await until(lambda: len(costs(owner)) == 2)
    assert [c.version for c in costs(owner)] == [1, 1]


async def test_ended_batch_is_delivered(tmp_path: Path) -> None:
    """Only timings of attached workers are delivered."""
    config = EstimatorConfig(refit_samples=8, refit_interval_s=0, batch_refresh_s=1e-9)
    owner, registry = Owner(), CollectorRegistry()

    def seen_batches() -> float | None:
        return registry.get_sample_value("foretoken_estimator_batches_total", {"used": "yes"})

    async with (
        estimator_at(socket_in(tmp_path), EstimatorService(config, registry)),
        running_peers(owner, estimator=socket_in(tmp_path)) as peers,
    ):
        peers.cost_models.observe("w", PROFILE)
        await until(lambda: len(costs(owner)) == 1)
        ended = BatchTiming(7, 100, 50, 30.0)
        peers.cost_models.observe_batch("w", ended)
        peers.cost_models.observe_batch("never seen", ended)
        await until(lambda: seen_batches() == 1)
        peers.cost_models.observe("w", DECODES)  # the refresh is due
        await until(lambda: costs(owner)[-1].neighbours == Neighbours.fit([ended]))
        peers.cost_models.forget_worker("w")
        peers.cost_models.observe_batch("w", ended)
    assert costs(owner, "never seen") == []


def test_messages_of_a_worker_are_merged_in_order() -> None:
    def message(worker: str, *tokens: int, swaps: int = 0) -> estimator_pb2.ObserveTimingsRequest:
        return estimator_pb2.ObserveTimingsRequest(
            worker_id=worker,
            timings=[common_pb2.StepTiming(context_tokens=each) for each in tokens],
            swaps=SWAPS[:1] * swaps,
        )

    full = message("a", *range(MAX_PER_CALL - 1))
    sent = [message("a", 1), message("b", 2), message("a", 3, swaps=2), full, message("a", 9)]
    copies = [bytes(each.SerializeToString()) for each in sent]
    assert list(merged(sent)) == [
        message("a", 1, 3, swaps=2),
        message("a", *range(MAX_PER_CALL - 1), 9),
        message("b", 2),
    ]
    assert [each.SerializeToString() for each in sent] == copies  # not changed
    assert list(merged([])) == []


class _ImplausibleEstimator(estimator_pb2_grpc.EstimatorServicer):
    """An estimator that sends some implausible models."""

    def __init__(self, *models: estimator_pb2.CostModel):
        self.models = models

    async def Observe(self, request: Any, context: Any) -> estimator_pb2.ObserveTimingsResponse:
        return estimator_pb2.ObserveTimingsResponse()

    async def GetCostModel(self, request: Any, context: Any) -> estimator_pb2.CostModel:
        return self.models[0]

    async def WatchCostModel(
        self, request: Any, context: Any
    ) -> AsyncIterator[estimator_pb2.CostModel]:
        for model in self.models:
            yield model


async def test_implausible_cost_model_is_ignored(tmp_path: Path) -> None:
    def model(version: int, prefill_token_s: float, base_s: float = 0.01) -> Any:
        return estimator_pb2.CostModel(
            version=version, base_s=base_s, prefill_token_s=prefill_token_s, decode_seq_s=0.001
        )

    crowd = model(11, 1e-4)
    crowd.neighbours.extend([1.0] * 4 * 257)
    wild = _ImplausibleEstimator(
        model(7, 1e-4), crowd, model(8, 0), model(9, -1e-4), model(10, 1e-4, float("nan")),
        model(3, 2e-4),
    )  # fmt: skip
    owner = Owner()
    async with (
        estimator_at(socket_in(tmp_path), wild),
        running_peers(owner, estimator=socket_in(tmp_path)) as peers,
    ):
        peers.cost_models.observe("w", DECODES)
        await until(lambda: len(costs(owner)) >= 2)
    assert [c.version for c in costs(owner)][:2] == [7, 3]
