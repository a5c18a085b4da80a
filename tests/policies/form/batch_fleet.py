"""Workers that generate one token per tick, for tests of the batch arrangement over several rounds.
They execute decisions and check that each instruction is valid."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.forecast import certain
from services.policies.decide import decide
from services.policies.decision import Decision
from services.policies.memory import PolicyMemory
from services.policies.preset import choose
from services.policies.snapshot import NOWHERE, RequestColumns, Snapshot, WorkerSnapshot
from tests.policies.made_snapshots import jobs, table


@dataclass
class Asked:
    """A request: `length` is its actual output length, `foreseen` the forecast one."""

    prompt: int
    length: int
    cap: int
    foreseen: int
    arrival_s: float
    output: int = 0
    limit: int = 0
    home: int = NOWHERE
    runs: bool = False
    over: bool = False
    since_s: float = 0.0
    evictions: int = 0
    preemptions: int = 0


@dataclass(frozen=True)
class Begun:
    """A batch at its start. Of each member: the prefilled tokens (`lengths`), and the output that
    its limit allows (`max_output`) and that is expected (`expected`)."""

    now: float
    worker: int
    rows: tuple[int, ...]
    limits: tuple[int, ...]
    lengths: tuple[int, ...]
    max_output: tuple[int, ...]
    expected: tuple[int, ...]

    def tokens(self, max_output: tuple[int, ...], block: int) -> int:
        """KV tokens of the batch, padded to its longest member."""
        return len(self.rows) * -(-(max(self.lengths) + max(max_output)) // block) * block


@dataclass
class Fleet:
    """`reported` lists the batches in the order of their start."""

    preset: str
    workers: tuple[WorkerSnapshot, ...]
    overrides: Mapping[str, object] = field(default_factory=dict)
    tick_s: float = 1.0
    now: float = 0.0
    asked: list[Asked] = field(default_factory=list)
    reported: list[Begun] = field(default_factory=list)
    memory: PolicyMemory = field(default_factory=PolicyMemory)
    decision: Decision = field(default_factory=lambda: Decision(0))

    def __post_init__(self) -> None:
        self.row = choose(self.preset, self.overrides)
        self.rounds = 0

    def ask(
        self, *requests: tuple[int, int], cap: int = 1_000, foreseen: int | None = None
    ) -> None:
        """Submit a request for each (prompt, length); the forecast is exact unless `foreseen` is
        given."""
        for prompt, length in requests:
            expected = length if foreseen is None else foreseen
            one = Asked(prompt, length, max(cap, length), expected, self.now, since_s=self.now)
            self.asked.append(one)

    def jobs(self) -> RequestColumns:
        left = self.asked
        total = np.array([max(each.foreseen, each.output) for each in left], float)
        columns = ("prompt", "output", "cap", "limit", "home", "arrival_s", "since_s")
        return jobs(
            len(left),
            **{name: [getattr(each, name) for each in left] for name in columns},
            evictions=[each.evictions for each in left],
            preemptions=[each.preemptions for each in left],
            total=np.minimum(total, [each.cap for each in left]),
        )

    def round(self) -> Decision:
        """Decide and execute one round; only waiting requests may start."""
        self.rounds += 1
        alive = [row for row, each in enumerate(self.asked) if not each.over]
        runs = [row for row in alive if self.asked[row].runs]
        waits = [row for row in alive if not self.asked[row].runs]
        snapshot = Snapshot(
            self.now, self.jobs(), np.array(waits, np.int64), np.array(runs, np.int64),
            self.workers, table(certain(1)),
        )  # fmt: skip
        rng = np.random.default_rng(0)
        self.decision = decide(snapshot, self.row, self.memory, rng, self.rounds)
        self.memory = self.decision.memory
        for share in self.decision.workers:
            self._carry_out(
                share.worker, share.run.tolist(), share.limits.tolist(), share.pause.tolist()
            )
        return self.decision

    def _carry_out(
        self, number: int, run: list[int], limits: Sequence[int], pause: list[int]
    ) -> None:
        for row in pause:
            assert self.asked[row].runs and self.asked[row].home == number
            self._stop(row)
            self.asked[row].preemptions += 1
        begins = [(row, int(limit)) for row, limit in zip(run, limits, strict=True)
                  if not self.asked[row].runs]  # fmt: skip
        for row, limit in begins:
            one = self.asked[row]
            assert not one.over and one.output < limit <= one.cap
            one.runs, one.home, one.limit = True, number, limit
        if begins:
            rows, granted = zip(*begins, strict=True)
            assert set(run) == set(rows), "a request joined a running batch"
            members = [self.asked[row] for row in rows]
            max_output = [each.limit - each.output for each in members]
            expected = [max(1, each.foreseen - each.output) for each in members]
            self.reported.append(
                Begun(
                    self.now,
                    number,
                    rows,
                    granted,
                    tuple(each.prompt + each.output for each in members),
                    tuple(max_output),
                    tuple(min(e, m) for e, m in zip(expected, max_output, strict=True)),
                )
            )

    def _stop(self, row: int) -> None:
        self.asked[row].runs = False
        self.asked[row].since_s = self.now

    def evict(self, row: int) -> None:
        self._stop(row)
        self.asked[row].evictions += 1
        self.asked[row].preemptions += 1

    def rounds_until_settled(self) -> None:
        """Run a round and the immediate rounds it requests."""
        for _ in range(4):
            if self.round().next_s > self.now + 1e-6:
                return
        raise AssertionError("a round asks for the next one for ever")

    def tick(self) -> None:
        """Each running request generates a token. In a static batch no request leaves before all
        members have ended or reached their limits."""
        self.now += self.tick_s
        for worker in self.workers:
            batch = [each for each in self.asked if each.runs and each.home == worker.number]
            for each in batch:
                if each.output < min(each.limit, each.length):
                    each.output += 1
            stopped = [each.output >= min(each.limit, each.length) for each in batch]
            for each in batch:
                if each.output >= each.length and (all(stopped) or not self.row.static):
                    each.over, each.runs = True, False

    def run(self, ticks: int) -> None:
        """Run a round before each tick."""
        for _ in range(ticks):
            self.rounds_until_settled()
            self.tick()

    @property
    def over(self) -> bool:
        return all(each.over for each in self.asked)
