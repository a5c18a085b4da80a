"""A request's story: what was decided of it and why, as chapters of plain words.

A chapter keeps numbers; its sentence is made when somebody reads it. What repeats is one chapter
with a count and until when. A story is bounded: of a very long one the middle is left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

from services.core import FinishReason, Sla
from services.policies.decision import Reason, Why
from services.verdict import Timeline

MOST_CHAPTERS = 64  # a request preempted ten times has some fifty
FIRST_KEPT = 24  # of a longer one; and the last, as many as there is room for
MOST_NAMES = 3  # of those for whom one was paused


class Kind(StrEnum):
    ARRIVED = "arrived"
    REFUSED = "refused"
    FORECAST = "forecast"
    LINE = "line"
    WAITS = "waits"
    PLACED = "placed"
    RESUMED = "resumed"
    MOVED = "moved"
    ADOPTED = "adopted"
    EXTENDED = "extended"
    STARTED = "started"
    PAUSED = "paused"
    EVICTED = "evicted"
    RETURNED = "returned"
    LOST = "lost"
    SWAPPED_OUT = "swapped out"
    SWAPPED_IN = "swapped in"
    DROPPED = "dropped"
    REJOINED = "rejoined"
    SKIPPED = "skipped"
    FINISHED = "finished"
    STOPPED = "stopped"
    CANCELLED = "cancelled"
    LEFT = "left"
    JUDGED = "judged"


Values = tuple[Any, ...]  # what a kind's sentence below takes


@dataclass(slots=True)
class Chapter:
    """What happened at `at_s`; `times` over, the last at `until_s`, where it went on."""

    at_s: float
    kind: Kind
    values: Values = ()
    times: int = 1
    until_s: float = 0.0

    @property
    def text(self) -> str:
        return SENTENCES[self.kind](*self.values)


class Line(NamedTuple):
    """A chapter as it is told: seconds since the request reached its gateway."""

    at_s: float
    kind: str
    text: str
    times: int = 1
    until_s: float = 0.0


class Story(NamedTuple):
    request_id: str
    live: bool
    lines: tuple[Line, ...]


@dataclass(slots=True, eq=False)
class Tale:
    """A story as it is written. `row` is the board's while the request lives."""

    request_id: str
    link: str
    arrival_s: float
    sla: Sla
    delivered: int = 0
    row: int = -1
    worker: str = ""  # where it was placed last
    forecast: tuple[str, int] = ("", -1)  # source and version of the one told last
    line: Timeline = field(default_factory=lambda: Timeline(0.0))
    chapters: list[Chapter] = field(default_factory=list)
    skipped: int = 0

    def add(self, chapter: Chapter) -> None:
        self.chapters.append(chapter)
        if len(self.chapters) > MOST_CHAPTERS:
            del self.chapters[FIRST_KEPT]
            self.skipped += 1

    def told(self) -> Iterator[Chapter]:
        for number, chapter in enumerate(self.chapters):
            if self.skipped and number == FIRST_KEPT:
                yield Chapter(chapter.at_s, Kind.SKIPPED, (self.skipped,))
            yield chapter

    def story(self, live: bool, chapters: Iterator[Chapter]) -> Story:
        return Story(
            self.request_id,
            live,
            tuple(
                Line(
                    chapter.at_s - self.arrival_s,
                    chapter.kind.value,
                    chapter.text,
                    chapter.times,
                    max(0.0, chapter.until_s - self.arrival_s),
                )
                for chapter in chapters
            ),
        )


# What each kind says


def _arrived(prompt: int, delivered: int, most: int, sla: Sla, left_s: float) -> str:
    budgets = [
        f"{name} {value_s:g} s"
        for name, value_s in (("TTFT", sla.ttft_s), ("TPOT", sla.tpot_s), ("MTPOT", sla.mtpot_s))
        if value_s < inf
    ]
    said = f"arrived with {prompt} prompt tokens, to make {most} at most; SLA {sla.name}"
    if budgets:
        said += f" ({', '.join(budgets)})"
    if left_s < inf:
        said += f"; its deadline is in {left_s:.3g} s"
    if delivered:
        said += f"; submitted again, its client has {delivered} output tokens"
    return said


