"""The simulation as a whole: hand-worked times, conservation, and its two engines."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core import FinishReason, Sla
from services.costs import CostModel
from services.policies.place import assignment
from services.policies.preset import presets
from services.policies.snapshot import Bools
from services.scheduler.core.rounds import Rounds
from services.sla import RequestTimeline, SlaMissCause, judge_sla
from simulator.engine.records import Records
from simulator.engine.settings import Timing
from simulator.engine.simulation import RunResult, Simulation, simulate
from simulator.hardware.hardware import Hardware
from simulator.workload.workload import Workload
from tests.simulator.fixtures import (
    BY_HAND,
    INSTANT,
    SMALL,
    random_workload,
    settings,
    sharing_workload,
    workload,
)

ALL_PRESETS = sorted(presets())
COLUMNS = ("first_s", "last_s", "longest_gap_s", "tokens", "finished", "preemptions", "evictions")


def same_records(one: Records, other: Records) -> bool:
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in COLUMNS)


# By hand


def test_simulation_of_two_requests_matches_worked_transcript():
    """Steps: 0.0 prefill of A (10 tokens) until 2.0; B arrived at 0.5: prefill of B (20 tokens)
    beside A's second token until 5.0; then one second per step. A has 3 tokens, B has 2."""
    hardware = Hardware("hand", BY_HAND, kv_tokens=1_600, max_batch_tokens=64)
    result = simulate(
        settings("fcfs", hardware, timing=INSTANT), workload([(0.0, 10, 3), (0.5, 20, 2)])
    )
    records = result.records
    assert records.first_s.tolist() == [2.0, 5.0]
    assert records.last_s.tolist() == [6.0, 6.0]
    assert records.longest_gap_s.tolist() == [3.0, 1.0]
    assert records.tokens.tolist() == [3, 2]
    assert result.usages[0].steps == 3
    assert result.usages[0].busy_s == 6.0


def test_simulation_adds_hops_and_the_time_of_rounds():
    """Arrival at 0; the round starts at once and takes 0.2 s; the plan needs one hop of 0.1 s and
    the prompt two. The prefill (10 tokens: 2 s) ends at 2.4, and its token needs a hop."""
    timing = Timing(0.1, 0.0, round_s=0.2, round_job_s=0.0, round_share=1.0)
    hardware = Hardware("hand", BY_HAND, kv_tokens=1_600)
    result = simulate(settings("fcfs", hardware, timing=timing), workload([(0.0, 10, 1)]))
    assert result.records.ttft_s.tolist() == pytest.approx([2.5])


def test_closed_loop_keeps_its_number_of_clients():
    rows = [(0.0, 10, 2)] * 6
    hardware = Hardware("hand", BY_HAND, kv_tokens=1_600)
    result = simulate(settings("fcfs", hardware, timing=INSTANT), workload(rows, clients=2))
    records = result.records
    starts, ends = records.arrival_s, records.last_s
    alive = [int(np.sum((starts <= t) & (ends > t))) for t in starts]
    assert max(alive) == 2
    assert sorted(starts.tolist())[2] == min(ends.tolist())


def test_answer_longer_than_max_tokens_is_cut():
    result = simulate(settings("fcfs", max_tokens=5), workload([(0.0, 4, 50)]))
    assert result.records.tokens.tolist() == [5]
    assert result.records.finished.all()


def test_request_that_no_worker_can_hold_is_rejected_and_the_run_ends():
    result = simulate(settings("fcfs", max_tokens=64), workload([(0.0, 5_000, 5), (1.0, 10, 5)]))
    assert result.records.rejected.tolist() == [True, False]
    assert result.records.finished.tolist() == [False, True]


# Conservation


@pytest.mark.parametrize("preset", ALL_PRESETS)
def test_every_preset_ends_each_request_once_and_returns_all_blocks(preset: str):
    requests = random_workload(3, 40, 20.0)
    simulation = Simulation(settings(preset, workers=2), requests)
    result = simulation.run()
    records = result.records
    assert records.finished.all()
    assert not records.rejected.any()
    assert records.tokens.tolist() == requests.output_tokens.tolist()
    assert (records.first_s > records.arrival_s).all()
    assert (records.last_s >= records.first_s).all()
    for worker in simulation._workers:
        worker.state.check_integrity()
        assert worker.state.pool.free_blocks == worker.state.pool.blocks
        assert worker.state.idle


# Prefix cache


def test_repeated_prompt_prefills_only_its_last_block():
    """100 tokens at 0.1 s and a step of 1 s: 11 s, and a second token until 12. The same prompt
    later finds its first 6 blocks and computes 4 tokens: 1.4 s. Another text of this length does
    not."""
    hardware = Hardware("hand", BY_HAND, kv_tokens=1_600, max_batch_tokens=128)
    rows = workload([(0.0, 100, 2), (20.0, 100, 1), (40.0, 100, 1)])
    rows = replace(rows, prompts=["x" * 100, "x" * 100, "y" * 100])
    result = simulate(settings("fcfs", hardware, timing=INSTANT), rows)
    assert result.records.ttft_s.tolist() == pytest.approx([11.0, 1.4, 11.0])
    assert result.usages[0].prefix_asked_tokens == 300
    assert result.usages[0].prefix_hit_tokens == 96


