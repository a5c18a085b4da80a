"""FamilyText: the text of a collector's family, of which only changed series are rendered again.

Most series of a process do not change between two readings of its metrics, which endpoint pickers
ask for 20 times a second. prometheus_client makes several objects of every series at each reading.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from prometheus_client import Counter
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Key = tuple[str, ...]
Row = Sequence[float]
Head = tuple[str, str, str]  # name, type and help of a family, as in the exposition

CREATED = "_created"  # a suffix of the library: no such series are exposed

VALUE = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


@runtime_checkable
class Rows(Protocol):
    """The numbers of one family. The series with the same label values are one row, such as the
    buckets, the sum and the count of a histogram."""

    def head(self) -> Head: ...

    def rows(self) -> Iterable[tuple[Key, Row]] | None:
        """Numbers that are equal while the row's series are, by label values; None while the family
        cannot be read."""

    def series(self, key: Key) -> Sequence[tuple[str, Mapping[str, str]]]:
        """Names and labels of a row's series, always the same."""

    def values(self, row: Row) -> Iterable[float]:
        """The values of a row's series, in the order of `series`."""


class LibraryRows:
    """A counter, gauge or histogram of prometheus_client.

    The library has no public access to single values: this class alone uses its internals, and
    tests compare the text with that of the library's own exposition.
    """

    def __init__(self, metric: MetricWrapperBase):
        self._metric = metric
        self._labels = metric._labelnames
        [family] = metric.describe()
        suffix = "_total" if family.type == "counter" else ""
        self._head = family.name + suffix, family.type, family.documentation

    def head(self) -> Head:
        return self._head

    def rows(self) -> Iterable[tuple[Key, Row]]:
        if not self._labels:
            return [((), _values(self._metric))]
        return [(tuple(key), _values(child)) for key, child in list(self._metric._metrics.items())]

    def series(self, key: Key) -> Sequence[tuple[str, Mapping[str, str]]]:
        child = self._metric._metrics[key] if key else self._metric
        own = dict(zip(self._labels, key, strict=True))
        return [
            (self._metric._name + sample.name, {**own, **sample.labels})
            for sample in child._child_samples()
            if sample.name != CREATED
        ]

    def values(self, row: Row) -> Iterable[float]:
        return row


def _values(child: MetricWrapperBase) -> list[float]:
    if type(child) is Counter:  # most of them: without its two samples
        return [child._value.get()]
    return [sample.value for sample in child._child_samples() if sample.name != CREATED]


def rows_of(collector: Collector) -> Rows:
    """Raises TypeError for a collector that is neither ours nor one of the library's metrics."""
    if isinstance(collector, MetricWrapperBase):
        return LibraryRows(collector)
    if isinstance(collector, Rows):
        return collector
    raise TypeError(f"{type(collector).__name__}: a collector needs the methods of Rows")


class FamilyText:
    """The lines of a family, with `labels` added to each series; its own labels take precedence."""

    def __init__(self, rows: Rows, labels: Mapping[str, str]):
        self._rows, self._labels = rows, labels
        name, kind, documentation = rows.head()
        self.name = name
        self._head = f"# HELP {name} {documentation.translate(HELP)}\n# TYPE {name} {kind}\n"
        self._groups: dict[Key, _Group] = {}
        self._text = self._head

    def text(self) -> str:
        """The current lines, the same object while nothing has changed; empty if the family cannot
        be read. O(rows), and O(series) of changed rows."""
        rows = self._rows.rows()
        if rows is None:
            return ""
        changed, keys = False, []
        for key, row in rows:
            keys.append(key)
            group = self._groups.get(key)
            if group is None:
                group = self._groups[key] = _Group(self._prefixes(key))
            if group.row != row:
                group.row = row
                group.text = _render(group.prefixes, self._rows.values(row))
                changed = True
        if len(keys) != len(self._groups):
            self._groups = {key: self._groups[key] for key in keys}
            changed = True
        if changed:
            self._text = self._head + "".join([each.text for each in self._groups.values()])
        return self._text

    def _prefixes(self, key: Key) -> list[str]:
        return [
            line_prefix(name, {**self._labels, **labels}) for name, labels in self._rows.series(key)
        ]


class _Group:
    """The lines of a row, and the numbers that they show."""

    __slots__ = ("prefixes", "row", "text")

    def __init__(self, prefixes: list[str]):
        self.prefixes = prefixes
        self.row: Row | None = None
        self.text = ""


def _render(prefixes: list[str], values: Iterable[float]) -> str:
    lines = zip(prefixes, values, strict=True)
    return "".join([f"{prefix} {format_number(value)}\n" for prefix, value in lines])


def line_prefix(name: str, labels: Mapping[str, str]) -> str:
    """A series in the text format, without its value."""
    pairs = ",".join(f'{key}="{value.translate(VALUE)}"' for key, value in labels.items())
    return f"{name}{{{pairs}}}" if pairs else name


def format_number(number: float) -> str:
    """The number in Prometheus' text format."""
    text: str = floatToGoString(number)  # type: ignore[no-untyped-call]  # prometheus_client has no types
    return text
