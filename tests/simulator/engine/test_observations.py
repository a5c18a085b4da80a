"""Observations of a run: hand-worked values, bounds, and results that they leave unchanged."""

from dataclasses import replace

import numpy as np
import pytest

from services.core import Sla
from services.forecast import Forecast
from services.predictor.learning.scorecard import judge
from services.scheduler.core.phases import TransitionCause
from simulator.engine.observations import (
    ForecastRecords,
    MemorySamples,
    Observations,
    WorkerMemory,
)
from simulator.engine.records import Records
from simulator.engine.settings import ObservationLimits, RunSettings
from simulator.engine.simulation import RunResult, simulate
from simulator.hardware.hardware import Hardware
from tests.simulator.fixtures import (
    BY_HAND,
    INSTANT,
    SMALL,
    random_workload,
    settings,
    sharing_workload,
    workload,
)

VARIED = ("fcfs", "past-future", "foretoken", "alise-oracle", "so", "scls")
TIGHT = replace(SMALL, kv_tokens=512, host_tokens=0)
BLOCKS_OF_ONE = Hardware(
    "hand", BY_HAND, kv_tokens=1_600, max_batch_tokens=64, block_tokens=1, report_every_steps=1
)


def observed(settings: RunSettings, limits: ObservationLimits | None = None) -> RunSettings:
    return replace(settings, observe=limits or ObservationLimits())


def observations(result: RunResult) -> Observations:
    assert result.observations is not None
    return result.observations


# Memory


@pytest.mark.parametrize(
    ("predictor", "predicted"),
    [("oracle", [13, 13, 34, 35, 35]), ("max", [18, 18, 46, 45, 45])],
)
def test_memory_samples_match_worked_example(predictor: str, predicted: list[float]):
    """A has 10 and 3 tokens, B 20 and 2, and their cap is 8. A is prefilled until 2 s, B beside
    A's second token until 5 s, and both end at 6 s.

    Held and remaining of A and B: at 0.5 s (10, 3), (20, 2): max(10 + 3, 30 + 2·2) = 34; at 2 s
    (11, 2), (20, 2): 31 + 2·2; at 5 s (12, 1), (21, 1): 33 + 2·1. With remaining tokens up to the
    cap: at 0.5 s 30 + 2·8; at 2 s (20, 8), (11, 7): 31 + 2·7; at 5 s (12, 6), (21, 7): 33 + 2·6.
    """
    made = replace(
        settings("fcfs", BLOCKS_OF_ONE, timing=INSTANT, max_tokens=8), predictor=predictor
    )
    result = simulate(observed(made), workload([(0.0, 10, 3), (0.5, 20, 2)]))
    memory = observations(result).memory
    assert memory.at_s == [0.0, 0.0, 0.5, 2.0, 5.0]
    used, running, predicted_peak, true_peak = memory.of_worker(0).tolist()
    assert used == running == [0, 10, 10, 31, 33]
    assert true_peak == [13, 13, 34, 35, 35]
    assert predicted_peak == predicted


def test_memory_samples_are_thinned_evenly_when_full():
    samples = MemorySamples(4)
    for at in range(10):
        if samples.count_round():
            samples.add(at, [WorkerMemory(at, 0, 0, 0)])
    assert samples.at_s == [0, 4, 8]
    assert samples.of_worker(0)[0].tolist() == [0, 4, 8]


def test_thinned_run_keeps_every_nth_sample_of_the_whole_run():
    requests, made = random_workload(3, 40, 20.0), settings("past-future", workers=2)
    whole, thin = (
        observations(simulate(observed(made, ObservationLimits(samples)), requests)).memory
        for samples in (100_000, 32)
    )
    every = 2 ** int(np.ceil(np.log2(len(whole.at_s) / 31)))
    assert 16 <= len(thin.at_s) < 32 < len(whole.at_s)
    assert thin.at_s == whole.at_s[::every]
    assert thin.workers == whole.workers[::every]


