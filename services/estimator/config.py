"""Settings of the estimator, with their defaults and reasons."""

from typing import ClassVar

from pydantic import Field

from services.runtime.main import ServedSettings


class EstimatorConfig(ServedSettings):
    """Section `estimator`."""

    section: ClassVar[str] = "estimator"

    address: str = "127.0.0.1:50055"  # host:port, or unix:/path
    window: int = Field(default=2_000, ge=24, le=100_000)  # samples a worker; a fit takes ~2 ms
    refit_samples: int = Field(default=64, ge=1)  # new ones before the next fit: under 1 % of time
    workers_max: int = Field(default=1_024, ge=1)
    watchers_max: int = Field(default=1_024, ge=1)  # open WatchCostModel streams
