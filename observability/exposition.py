"""Exposition: a process's metrics in Prometheus' text format, and the merged text of several
processes.

Counters, gauges and histograms of the catalogue; no `_created` series. A family's lines are
adjacent under one HELP and one TYPE, in text format 0.0.4.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from observability.metrics.lean import format_number

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_VALUE = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Part:
    """A registry, and the labels that all of its series get; a series' own labels take
    precedence."""

    registry: CollectorRegistry
    labels: Mapping[str, str] = field(default_factory=dict)


def expose(parts: Iterable[Part]) -> str:
    """The text of a process's metrics. O(series); gauges are read in the calling thread."""
    return merge("\n".join(_lines(part)) for part in parts)


def merge(texts: Iterable[str]) -> str:
    """The texts of several processes as one: each family once, with all series.

    Of duplicate series the first is kept, and of a family its first HELP and TYPE. Empty lines are
    dropped. O(lines).
    """
    families: dict[str, _Family] = {}
    for text in texts:
        _take(text, families)
    return "".join(line for name, family in families.items() for line in family.lines(name))


def with_aliases(text: str, names: Mapping[str, str]) -> str:
    """The text, followed by the families in `names` under their other names.

    Names omit the suffixes `_total`, `_bucket`, `_sum` and `_count`, which are kept. The text must
    be an output of `merge`.
    """
    added, old, new = [], "", ""
    for line in text.split("\n"):
        if line.startswith("#"):
            mark, kind, family, rest = f"{line} ".split(" ", 3)
            old = family if family in names else family.removesuffix("_total")
            new = names.get(old, "")
            if new:
                added.append(f"{mark} {kind} {new}{family[len(old) :]} {rest[:-1]}\n")
        elif new and line:
            added.append(f"{new}{line[len(old) :]}\n")
    return text + "".join(added)


class _Family:
    """One family's lines, its series by name and labels."""

    __slots__ = ("help", "kind", "series")

    def __init__(self) -> None:
        self.help = self.kind = ""
        self.series: dict[str, str] = {}

    def lines(self, name: str) -> Iterator[str]:
        if self.help:
            yield f"{self.help}\n"
        yield f"{self.kind or f'# TYPE {name} untyped'}\n"
        for series, value in self.series.items():
            yield f"{series} {value}\n"


def _take(text: str, families: dict[str, _Family]) -> None:
    name, family = "", _Family()
    for line in text.split("\n"):
        if line.startswith(("# HELP ", "# TYPE ")):
            _, kind, name, *rest = line.split(" ", 3)
            if not (name and rest):  # neither HELP nor TYPE
                continue
            family = families.setdefault(name, _Family())
            if kind == "HELP":
                family.help = family.help or line
            else:
                family.kind = family.kind or line
        elif line and line[0] != "#":
            series, _, value = line.rpartition(" ")
            if not (name and series.startswith(name)):  # a series without a declared family
                name = series.partition("{")[0]
                family = families.setdefault(name, _Family()) if name else _Family()
            family.series.setdefault(series, value)


def _lines(part: Part) -> Iterator[str]:
    for family in part.registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        yield f"# HELP {name} {family.documentation.translate(_HELP)}"
        yield f"# TYPE {name} {family.type}"
        created = family.name + "_created"
        for sample in family.samples:
            if sample.name != created:
                labels = {**part.labels, **sample.labels}
                pairs = ",".join(f'{key}="{v.translate(_VALUE)}"' for key, v in labels.items())
                value = format_number(sample.value)
                yield f"{sample.name}{{{pairs}}} {value}" if labels else f"{sample.name} {value}"
