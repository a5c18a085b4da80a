"""The worker's metrics, of a real engine under a mixed load, and of transcripts."""

from collections import Counter as Tally
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from observability.metrics import worker as catalogue
from services.core import Pause, Report, Residency
from services.costs import Direction
from services.worker.engine.phase_clock import EnginePhase, PhaseClock
from services.worker.engine.step import Engine
from services.worker.metrics import COUNTED, WorkerMetrics
from services.worker.requests.types.batch import StepResult
from tests.observability.metrics.seen import uncatalogued, unseen
from tests.worker.kv.test_swap_answers import BLOCK, LENGTHS, NEW_TOKENS, SwappingFeeder
from tests.worker.requests.worker_transcript import Transcript
from tests.worker.worker_fixtures import Feeder, engine_of, prompt_tokens, reference
from tests.worker.worker_serving import KV_TOKENS, running, until

# In host memory, of this Llama: 2 layers · keys and values · 2 heads · 4 tokens · 8 floats of 4
# bytes.
BLOCK_BYTES = 2 * 2 * 2 * 4 * 8 * 4


class EngineMetrics:
    """The metrics of an engine."""

    def __init__(self, engine: Engine):
        self.registry = CollectorRegistry()
        self.metrics = WorkerMetrics(
            self.registry, engine.state, engine.phases, engine.host_block_bytes
        )

    def value(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"foretoken_{name}", labels)
        assert value is not None, f"{name} is not there"
        return value

    def by(self, name: str, label: str) -> dict[str, float]:
        families = {family.name: family for family in self.registry.collect()}
        return {s.labels[label]: s.value for s in families[f"foretoken_{name}"].samples}


@pytest.fixture(scope="module")
def metered() -> tuple[EngineMetrics, SwappingFeeder, list[StepResult], list[Report]]:
    """Eight requests, swapped at random until they end; the block counts are checked at each
    step."""
    feeder = SwappingFeeder(0, "swap", host_gib=0.01)
    engine = feeder.engine
    metered = EngineMetrics(engine)
    results: list[StepResult] = []
    reports: list[Report] = []
    feeder.on_report = reports.append

    def record_step(result: StepResult) -> None:
        results.append(result)
        metered.metrics.record_step(result)
        blocks = metered.by("kv_blocks", "state")
        pool, host = engine.state.pool, engine.state.host
        assert blocks["held"] + blocks["cached"] + blocks["free"] == pool.blocks
        assert blocks["resting"] + blocks["host_free"] == host.blocks
        assert blocks["held"] == len({b for owner in pool.owners() for b in pool.table(owner)})
        assert blocks["resting"] == sum(host.held().values())

    feeder.on_step = record_step
    for number, length in enumerate(LENGTHS):
        feeder.add(f"r{number}", prompt_tokens(number, length), NEW_TOKENS)
    feeder.finish()
    return metered, feeder, results, reports


def test_state_counters_are_exported(metered) -> None:
    reported, feeder, _, _ = metered
    counters = feeder.engine.state.counters
    for field, metric in COUNTED.items():
        assert reported.registry.get_sample_value(metric.family) == getattr(counters, field)
    assert min(counters.offloads, counters.uploads, counters.dropped) > 0
    evictions = reported.by("worker_evictions", "kv")
    assert evictions["offloaded"] == counters.evicted_offloaded
    assert evictions["dropped"] == counters.evicted_dropped


def test_blocks_end_as_cached_or_free(metered) -> None:
    reported, _, _, _ = metered
    blocks = reported.by("kv_blocks", "state")
    assert blocks["held"] == blocks["resting"] == 0 and blocks["cached"] > 0
    assert reported.value("kv_cache_usage_perc") == reported.value("host_kv_cache_usage_perc") == 0
    assert reported.value("kv_block_tokens") == BLOCK
    assert (
        reported.value("worker_requests_running") == reported.value("worker_requests_resting") == 0
    )


