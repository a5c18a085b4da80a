"""A request's story: what the scheduler decided about it and why, as chapters in plain words.

A chapter stores numbers; its sentence is made when it is read. A condition that repeats is one
chapter with a count and an end time. Stories are bounded: a long one loses its middle.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from services.core import Request
from services.forecast import Forecast
from services.policies.decision import explain
from services.scheduler.core.phases import Transition

MAX_CHAPTERS = 64  # a request preempted ten times has about fifty
FIRST_KEPT = 24  # of a longer story; the rest of the room is for its end
MAX_NAMES = 3  # requests named in the chapter of a pause
MIN_GATEWAY_S = 1e-3  # shorter times at the gateway get no chapter


class Kind:
    """The word for what happened. Not an enum: reading a member costs as much as a chapter."""

    RECEIVED = "received"
    ARRIVED = "arrived"
    REFUSED = "refused"
    FORECAST = "forecast"
    POSITION = "position"
    WAITS = "waits"
    PLACED = "placed"
    RESUMED = "resumed"
    MOVED = "moved"
    ADOPTED = "adopted"
    EXTENDED = "extended"
    STARTED = "started"
    PAUSED = "paused"
    EVICTED = "evicted"
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
Values = tuple[Any, ...]  # arguments of the kind's sentence below


class Chapter(NamedTuple):
    """What happened at `at_s`; `times` over, the last at `until_s`, if it repeated."""

    at_s: float
    kind: str
    values: Values = ()
    times: int = 1
    until_s: float = 0.0

    @property
    def text(self) -> str:
        return SENTENCES[self.kind](*self.values)


Noted = tuple[float, str, Values] | tuple[float, str, Values, int, float]
"""A stored chapter. A plain tuple: a named one costs ten times as much."""
Waits = tuple[float, int, tuple[int, float, float]]
"""Start of a wait, rounds before it, and its reason with its numbers at the start."""


class StoryLine(NamedTuple):
    """A chapter as it is printed: seconds since the request reached its gateway."""

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
    watched: bool = False  # whether its KV is followed
    worker: str = ""  # the last worker that had it
    forecast: tuple[str, int] = ("", -1)  # source and version of the last forecast
    waits: Waits | None = None  # repeats, not a chapter yet
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
        if len(chapters) > MAX_CHAPTERS:
            del chapters[FIRST_KEPT]
            self.skipped += 1

    def written(self) -> Iterator[Chapter]:
        for number, noted in enumerate(self.chapters):
            if self.skipped and number == FIRST_KEPT:
                yield Chapter(noted[0], Kind.SKIPPED, (self.skipped,))
            yield Chapter(*noted)

    def story(self, live: bool, chapters: Iterator[Chapter]) -> Story:
        """These chapters, ordered by time, in seconds since the request's arrival."""
        arrival_s = self.request.arrival_s
        lines = [
            StoryLine(
                chapter.at_s - arrival_s,
                chapter.kind,
                chapter.text,
                chapter.times,
                max(0.0, chapter.until_s - arrival_s),
            )
            for chapter in chapters
        ]
        return Story(self.request_id, live, tuple(sorted(lines, key=lambda line: line.at_s)))


def open_story(request: Request, link: str, now: float, others: int) -> OpenStory:
    """The story of a request that reaches the scheduler now, while `others` wait."""
    chapters: list[Noted] = [(now, Kind.ARRIVED, (request, now, others))]
    if now - request.arrival_s >= MIN_GATEWAY_S:
        chapters.insert(0, (request.arrival_s, Kind.RECEIVED, (request, now)))
    return OpenStory(request, link, chapters)


# The sentence of each kind


def _received(request: Request, now: float) -> str:
    age_s = now - request.arrival_s
    if request.delivered_tokens or request.worker_id:
        return f"received by the gateway, which submitted it again after {age_s:.3f} s"
    return (
        f"received by the gateway; {age_s:.3f} s for parsing, tokenization and its queue "
        "until it reached the scheduler"
    )


def _arrived(request: Request, now: float, others: int) -> str:
    sla = request.sla
    budgets = [
        f"{name} {value_s:g} s"
        for name, value_s in (("TTFT", sla.ttft_s), ("TPOT", sla.tpot_s), ("MTPOT", sla.mtpot_s))
        if value_s < inf
    ]
    parts = [
        f"arrived with {request.prompt_tokens} prompt tokens and max_tokens {request.max_tokens}",
        f"SLA {sla.name}" + (f" ({', '.join(budgets)})" if budgets else ""),
    ]
    if others:
        parts.append(f"{others} other requests wait" if others > 1 else "1 other request waits")
    if request.deadline_s < inf:
        parts.append(f"deadline in {request.deadline_s - now:.3g} s")
    if request.min_tokens > 1:
        parts.append(f"at least {request.min_tokens} output tokens")
    if request.delivered_tokens:
        parts.append(f"submitted again after {request.delivered_tokens} delivered output tokens")
    return "; ".join(parts)


