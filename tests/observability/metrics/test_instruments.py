"""Instruments of catalogued metrics: counters, and readings of existing numbers."""

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from observability.exposition import Part, expose
from observability.metrics.instruments import (
    MAX_LABEL_CHARS,
    OTHER,
    BoundedLabels,
    Instruments,
    Reading,
)
from observability.metrics.metric import Metric, counter, gauge, histogram

APPLES = counter("apples", "Apples eaten.")
BY_KIND = counter("pears", "Pears eaten, by kind.", "kind")
ROOM = gauge("room", "Room left, by shelf.", "shelf")
BITES = histogram("bites", "Bites an apple, by eater.", "eater", buckets=(1, 2))
TWO = gauge("two", "By two.", "a", "b")


def lines(registry: CollectorRegistry, name: str) -> list[str]:
    text = generate_latest(registry).decode()
    return [x for x in text.splitlines() if name in x and "_created" not in x and "HELP" not in x]


def test_reading_calls_its_function_at_each_scrape() -> None:
    registry, eaten = CollectorRegistry(), 3
    Instruments(registry).reading(APPLES, lambda: eaten)
    assert lines(registry, "apples") == [
        "# TYPE foretoken_apples_total counter",
        "foretoken_apples_total 3.0",
    ]
    eaten = 5
    assert registry.get_sample_value("foretoken_apples_total") == 5


def test_unknown_value_has_no_series() -> None:
    registry, known = CollectorRegistry(), list[float]()
    Instruments(registry).reading(APPLES, lambda: known[0] if known else None)
    assert lines(registry, "apples") == ["# TYPE foretoken_apples_total counter"]
    known.append(0)
    assert registry.get_sample_value("foretoken_apples_total") == 0


def test_labelled_reading_follows_its_keys() -> None:
    registry, shelves = CollectorRegistry(), {"top": 1.5, "low": 0.0}
    Instruments(registry).reading(ROOM, lambda: shelves)
    assert lines(registry, "room") == [
        "# TYPE foretoken_room gauge",
        'foretoken_room{shelf="top"} 1.5',
        'foretoken_room{shelf="low"} 0.0',
    ]
    del shelves["top"]
    assert registry.get_sample_value("foretoken_room", {"shelf": "top"}) is None


def test_reading_of_several_labels_has_their_values_as_keys() -> None:
    registry = CollectorRegistry()
    found: dict[tuple[str, ...], float] = {("1", "x"): 2.0}
    Instruments(registry).reading(TWO, lambda: found)
    whole = expose([Part(registry)])
    assert 'foretoken_two{a="1",b="x"} 2.0' in whole
    found.clear()
    assert "foretoken_two{" not in expose([Part(registry)])


def test_failing_reading_is_omitted_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, shelves = CollectorRegistry(), dict[str, float]()
    make = Instruments(registry)
    make.reading(APPLES, lambda: 1)
    make.reading(ROOM, lambda: shelves["gone"])
    make.reading(BY_KIND, lambda: {"red": 2})
    text = expose([Part(registry)])
    assert "foretoken_apples_total 1.0" in text and "room" not in text
    assert 'foretoken_pears_total{kind="red"} 2.0' in text
    assert [record.message for record in caplog.records] == [
        "metric foretoken_room cannot be read and is omitted"
    ]


def test_known_label_values_start_at_zero() -> None:
    registry = CollectorRegistry()
    make = Instruments(registry)
    make.counter(BY_KIND, "red", "green").labels("red").inc()
    make.histogram(BITES, "me")
    value = registry.get_sample_value
    reported = {
        kind: value("foretoken_pears_total", {"kind": kind}) for kind in ("red", "green", "x")
    }
    assert reported == {"red": 1, "green": 0, "x": None}
    assert value("foretoken_bites_count", {"eater": "me"}) == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda make: make.counter(ROOM),
        lambda make: make.gauge(APPLES),
        lambda make: make.histogram(APPLES),
        lambda make: make.reading(BITES, lambda: 1.0),
    ],
)
def test_wrong_instrument_kind_is_an_error(
    make: Callable[[Instruments], object],
) -> None:
    with pytest.raises(ValueError):
        make(Instruments(CollectorRegistry()))


@pytest.mark.parametrize("metric", [APPLES, ROOM])
def test_reading_is_registered_once(metric: Metric) -> None:
    registry = CollectorRegistry()
    registry.register(Reading(metric, lambda: {}))
    with pytest.raises(ValueError, match="Duplicated"):
        Instruments(registry).reading(metric, lambda: {})


def test_bounded_labels_keep_the_first_values() -> None:
    names = BoundedLabels(2)
    assert [names.label(name) for name in ("a", "b", "c", "a", "d", "b")] == [
        "a", "b", OTHER, "a", OTHER, "b",
    ]  # fmt: skip
    assert BoundedLabels().label("x" * MAX_LABEL_CHARS) == "x" * MAX_LABEL_CHARS
    assert BoundedLabels().label("x" * (MAX_LABEL_CHARS + 1)) == OTHER