def test_engine_without_paged_kv_computes_equal_prompts_again():
    hardware = Hardware("hand", BY_HAND, 1_600, max_batch_tokens=128, attends_padding=True)
    rows = workload([(0.0, 100, 2), (20.0, 100, 1)])
    rows = replace(rows, prompts=["x" * 100] * 2)
    result = simulate(settings("sls", hardware, timing=INSTANT), rows)
    assert result.records.ttft_s[1] == pytest.approx(11.0)
    assert result.usages[0].prefix_hit_tokens == 0


def test_foretoken_sends_prompts_to_the_worker_that_caches_their_beginning():
    """Two texts on two workers, one request at a time: every later request hits."""
    hardware = Hardware("hand", BY_HAND, kv_tokens=1_600, max_batch_tokens=512)
    rows = workload([(30.0 * row, 160, 1) for row in range(8)])
    rows = replace(rows, prompts=["xy"[row % 2] * 160 for row in range(8)])
    chosen = settings("foretoken", hardware, workers=2, timing=INSTANT)
    usages = simulate(chosen, rows).usages
    assert sum(usage.prefix_hit_tokens for usage in usages) == 6 * 144


# Two engines


def both_engines(
    preset: str, requests: Workload, workers: int = 1, hardware: Hardware = SMALL
) -> None:
    runs: list[RunResult] = [
        simulate(settings(preset, hardware, workers, jumps=jumps), requests)
        for jumps in (True, False)
    ]
    assert same_records(runs[0].records, runs[1].records)
    assert runs[0].end_s == runs[1].end_s
    for jumped, stepped in zip(runs[0].usages, runs[1].usages, strict=True):
        assert jumped.steps == stepped.steps
        assert jumped.kv_peak_tokens == stepped.kv_peak_tokens
        assert jumped.busy_s == pytest.approx(stepped.busy_s)
        assert jumped.prefix_hit_tokens == stepped.prefix_hit_tokens


@pytest.mark.parametrize("preset", ALL_PRESETS)
def test_simulation_in_jumps_equals_single_steps_for_every_preset(preset: str):
    both_engines(preset, random_workload(11, 30, 30.0))
    both_engines(preset, sharing_workload(11, 30, 30.0))


@pytest.mark.slow
@pytest.mark.property
@pytest.mark.timeout(900)  # 400 fresh examples take 5 minutes on a slow machine
@given(
    preset=st.sampled_from(ALL_PRESETS),
    seed=st.integers(0, 10_000),
    rate=st.sampled_from([2.0, 20.0, 200.0]),
    workers=st.integers(1, 3),
    kv_blocks=st.integers(24, 90),
    host_blocks=st.sampled_from([0, 8, 100]),
    every=st.integers(1, 40),
    make=st.sampled_from([random_workload, sharing_workload]),
)
def test_simulation_in_jumps_equals_single_steps(
    preset: str,
    seed: int,
    rate: float,
    workers: int,
    kv_blocks: int,
    host_blocks: int,
    every: int,
    make: Callable[[int, int, float], Workload],
):
    hardware = replace(
        SMALL, kv_tokens=16 * kv_blocks, host_tokens=16 * host_blocks, report_every_steps=every
    )
    both_engines(preset, make(seed, 30, rate), workers, hardware)


def test_simulation_jumps_compute_many_steps_at_once():
    """A single long answer under a whole-answer budget needs a span per report, not per token."""
    hardware = replace(SMALL, report_every_steps=64)
    result = simulate(settings("fcfs", hardware), workload([(0.0, 10, 250)]))
    stepped = simulate(settings("fcfs", hardware, jumps=False), workload([(0.0, 10, 250)]))
    assert result.usages[0].steps == stepped.usages[0].steps == 250
    assert result.events < stepped.events / 5


@pytest.mark.parametrize("preset", ALL_PRESETS)
def test_settled_rounds_change_nothing(preset: str, monkeypatch: pytest.MonkeyPatch):
    requests = random_workload(7, 20, 20.0)
    settled = simulate(settings(preset, workers=2), requests)
    monkeypatch.setattr(Rounds, "settle", lambda *_: None)
    arranged = simulate(settings(preset, workers=2), requests)
    assert same_records(settled.records, arranged.records)
    assert settled.rounds == arranged.rounds


@pytest.mark.parametrize("preset", ["fcfs", "foretoken"])
def test_assignment_in_parts_equals_the_whole(preset: str, monkeypatch: pytest.MonkeyPatch):
    requests = random_workload(8, 60, 1e4)
    runs = []
    for part in (1, 1_000):
        monkeypatch.setattr(assignment, "MIN_PART", part)
        runs.append(simulate(settings(preset, workers=3), requests).records)
    assert same_records(*runs)


