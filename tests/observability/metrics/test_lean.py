"""LeanHistogram equals the library's histogram."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from observability.exposition import Part, expose
from observability.metrics.instruments import Instruments
from observability.metrics.metric import GAP_S, counter, histogram

TIMED = histogram("timed_seconds", "Time.", "class", buckets=GAP_S)
PLAIN = histogram("plain_seconds", "Time.", buckets=GAP_S)
VALUES = st.sampled_from((*GAP_S, 0.0, 0.00049, 0.7, 40.1, 1e9)) | st.floats(0, 50)


@given(st.lists(st.tuples(st.sampled_from("ab"), VALUES, st.integers(1, 3))))
def test_lean_histogram_equals_the_library_s(seen: list[tuple[str, float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    lean, full = Instruments(ours).lean_histogram(TIMED), Instruments(theirs).histogram(TIMED)
    plain, fully = Instruments(ours).lean_histogram(PLAIN), Instruments(theirs).histogram(PLAIN)
    for name, value, times in seen:
        lean.labels(name).observe(value, times)
        plain.labels().observe(value, times)
        for _ in range(times):
            full.labels(name).observe(value)
            fully.observe(value)
    reported, expected = lines(ours), lines(theirs)
    assert [name for name, _ in reported] == [name for name, _ in expected]
    assert [value for _, value in reported] == pytest.approx([value for _, value in expected])


def lines(registry: CollectorRegistry) -> list[tuple[str, float]]:
    """Series and values sorted by name, because sum and count differ in order; comments have 0."""
    parted = [line.rpartition(" ") for line in expose([Part(registry)]).splitlines()]
    return sorted(
        (f"{name} {value}", 0.0) if name.startswith("#") else (name, float(value))
        for name, _, value in parted
    )


def test_lean_histogram_refuses_other_kinds() -> None:
    registry = CollectorRegistry()
    make = Instruments(registry)
    timed = make.lean_histogram(TIMED)
    with pytest.raises(ValueError, match="timed_seconds has labels"):
        timed.labels()
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        make.lean_histogram(TIMED)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        make.histogram(TIMED)
    with pytest.raises(ValueError, match="catalogued as a counter, not as a histogram"):
        make.lean_histogram(counter("counted", "Counts."))
