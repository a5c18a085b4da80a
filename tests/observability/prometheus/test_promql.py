"""PromQL queries from the catalogue."""

import pytest

from observability.metrics import gateway, scheduler, worker
from observability.metrics.metric import counter
from observability.prometheus.promql import (
    NotEqual,
    OneOf,
    Queries,
    Record,
    complement,
    ratio,
    share,
    sum_of,
)

Q = Queries("5m", {"class": "$class", "worker": "$worker"})
PLAIN = Queries("1m")


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (PLAIN.gauge(scheduler.WAITING), "sum(foretoken_scheduler_requests_waiting)"),
        (
            Q.gauge(worker.USAGE, "worker", agg="max"),
            'max by (worker) (foretoken_kv_cache_usage_perc{worker=~"$worker"})',
        ),
        (
            Q.rate(gateway.SLA, "cause", where={"outcome": "missed", "cause": NotEqual("client")}),
            "sum by (cause) (rate(foretoken_sla_requests_total"
            '{class=~"$class", outcome="missed", cause!="client"}[5m]))',
        ),
        (
            PLAIN.increase(gateway.REFUSALS, where={"reason": OneOf(("queue", "sessions"))}),
            'sum(increase(foretoken_refusals_total{reason=~"queue|sessions"}[1m]))',
        ),
        (
            PLAIN.rate(gateway.PROMPT_TOKENS, "model_name", window="1h"),
            "sum by (model_name) (rate(foretoken_prompt_tokens_total[1h]))",
        ),
        (
            Q.quantile(0.99, gateway.TTFT, "class"),
            "histogram_quantile(0.99, sum by (le, class) (rate("
            'foretoken_time_to_first_token_seconds_bucket{class=~"$class"}[5m])))',
        ),
        (
            PLAIN.mean(gateway.DECODE),
            "sum(rate(foretoken_request_decode_time_seconds_sum[1m])) / "
            "(sum(rate(foretoken_request_decode_time_seconds_count[1m])) > 0)",
        ),
        (
            PLAIN.buckets(worker.STEP),
            "sum by (le) (rate(foretoken_worker_step_seconds_bucket[1m]))",
        ),
        (PLAIN.recorded(Record("a:b", ("class",), "1"), "class"), "max by (class) (a:b)"),
        (Q.recorded(Record("a:b", ("class",), "1")), 'max(a:b{class=~"$class"})'),
        (
            Q.values_of(gateway.TTFT, "class"),
            "label_values(foretoken_time_to_first_token_seconds_count, class)",
        ),
        (ratio("a", "b"), "a / (b > 0)"),
        (share("a", "b"), "(a or 0 * b) / (b > 0)"),
        (complement("a", "b"), "1 - (a or 0 * b) / (b > 0)"),
        (sum_of("a", "b"), "((a or vector(0)) + (b or vector(0)))"),
    ],
)
def test_promql_builder_writes_expressions(written: str, message: str):
    assert written == message


NOT_CATALOGUED = counter("made_up", "Not in the catalogue.")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: Q.rate(NOT_CATALOGUED), "foretoken_made_up is not in the catalogue"),
        (lambda: Q.values_of(NOT_CATALOGUED, "class"), "is not in the catalogue"),
        (lambda: Q.rate(gateway.SLA, "tenant"), "has no label 'tenant'; it has: model_name, class"),
        (lambda: Q.rate(gateway.SLA, where={"klass": "x"}), "has no label 'klass'"),
        (lambda: Q.gauge(scheduler.WAITING, "model_name"), "no label 'model_name'; it has: none"),
        (lambda: Q.rate(gateway.RUNNING), "is a gauge, but the query needs a counter"),
        (lambda: Q.gauge(gateway.SLA), "is a counter, but the query needs a gauge"),
        (lambda: Q.quantile(0.5, gateway.SLA), "is a counter, but the query needs a histogram"),
        (lambda: Q.recorded(Record("a:b", ("class",), "1"), "worker"), "has no label 'worker'"),
    ],
)
def test_promql_mistake_fails_the_build(mistake, message: str):
    with pytest.raises(ValueError) as refused:
        mistake()
    assert message in str(refused.value)
