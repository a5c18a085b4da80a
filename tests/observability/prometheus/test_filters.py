"""Dashboards and rules filter only by label values that services emit."""

from observability.metrics import gateway, scheduler, worker
from tests.observability.prometheus.checks import every_query
from tests.observability.prometheus.emitted import values
from tests.observability.prometheus.queries import Query


def not_emitted(query: Query) -> list[tuple[str, str, str]]:
    return [
        (metric.name, label, value)
        for metric, label, value in query.filters()
        if value not in values()[metric, label]
    ]


def test_filter_values_are_emitted_by_services():
    queries = every_query()
    assert {each.where: bad for each in queries if (bad := not_emitted(each))} == {}
    seen = {(metric.name, label) for each in queries for metric, label, _ in each.filters()}
    known = {("sla_requests", "cause"), ("kv_blocks", "state"), ("kv_swap_seconds", "direction")}
    assert known <= seen


def test_filter_check_detects_an_unknown_value():
    expr = (
        'sum(rate(foretoken_scheduler_requests_refused_total{reason=~"queue_full|full"}[5m])) / '
        'sum(foretoken_kv_swap_seconds_sum{worker=~"$worker", direction!="download"})'
    )
    assert not_emitted(Query("here", expr)) == [
        ("scheduler_requests_refused", "reason", "full"),
        ("kv_swap_seconds", "direction", "download"),
    ]


def test_filter_values_equal_the_services_enums():
    found = values()
    assert found[gateway.SLA, "outcome"] == {"met", "missed"}
    assert found[worker.EVICTIONS, "kv"] == {"offloaded", "dropped"}
    assert found[worker.BLOCKS, "state"] == {"held", "cached", "free", "resting", "host_free"}
    assert found[scheduler.PREEMPTIONS, "cause"] == {"paused", "evicted", "lost"}
