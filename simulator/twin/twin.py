"""The twin of a recorded run: the same requests, policy and hardware in virtual time."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.core import WorkerView
from services.costs import CostModel, Direction, StepTiming
from simulator.engine.settings import RunSettings, Timing
from simulator.engine.simulation import Simulation
from simulator.hardware.hardware import Hardware
from simulator.hardware.least_squares import solve_non_negative
from simulator.twin.machine_speed import measure_slowdown
from simulator.twin.recorded_run import RecordedLog, RecordedRun, RunReader
from simulator.twin.step_ends import WorkerSteps

MIN_STEPS = 12  # three per coefficient


def simulate_twin(
    recorded: RecordedLog,
    hardware: Sequence[Hardware],
    timing: Timing,
    predictor: str = "",
    follow_speed: bool = False,
) -> RecordedRun:
    """Simulates the requests of a log on `hardware`, one for each worker, and returns the run as
    its log would show it; the id of a request is its place in the recorded run.

    The scheduler receives the recorded forecasts and cost models, or with `predictor` the forecasts
    of that predictor. With `follow_speed`, steps take longer or shorter where those of the log did.
    Raises ValueError for a predictor that cannot be simulated.
    """
    run = recorded.run
    settings = RunSettings(
        recorded.preset,
        tuple(hardware),
        max_queue=recorded.limits.max_queue,
        predictor=predictor,
        timing=timing,
    )
    reader = RunReader(run.workload.name)
    advice = None if predictor else run.advice
    slowdowns = [
        measure_slowdown(steps, each.cost, run.origin_s)
        for steps, each in zip(run.steps, hardware, strict=True)
        if follow_speed
    ]
    Simulation(settings, run.workload, reader.observe, advice, slowdowns).run()
    return reader.build()


def measured_hardware(run: RecordedRun) -> tuple[Hardware, ...]:
    """Returns each worker as the run shows it: its capacities, and a cost model of its own steps
    with the host time between them; the estimator's last cost model if it has too few steps. Raises
    ValueError for a worker with too few steps and no cost model."""
    return tuple(
        _hardware(view, _fit_cost(view, steps, reported))
        for view, steps, reported in zip(run.workers, run.steps, run.costs, strict=True)
    )


def _hardware(view: WorkerView, cost: CostModel) -> Hardware:
    made = Hardware(
        view.worker_id,
        cost,
        view.kv_tokens,
        view.host_tokens,
        view.block_tokens,
        view.max_running,
        max_context_tokens=view.max_context_tokens,
        source=f"measured: {cost.samples} steps of a recorded run",
        about=f"{view.model}, {view.placement}",
    )
    if view.max_batch_tokens:
        made = replace(made, max_batch_tokens=view.max_batch_tokens)
    if view.report_every_steps:
        made = replace(made, report_every_steps=view.report_every_steps)
    return made


def _fit_cost(view: WorkerView, steps: WorkerSteps, reported: CostModel | None) -> CostModel:
    if len(steps.timings) >= MIN_STEPS:
        cost = fit_mean_cost(steps.timings)
    elif reported:
        cost = reported
    else:
        raise ValueError(
            f"the log has {len(steps.timings)} steps of {view.worker_id} and no cost model: record "
            "a longer run, or give a hardware file"
        )
    known, swaps = reported or cost, steps.swaps  # the estimator also knows copies at start
    return replace(
        cost,
        base_s=cost.base_s + steps.host_s,
        offload_token_s=swaps.token_s(Direction.OFFLOAD) or known.offload_token_s,
        upload_token_s=swaps.token_s(Direction.UPLOAD) or known.upload_token_s,
        quantize_token_s=swaps.quantize_token_s or known.quantize_token_s,
    )


def fit_mean_cost(timings: Sequence[StepTiming]) -> CostModel:
    """Returns argmin over c >= 0 of the sum of (work·c - elapsed)², in seconds.

    A run's duration is the sum of its steps, so the fit must match their mean; the estimator's fit
    matches the median, which is lower where pauses are frequent. O(steps).
    """
    work = np.array(
        [(1.0, t.prefill_tokens, t.decode_seqs, t.context_tokens) for t in timings], float
    )
    elapsed_s = np.array([t.elapsed_s for t in timings])
    found = solve_non_negative(work, elapsed_s)
    base_s, prefill_token_s, decode_seq_s, context_token_s = (float(c) for c in found)
    return CostModel(
        base_s,
        prefill_token_s,
        decode_seq_s,
        context_token_s,
        source="steps of a run",
        samples=len(timings),
    )
