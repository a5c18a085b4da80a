"""Answers at once by what is known without reading; better ones when the prompt has been read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.core import Outcome
from services.forecast import Forecast
from services.lengths import LEARNABLE_REASONS
from services.predictor.blend.guard import Foreteller, Made
from services.predictor.encoder.extract import Extracts
from services.predictor.encoder.packing import pack
from services.predictor.interface import Features, Prompt, Query
from services.predictor.serving.forecast_cache import Remembered, Seen
from services.predictor.serving.newest_first_queue import Newest
from services.predictor.serving.pending import Pending, Waiting

REMEMBERED, WORDS, PLAIN = "remembered", "words", "plain"  # stages that answer at once


@dataclass(frozen=True, slots=True)
class Late:
    """A request that ended before its prompt was read: what is left of it to learn from."""

    outcome: Outcome
    waiting: Waiting
    finished_at_s: float


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to foretell; with `late`, one that is only to be learnt from."""

    request_id: str
    query: Query
    at_s: float
    late: Late | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What came of a prompt: its features, also as the log keeps them, and the model's forecast.

    `missed` says what failed, empty where nothing did; without a forecast and nothing missed, no
    model is ready yet.
    """

    features: Features | None = None
    packed: bytes = b""
    by_model: Forecast | None = None
    missed: str = ""


@dataclass(frozen=True, slots=True)
class Read:
    """What reading a batch has changed: better forecasts of requests that still wait, since when
    they waited, features of those that ended, and reasons of what was missed. How many prompts
    were read of requests that waited when it began, and how many of others."""

    waiting: int
    ended: int
    better: tuple[tuple[str, Forecast], ...]
    since_s: tuple[float, ...]
    late: tuple[tuple[Late, bytes], ...]
    missed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What is given at once, and the stage it came from."""

    made: Made
    stage: str


