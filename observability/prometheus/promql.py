"""PromQL queries, built from the catalogue's constants.

A metric, label or kind that is not in the catalogue raises ValueError when dashboards and rules are
built, instead of making an empty panel. Aggregations keep only the labels in `by`; they always
include all processes and scrape targets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from observability.metrics.catalogue import CATALOGUE, PROCESS_LABELS
from observability.metrics.metric import PREFIX, Kind, Metric

_SERVICE = {metric: service for service, metrics in CATALOGUE.items() for metric in metrics}


@dataclass(frozen=True, slots=True)
class NotEqual:
    """Matches all other values of a label."""

    value: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """Matches any of these values of a label."""

    values: tuple[str, ...]


Where = Mapping[str, str | NotEqual | OneOf]
ANY: Where = {}


@dataclass(frozen=True, slots=True)
class Record:
    """A recording rule: the name, labels and expression of its series."""

    name: str
    labels: tuple[str, ...]
    expr: str


@dataclass(frozen=True, slots=True)
class Queries:
    """Builds queries over `window`. `filters` (label → regular expression) apply to all series that
    have the label."""

    window: str
    filters: Mapping[str, str] = field(default_factory=dict)

    def gauge(self, metric: Metric, *by: str, agg: str = "sum", where: Where = ANY) -> str:
        """A gauge aggregated by `agg`: sum, max, min, avg, count."""
        _require(metric, Kind.GAUGE)
        return self._aggregate(agg, by, metric, self._select(metric, "", where))

    def rate(self, metric: Metric, *by: str, where: Where = ANY, window: str = "") -> str:
        """A counter's increase per second."""
        return self._over("rate", metric, by, where, window)

    def increase(self, metric: Metric, *by: str, where: Where = ANY, window: str = "") -> str:
        """A counter's increase in the window."""
        return self._over("increase", metric, by, where, window)

    def summed(self, metric: Metric, *by: str, where: Where = ANY) -> str:
        """The sum of a histogram's observations, per second."""
        return self._part(metric, "_sum", by, where)

    def mean(self, metric: Metric, *by: str, where: Where = ANY) -> str:
        """The mean of a histogram's observations in the window; empty without any."""
        count = self._part(metric, "_count", by, where)
        return ratio(self.summed(metric, *by, where=where), count)

    def quantile(self, share: float, metric: Metric, *by: str, where: Where = ANY) -> str:
        """A quantile of a histogram's observations in the window, interpolated within a bucket."""
        return f"histogram_quantile({share:g}, {self._part(metric, '_bucket', ('le', *by), where)})"

    def buckets(self, metric: Metric, where: Where = ANY) -> str:
        """A histogram's buckets in the window, for a heatmap."""
        return self._part(metric, "_bucket", ("le",), where)

    def recorded(self, record: Record, *by: str, agg: str = "max") -> str:
        """The series of a recording rule."""
        return self._aggregate(agg, by, record, record.name + self._matchers(record, ANY))

    def values_of(self, metric: Metric, label: str) -> str:
        """Grafana's query for all values of a label, not filtered by variables."""
        _require_labels(metric, (label,))
        suffix = "_count" if metric.kind is Kind.HISTOGRAM else ""
        return f"label_values({metric.family}{suffix}, {label})"

    def _over(
        self, function: str, metric: Metric, by: tuple[str, ...], where: Where, window: str
    ) -> str:
        _require(metric, Kind.COUNTER)
        selected = self._select(metric, "", where)
        grown = f"{function}({selected}[{window or self.window}])"
        return self._aggregate("sum", by, metric, grown)

    def _part(self, metric: Metric, suffix: str, by: tuple[str, ...], where: Where) -> str:
        _require(metric, Kind.HISTOGRAM)
        grown = f"rate({self._select(metric, suffix, where)}[{self.window}])"
        return self._aggregate("sum", by, metric, grown)

    def _aggregate(self, agg: str, by: tuple[str, ...], series: Metric | Record, inner: str) -> str:
        _require_labels(series, tuple(label for label in by if label != "le"))
        return f"{agg} by ({', '.join(by)}) ({inner})" if by else f"{agg}({inner})"

    def _select(self, metric: Metric, suffix: str, where: Where) -> str:
        return metric.family + suffix + self._matchers(metric, where)

    def _matchers(self, series: Metric | Record, where: Where) -> str:
        _require_labels(series, tuple(where))
        has = labels_of(series)
        chosen = [f'{label}=~"{value}"' for label, value in self.filters.items() if label in has]
        asked = [f"{label}{_matched(value)}" for label, value in where.items()]
        return f"{{{', '.join(chosen + asked)}}}" if chosen or asked else ""


def labels_of(series: Metric | Record) -> tuple[str, ...]:
    """All labels of a series, including those of its process. Raises ValueError for a metric that
    is not in the catalogue."""
    if isinstance(series, Record):
        return series.labels
    if series not in _SERVICE:
        raise ValueError(f"{PREFIX}{series.name} is not in the catalogue")
    return PROCESS_LABELS.get(_SERVICE[series], ()) + series.labels


def ratio(part: str, whole: str) -> str:
    """The ratio of two queries; empty where `whole` is 0."""
    return f"{part} / ({whole} > 0)"


def share(part: str, whole: str) -> str:
    """The ratio of two queries with the same labels; 0 where `part` has no series."""
    return f"({part} or 0 * {whole}) / ({whole} > 0)"


def complement(part: str, whole: str) -> str:
    """One minus the share."""
    return f"1 - {share(part, whole)}"


def sum_of(*parts: str) -> str:
    """The sum of queries without labels; a missing series counts as 0."""
    return f"({' + '.join(f'({part} or vector(0))' for part in parts)})"


def _matched(value: str | NotEqual | OneOf) -> str:
    match value:
        case NotEqual():
            return f'!="{value.value}"'
        case OneOf():
            return f'=~"{"|".join(value.values)}"'
    return f'="{value}"'


def _require(metric: Metric, kind: Kind) -> None:
    if metric.kind is not kind:
        raise ValueError(f"{PREFIX}{metric.name} is a {metric.kind}, but the query needs a {kind}")


def _require_labels(series: Metric | Record, labels: tuple[str, ...]) -> None:
    has = labels_of(series)
    for label in labels:
        if label not in has:
            known = ", ".join(has) or "none"
            raise ValueError(f"{series.name} has no label {label!r}; it has: {known}")