def test_observation_reads_padding_of_static_batches_as_used_and_not_as_running():
    """Prompts of 10 and 20 tokens in one static batch: the shorter one is padded by 10."""
    made = observed(settings("sls", BLOCKS_OF_ONE, timing=INSTANT))
    result = simulate(made, workload([(0.0, 10, 3), (0.0, 20, 3)]))
    used, running, *_ = observations(result).memory.of_worker(0)
    assert set((used - running).tolist()) == {0.0, 10.0}


def test_memory_samples_count_shared_blocks_once():
    """Two equal prompts of 100 tokens, 7 blocks of 16; B arrives at 12.5 s and finds 6 of them. A
    has 5 tokens and B 3. Held and remaining of both: at 12.5 s (112, 3), (112, 3): 224 + 2·3; at 13
    s (112, 2), (112, 3): 224 + 2·2; at 14.4 s, when the report says what is shared, (112, 1), (112,
    2): 224 + 2·1 − 96; at 15.4 s B alone, (112, 1)."""
    hardware = replace(BLOCKS_OF_ONE, block_tokens=16, max_batch_tokens=128)
    made = replace(settings("fcfs", hardware, timing=INSTANT, max_tokens=8), predictor="oracle")
    requests = replace(workload([(0.0, 100, 5), (12.5, 100, 3)]), prompts=["x" * 100] * 2)
    memory = observations(simulate(observed(made), requests)).memory
    used, running, predicted_peak, true_peak = memory.of_worker(0)[:, 4:].tolist()
    assert memory.at_s[4:] == pytest.approx([12.5, 13.0, 14.4, 15.4])
    assert used == running == [112, 128, 128, 112]
    assert true_peak == predicted_peak == [230, 228, 130, 113]


# Timelines


def test_timeline_of_an_eviction_matches_worked_example():
    """33 tokens fit until 6 s, 35 do not: B, the newest, is evicted, which the report at 7 s says.
    A ends at 9 s; B runs again with 22 tokens to prefill (3.2 s) and one to decode."""
    hardware = replace(BLOCKS_OF_ONE, kv_tokens=34)
    made = replace(settings("fcfs", hardware, timing=INSTANT, max_tokens=8), predictor="oracle")
    result = simulate(observed(made), workload([(0.0, 10, 6), (0.5, 20, 4)]))
    finished, evicted = TransitionCause.FINISHED, TransitionCause.EVICTED
    assert observations(result).timelines.intervals == [
        (1, "w0", 0.5, 7.0, evicted),
        (0, "w0", 0.0, 9.0, finished),
        (1, "w0", 9.0, pytest.approx(13.2), finished),
    ]
    assert result.records.last_s.tolist() == pytest.approx([9.0, 13.2])


@pytest.mark.parametrize("preset", ["fcfs", "srtf"])
def test_timelines_agree_with_records(preset: str):
    requests = random_workload(4, 40, 40.0)
    limits = ObservationLimits(requests=len(requests))
    result = simulate(observed(settings(preset, TIGHT, workers=2), limits), requests)
    records, timelines = result.records, observations(result).timelines
    assert records.preemptions.sum() > 0
    hop_s = result.settings.timing.hop_s
    for row in range(len(requests)):
        mine = [each for each in timelines.intervals if each.row == row]
        starts = [each.start_s for each in mine]
        ends = [each.end_s for each in mine]
        assert starts[0] >= records.arrival_s[row]
        assert all(start <= end for start, end in zip(starts, ends, strict=True))
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        assert starts[0] < records.first_s[row] < records.last_s[row]
        causes = [each.ended for each in mine]
        if causes[-1] is TransitionCause.FINISHED:  # else it ended before it read its pause
            causes.pop()
            assert records.last_s[row] <= ends[-1] + 1.5 * hop_s
        assert set(causes) <= {TransitionCause.EVICTED, TransitionCause.PAUSED}
        assert len(causes) >= records.preemptions[row]
        if preset == "fcfs":  # pauses none
            assert len(causes) == records.evictions[row] == records.preemptions[row]


