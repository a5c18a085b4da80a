"""The number of threads for a tiny model, by the load of other processes."""

import threading
from dataclasses import dataclass

import pytest
import torch

from services.core import Grant, Plan
from services.runtime.process_limits import cores
from services.worker.engine.spare_cores import (
    MEASURE_INTERVAL_S,
    STALE_S,
    SpareCores,
    machine_busy_s,
    spare_cores_for,
)
from services.worker.machine import TINY_PARAMETERS
from services.worker.requests.types.prompt import Prompt
from tests.worker.worker_fixtures import engine_of, prompt_tokens


@dataclass
class Machine:
    """A clock, and the core time used by all processes and by this one."""

    now_s: float = 100.0
    all_s: float | None = 40.0
    own_s: float = 7.0

    def spare(self, all_cores: int, most: int) -> SpareCores:
        return SpareCores(
            all_cores, most, lambda: self.all_s, lambda: self.own_s, lambda: self.now_s
        )

    def pass_by(self, seconds: float, own: float, others: float) -> None:
        """Advances the clock while this process and others use cores."""
        assert self.all_s is not None
        self.now_s += seconds
        self.own_s += own * seconds
        self.all_s += (own + others) * seconds


@pytest.mark.parametrize(
    ("all_cores", "most", "own", "others", "threads"),
    [
        (2, 2, 1.0, 0.0, 2),  # no other load
        (2, 2, 1.9, 0.1, 2),  # little other load
        (2, 2, 1.0, 0.3, 1),  # the other core is not free
        (2, 2, 0.5, 1.5, 1),  # no core is free
        (2, 2, 0.2, 2.4, 1),  # at least one
        (4, 2, 1.0, 2.0, 2),
        (4, 2, 1.0, 3.0, 1),
        (4, 3, 1.0, 1.0, 3),
        (4, 3, 1.0, 1.5, 2),
    ],
)
def test_threads_follow_free_cores(
    all_cores: int, most: int, own: float, others: float, threads: int
):
    machine = Machine()
    spare = machine.spare(all_cores, most)
    machine.pass_by(MEASURE_INTERVAL_S, own, others)
    assert spare.threads() == threads


def test_threads_stay_between_two_measurements():
    machine = Machine()
    spare = machine.spare(2, 2)
    assert spare.threads() == 1
    machine.pass_by(MEASURE_INTERVAL_S, 1.0, 0.0)
    assert spare.threads() == 2
    machine.pass_by(MEASURE_INTERVAL_S / 2, 0.5, 1.5)
    assert spare.threads() == 2
    machine.pass_by(MEASURE_INTERVAL_S / 2, 0.5, 1.5)
    assert spare.threads() == 1


def test_measurement_after_idle_time_is_discarded():
    machine = Machine()
    spare = machine.spare(2, 2)
    machine.pass_by(MEASURE_INTERVAL_S, 1.0, 0.0)
    assert spare.threads() == 2
    machine.pass_by(STALE_S + 1, 0.0, 2.0)
    assert spare.threads() == 2
    machine.pass_by(MEASURE_INTERVAL_S, 1.0, 0.5)
    assert spare.threads() == 1


def test_unknown_system_counts_give_one_thread():
    machine = Machine(all_s=None)
    spare = machine.spare(2, 2)
    machine.now_s += MEASURE_INTERVAL_S
    assert spare.threads() == 1


def test_linux_core_counts_grow_with_work():
    before = machine_busy_s()
    assert before is not None
    total = 0
    while (now := machine_busy_s()) is not None and now < before + 0.02:
        total += sum(range(10_000))
    assert now is not None and total


def test_only_tiny_models_with_spare_cores_measure():
    assert spare_cores_for(TINY_PARAMETERS, 1) is None
    assert spare_cores_for(1_000, cores()) is None
    assert (spare_cores_for(1_000, 1) is None) is (cores() < 2)


def test_engine_adjusts_threads_at_each_step():
    engine, machine = engine_of("llama"), Machine()
    engine._cores = machine.spare(2, 2)
    engine.add(Prompt("r", prompt_tokens(1, 9), 9, 4), 0.0)
    engine.state.apply_plan(Plan(1, admit=(Grant("r", 4),)), 0.0)
    seen: list[int] = []

    def run() -> None:  # in a new thread, because PyTorch's number of threads is per thread
        for others in (0.0, 1.0, 0.1):
            machine.pass_by(MEASURE_INTERVAL_S, 0.5, others)
            assert engine.step() is not None
            seen.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [2, 1, 2]
