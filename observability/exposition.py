"""Exposition: what a process has counted as Prometheus reads it, and several processes' as one.

Counters, gauges and histograms, as the catalogue has them; no `_created` series. A family's lines
stand together under one HELP and one TYPE, in text format 0.0.4.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from observability.metrics.lean import spelled

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_VALUE = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Part:
    """A registry, and the labels that all of its series get; a series' own go before them."""

    registry: CollectorRegistry
    labels: Mapping[str, str] = field(default_factory=dict)


def expose(parts: Iterable[Part]) -> str:
    """All that the parts of one process count. O(series); gauges are read where it is called."""
    return merge("\n".join(_lines(part)) for part in parts)


def merge(texts: Iterable[str]) -> str:
    """Several processes' texts as one: a family once, with everybody's series in it.

    Of a series that two have the first is kept, and of a family its first HELP and TYPE. Lines that
    say nothing are left out. O(lines).
    """
    families: dict[str, _Family] = {}
    for text in texts:
        _take(text, families)
    return "".join(line for name, family in families.items() for line in family.lines(name))


def with_aliases(text: str, names: Mapping[str, str]) -> str:
    """The text, and behind it the families that `names` has, once more under the name there.

    Names are of series without what their kind adds: `_total`, `_bucket`, `_sum` and `_count` are
    kept. The text must be as `merge` makes it.
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
            if not (name and rest):  # of nothing, or says nothing
                continue
            family = families.setdefault(name, _Family())
            if kind == "HELP":
                family.help = family.help or line
            else:
                family.kind = family.kind or line
        elif line and line[0] != "#":
            series, _, value = line.rpartition(" ")
            if not (name and series.startswith(name)):  # nobody of ours: a family of its own
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
                told = ",".join(f'{key}="{v.translate(_VALUE)}"' for key, v in labels.items())
                value = spelled(sample.value)
                yield f"{sample.name}{{{told}}} {value}" if told else f"{sample.name} {value}"