class Cascade:
    """Requests that wait for their outcome, those whose prompts wait to be read, what was read.

    keeps_text: whether prompts go into the log. Prompts to be read are kept until they are, or
    fall out. reads: whether there is anybody to read them. at_once: reads them before they are
    answered, where that costs next to nothing; nothing is left to be read then.
    """

    def __init__(
        self,
        foreteller: Foreteller,
        pending: Pending,
        remembered: Remembered,
        unread_max: int,
        reads: bool,
        keeps_text: bool,
        changed: Callable[[Read], None],
        at_once: Extracts | None = None,
    ):
        self.unread: Newest[Asked] = Newest(unread_max)
        self.ended: Newest[Asked] = Newest(unread_max)
        self._foreteller = foreteller
        self._pending = pending
        self._remembered = remembered
        self._reads, self._keeps_text = reads, keeps_text
        self._changed = changed
        self._at_once = at_once
        self._under_way: dict[str, Late | None] = {}

    def answer(self, batch: Sequence[Asked]) -> list[Answer]:
        """One each, in order. What could be better is left to be read."""
        if self._at_once:
            return self._read_and_tell(batch, self._at_once)
        seen = [self._seen(asked.query) for asked in batch]
        others = iter(
            self._foreteller.forecast(
                [asked.query for asked, s in zip(batch, seen, strict=True) if not s]
            )
        )
        return [
            self._recalled(asked, s) if s else self._told(asked, next(others))
            for asked, s in zip(batch, seen, strict=True)
        ]

    def end(self, outcome: Outcome, waiting: Waiting | None, finished_at_s: float) -> None:
        """Nobody waits for its forecast any more. If it is fit to learn from it is read all the
        same, after all those that somebody waits for."""
        name = outcome.request_id
        fit = outcome.reason in LEARNABLE_REASONS and outcome.output_tokens > 0
        late = Late(outcome, waiting, finished_at_s) if waiting and fit else None
        if name in self._under_way:
            self._under_way[name] = late
        elif (asked := self.unread.pop(name)) and late:
            self.ended.put(name, replace(asked, late=late))

    def take(self, most: int) -> list[Asked]:
        """What to read next: the newest that wait, else the newest that ended."""
        batch = self.unread.take(most) or self.ended.take(most)
        self._under_way = {asked.request_id: asked.late for asked in batch}
        return batch

    def read(self, batch: Sequence[Asked], readings: Sequence[Reading]) -> None:
        """What came of the batch last taken."""
        better: list[tuple[str, Forecast]] = []
        since_s: list[float] = []
        late: list[tuple[Late, bytes]] = []
        for asked, reading in zip(batch, readings, strict=True):
            ended = self._under_way.pop(asked.request_id)
            if reading.by_model:
                seen = Seen(reading.by_model, reading.packed, self._foreteller.edition)
                self._remembered.put(asked.query, seen)
            if ended and reading.packed:
                late.append((ended, reading.packed))
            elif (made := self._improved(asked, reading)) and made.given is made.by_model:
                better.append((asked.request_id, made.given))
                since_s.append(asked.at_s)
        missed = tuple(reading.missed for reading in readings if reading.missed)
        ended_before = sum(asked.late is not None for asked in batch)
        self._changed(
            Read(
                len(batch) - ended_before,
                ended_before,
                tuple(better),
                tuple(since_s),
                tuple(late),
                missed,
            )
        )

    def _read_and_tell(self, batch: Sequence[Asked], reader: Extracts) -> list[Answer]:
        rows = [i for i, asked in enumerate(batch) if asked.query.prompt]
        features = reader.extract([p for asked in batch if (p := asked.query.prompt)])
        queries = [asked.query for asked in batch]
        packed = [b""] * len(batch)
        for i, read in zip(rows, features, strict=True):
            queries[i], packed[i] = replace(queries[i], features=read), pack(read)
        made = self._foreteller.forecast(queries)
        for asked, each, bytes_ in zip(batch, made, packed, strict=True):
            self._await(asked, Waiting(each, bytes_, self._kept(asked)))
        return [Answer(each, WORDS if each.by_model else PLAIN) for each in made]

    def _seen(self, query: Query) -> Seen | None:
        return self._remembered.get(query) if self._reads else None

    def _recalled(self, asked: Asked, seen: Seen) -> Answer:
        """As it was foretold before; read again where the models would say otherwise now."""
        [by_history] = self._foreteller.by_history([asked.query])
        made = self._foreteller.choose(seen.by_model, by_history)
        if seen.edition == self._foreteller.edition:
            self._await(asked, Waiting(made, seen.packed, self._kept(asked)))
        else:
            self._await(asked, Waiting(made, b"", self._kept(asked)))
            self._leave(asked)
        return Answer(made, REMEMBERED)

    def _told(self, asked: Asked, made: Made) -> Answer:
        self._await(asked, Waiting(made, b"", self._kept(asked)))
        self._leave(asked)
        return Answer(made, WORDS if made.by_model else PLAIN)

    def _await(self, asked: Asked, waiting: Waiting) -> None:
        self._pending.put(asked.request_id, waiting)

    def _leave(self, asked: Asked) -> None:
        """To be read, if there is text, and it was not read for this request before."""
        name = asked.request_id
        waiting = self._pending.get(name)
        if (
            self._reads
            and asked.query.prompt
            and waiting
            and not waiting.packed
            and name not in self._under_way
        ):
            self.unread.put(name, asked)

    def _improved(self, asked: Asked, reading: Reading) -> Made | None:
        waiting = self._pending.get(asked.request_id)
        if waiting is None or not reading.packed:
            return None
        made = waiting.made
        if reading.by_model:
            made = self._foreteller.choose(reading.by_model, made.by_history)
        self._pending.amend(asked.request_id, replace(waiting, made=made, packed=reading.packed))
        return made if reading.by_model else None

    def _kept(self, asked: Asked) -> Prompt | None:
        return asked.query.prompt if self._keeps_text else None