# Queueing theory and oracles


def service_s(hardware: Hardware, prompt: int, output: int) -> float:
    """Seconds of a request alone: its prefill, then a step per further token."""
    cost = hardware.cost
    steps = [cost.step_s(prompt, 0, prompt)]
    steps += [cost.step_s(0, 1, prompt + made) for made in range(output - 1)]
    return sum(steps)


@pytest.mark.slow
@given(seed=st.integers(0, 1_000), rate=st.sampled_from([0.5, 2.0, 10.0]))
@pytest.mark.property
def test_one_worker_fcfs_matches_single_server_queue(seed: int, rate: float):
    """With one slot and prompts within a step, a worker is a queue with one server."""
    hardware = replace(SMALL, max_running=1)
    requests = random_workload(seed, 25, rate)
    records = simulate(settings("fcfs", hardware, timing=INSTANT), requests).records
    free_s = 0.0
    for row in range(len(requests)):
        start_s = max(free_s, float(requests.arrival_s[row]))
        prompt, output = int(requests.input_tokens[row]), int(requests.output_tokens[row])
        free_s = start_s + service_s(hardware, prompt, output)
        assert records.last_s[row] == pytest.approx(free_s)


@pytest.mark.slow
def test_one_worker_fcfs_waits_as_m_d_1_predicts():
    """Mean wait of M/D/1: ρ · S / (2 · (1 − ρ)) (Pollaczek–Khinchine). The tolerance is four
    standard errors of batch means."""
    hardware = replace(SMALL, max_running=1)
    served_s = service_s(hardware, 50, 10)
    load, requests = 0.6, 1_600
    rng = np.random.default_rng(1)
    arrivals = np.cumsum(rng.exponential(served_s / load, requests)).tolist()
    rows = [(arrival, 50, 10) for arrival in arrivals]
    records = simulate(settings("fcfs", hardware, timing=INSTANT), workload(rows)).records
    wait_s = records.e2e_s - served_s
    batches = wait_s.reshape(20, -1).mean(axis=1)
    error_s = batches.std(ddof=1) / np.sqrt(len(batches))
    assert wait_s.mean() == pytest.approx(load * served_s / (2 * (1 - load)), abs=4 * error_s)


# Judgement


def test_simulated_records_judge_slas_as_services_do():
    requests = random_workload(5, 60, 40.0)
    records = simulate(settings("srtf"), requests).records
    sla = Sla("test", float(np.median(records.ttft_s)), 0.03, 0.2)
    met: Bools = records.meets(sla)
    assert 0 < met.sum() < len(requests)
    for row in range(len(requests)):
        timeline = RequestTimeline(float(records.arrival_s[row]))
        timeline.first_token_s = float(records.first_s[row])
        timeline.last_token_s = timeline.ended_s = float(records.last_s[row])
        timeline.tokens = int(records.tokens[row])
        timeline.longest_gap_s = float(records.longest_gap_s[row])
        verdict = judge_sla(sla, timeline, FinishReason.STOP)
        assert (verdict is SlaMissCause.NONE) == met[row]


@pytest.mark.slow
def test_cold_forecasts_from_history_are_no_worse_than_none():
    """600 answers with lognormal lengths at twice the capacity. Forecasts from ended answers alone
    are biased to short ones: with them `srtf` takes 1.5 times as long as `mlfq`."""
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(1 / 40, 600))
    inputs = rng.integers(5, 40, 600)
    outputs = np.clip(rng.lognormal(np.log(20), 1.2, 600).astype(int), 1, 250)
    load = Workload("lognormal", arrival_s, inputs, outputs)

    def latency_s(preset: str) -> float:
        records = simulate(settings(preset), load).records
        return float(np.mean((records.last_s - records.arrival_s) / records.tokens))

    feedback_s = latency_s("mlfq")
    assert latency_s("srtf") < 1.1 * feedback_s
    assert latency_s("foretoken") < 1.1 * feedback_s


def test_late_long_prompts_do_not_take_turns():
    """Memory holds one of four requests: prompts take 4 s, answers 20 s. A plan follows each chunk
    of a prompt, so that late prompts could take turns with every one."""
    costs = CostModel(0.01, 1e-3, 0.0, 0.0)
    hardware = Hardware("chunks", costs, kv_tokens=6_400, max_batch_tokens=512)
    load = workload([(0.1 * row, 4_000, 2_000) for row in range(4)])
    chosen = settings("foretoken", hardware, timing=INSTANT, max_tokens=2_000)
    chosen = replace(chosen, predictor="oracle", sla=Sla(ttft_s=1.0, mtpot_s=1.5))
    records = simulate(chosen, load).records
    assert records.finished.all()
    assert records.preemptions.sum() <= 4
