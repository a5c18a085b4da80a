"""The exposition of one process and of several, read by Prometheus' parser."""

from collections.abc import Mapping
from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from observability.exposition import Part, expose
from observability.merging import merge, with_aliases
from observability.metrics import gateway as catalogue
from observability.metrics import scheduler as schedulers
from observability.metrics import worker as workers
from observability.metrics.instruments import Instruments
from observability.metrics.vllm import ALIASES

Series = tuple[str, frozenset[tuple[str, str]]]
SPECIAL = 'say "hi", \\ {and}=\n # HELP me\r'


def read(text: str) -> dict[Series, float]:
    """All samples by name and labels. Asserts that each is there once."""
    found: dict[Series, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            series = sample.name, frozenset(sample.labels.items())
            assert series not in found
            found[series] = sample.value
    return found


def types(text: str) -> list[tuple[str, str]]:
    """Names and types in order of exposition."""
    lines = (line.split(" ") for line in text.split("\n") if line.startswith("# TYPE "))
    return [(name, kind) for _, _, name, kind in lines]


def named(name: str, **labels: str) -> Series:
    return name, frozenset(labels.items())


def test_exposition_has_values_and_process_labels() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    Counter("a", "Counted \\ in\nlines.", ["kind"], registry=registry).labels(SPECIAL).inc(3)
    Gauge("b", "Beside.", registry=other).set(-0.5)
    Histogram("c", "Timed.", buckets=(0.1, 2), registry=registry).observe(0.5)
    text = expose([Part(registry, {"model_name": SPECIAL}), Part(other)])
    assert read(text) == {
        named("a_total", kind=SPECIAL, model_name=SPECIAL): 3,
        named("b"): -0.5,
        named("c_bucket", le="0.1", model_name=SPECIAL): 0,
        named("c_bucket", le="2.0", model_name=SPECIAL): 1,
        named("c_bucket", le="+Inf", model_name=SPECIAL): 1,
        named("c_count", model_name=SPECIAL): 1,
        named("c_sum", model_name=SPECIAL): 0.5,
    }
    assert types(text) == [("a_total", "counter"), ("c", "histogram"), ("b", "gauge")]
    assert "# HELP a_total Counted \\\\ in\\nlines.\n" in text
    assert text.endswith("\n") and "_created" not in text


def test_series_label_overrides_the_process_label() -> None:
    registry = CollectorRegistry()
    Gauge("a", "Of a worker.", ["worker"], registry=registry).labels("theirs").set(1)
    text = expose([Part(registry, {"worker": "mine"})])
    assert read(text) == {named("a", worker="theirs"): 1}


def test_equal_families_share_their_header() -> None:
    one, two = CollectorRegistry(), CollectorRegistry()
    Counter("a", "Of one process.", registry=one).inc(1)
    Gauge("z", "In between.", registry=one).set(1)
    Counter("a", "Of the other process.", registry=two).inc(2)
    parts = Part(one, {"worker": "0"}), Part(two, {"worker": "1"})
    text = merge(expose([part]) for part in parts)
    assert text == (
        "# HELP a_total Of one process.\n# TYPE a_total counter\n"
        'a_total{worker="0"} 1.0\na_total{worker="1"} 2.0\n'
        '# HELP z In between.\n# TYPE z gauge\nz{worker="0"} 1.0\n'
    )


def test_foreign_text_does_not_change_our_families() -> None:
    ours = "# HELP a A.\n# TYPE a gauge\na 1.0\n"
    other = "b 2.0\n# a word\nnonsense\n\n# TYPE a gauge\na 7.0\nc_x 3.0\n# HELP \n# TYPE d\n"
    text = merge([ours, other])
    assert text.startswith(ours)
    assert {name: value for (name, _), value in read(text).items()} == {"a": 1, "b": 2, "c_x": 3}
    assert merge([text]) == text


@given(
    st.lists(
        st.dictionaries(
            st.tuples(st.sampled_from("abc"), st.text('x"\\\n,={} \u2028\r', max_size=6)),
            st.floats(allow_nan=False),
            max_size=6,
        ),
        max_size=5,
    )
)
def test_merge_keeps_each_series_once_with_adjacent_families(
    processes: list[dict[tuple[str, str], float]],
) -> None:
    expected: dict[Series, float] = {}
    for process in processes:
        for (name, value), number in process.items():
            expected.setdefault(named(name, x=value), number)
    text = merge(expose([Part(registry_of(process))]) for process in processes)
    assert read(text) == expected
    heads = [name for name, _ in types(text)]
    assert len(heads) == len(set(heads)) == len({name for name, _ in expected})
    reported = [line[0] for line in text.split("\n") if line and line[0] != "#"]
    assert [name for name, _ in groupby(reported)] == heads


def registry_of(process: Mapping[tuple[str, str], float]) -> CollectorRegistry:
    registry = CollectorRegistry()
    gauges: dict[str, Gauge] = {}
    for (name, value), number in process.items():
        if name not in gauges:
            gauges[name] = Gauge(name, f"Of {name}.", ["x"], registry=registry)
        gauges[name].labels(value).set(number)
    return registry


def test_vllm_aliases_are_added() -> None:
    registry = CollectorRegistry()
    make = Instruments(registry)
    make.lean_histogram(catalogue.TTFT).labels("batch").observe(0.3)
    make.counter(catalogue.PROMPT_TOKENS).inc(7)
    make.gauge(workers.RESTING).set(2)
    make.gauge(schedulers.WAITING).set(9)  # vLLM has no such metric
    plain = expose([Part(registry, {"model_name": "m"})])
    text = with_aliases(plain, ALIASES)
    ours, everything = read(plain), read(text)
    added = {series: value for series, value in everything.items() if series not in ours}
    assert text.startswith(plain) and {**ours, **added} == everything
    assert added == {
        (f"vllm:{vllm}", labels): value
        for (name, labels), value in ours.items()
        for begin, end in (
            ("foretoken_time_to_first_token_seconds", "time_to_first_token_seconds"),
            ("foretoken_prompt_tokens", "prompt_tokens"),
            ("foretoken_worker_requests_resting", "num_requests_swapped"),
        )
        if name.startswith(begin)
        for vllm in (name.replace(begin, end),)
    }
    assert types(text)[4:] == [
        ("vllm:time_to_first_token_seconds", "histogram"),
        ("vllm:prompt_tokens_total", "counter"),
        ("vllm:num_requests_swapped", "gauge"),
    ]
    assert "# HELP vllm:prompt_tokens_total Prompt tokens" in text
