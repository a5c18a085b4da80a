"""Text that is kept and reused equals the library's exposition, after every change."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from observability.exposition import Exposition, Part
from observability.merging import Merger, merge, split_blocks, with_aliases
from observability.metrics.instruments import Instruments
from observability.metrics.metric import counter, gauge, histogram

NAMES = st.sampled_from(["a", "b", 'say "c"\n\u2028'])
NUMBERS = st.floats(0, 1e9)
CHANGES = st.lists(st.tuples(st.integers(0, 6), NAMES, NUMBERS), max_size=12)
TIMED, PLAIN = histogram("timed_seconds", "T.", "class"), histogram("plain_seconds", "T.")


@dataclass
class Instrumented:
    """A process with every kind of instrument; `numbers` are read."""

    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    numbers: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        make, registry = Instruments(self.registry), self.registry
        self.counter = Counter("counted", "C.", ["kind"], registry=registry)
        self.plain = Counter("events", "E.", registry=registry)
        self.gauge = Gauge("level", "G.", ["kind"], registry=registry)
        self.function = Gauge("called", "F.", registry=registry)
        self.function.set_function(lambda: sum(self.numbers.values()))
        self.histogram = Histogram("took", "H.", ["kind"], buckets=(1, 1e6), registry=registry)
        self.lean = make.lean_histogram(TIMED)
        make.lean_histogram(PLAIN)
        make.reading(counter("seen", "S.", "kind"), lambda: dict(self.numbers))
        make.reading(gauge("one", "O."), lambda: self.numbers.get("a"))

    def change(self, what: int, name: str, number: float) -> None:
        def take() -> None:
            if name in [labels[0] for labels in self.gauge._metrics]:
                self.gauge.remove(name)

        steps: list[Any] = [
            lambda: self.counter.labels(name).inc(number),
            lambda: self.plain.inc(number),
            lambda: self.gauge.labels(name).set(number),
            lambda: self.histogram.labels(name).observe(number),
            lambda: self.lean.labels(name).observe(number),
            lambda: self.numbers.update({name: number}),
            take,
        ]
        steps[what]()


Series = tuple[str, frozenset[tuple[str, str]]]


def read(text: str) -> dict[Series, float]:
    found = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert found
    return found


@given(CHANGES)
def test_text_equals_the_library_s_after_every_change(
    changes: list[tuple[int, str, float]],
) -> None:
    process = Instrumented()
    exposition = Exposition([Part(process.registry)])
    for change in changes:
        process.change(*change)
        assert read(exposition.text()) == read(generate_latest(process.registry).decode())
    text = exposition.text()
    assert exposition.text() == text and "_created" not in text


@given(CHANGES, CHANGES)
def test_repeated_merges_equal_a_single_one(
    first: list[tuple[int, str, float]], second: list[tuple[int, str, float]]
) -> None:
    """Two processes, with one worker's label each, change in turns."""
    processes = [Instrumented(), Instrumented()]
    expositions = [
        Exposition([Part(each.registry, {"worker": str(number)})])
        for number, each in enumerate(processes)
    ]
    aliases = {"counted": "vllm:counted", "foretoken_timed_seconds": "vllm:timed"}
    merger = Merger(aliases)
    for number, changes in enumerate((first, second)):
        for change in changes:
            processes[number].change(*change)
        texts = [each.text() for each in expositions]
        expected = with_aliases(merge(texts), aliases)
        assert merger.merge([split_blocks(text) for text in texts]).decode() == expected
        # The families themselves, as of the gateway's own process.
        assert merger.merge([b for e in expositions for b in e.blocks()]).decode() == expected


def test_series_are_chosen_by_name() -> None:
    process = Instrumented()
    process.change(3, "a", 2.0)
    process.change(0, "a", 1.0)
    text = Exposition([Part(process.registry)]).text(["took_count", "counted_total"])
    assert read(text) == {
        ("took_count", frozenset({("kind", "a")})): 1,
        ("counted_total", frozenset({("kind", "a")})): 1,
    }
    assert Exposition([Part(process.registry)]).text(["none"]) == ""


def test_blocks_of_another_origin_are_put_in_order_first() -> None:
    blocks = split_blocks("b 2.0\n# TYPE a gauge\na 7.0\n")
    assert dict(blocks) == {
        "b": "# TYPE b untyped\nb 2.0\n",
        "a": "# TYPE a gauge\na 7.0\n",
    }
    assert dict(split_blocks("")) == {}


def test_collector_without_rows_is_refused() -> None:
    class Other(Collector):
        def collect(self) -> list[Any]:
            return []

    registry = CollectorRegistry()
    registry.register(Other())
    with pytest.raises(TypeError, match="Other: a collector needs the methods of Rows"):
        Exposition([Part(registry)]).text()
