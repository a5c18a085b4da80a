"""One worker on which every step takes a second and each running request generates one token per
step. Each step runs one real round."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from services.costs import CostModel
from services.forecast import MAX_POINTS, Floats, Forecast, Ints, certain
from services.forecasttable import ForecastTable
from services.policies.decide import decide
from services.policies.memory import PolicyMemory
from services.policies.order.pace import Spread
from services.policies.preset import choose
from services.policies.snapshot import NOWHERE, Snapshot
from tests.policies.made_snapshots import jobs, node

SECOND = CostModel(1.0, 0.0, 0.0, 0.0)


def spread_of(*columns: Sequence[float] | Floats) -> Spread:
    """The spread of one row with these lengths, seconds and masses, at most MAX_POINTS."""
    ends = (0, MAX_POINTS - len(columns[0]))
    lengths, seconds = (
        np.pad(np.array(each, float), ends, "edge")[:, None] for each in columns[:2]
    )
    masses = np.pad(np.array(columns[2], float), ends)[:, None]

    def spread(_: Ints, begin: int, count: int) -> tuple[Floats, Floats, Floats]:
        part = slice(begin, begin + count)
        return lengths[part], seconds[part], masses[part]

    return spread


@dataclass
class Job:
    """A request that generates `length` tokens; its forecast may differ."""

    name: str
    length: int
    forecast: Forecast
    arrival_s: float = 0.0
    serial: int = 0
    which: int = 0
    output: int = 0
    admitted: int = 0
    runs: bool = False
    since_s: float = 0.0


class World:
    """`ran` lists the names of the requests that ran in each step."""

    def __init__(self, preset: str, places: int = 1, **cells: Any):
        self.preset = choose(preset, cells)
        self.worker = replace(node(kv_tokens=10_000, places=places), cost=SECOND)
        self.forecasts = ForecastTable()
        self.memory = PolicyMemory()
        self.now, self.round, self.ran = 0.0, 0, list[set[str]]()
        self.rows: list[Job | None] = []
        self.ended: dict[str, float] = {}
        self._serial = 0

    def submit(self, name: str, length: int, forecast: Forecast | None = None) -> Job:
        """Submit a request now; the forecast defaults to the actual length."""
        self._serial += 1
        job = Job(name, length, forecast or certain(length), self.now, self._serial)
        job.which, job.since_s = self.forecasts.intern(job.forecast), self.now
        free = self.rows.index(None) if None in self.rows else len(self.rows)
        self.rows[free : free + 1] = [job]
        return job

    def snapshot(self) -> Snapshot:
        made = [job or Job("", 1, certain(1)) for job in self.rows]
        live = np.array([job is not None for job in self.rows], bool)
        runs = np.array([job.runs for job in made], bool)
        output = np.array([job.output for job in made], np.int64)
        cap = np.array([job.forecast.max_tokens for job in made], np.int64)
        which = np.array([job.which for job in made], np.int64)
        started = runs | (output > 0)
        of = jobs(
            len(made),
            serial=[job.serial for job in made],
            home=np.where(started, self.worker.number, NOWHERE),
            output=output,
            held=np.where(output > 0, 10 + output, 0),
            cap=cap,
            limit=np.where(runs, cap, 0),
            admitted=[job.admitted for job in made],
            forecast=which,
            total=self.forecasts.mean(which, output, cap),
            arrival_s=[job.arrival_s for job in made],
            since_s=[job.since_s for job in made],
        )
        queued, running = np.flatnonzero(live & ~runs), np.flatnonzero(live & runs)
        return Snapshot(self.now, of, queued, running, (self.worker,), self.forecasts)

    def step(self) -> None:
        """Run a round and one second of its decision."""
        self.round += 1
        rng = np.random.default_rng(0)
        decision = decide(self.snapshot(), self.preset, self.memory, rng, self.round)
        self.memory = decision.memory
        (share,) = decision.workers
        for row in share.pause.tolist():
            job = self.at(row)
            job.runs, job.since_s = False, self.now
        for row in share.run.tolist():
            job = self.at(row)
            job.runs, job.admitted = True, job.admitted if job.runs else self.round
        self.now += 1
        self.ran.append(set())
        for row, each in enumerate(self.rows):
            if each is not None and each.runs:
                self.ran[-1].add(each.name)
                each.output += 1
                if each.output >= each.length:
                    self.ended[each.name] = self.now
                    self.forecasts.release(each.which)
                    self.rows[row] = None

    def at(self, row: int) -> Job:
        job = self.rows[row]
        assert job is not None
        return job

    def go(self, steps: int, before: Callable[[int], None] | None = None) -> None:
        for step in range(steps):
            if before:
                before(step)
            self.step()

    def turns(self) -> str:
        """The requests that ran, one word per step; '-' for an idle step."""
        return " ".join("".join(sorted(names)) or "-" for names in self.ran)


def stream(world: World, every: int, length: int) -> Callable[[int], None]:
    """Submit a request of this length every `every` steps."""

    def before(step: int) -> None:
        if step % every == 0:
            world.submit(f"s{step}", length)

    return before


def a_turn_later(
    snapshot: Snapshot,
    number: int,
    rng: np.random.Generator,
    most_tokens: int,
    waits_s: Sequence[float],
) -> Snapshot:
    """Return a random successor of the snapshot: some rows have new requests, some have up to
    `most_tokens` more tokens, and some lost their KV."""
    old = snapshot.jobs
    count = len(old)
    anew = rng.random(count) < 0.1
    output = np.where(
        rng.random(count) < 0.5, old.output, old.output + rng.integers(0, most_tokens)
    )
    now = snapshot.now + float(rng.choice(waits_s))
    made = replace(
        old,
        serial=np.where(anew, 100 * number + np.arange(count), old.serial),
        output=output,
        held=np.where(rng.random(count) < 0.5, old.held, old.prompt + output),
        since_s=np.where(anew, now, old.since_s),
    )
    return replace(snapshot, now=now, jobs=made)
