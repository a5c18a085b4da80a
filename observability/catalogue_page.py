"""`python -m observability.catalogue_page` writes METRICS.md, the reference of all metrics."""

from collections.abc import Iterator
from pathlib import Path

from observability.metrics import metric as definitions
from observability.metrics.catalogue import CATALOGUE, PROCESS_LABELS
from observability.metrics.metric import PREFIX, Metric
from observability.metrics.vllm import ALIASES

PAGE = Path(__file__).parent / "METRICS.md"
HEAD = """\
# Metrics

All metrics of all processes. `make metrics` generates this page from `observability/metrics/`.

The gateway's `/metrics` exposes the metrics of its process and of all processes in
`gateway.metrics_peers`; `foretoken serve` configures every process that it starts. A service
exposes its metrics over HTTP at `metrics_host` and `metrics_port`, and over gRPC
(`foretoken.v1.Telemetry/Scrape`). Four metrics that endpoint pickers read are there
under vLLM's names, too (`vllm:num_requests_running`, `vllm:num_requests_waiting`,
`vllm:kv_cache_usage_perc`, `vllm:cache_config_info`); `gateway.vllm_metrics=on` adds all
that vLLM has. There are no `_created` series.
"""
UNITS = {"seconds": "seconds", "tokens": "tokens", "bytes": "bytes", "perc": "share (0 to 1)"}


def page() -> str:
    parts = [HEAD]
    for service, metrics in CATALOGUE.items():
        parts += [f"\n## {service.capitalize()}\n\n", *_labels(service), *_table(metrics)]
    parts += ["\n## Buckets\n\n", *_buckets()]
    return "".join(parts)


def _labels(service: str) -> Iterator[str]:
    if labels := PROCESS_LABELS.get(service):
        names = " and ".join(f"`{name}`" for name in labels)
        yield f"All series also have {names}.\n\n"


def _table(metrics: tuple[Metric, ...]) -> Iterator[str]:
    yield "| Name | Type | Labels | Unit | Buckets | What it counts | vLLM |\n"
    yield "|---|---|---|---|---|---|---|\n"
    for metric in metrics:
        alias = ALIASES.get(PREFIX + metric.name, "")
        suffix = metric.family.removeprefix(PREFIX + metric.name)
        cells = (
            f"`{metric.family}`",
            metric.kind.value,
            ", ".join(f"`{label}`" for label in metric.labels),
            UNITS.get(metric.name.rpartition("_")[2], ""),
            BUCKETS.get(metric.buckets, ""),
            metric.help,
            alias and f"`{alias}{suffix}`",
        )
        yield f"| {' | '.join(cells)} |\n"


def _buckets() -> Iterator[str]:
    for buckets, name in BUCKETS.items():
        yield f"- {name}: {', '.join(f'{bound:g}' for bound in buckets)}\n"


# The names of bucket lists.
BUCKETS = {
    value: name
    for name, value in vars(definitions).items()
    if name.isupper() and isinstance(value, tuple)
}

if __name__ == "__main__":
    PAGE.write_text(page())
