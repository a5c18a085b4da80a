"""Measured capacity: the rate at which workers serve requests of a workload while some wait."""

from dataclasses import replace

import numpy as np

from services.policies.preset import choose
from simulator.engine.simulation import simulate
from simulator.study import Point

SERVED = 0.9  # the share of requests that is counted: the last ones wait for the longest answers
UNORDERED = "fcfs"  # the preset that capacity is measured with
UNBOUNDED = 2**30  # waiting requests: none is refused


def measure_capacity(point: Point) -> float:
    """Requests per second that the workers of the point serve with `fcfs`, if all requests of its
    workload are queued at the start."""
    requests = point.workload
    burst = replace(requests, arrival_s=np.zeros(len(requests)), clients=0)
    settings = replace(
        point.settings, preset=choose(UNORDERED), max_queue=UNBOUNDED, predictor="", training=None
    )
    last_s = simulate(settings, burst).records.last_s
    return SERVED * len(burst) / float(np.quantile(last_s[np.isfinite(last_s)], SERVED))
