"""Settings of a run: what is served, by which policy, on what, and how long messages take."""

from dataclasses import dataclass, field

import numpy as np

from services.core import Sla
from services.forecast import Ints
from services.policies.preset import RESIDENCIES, Preset
from simulator.hardware.hardware import Hardware
from simulator.workload.workload import Workload

MODEL = "model"  # name of the served model
NO_SLA = Sla()


@dataclass(frozen=True, slots=True)
class Timing:
    """Latencies of the control plane, in seconds.

    `hop_s` is one message between two processes. A forecast takes `forecast_s`; a new request waits
    for it up to `patience_s`, as with the served setting `forecast_patience_s`. A round takes
    `round_s`, and `round_job_s` for each request on the board; the next round starts no earlier
    than the time that leaves rounds `round_share` of the scheduler's time, as the served scheduler
    does, and it starts `wake_s` after it is due. The predictor learns what has ended, and shared
    forecasts are renewed, `refresh_s` after the first outcome since the last time. A sentence
    encoder reads one prompt after another, each in `encode_s`, and a new request waits up to
    `encoder_patience_s` for that.

    The default `encode_s` is that of the served encoder on one core of a shared machine: median
    10.7 ms, 5.7 to 14.3 ms from the tenth to the ninetieth percentile, of 150 prompts of up to 64
    tokens. ALISE (Zhao and Wang, 2024, §5) reports 3.9 to 4.7 ms per prediction.
    """

    hop_s: float = 0.001
    forecast_s: float = 0.005
    round_s: float = 0.001
    round_job_s: float = 1e-6
    round_share: float = 0.1
    refresh_s: float = 0.25
    wake_s: float = 0.0
    patience_s: float = 0.0
    encode_s: float = 0.01
    encoder_patience_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ObservationLimits:
    """How much a run observes for its plots: at most `samples` (2 or more) of memory over time, and
    the timelines of `requests` in the middle of the workload."""

    samples: int = 512
    requests: int = 60


@dataclass(frozen=True, slots=True)
class RunSettings:
    """One run. `hardware` has one entry for each worker.

    Every request sets `max_tokens`, or what fits behind its prompt: a longer answer is cut there,
    as by a server. Requests beyond `max_queue` are refused. `predictor` replaces the preset's if it
    is not empty, and has learned the requests of `training`. `pure`: it answers alone, as served
    with `predictor.pure`; without, history answers until the first fit, and forecasts are
    recalibrated by outcomes. `jumps`: workers compute equal steps at once; without, one by one. The
    run ends when `stop_after` requests have ended, 0 for all. `observe`: the run is observed, which
    changes none of its results.
    """

    preset: Preset
    hardware: tuple[Hardware, ...]
    sla: Sla = NO_SLA
    max_tokens: int = 4_096
    max_queue: int = 4_096
    predictor: str = ""
    timing: Timing = field(default_factory=Timing)
    seed: int = 0
    jumps: bool = True
    stop_after: int = 0
    observe: ObservationLimits | None = None
    training: Workload | None = None
    pure: bool = True

    @property
    def effective_hardware(self) -> tuple[Hardware, ...]:
        """The workers as the preset configures them."""
        if not RESIDENCIES[self.preset.residency].int8:
            return self.hardware
        return tuple(hardware.with_int8_at_rest() for hardware in self.hardware)

    @property
    def predictor_name(self) -> str:
        return self.predictor or self.preset.predictor

    def caps_of(self, workload: Workload) -> Ints:
        """The cap of each request: its own, else `max_tokens`, or what some worker has room for
        behind the prompt. A prompt without room has a cap of one token and is refused."""
        if workload.requests:
            return np.array([request.max_tokens for request in workload.requests], np.int64)
        reach = max(hardware.view("", MODEL).reach_tokens for hardware in self.hardware)
        caps: Ints = np.clip(reach - workload.input_tokens, 1, self.max_tokens)
        return caps
