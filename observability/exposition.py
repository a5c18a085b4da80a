"""Exposition: the metrics of a process in Prometheus' text format 0.0.4.

The lines of a family are adjacent, under one HELP and one TYPE. There are no `_created` series.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from observability.merging import Blocks, merge
from observability.metrics.rows import FamilyText, rows_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Part:
    """A registry, and labels that are added to all of its series; labels that a series already has
    take precedence."""

    registry: CollectorRegistry
    labels: Mapping[str, str] = field(default_factory=dict)


class Exposition:
    """The metrics of a process. Keeps the text of what has not changed: reading it again costs
    little, and values are always current. Readings are taken in the calling thread."""

    def __init__(self, parts: Iterable[Part]):
        self._parts = [_PartText(part) for part in parts]

    def text(self, names: Collection[str] = ()) -> str:
        """The text of all metrics, or of the series with these names. O(families + changed series),
        O(lines) with several parts."""
        texts = ["".join(each.values()) for each in self.blocks(names)]
        return texts[0] if len(texts) == 1 else merge(texts)

    def blocks(self, names: Collection[str] = ()) -> list[Blocks]:
        """The families of each part, restricted to the series with these names."""
        return [part.blocks(names) for part in self._parts]


def expose(parts: Iterable[Part], names: Collection[str] = ()) -> str:
    """The text of a process's metrics, once. O(series)."""
    return Exposition(parts).text(names)


class _PartText:
    """The families of a registry."""

    def __init__(self, part: Part):
        self._part = part
        self._families: dict[Collector, FamilyText] = {}

    def blocks(self, names: Collection[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for collector in self._collectors(names):
            family = self._families.get(collector)
            if family is None:
                family = self._families[collector] = FamilyText(
                    rows_of(collector), self._part.labels
                )
            if text := family.text():
                found[family.name] = _restrict(text, names) if names else text
        return {name: text for name, text in found.items() if text}

    def _collectors(self, names: Collection[str]) -> list[Collector]:
        """Those of the series with these names, or all. The library has no public list of them."""
        registry = self._part.registry
        if not names:
            return list(registry._collector_to_names)
        known = registry._names_to_collectors  # with all suffixes
        return list(dict.fromkeys(known[name] for name in sorted(names) if name in known))


def _restrict(text: str, names: Collection[str]) -> str:
    """A family's series with these names; empty without one."""
    head, kind, *lines = text.split("\n")
    kept = [line for line in lines if line.partition("{")[0].partition(" ")[0] in names]
    return "\n".join((head, kind, *kept, "")) if kept else ""
