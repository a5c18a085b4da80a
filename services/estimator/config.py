"""Settings of the estimator, with their defaults and reasons."""

from typing import ClassVar

from pydantic import Field

from services.estimator.batches import Learning
from services.runtime.main import ServedSettings


class EstimatorConfig(ServedSettings):
    """Section `estimator`."""

    section: ClassVar[str] = "estimator"

    address: str = "127.0.0.1:50055"  # host:port, or unix:/path
    window: int = Field(default=2_000, ge=24, le=100_000)  # samples a worker; a fit takes ~6 ms
    refit_samples: int = Field(default=64, ge=1)  # new ones before the next fit: under 1 % of time
    workers_max: int = Field(default=1_024, ge=1)
    # Batches are learnt from so often, if they were off by more than both (Magnus' numbers).
    batch_refresh_s: float = Field(default=120.0, gt=0)
    batch_off_s: float = Field(default=2.0, ge=0)
    batch_off_share: float = Field(default=0.2, ge=0)
    neighbours: int = Field(default=256, ge=1, le=256)  # kept a worker: each model carries them
    neighbours_asked: int = Field(default=5, ge=1, le=256)  # k; 5 is the usual
    watchers_max: int = Field(default=1_024, ge=1)  # open WatchCostModel streams

    @property
    def learning(self) -> Learning:
        return Learning(
            self.batch_refresh_s,
            self.batch_off_s,
            self.batch_off_share,
            self.neighbours_asked,
            self.neighbours,
        )
