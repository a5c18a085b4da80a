"""Settings of the scheduler, with their defaults and reasons."""

import platform
from typing import Annotated, Any, ClassVar

from pydantic import Field

from services.policies.preset import DEFAULT, Preset, choose, presets
from services.runtime.main import LabelledSettings


class SchedulerConfig(LabelledSettings):
    """Section `scheduler`."""

    section: ClassVar[str] = "scheduler"
    secret: ClassVar[frozenset[str]] = frozenset(("lease_url",))

    address: str = "127.0.0.1:50052"
    # Stored with the outcomes that the predictor learns from; a certificate's name replaces it.
    # Empty: the name of the machine.
    name: str = Field("", max_length=256)
    predictor_address: str = "127.0.0.1:50053"
    batcher_address: str = ""  # a batcher process; empty: the scheduler arranges rounds itself
    estimator_address: str = "127.0.0.1:50055"

    # Schedulers of the same workers share a lease in Redis: the one that holds it leads, the others
    # wait. redis://[user:password@]host[:port][/database]; empty: this scheduler is alone.
    lease_url: str = Field(default="", repr=False)
    lease_name: str = Field("foretoken:scheduler", min_length=1)  # one for each group of schedulers
    # A dead leader is replaced within this time and a tenth of it. A leader that cannot renew the
    # lease for nine tenths of this time exits.
    lease_s: float = Field(2.0, ge=0.2)

    policy: str = DEFAULT  # a preset of services/policies/presets.toml, or of presets_file
    preset: dict[str, Any] = Field(default_factory=dict)  # replaced choices of the preset
    presets_file: str = (
        ""  # TOML with more presets, in the format of services/policies/presets.toml
    )
    # Waiting requests. Beyond it requests get 429 with a retry time, unless their model has less
    # than its share of the queue.
    max_queue: int = Field(4_096, gt=0)
    # How long a request waits for its worker, and a worker's request for its gateway, to return.
    adopt_s: float = Field(10.0, gt=0)
    # Share of each tenant (cache_salt, else `user`) against the others; the default is 1. API keys
    # have theirs in gateway.key_limits.
    tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    # Share of this process's time for rounds; events collect meanwhile. With 1,000 waiting requests
    # a round takes milliseconds, and half of the time for rounds starves gateways in this process:
    # at 3 times capacity, a tenth gives 2.5 times less latency per token. Where rounds are short it
    # costs 4 ms at most.
    round_share: float = Field(0.1, gt=0, le=1)
    fleet_interval_s: float = Field(0.25, gt=0)  # between updates of queue and drain time
    # For all workers to load a LoRA adapter, from the request to load it.
    adapter_wait_s: float = Field(60.0, gt=0)
    # Streams at a time, also those that have not said hello yet; further ones are refused.
    max_gateways: int = Field(1_024, gt=0)
    max_workers: int = Field(4_096, gt=0)
    hello_wait_s: float = Field(30.0, gt=0)  # for the first message of a stream
    # A worker is suspected to hang after this silence: it gets no more requests, and its own
    # continue at workers with room. A worker says something every worker.heartbeat_s.
    suspect_s: float = Field(3.0, gt=0)
    # The same in multiples of the longest recent gap between two of its messages: a busy machine
    # lengthens the gaps of all.
    suspect_gaps: float = Field(3.0, ge=1)
    outbox_limit: int = Field(65_536, gt=0)  # messages queued for a peer before it is cut off
    # How long a request waits for its first forecast. Without one it runs only if there is room for
    # max_tokens, behind requests that have a forecast, so an idle system loses no time.
    forecast_patience_s: float = Field(0.0, ge=0)
    forecast_timeout_s: float = Field(0.05, gt=0)  # then history answers
    # A late forecast is still used within this time: queues change within seconds.
    forecast_late_s: float = Field(2.0, gt=0)
    forecast_failures_max: int = Field(5, gt=0)  # in a row; then history answers at once
    # Pause between two tries of a predictor that does not answer. It doubles up to the maximum: a
    # predictor that is down costs nothing, and one that is back is found within seconds.
    forecast_pause_s: float = Field(0.25, gt=0)
    forecast_pause_max_s: float = Field(5.0, gt=0)
    batcher_timeout_s: float = Field(0.05, gt=0)  # then the scheduler arranges the round
    refresh_interval_s: float = Field(0.25, gt=0)  # between refreshes of shared forecasts
    # Ended requests that `foretoken why` can explain: 30 MB at most.
    story_requests: int = Field(4_096, ge=0)
    event_log: str = ""  # file for the event log, from which `foretoken why --log` replays a run
    event_log_max_bytes: int = Field(256 * 2**20, gt=0)

    @property
    def reporter(self) -> str:
        """The name that is stored with outcomes."""
        return self.name or platform.node()

    def chosen(self) -> Preset:
        """The preset to serve by. Raises ValueError for unknown or incompatible choices."""
        return choose(self.policy, self.preset, presets(self.presets_file))