def test_swaps_are_counted_with_bytes_and_time(metered) -> None:
    reported, feeder, results, _ = metered
    swaps = [swap for result in results for swap in result.swaps]
    for direction in Direction:
        mine = [swap for swap in swaps if swap.direction is direction]
        copied = sum(-(-swap.tokens // BLOCK) for swap in mine)
        assert copied > 0
        way = {"direction": direction.value}
        assert reported.value("kv_swap_bytes_total", **way) == copied * BLOCK_BYTES
        assert reported.value("kv_swap_seconds_count", **way) == len(mine)
        spent_s = sum(swap.elapsed_s for swap in mine)
        assert reported.value("kv_swap_seconds_sum", **way) == pytest.approx(spent_s)
    offloads = Tally(swap.direction for swap in swaps)[Direction.OFFLOAD]
    assert offloads == feeder.engine.state.counters.offloads


def test_every_swap_is_counted_once_in_metrics_and_reports(metered) -> None:
    _, _, results, reports = metered
    counted = [swap for result in results for swap in result.swaps]
    assert counted == [swap for report in reports for swap in report.swaps]


def test_step_tokens_add_up(metered) -> None:
    reported, feeder, results, _ = metered
    timings = [timing for result in results for timing in result.timings]
    tokens = sum(t.prefill_tokens + t.decode_seqs for t in timings)
    assert reported.value("worker_batch_tokens_sum") == tokens
    assert reported.value("worker_batch_tokens_count") == len(timings) == len(results)
    assert reported.value("worker_step_seconds_count") == len(timings)
    assert reported.value("worker_prefilled_tokens_total") == sum(t.prefill_tokens for t in timings)
    assert reported.value("worker_generated_tokens_total") == sum(map(len, feeder.output.values()))


def test_phases_add_up_to_the_time_in_steps(metered) -> None:
    reported, _, results, _ = metered
    phases = reported.by("worker_phase_seconds", "phase")
    assert set(phases) == {"compose", "swap", "model", "attention", "sampling", "commit"}
    assert reported.value("worker_busy_seconds_total") == pytest.approx(sum(phases.values()))
    computed = ("compose", "model", "attention", "sampling", "commit")
    assert all(phases[phase] > 0 for phase in computed)
    # The clock of a step covers the computation, and a little work around it.
    device_s = sum(timing.elapsed_s for result in results for timing in result.timings)
    assert phases["attention"] < device_s < reported.value("worker_busy_seconds_total")


# Transcripts


def test_eviction_without_host_memory_is_dropped() -> None:
    """The newest request is evicted in the fourth step, as in test_state.py."""
    t = Transcript(kv_tokens=16)
    t.prompt("old", 6, max_tokens=7)
    t.prompt("new", 5, max_tokens=7)
    t.admit(old=9, new=9)
    t.step(times=3)
    assert (t.state.counters.evicted_offloaded, t.state.counters.evicted_dropped) == (0, 0)
    t.step(times=2)
    assert (t.state.counters.evicted_offloaded, t.state.counters.evicted_dropped) == (0, 1)


def test_eviction_with_host_memory_is_offloaded() -> None:
    t = Transcript(kv_tokens=16, host_blocks=4)
    t.prompt("old", 6, max_tokens=7)
    t.prompt("new", 5, max_tokens=7)
    t.admit(old=9, new=9)
    t.plan(residency="swap")
    t.step(times=5)
    assert (t.state.counters.evicted_offloaded, t.state.counters.evicted_dropped) == (1, 0)


def test_planned_pause_is_not_an_eviction() -> None:
    t = Transcript(kv_tokens=16)
    t.prompt("a", 6, max_tokens=7)
    t.admit(a=9)
    t.step()
    t.plan(pause=[Pause("a", Residency.DROP)])
    counters = t.state.counters
    assert (counters.dropped, counters.evicted_dropped, counters.evicted_offloaded) == (1, 0, 0)


# Phases


class Clock:
    """Advances when a test says so."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_phase_lasts_until_the_next_one_begins(monkeypatch) -> None:
    time = Clock()
    monkeypatch.setattr("services.worker.engine.phase_clock.perf_counter", time)
    phases = PhaseClock()
    for lost in (True, False, False):
        phases.begin()
        for phase, seconds in (
            (EnginePhase.COMPOSE, 1.0),
            (EnginePhase.MODEL, 2.0),
            (EnginePhase.ATTENTION, 4.0),
            (EnginePhase.MODEL, 8.0),
            (EnginePhase.COMMIT, 16.0),
        ):
            phases.enter(phase)
            time.now_s += seconds
        if not lost:  # a failed step has no end; the next one begins
            phases.end()
        time.now_s += 1_000.0
    reported = {phase.name: phases.seconds[phase] for phase in EnginePhase if phases.seconds[phase]}
    assert reported == {"COMPOSE": 2.0, "MODEL": 20.0, "ATTENTION": 8.0, "COMMIT": 32.0}


def test_work_before_the_start_is_not_counted() -> None:
    """Such as the profile at start."""
    feeder = Feeder(engine_of("llama"))
    feeder.add("before", prompt_tokens(1, 9), 4)
    feeder.run()
    reported = EngineMetrics(feeder.engine)
    assert reported.value("worker_busy_seconds_total") == 0
    assert reported.value("prefix_cache_queries_total") == 0
    feeder.on_step = reported.metrics.record_step
    feeder.add("after", prompt_tokens(2, 11), 4)
    feeder.run()
    assert reported.value("worker_busy_seconds_total") > 0
    assert reported.value("prefix_cache_queries_total") == 11
    assert reported.value("worker_prefilled_tokens_total") == 11
    assert reported.value("worker_generated_tokens_total") == len(feeder.output["after"])


# A worker that serves


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    reference("llama").save_pretrained(path)
    return path


async def test_every_metric_exists_after_work(folder: Path) -> None:
    async with running(folder) as world:
        gateway = world.gateway()
        gateway.send("r", prompt_tokens(1, 40), 20, ignore_eos=True)
        world.scheduler.admit("r")
        await until(lambda: "r" in gateway.ended)
        assert unseen(world.registry, catalogue.ALL) == []
        assert uncatalogued(world.registry, catalogue.ALL) == set()
        value = world.registry.get_sample_value
        assert value("foretoken_worker_generated_tokens_total") == 20
        assert value("foretoken_worker_prefilled_tokens_total") == 40
        states = ("held", "cached", "free")
        blocks = [value("foretoken_kv_blocks", {"state": state}) or 0 for state in states]
        assert sum(blocks) == KV_TOKENS // 16
