"""Settings of the estimator. Comments give the reason for each default."""

from typing import ClassVar

from pydantic import Field

from services.estimator.batches import BatchLearning
from services.runtime.main import LabelledSettings


class EstimatorConfig(LabelledSettings):
    """Section `estimator`."""

    section: ClassVar[str] = "estimator"

    address: str = "127.0.0.1:50055"  # host:port, or unix:/path
    window: int = Field(
        default=2_000, ge=24, le=100_000
    )  # samples per worker; a fit takes about 6 ms
    refit_samples: int = Field(default=64, ge=1)  # new samples before a refit
    # The shortest time between two fits: under 1 % of CPU time, however short the steps are.
    refit_interval_s: float = Field(default=2.0, ge=0)
    workers_max: int = Field(default=1_024, ge=1)
    # How often to learn from batches with an estimate off by more than both limits (as Magnus).
    batch_refresh_s: float = Field(default=120.0, gt=0)
    batch_off_s: float = Field(default=2.0, ge=0)
    batch_off_share: float = Field(default=0.2, ge=0)
    neighbours: int = Field(default=256, ge=1, le=256)  # per worker; each cost model includes them
    neighbours_k: int = Field(default=5, ge=1, le=256)  # k of the nearest-neighbour estimate
    watchers_max: int = Field(default=1_024, ge=1)  # open WatchCostModel streams

    @property
    def learning(self) -> BatchLearning:
        return BatchLearning(
            self.batch_refresh_s,
            self.batch_off_s,
            self.batch_off_share,
            self.neighbours_k,
            self.neighbours,
        )
