"""`python -m observability.catalogue_page` writes METRICS.md, the reference of all metrics."""

from collections.abc import Iterator
from pathlib import Path

from observability.metrics import metric as scales
from observability.metrics.catalogue import CATALOGUE, PROCESS_LABELS
from observability.metrics.metric import PREFIX, Metric
from observability.metrics.vllm import ALIASES

PAGE = Path(__file__).parent / "METRICS.md"
HEAD = """\
# Metrics

Every metric of every process, made from the catalogue (`observability/metrics/`) by `make metrics`.

The gateway's `/metrics` tells of its own process and of those that `gateway.metrics_peers` names;
`foretoken serve` names all it starts. A service tells of itself at its `metrics_port`, on
`metrics_host`, and over gRPC (`foretoken.v1.Telemetry/Scrape`). With `gateway.vllm_metrics=on` what
vLLM counts too is there once more under the name it has there. There are no `_created` series.
"""
UNITS = {"seconds": "seconds", "tokens": "tokens", "bytes": "bytes", "perc": "share, 0 to 1"}


def page() -> str:
    parts = [HEAD]
    for service, metrics in CATALOGUE.items():
        parts += [f"\n## {service.capitalize()}\n\n", *_labels(service), *_table(metrics)]
    parts += ["\n## Buckets\n\n", *_buckets()]
    return "".join(parts)


def _labels(service: str) -> Iterator[str]:
    if own := PROCESS_LABELS.get(service):
        names = " and ".join(f"`{name}`" for name in own)
        yield f"All series have {names} beside their own labels.\n\n"


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
            SCALES.get(metric.buckets, ""),
            metric.help,
            alias and f"`{alias}{suffix}`",
        )
        yield f"| {' | '.join(cells)} |\n"


def _buckets() -> Iterator[str]:
    for buckets, name in SCALES.items():
        yield f"- {name}: {', '.join(f'{bound:g}' for bound in buckets)}\n"


# The bucket lists by name.
SCALES = {
    value: name
    for name, value in vars(scales).items()
    if name.isupper() and isinstance(value, tuple)
}

if __name__ == "__main__":
    PAGE.write_text(page())
