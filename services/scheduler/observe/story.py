"""A request's story: what was decided of it and why, as chapters of plain words.

A chapter keeps numbers; its sentence is made when somebody reads it. What repeats is one chapter
with a count and until when. A story is bounded: of a very long one the middle is left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from services.core import Request
from services.forecast import Forecast
from services.policies.decision import explain
from services.scheduler.core.events import Finish

MOST_CHAPTERS = 64  # a request preempted ten times has some fifty
FIRST_KEPT = 24  # of a longer one; and the last, as many as there is room for
MOST_NAMES = 3  # of those for whom one was paused


class Kind:
    """The word for what happened. No enum: reading a member of one costs as much as a chapter."""

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


Numbers = tuple[float, float] | None
Values = tuple[Any, ...]  # what a kind's sentence below takes


class Chapter(NamedTuple):
    """What happened at `at_s`; `times` over, the last at `until_s`, where it went on."""

    at_s: float
    kind: str
    values: Values = ()
    times: int = 1
    until_s: float = 0.0

    @property
    def text(self) -> str:
        return SENTENCES[self.kind](*self.values)


Noted = tuple[float, str, Values] | tuple[float, str, Values, int, float]
"""A chapter as it is kept, in a plain tuple: a named one costs ten times that."""
Waits = tuple[float, int, tuple[int, float, float]]
"""Since when one waits, how many rounds there had been, the reason, and its numbers at first."""


class StoryLine(NamedTuple):
    """A chapter as it is told: seconds since the request reached its gateway."""

    at_s: float
    kind: str
    text: str
    times: int = 1
    until_s: float = 0.0


class Story(NamedTuple):
    request_id: str
    live: bool
    lines: tuple[StoryLine, ...]


@dataclass(slots=True, eq=False)
class OpenStory:
    """A story as it is written. `row` is the board's while the request lives."""

    request: Request
    link: str
    chapters: list[Noted]
    row: int = -1
    runs: bool = False
    watched: bool = False  # where its KV is
    worker: str = ""  # where it was placed last
    forecast: tuple[str, int] = ("", -1)  # source and version of the one told last
    waits: Waits | None = None  # what goes on, and is no chapter yet
    skipped: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def last_s(self) -> float:
        return self.chapters[-1][0]

    def add(self, noted: Noted) -> None:
        chapters = self.chapters
        chapters.append(noted)
        if len(chapters) > MOST_CHAPTERS:
            del chapters[FIRST_KEPT]
            self.skipped += 1

    def told(self) -> Iterator[Chapter]:
        for number, noted in enumerate(self.chapters):
            if self.skipped and number == FIRST_KEPT:
                yield Chapter(noted[0], Kind.SKIPPED, (self.skipped,))
            yield Chapter(*noted)

    def story(self, live: bool, chapters: Iterator[Chapter]) -> Story:
        arrival_s = self.request.arrival_s
        return Story(
            self.request_id,
            live,
            tuple(
                StoryLine(
                    chapter.at_s - arrival_s,
                    chapter.kind,
                    chapter.text,
                    chapter.times,
                    max(0.0, chapter.until_s - arrival_s),
                )
                for chapter in chapters
            ),
        )


# What each kind says


def _arrived(request: Request, now: float, others: int) -> str:
    sla, left_s = request.sla, request.deadline_s - now
    budgets = [
        f"{name} {value_s:g} s"
        for name, value_s in (("TTFT", sla.ttft_s), ("TPOT", sla.tpot_s), ("MTPOT", sla.mtpot_s))
        if value_s < inf
    ]
    most = request.max_tokens
    said = f"arrived with {request.prompt_tokens} prompt tokens, to make {most} at most"
    said += f"; SLA {sla.name}"
    if budgets:
        said += f" ({', '.join(budgets)})"
    if others:
        said += f"; {others} others wait" if others > 1 else "; 1 other waits"
    if left_s < inf:
        said += f"; its deadline is in {left_s:.3g} s"
    if request.delivered_tokens:
        said += f"; submitted again, its client has {request.delivered_tokens} output tokens"
    return said


def _forecast(forecast: Forecast, mean: float, cap: int) -> str:
    """Quantiles of the whole answer, `mean` given what was made of it by then."""
    name = f"{forecast.source} v{forecast.version}" if forecast.version else forecast.source
    half, most = (min(cap, forecast.quantile(q)) for q in (0.5, 0.9))
    return (
        f"forecast by {name}: {mean:.0f} output tokens expected, "
        f"half of such answers end by {half:.0f}, nine in ten by {most:.0f}"
    )


def _waits(reason: int, a: float, b: float) -> str:
    return f"waits: {explain(reason, a, b)}"


def _placed(worker: str, limit: int, numbers: Numbers) -> str:
    return f"admitted at {worker}, {_limit(limit)}{_foreseen(numbers)}"


def _resumed(worker: str, limit: int, held: int, numbers: Numbers) -> str:
    kv = f"{held} tokens of its KV kept" if held else "its KV made anew"
    return f"admitted again at {worker}, {kv}, {_limit(limit)}{_foreseen(numbers)}"


def _moved(there: str, worker: str, limit: int, numbers: Numbers) -> str:
    return f"moved from {there} to {worker}, its KV made anew, {_limit(limit)}{_foreseen(numbers)}"


def _limit(limit: int) -> str:
    return f"to stop at {limit} output tokens"


def _foreseen(numbers: Numbers) -> str:
    """Of an admission, where its form has any."""
    if numbers is None or not numbers[1]:
        return ""
    return f": {numbers[0]:.0f} tokens of KV foreseen with it, {numbers[1]:.0f} may be planned"


def _adopted(worker: str, output: int, runs: bool) -> str:
    doing = "runs" if runs else "rests"
    return f"taken over: it {doing} at {worker} already, with {output} output tokens"


def _paused(worker: str, output: int, others: tuple[str, ...], more: int) -> str:
    said = f"paused at {worker} after {output} output tokens by the plan"
    if others:
        said += f", for {', '.join(others)}" + (f" and {more} more" if more else "")
    return said


def _evicted(worker: str, output: int, held: int) -> str:
    kv = f"{held} tokens of its KV are kept" if held else "its KV was dropped"
    return f"evicted by {worker} after {output} output tokens: memory ran out; {kv}"


def _finished(end: Finish) -> str:
    said = f"ended ({end.reason.value}) with {end.output_tokens} output tokens, "
    if end.preemptions:
        said += (
            "preempted once, " if end.preemptions == 1 else f"preempted {end.preemptions} times, "
        )
    said += f"queued {end.queued_s:.3f} s"
    return f"{said}: {end.message}" if end.message else said


SENTENCES: dict[str, Callable[..., str]] = {
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
}
