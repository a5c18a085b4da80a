"""Exposition: the metrics of a process in Prometheus' text format 0.0.4, and the merged text of
several processes.

The lines of a family are adjacent, under one HELP and one TYPE. There are no `_created` series.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from observability.metrics.lean import format_number

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_VALUE = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP = str.maketrans({"\\": r"\\", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Part:
    """A registry, and labels that are added to all of its series; labels that a series already has
    take precedence."""

    registry: CollectorRegistry
    labels: Mapping[str, str] = field(default_factory=dict)


def expose(parts: Iterable[Part], names: Collection[str] = ()) -> str:
    """The text of a process's metrics, or of the series with these names. O(series); readings are
    taken in the calling thread."""
    return merge("\n".join(_lines(part, names)) for part in parts)


def merge(texts: Iterable[str]) -> str:
    """The texts of several processes as one: each family once, with the series of all processes.

    Keeps the first of duplicate series, and the first HELP and TYPE of a family. Drops empty lines.
    O(lines).
    """
    families: dict[str, _Family] = {}
    for text in texts:
        _add_families(text, families)
    return "".join(line for name, family in families.items() for line in family.lines(name))


def with_aliases(text: str, names: Mapping[str, str]) -> str:
    """The text, followed by copies of the families in `names` (name → alias).

    Names and aliases omit the suffixes `_total`, `_bucket`, `_sum` and `_count`, which are kept.
    The text must be an output of `merge`.
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
    """The lines of one family. `series`: values by name and labels."""

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


def _add_families(text: str, families: dict[str, _Family]) -> None:
    name, family = "", _Family()
    for line in text.split("\n"):
        if line.startswith(("# HELP ", "# TYPE ")):
            _, kind, name, *rest = line.split(" ", 3)
            if not (name and rest):  # malformed
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


def _lines(part: Part, names: Collection[str]) -> Iterator[str]:
    source = part.registry.restricted_registry(names) if names else part.registry
    for family in source.collect():
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