def _forecast(forecast: Forecast, mean: float, cap: int) -> str:
    """Quantiles of the whole answer; `mean` is conditioned on the output at that time."""
    name = f"{forecast.source} v{forecast.version}" if forecast.version else forecast.source
    median, high = (min(cap, forecast.quantile(q)) for q in (0.5, 0.9))
    return (
        f"forecast by {name}: {mean:.0f} output tokens expected, "
        f"median {median:.0f}, 90th percentile {high:.0f}"
    )


def _waits(reason: int, first: float, second: float) -> str:
    return f"waits: {explain(reason, first, second)}"


def _placed(worker: str, limit: int, numbers: Numbers) -> str:
    return f"admitted at {worker}, {_limit(limit)}{_expected_kv(numbers)}"


def _resumed(worker: str, limit: int, held: int, numbers: Numbers) -> str:
    kv = f"{held} KV tokens kept" if held else "KV recomputed"
    return f"resumed at {worker}, {kv}, {_limit(limit)}{_expected_kv(numbers)}"


def _moved(source: str, worker: str, limit: int, numbers: Numbers) -> str:
    return f"moved from {source} to {worker}, KV recomputed, {_limit(limit)}{_expected_kv(numbers)}"


def _limit(limit: int) -> str:
    return f"budget {limit} output tokens"


def _expected_kv(numbers: Numbers) -> str:
    if numbers is None or not numbers[1]:
        return ""
    return f": forecast peak {numbers[0]:.0f} KV tokens of {numbers[1]:.0f}"


def _adopted(worker: str, output: int, runs: bool) -> str:
    state = "runs" if runs else "is paused"
    return f"adopted: it {state} at {worker} with {output} output tokens"


def _paused(worker: str, output: int, others: tuple[str, ...], more: int) -> str:
    text = f"paused at {worker} by the plan after {output} output tokens"
    if others:
        text += f", for {', '.join(others)}" + (f" and {more} more" if more else "")
    return text


def _evicted(worker: str, output: int, held: int) -> str:
    kv = f"{held} KV tokens kept" if held else "KV dropped"
    return f"evicted by {worker} after {output} output tokens: memory ran out; {kv}"


def _finished(end: Transition) -> str:
    text = f"ended ({end.reason}) with {end.output_tokens} output tokens, "
    if end.preemptions:
        text += (
            "preempted once, " if end.preemptions == 1 else f"preempted {end.preemptions} times, "
        )
    text += f"queued {end.queued_s:.3f} s"
    return f"{text}: {end.message}" if end.message else text


SENTENCES: dict[str, Callable[..., str]] = {
    Kind.RECEIVED: _received,
    Kind.ARRIVED: _arrived,
    Kind.REFUSED: lambda message: f"refused: {message}",
    Kind.FORECAST: _forecast,
    Kind.POSITION: lambda position, count: f"position {position} of {count} in the queue",
    Kind.WAITS: _waits,
    Kind.PLACED: _placed,
    Kind.RESUMED: _resumed,
    Kind.MOVED: _moved,
    Kind.ADOPTED: _adopted,
    Kind.EXTENDED: lambda limit: f"slice extended, {_limit(limit)}",
    Kind.STARTED: lambda output, worker: f"{worker} reports the first output tokens: {output}",
    Kind.PAUSED: _paused,
    Kind.EVICTED: _evicted,
    Kind.LOST: lambda worker: f"worker {worker} was lost; the request waits again without KV",
    Kind.SWAPPED_OUT: lambda held: f"{held} KV tokens moved to host memory",
    Kind.SWAPPED_IN: lambda held: f"{held} KV tokens moved back to the device",
    Kind.DROPPED: lambda: "KV dropped; it will be recomputed",
    Kind.REJOINED: lambda: "the gateway reconnected and continues the request",
    Kind.SKIPPED: lambda count: f"… {count} chapters omitted",
    Kind.FINISHED: _finished,
    Kind.STOPPED: lambda output: f"ended by a stop string with {output} output tokens",
    Kind.CANCELLED: lambda output: f"cancelled with {output} output tokens",
    Kind.LEFT: lambda: "ended because the gateway's stream ended",
}
