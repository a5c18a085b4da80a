"""The engine with random swaps: the same tokens as without, and no block is lost."""

from random import Random

import pytest

from services.core import Pause, QueueOrder, Residency
from services.costs import KVCosts
from services.worker.kv.residency import RESIDENCIES
from tests.worker.worker_fixtures import Feeder, clear_cases, engine_of

BLOCK = 4
LENGTHS = (3, 9, 14, 22, 30, 5, 18, 27)
NEW_TOKENS = 24
COSTS = (KVCosts(), KVCosts(1.0, 0.1, 0.1), KVCosts(0.1, 1.0, 1.0))


class SwappingFeeder(Feeder):
    """A scheduler that changes its plan at every other step: pauses, ranks, prefetches and
    cancels."""

    def __init__(self, seed: int, residency: str, **settings: object):
        settings = {"block_tokens": BLOCK, "kv_tokens": 88, "max_batch_tokens": 32} | settings
        super().__init__(engine_of("llama", **settings))
        self.random = Random(seed)
        self.residency = residency
        self.cancelled: set[str] = set()

    def waiting(self) -> list[str]:
        state = self.engine.state
        return [name for name in state.sequences if name not in state.running]

    def change_mind(self) -> None:
        draw, state = self.random, self.engine.state
        running = list(state.running)
        pauses = draw.sample(running, min(len(running), draw.randrange(3)))
        names = draw.sample(list(state.sequences), len(state.sequences))
        self.plan(
            pause=tuple(Pause(name, draw.choice(list(Residency))) for name in pauses),
            prefetch=tuple(names[:1]),
            order=QueueOrder.of((name, float(i)) for i, name in enumerate(names)),
            victims=tuple(draw.sample(names, len(names) // 2)),
            residency=self.residency,
            costs=draw.choice(COSTS),
        )

    def admit_some(self) -> None:
        waiting = self.waiting()
        some = self.random.sample(waiting, min(len(waiting), 2))
        if some:
            self.plan(admit=tuple(self._grant(name) for name in some), residency=self.residency)

    def cancel_one(self) -> None:
        name = self.random.choice(list(self.engine.state.sequences))
        self.cancelled.add(name)
        self.plan(cancel=(name,), residency=self.residency)

    def finish(self, cancels: int = 0) -> None:
        """Runs until all requests have finished or were cancelled, `cancels` of them at random
        steps."""
        for _ in range(2_000):
            if not self.engine.state.sequences:
                break
            if self.random.random() < 0.5:
                self.change_mind()
            if self.random.random() < 0.7:
                self.admit_some()
            if cancels > len(self.cancelled) and self.random.random() < 0.3:
                self.cancel_one()
            self.step()
        assert not self.engine.state.sequences, "a request never finished"


@pytest.fixture(scope="module")
def cases():
    return clear_cases("llama", LENGTHS, NEW_TOKENS)


def serve(cases, seed: int, residency: str, cancels: int = 0, **settings: object) -> SwappingFeeder:
    feeder = SwappingFeeder(seed, residency, **settings)
    for name, (tokens, _) in cases.items():
        feeder.add(name, tokens, NEW_TOKENS)
    feeder.finish(cancels)
    state = feeder.engine.state
    assert state.pool.free_blocks == state.pool.blocks
    assert state.host.free_blocks == state.host.blocks
    return feeder


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("residency", RESIDENCIES)
def test_answers_do_not_depend_on_kv_moves(cases, residency, seed, overlap):
    feeder = serve(cases, seed, residency, host_gib=0.01, overlap=overlap)
    assert dict(feeder.output) == {name: answer for name, (_, answer) in cases.items()}
    counters = feeder.engine.state.counters
    assert 0 < counters.uploads <= counters.offloads and counters.dropped > 0


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("seed", range(8))
def test_cancel_at_any_point_of_a_swap_leaves_no_trace(cases, seed, overlap):
    feeder = serve(cases, seed, "swap", cancels=5, host_gib=0.01, overlap=overlap)
    assert len(feeder.cancelled) == 5
    for name, (_, answer) in cases.items():
        got = feeder.output[name]
        assert got == answer[: len(got)]
        assert name in feeder.cancelled or got == answer


def test_small_host_pool_recomputes_the_rest(cases):
    """One block of this model in host memory is 2 layers · 2 · 2 heads · 4 tokens · 8 floats."""
    few = 8 * 2 * 2 * 2 * 4 * 8 * 4 / 2**30
    feeder = serve(cases, 0, "swap", host_gib=few)
    assert feeder.engine.state.limits.host_blocks == 8
    assert dict(feeder.output) == {name: answer for name, (_, answer) in cases.items()}
    counters = feeder.engine.state.counters
    assert counters.host_full > 0 and counters.offloads > 0


def test_refused_host_memory_at_run_time_means_recompute(cases, monkeypatch):
    """Enough memory is free at start, but not when the first slab is allocated."""
    monkeypatch.setattr("services.worker.engine.assembly.free_host_bytes", lambda: 0)
    feeder = serve(cases, 0, "swap", host_gib=0.01)
    assert dict(feeder.output) == {name: answer for name, (_, answer) in cases.items()}
    counters = feeder.engine.state.counters
    assert counters.host_full > 0 and counters.uploads == 0


@pytest.mark.parametrize("sharing", [True, False])
def test_answers_do_not_depend_on_shared_prefixes(sharing):
    """Six prompts have the same first 17 tokens, which are four full blocks."""
    cases = clear_cases("llama", (17,), NEW_TOKENS)
    prefix = cases["r0"][0]
    feeder = Feeder(engine_of("llama", block_tokens=BLOCK, prefix_sharing=sharing))
    expected = {}
    for number in range(6):
        tail = clear_cases("llama", (3 + number,), 1)["r0"][0]
        expected[f"q{number}"] = (*prefix, *tail)
        feeder.add(f"q{number}", (*prefix, *tail), NEW_TOKENS)
        feeder.step()
    output = feeder.run()
    alone: dict[str, list[int]] = {}
    for name, tokens in expected.items():
        single = Feeder(engine_of("llama", block_tokens=BLOCK, prefix_sharing=False))
        single.add(name, tokens, NEW_TOKENS)
        alone |= single.run()
    assert output == alone
    hits = feeder.engine.state.counters.prefix_hit_tokens
    assert hits >= 5 * 16 if sharing else hits == 0