def test_timelines_are_of_the_middle_of_the_workload():
    made = observed(settings("fcfs"), ObservationLimits(requests=10))
    timelines = observations(simulate(made, random_workload(1, 40, 20.0))).timelines
    assert timelines.rows == range(15, 25)
    assert {each.row for each in timelines.intervals} == set(range(15, 25))


def test_rejected_request_has_no_timeline_and_no_forecast():
    result = simulate(
        observed(settings("fcfs", max_tokens=64)), workload([(0.0, 5_000, 5), (1.0, 10, 5)])
    )
    seen = observations(result)
    assert [each.row for each in seen.timelines.intervals] == [1]
    assert np.isnan(seen.forecasts.mean).tolist() == [True, False]


# Forecasts


def test_forecast_records_match_worked_example():
    """Points 2, 4, 8 and 16 of equal weight. A quarter is shorter than 4 and a half up to it; a
    half is shorter than 5 and no more up to it."""
    forecast = Forecast((2.0, 4.0, 8.0, 16.0), (0.25,) * 4, 16)
    records = ForecastRecords(np.array([4, 5, 1, 16, 7]))
    records.add((str(row), forecast) for row in range(4))
    assert records.mean[:4].tolist() == [7.5] * 4
    assert (records.low[0], records.high[0]) == (2.0, 16.0)
    assert records.below[:4].tolist() == pytest.approx([0.25, 0.5, 0.0, 0.75])
    assert records.up_to[:4].tolist() == pytest.approx([0.5, 0.5, 0.0, 1.0])
    assert np.isnan([records.mean[4], records.low[4], records.below[4]]).all()


def test_forecast_records_agree_with_the_served_scorecard():
    rng = np.random.default_rng(2)
    lengths = rng.integers(1, 100, 200)
    records = ForecastRecords(lengths)
    for row, length in enumerate(lengths.tolist()):
        points = np.unique(rng.integers(1, 100, 12)).astype(float)
        forecast = Forecast(tuple(points), (1 / len(points),) * len(points), 100)
        records.add([(str(row), forecast)])
        judged = judge(forecast, length, 100)
        assert (records.below[row] + records.up_to[row]) / 2 == pytest.approx(judged.level)
        assert (records.low[row] <= length <= records.high[row]) == judged.inside_90
        assert records.mean[row] == judged.mean


def test_forecast_records_are_of_answers_cut_at_max_tokens():
    made = replace(observed(settings("fcfs", max_tokens=5)), predictor="oracle")
    forecasts = observations(simulate(made, workload([(0.0, 4, 50)]))).forecasts
    assert forecasts.lengths.tolist() == forecasts.mean.tolist() == [5]


# Results


@pytest.mark.parametrize("preset", VARIED)
def test_observation_changes_no_result(preset: str):
    """With and without observation, and with and without jumps, results are equal; observations
    too."""
    requests = sharing_workload(11, 30, 30.0)
    made = replace(settings(preset, TIGHT, workers=2), sla=Sla("test", ttft_s=1.0))
    limits = ObservationLimits(16, 10)
    plain = simulate(made, requests)
    jumped = simulate(observed(made, limits), requests)
    stepped = simulate(replace(observed(made, limits), jumps=False), requests)
    assert plain.observations is None
    for other in (jumped, stepped):
        for name in vars(Records(1)):
            assert np.array_equal(getattr(plain.records, name), getattr(other.records, name)), name
        assert (plain.end_s, plain.rounds) == (other.end_s, other.rounds)
    assert plain.events == jumped.events
    one, two = observations(jumped), observations(stepped)
    assert any(worker.used for workers in one.memory.workers for worker in workers)
    assert all(each.running <= each.used for workers in one.memory.workers for each in workers)
    assert (one.memory.at_s, one.memory.workers) == (two.memory.at_s, two.memory.workers)
    assert one.timelines.intervals == two.timelines.intervals
    assert np.array_equal(one.forecasts.mean, two.forecasts.mean)
