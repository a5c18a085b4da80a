"""Settings of the scheduler, with their defaults and reasons."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from services.policies.preset import DEFAULT, Preset, choose
from services.policies.preset_table import load_presets
from services.runtime.main import ServedSettings


class SchedulerConfig(ServedSettings):
    """Section `scheduler`."""

    section: ClassVar[str] = "scheduler"

    address: str = "127.0.0.1:50052"
    predictor_address: str = "127.0.0.1:50053"
    batcher_address: str = ""  # of a batcher of its own; empty: rounds are arranged here
    estimator_address: str = "127.0.0.1:50055"

    policy: str = DEFAULT  # a row of services/policies/presets.toml, or of presets_file
    preset: dict[str, Any] = Field(default_factory=dict)  # choices of the preset replaced
    presets_file: str = ""  # TOML of more presets, as services/policies/presets.toml has them
    # Waiting requests; beyond it 429 with a time to retry, but for a model short of its share.
    max_queue: int = Field(4_096, gt=0)
    adopt_s: float = Field(10.0, gt=0)  # for who is said to be at a worker that may come back
    # What each tenant (cache_salt, else `user`) counts for beside others; 1 for who is not named.
    tenant_weights: dict[str, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        default_factory=dict
    )
    # Of this process's time for rounds; events gather meanwhile. With a thousand waiting a round
    # takes milliseconds, and half of the time for them starved gateways beside: at 3 times capacity
    # a tenth has 2.5 times less latency a token, and where rounds are short it costs 4 ms at most.
    round_share: float = Field(0.1, gt=0, le=1)
    fleet_interval_s: float = Field(0.25, gt=0)  # how often gateways hear of queue and drain time
    outbox_limit: int = Field(65_536, gt=0)  # messages a slow gateway may be behind, then cut off
    # A request without a forecast by then runs if there is room for all it may make; else it waits
    # for one, behind those that have theirs. So it costs an idle system nothing.
    forecast_patience_s: float = Field(0.0, ge=0)
    forecast_timeout_s: float = Field(0.05, gt=0)  # then history stands in
    # The better forecast is taken while the request may still wait; a queue moves in seconds.
    forecast_late_s: float = Field(2.0, gt=0)
    forecast_failures_max: int = Field(5, gt=0)  # in a row; then history answers at once
    # Between two tries of a predictor that does not answer; doubles, so one that is gone costs
    # nothing and one that is back is found in seconds.
    forecast_pause_s: float = Field(0.25, gt=0)
    forecast_pause_max_s: float = Field(5.0, gt=0)
    batcher_timeout_s: float = Field(0.05, gt=0)  # a round that took longer is arranged here
    refresh_interval_s: float = Field(0.25, gt=0)  # how often shared forecasts are renewed
    # Of the last so many requests that ended `foretoken why` knows the story: 30 MB at most.
    story_requests: int = Field(4_096, ge=0)
    event_log: str = ""  # file for (event, now, actions) lines, to replay a run; off by default
    event_log_max_bytes: int = Field(256 * 2**20, gt=0)

    def chosen(self) -> Preset:
        """The row to serve by. Raises ValueError for what is unknown or can't work."""
        return choose(self.policy, self.preset, load_presets(self.presets_file))
