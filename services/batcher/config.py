"""Settings of the batcher, with their defaults and reasons."""

from typing import ClassVar

from pydantic import Field

from services.runtime.main import LabelledSettings


class BatcherConfig(LabelledSettings):
    """Section `batcher`. Each stream brings its preset."""

    section: ClassVar[str] = "batcher"

    address: str = "127.0.0.1:50054"  # host:port, or unix:/path
    # A round blocks the event loop, so its size is bounded: 65,536 rows take about 50 ms.
    rows_max: int = Field(default=65_536, ge=1)
    workers_max: int = Field(default=1_024, ge=1)
    # Streams at a time, also those that have not said hello yet; further ones are refused.
    max_schedulers: int = Field(default=64, ge=1)
    hello_wait_s: float = Field(default=30.0, gt=0)  # for the first message of a stream
