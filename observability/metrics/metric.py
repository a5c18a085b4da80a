"""Metric: a family of series in the catalogue, independent of its instrument.

A name omits the prefix `foretoken_` and ends in its unit. Where vLLM has the metric, it is vLLM's
name. The exposition appends `_total` to a counter's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

PREFIX = "foretoken_"

# A quantile is interpolated between two bounds, so its error is at most the bucket's width: up
# to a factor of two.
LATENCY_S = (
    0.001, 0.002, 0.004, 0.006, 0.01, 0.02, 0.04, 0.06, 0.1, 0.2, 0.4, 0.6,
    1, 2, 4, 6, 10, 20, 40, 60, 120, 300, 600,
)  # fmt: skip
GAP_S = (
    0.0005, 0.001, 0.0015, 0.002, 0.004, 0.006, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08,
    0.1, 0.15, 0.2, 0.4, 0.6, 1, 2, 4, 10, 40,
)  # fmt: skip
STEP_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2, 5, 10)
ROUND_S = (0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1)
FIT_S = (1, 2, 5, 10, 20, 40, 80, 160, 320, 640, 1_280)
SLACK_S = (-60, -10, -4, -2, -1, -0.5, -0.2, 0, 0.1, 0.2, 0.5, 1, 2, 4, 10, 60)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096, 8_192, 16_384)
RATIO = (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 4, 8)


class Kind(StrEnum):
    """Prometheus' metric types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """`help` says what is counted, and in which unit. `labels` have few values, known in advance:
    never a request id or a client's text. `vllm` is vLLM's name if it differs."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    vllm: str = ""

    @property
    def family(self) -> str:
        """The name after `# TYPE`."""
        return PREFIX + self.name + ("_total" if self.kind is Kind.COUNTER else "")


def counter(name: str, help: str, *labels: str, vllm: str = "") -> Metric:
    return Metric(name, Kind.COUNTER, help, labels, (), vllm)


def invalid_messages(service: str, effect: str) -> Metric:
    """Invalid messages that a service received."""
    return counter(
        f"{service}_invalid_messages",
        f"Invalid messages, each of which {effect}, by the method and the field.",
        "method", "field",
    )  # fmt: skip


def gauge(name: str, help: str, *labels: str, vllm: str = "") -> Metric:
    return Metric(name, Kind.GAUGE, help, labels, (), vllm)


def histogram(
    name: str, help: str, *labels: str, buckets: tuple[float, ...] = LATENCY_S, vllm: str = ""
) -> Metric:
    return Metric(name, Kind.HISTOGRAM, help, labels, buckets, vllm)


def metrics_in(module: Mapping[str, object]) -> tuple[Metric, ...]:
    """The metrics that a module defines, given its `globals()`."""
    return tuple(value for value in module.values() if isinstance(value, Metric))
