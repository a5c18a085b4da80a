"""Limits of the compilation of grammars."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """See the settings of the same names in `gateway.config`."""

    max_source_bytes: int
    cache_bytes: int
    max_waiting: int
    max_waiting_per_tenant: int
    limit_s: float  # processor time of one compilation
    memory_bytes: int  # of one compilation
    slow_s: float = 0.1  # most constraints take about 1 ms
    quick_jobs: int = 2
    slow_jobs: int = 2
    wait_s: float = 10.0  # for a grammar, with the constraints before it; longer: 503