def _forecast(source: str, version: int, mean: float, median: float, most: float) -> str:
    name = f"{source} v{version}" if version else source
    return (
        f"forecast by {name}: {mean:.0f} output tokens expected, "
        f"half of such answers end by {median:.0f}, nine in ten by {most:.0f}"
    )


def _waits(reason: int, a: float, b: float) -> str:
    return f"waits: {Why(Reason(reason), a, b)}"


def _placed(worker: str, limit: int, why: Why | None) -> str:
    return f"admitted at {worker}, {_limit(limit)}{_because(why)}"


def _resumed(worker: str, limit: int, held: int, why: Why | None) -> str:
    kv = f"{held} tokens of its KV kept" if held else "its KV made anew"
    return f"admitted again at {worker}, {kv}, {_limit(limit)}{_because(why)}"


def _moved(there: str, worker: str, limit: int, why: Why | None) -> str:
    return f"moved from {there} to {worker}, its KV made anew, {_limit(limit)}{_because(why)}"


def _limit(limit: int) -> str:
    return f"to stop at {limit} output tokens"


def _because(why: Why | None) -> str:
    return f" ({why})" if why else ""


def _adopted(worker: str, output: int, runs: bool) -> str:
    doing = "runs" if runs else "rests"
    return f"taken over: it {doing} at {worker} already, with {output} output tokens"


def _paused(worker: str, output: int, others: tuple[str, ...], more: int) -> str:
    said = f"paused at {worker} after {output} output tokens by the plan"
    if others:
        said += f", for {', '.join(others)}" + (f" and {more} more" if more else "")
    return said


def _evicted(worker: str, output: int, held: int, rests: bool) -> str:
    kv = f"{held} tokens of its KV are kept" if rests else "its KV was dropped"
    return f"evicted by {worker} after {output} output tokens: memory ran out; {kv}"


def _finished(
    reason: FinishReason, output: int, preemptions: int, queued_s: float, message: str
) -> str:
    often = f"preempted {preemptions} times, " if preemptions else ""
    said = f"ended ({reason.value}) with {output} output tokens, {often}queued {queued_s:.3f} s"
    return f"{said}: {message}" if message else said


SENTENCES: dict[Kind, Callable[..., str]] = {
    Kind.ARRIVED: _arrived,
    Kind.REFUSED: lambda message: f"refused: {message}",
    Kind.FORECAST: _forecast,
    Kind.LINE: lambda place, of: f"stands at place {place} of {of} in the line",
    Kind.WAITS: _waits,
    Kind.PLACED: _placed,
    Kind.RESUMED: _resumed,
    Kind.MOVED: _moved,
    Kind.ADOPTED: _adopted,
    Kind.EXTENDED: lambda limit: f"its slice was extended, {_limit(limit)}",
    Kind.STARTED: lambda output, worker: f"{worker} reports its first tokens: {output}",
    Kind.PAUSED: _paused,
    Kind.EVICTED: _evicted,
    Kind.RETURNED: lambda worker, output: (
        f"its slice at {worker} is made, {output} output tokens so far: back in the line"
    ),
    Kind.LOST: lambda worker: f"lost with {worker}: waits again, its KV is gone",
    Kind.SWAPPED_OUT: lambda held: f"{held} tokens of its KV went to host memory",
    Kind.SWAPPED_IN: lambda held: f"{held} tokens of its KV are back on the device",
    Kind.DROPPED: lambda: "its KV was dropped, to be made anew",
    Kind.REJOINED: lambda: "its gateway came back to it on a new stream",
    Kind.SKIPPED: lambda count: f"… {count} chapters are left out here",
    Kind.FINISHED: _finished,
    Kind.STOPPED: lambda output: f"ended by a stop string with {output} output tokens",
    Kind.CANCELLED: lambda output: f"cancelled with {output} output tokens",
    Kind.LEFT: lambda: "its gateway's stream ended, and it with it",
    Kind.JUDGED: lambda text: text,
}
