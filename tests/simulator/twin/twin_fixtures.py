"""Simulated runs written as event logs."""

from pathlib import Path

from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.observe.event_log import EventLog, Head
from simulator.engine.settings import RunSettings
from simulator.engine.simulation import RunResult, Simulation
from simulator.workload.workload import Workload


def write_simulated(path: Path, settings: RunSettings, requests: Workload) -> RunResult:
    """Simulates a run and writes the event log that its scheduler would have written."""
    head = Head(settings.preset, SchedulerLimits(max_queue=settings.max_queue, patience_s=0.0))
    with EventLog(path, 2**26, head) as log:
        return Simulation(settings, requests, log.append).run()
