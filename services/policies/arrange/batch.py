"""Order → form → place: the pool is cut into batches, then given to workers.

A worker runs one batch at a time. A batch is over when nobody of it runs any more: all have ended,
or, where slices return, made theirs; who is left goes back to the pool. When the pool is cut is
the preset's affair:

  inserting cuts    at once: whoever comes is put into a batch that waits for a worker
  forming ahead     at the interval's times; batches then wait for their workers
  else              when a worker has nothing to do; what it does not take stays in the pool

Places that bind do so at the forming, to those who come one by one where nothing is formed ahead.
A batch is of one priority: whoever may wait would else go ahead with who may not.
"""

from dataclasses import replace

import numpy as np

from services.forecast import Floats, Ints
from services.forecasttable import ForecastTable
from services.policies.arrange.batch_placement import BATCH_PLACEMENTS, NO_SEAT
from services.policies.arrange.batch_state import NEXT, NOTES, recalled
from services.policies.arrange.results import whys, worker_decision
from services.policies.decision import Decision, WaitExplanations, WaitReason, WorkerDecision
from services.policies.estimate import ESTIMATES
from services.policies.form.batch_cuts import CUTS
from services.policies.form.pool import Batches, Sizes
from services.policies.interval import INTERVALS
from services.policies.order.priority import levels
from services.policies.order.registry import ORDERS
from services.policies.preset import Preset
from services.policies.slice import SLICES
from services.policies.snapshot import Bools, Candidates, WorkerSnapshot

__all__ = ["NOTES", "arrange_batches"]

UNTIL = "batch_until_s"  # before this nothing is formed ahead, unless all is idle
TURN = "batch_turn"  # the number of the worker whose turn was last
PUT_OFF = "batch_put_off"  # whether the last round put cutting off


def arrange_batches(
    contest: Candidates, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Decision:
    """What becomes of everybody. O(n log n) and what the cut takes."""
    if not contest.workers:
        told = whys(contest, np.flatnonzero(~contest.is_running), WaitReason.NO_WORKER)
        return Decision(contest.round, (), told, contest.rows, contest.jobs.serial)
    return _Round(contest, preset).decided()


class _Round:
    """One round's work; `standing` is changed as it goes on."""

    def __init__(self, contest: Candidates, preset: Preset):
        self.contest, self.preset, self.params = contest, preset, preset.params
        self.cut = CUTS[preset.form]
        self.bind = BATCH_PLACEMENTS[preset.place].bind
        self.interval = INTERVALS[preset.interval]
        self.of_batch = ORDERS[preset.order].of_batch
        self.level = contest.jobs.priority
        self.estimate = ESTIMATES[preset.estimator]
        self.standing = recalled(contest, SLICES[preset.slice].returns, self.cut.inserts)
        self.sizes = _sizes(contest, preset, self.cut.foresees)
        self.workers = contest.workers
        self.rooms = [self.cut.room(worker, self.params) for worker in self.workers]
        self.able = np.array([_able(contest, worker) for worker in self.workers])
        self.stays = contest.is_running & ~self.standing.paused
        home = contest.jobs.home
        self.lines = [np.flatnonzero(self.stays & (home == w.number)) for w in self.workers]
        self.fastest = sorted(range(len(self.workers)), key=lambda i: -self.workers[i].full_speed)
        self.sent: dict[int, Ints] = {}  # what each worker begins, by its place among them
        numbers = contest.numbers
        self.until_s = numbers.get(UNTIL, 0.0)
        self.turn = int(numbers.get(TURN, 0))
        returned = bool(self.standing.paused.any())
        self.puts_off = returned and not self.cut.inserts and not numbers.get(PUT_OFF, 0.0)

    def decided(self) -> Decision:
        formed = False
        if self.cut.inserts:
            self._form()
        elif self.interval.ahead:
            formed = self._due() and self._form()
        elif self.bind:
            self._bind(alone=True)
        self._send_formed()
        if not (self.cut.inserts or self.interval.ahead or self.puts_off):
            self._cut_for_idle()
        if formed:
            self.until_s = self.contest.now + self.interval.wait_s(self._loads_s(), self.params)
        numbers = {
            NEXT: float(self.standing.last),
            UNTIL: self.until_s,
            TURN: float(self.turn),
            PUT_OFF: float(self.puts_off),
        }
        return Decision(
            self.contest.round,
            tuple(self._share(i, worker) for i, worker in enumerate(self.workers)),
            self._whys(),
            self.contest.rows,
            self.contest.jobs.serial,
            self._next_s(),
            self.contest.now,
            numbers,
            self.standing.notes(self.contest),
        )

    # Who stands where

    def _waits(self) -> Bools:
        """Those who are not sent in this round, nor run until it is carried out."""
        return ~self.contest.is_running & ~self.standing.sent

    def _pool(self) -> Ints:
        """In no batch, and could be."""
        return np.flatnonzero(self._waits() & (self.standing.batch == 0) & self.able.any(axis=0))

    def _formed(self) -> Batches:
        """Those that wait whole; none of whom a part still runs."""
        batch = self.standing.batch
        ready = self._waits() & (batch > 0)
        if self.standing.paused.any():
            ready &= ~np.isin(batch, batch[self.contest.is_running])
        at = np.flatnonzero(ready)
        return Batches.of(at, batch[at], self.sizes)

    def _idle(self) -> list[int]:
        """Workers with nothing to do, the fastest first."""
        free = (i for i in self.fastest if not len(self.lines[i]) and i not in self.sent)
        return [i for i in free if self.workers[i].max_running > 0]

    def _serve_s(self, worker: WorkerSnapshot, batches: Batches) -> Floats:
        columns = (batches.size, batches.length, batches.expected)
        return self.estimate(worker.cost, *(column.astype(float) for column in columns))

    def _could(self, batches: Batches) -> Bools:
        """(workers, batches): who could take which whole."""
        if not len(batches):
            return np.zeros((len(self.workers), 0), bool)
        able = np.logical_and.reduceat(self.able[:, batches.members], batches.starts, axis=1)
        columns = (batches.size, batches.length, batches.makes)
        holds = np.array([room.holds(*columns) for room in self.rooms])
        could: Bools = able & holds
        return could

    def _loads_s(self) -> Floats:
        """Of each worker, what it runs and all that is bound to it are estimated to take."""
        standing, loads_s = self.standing, np.zeros(len(self.workers))
        waits = ~self.contest.is_running & (standing.seat > 0)
        at = np.flatnonzero(waits & (standing.batch > 0))
        heads = at[np.unique(standing.batch[at], return_index=True)[1]]
        items = np.concatenate([heads, np.flatnonzero(waits & (standing.batch == 0))])
        for i, (worker, line) in enumerate(zip(self.workers, self.lines, strict=True)):
            loads_s[i] = np.sum(standing.serve_s[items[standing.seat[items] == worker.number]])
            if len(line):
                known_s = float(standing.serve_s[line].max())
                adopted = Batches.of(line, np.ones(len(line), np.int64), self.sizes)
                loads_s[i] += known_s or float(self._serve_s(worker, adopted)[0])
        return loads_s

    # Forming

    def _due(self) -> bool:
        """At its time, or when nothing is left to do anywhere."""
        idle = not self.stays.any() and not (self._waits() & (self.standing.batch > 0)).any()
        return not self.puts_off and (self.contest.now >= self.until_s or idle)

    def _form(self) -> bool:
        """Everybody in the pool into batches, each for the largest worker that could take it;
        whether there was anybody."""
        pool = self._pool()
        if len(pool):
            hosts = self._hosts()
            for host in np.unique(hosts[pool]).tolist():
                for level in levels(pool[hosts[pool] == host], self.level):
                    self._cut_for(host, level, hosts)
        if self.bind:
            self._bind(alone=False)
        return len(pool) > 0

    def _hosts(self) -> Ints:
        """Of every row the worker with the most memory that could take it, by its place."""
        largest = sorted(self.fastest, key=lambda i: -self.workers[i].kv_tokens)
        hosts: Ints = np.array(largest)[self.able[largest].argmax(axis=0)]
        return hosts

    def _cut_for(self, host: int, at: Ints, hosts: Ints) -> None:
        """`at` are of one priority."""
        standing = self.standing
        known = Batches.of(at[:0], at[:0], self.sizes)
        if self.cut.inserts:
            open_ = self._waits() & (standing.batch > 0) & ~standing.closed
            there = np.flatnonzero(open_ & (hosts == host) & (self.level == self.level[at[0]]))
            known = Batches.of(there, standing.batch[there], self.sizes)
        labels = self.cut.cut(self.sizes, at, known, self.rooms[host], self.params)
        new = int(labels.max()) + 1 - len(known)
        ids = np.concatenate([known.ids, standing.new_ids(max(0, new))])
        seats = np.concatenate([known.first(standing.seat), np.zeros(max(0, new), np.int64)])
        standing.batch[at], standing.seat[at] = ids[labels], seats[labels]

    # Binding and sending

    def _bind(self, alone: bool) -> None:
        """Those that wait for no worker yet, each to one; `alone`: not batches but who is in
        the pool."""
        standing = self.standing
        assert self.bind
        self._reckon()
        loose = self._pool() if alone else np.flatnonzero(self._waits() & (standing.batch > 0))
        loose = loose[standing.seat[loose] == 0]
        if not len(loose):
            return
        ids = np.arange(1, len(loose) + 1) if alone else standing.batch[loose]
        batches = Batches.of(loose, ids, self.sizes)
        serve_s = np.array([self._serve_s(worker, batches) for worker in self.workers])
        numbers = np.array([worker.number for worker in self.workers], np.int64)
        last = int(np.count_nonzero(numbers <= self.turn)) - 1
        chosen = self.bind(self._loads_s(), serve_s, self._could(batches), last)
        found = chosen != NO_SEAT
        if found.any():
            self.turn = int(numbers[chosen[found][-1]])
        which = np.repeat(np.arange(len(batches)), batches.size)
        bound = found[which]
        rows, which = batches.members[bound], which[bound]
        standing.seat[rows] = numbers[chosen[which]]
        standing.serve_s[rows] = serve_s[chosen[which], which]

    def _reckon(self) -> None:
        """What the batches that are bound already would take as they are now. One that has grown
        beyond what its worker could take is bound no more."""
        standing = self.standing
        waits = self._waits() & (standing.batch > 0)
        for i, worker in enumerate(self.workers):
            at = np.flatnonzero(waits & (standing.seat == worker.number))
            if not len(at):
                continue
            batches = Batches.of(at, standing.batch[at], self.sizes)
            could = self._could(batches)[i]
            serve_s = np.where(could, self._serve_s(worker, batches), 0.0)
            standing.serve_s[batches.members] = np.repeat(serve_s, batches.size)
            standing.seat[batches.members] = np.repeat(could * worker.number, batches.size)

    def _send_formed(self) -> None:
        """To every worker with nothing to do the most urgent batch that waits for it, or for
        anybody. A worker that could take none of those whole takes of one what it can."""
        idle, batches = self._idle(), self._formed()
        if not idle or not len(batches):
            return
        could, seats = self._could(batches), batches.first(self.standing.seat)
        left: list[Ints] = []
        for nth in self._by_urgency(batches, self.workers[idle[0]]):
            seat, members = int(seats[nth]), batches.of_batch(nth)
            for i in idle:
                if could[i, nth] and seat in (0, self.workers[i].number):
                    self._send(i, members)
                    idle.remove(i)
                    break
            else:
                if not seat:
                    left.append(members)
        for i in idle:
            for nth, members in enumerate(left):
                part = self._part(i, members)
                if len(part):
                    self.standing.batch[part] = self.standing.new_ids(1)
                    self._send(i, part)
                    left[nth] = np.setdiff1d(members, part)
                    break

    def _by_urgency(self, batches: Batches, worker: WorkerSnapshot) -> list[int]:
        """By the most urgent member; or, where the order has a key of batches, by that, for this
        worker, and among equals by the most urgent member."""
        first = batches.members[batches.starts]
        if self.of_batch is None:
            order = np.argsort(first, kind="stable")
        else:
            now, arrival_s = self.contest.now, self.contest.jobs.arrival_s
            wait_s = np.maximum(0.0, now - batches.least(arrival_s))
            key = self.of_batch(wait_s, self._serve_s(worker, batches))
            order = np.lexsort((first, key, self.level[first]))
        return [int(nth) for nth in order]

    def _part(self, i: int, members: Ints) -> Ints:
        """The most urgent of these that fit this worker together."""
        members = members[self.able[i, members]]
        length = np.maximum.accumulate(self.sizes.length[members])
        makes = np.maximum.accumulate(self.sizes.makes[members])
        fits = self.rooms[i].holds(np.arange(1, len(members) + 1), length, makes)
        return members[fits]

    def _cut_for_idle(self) -> None:
        """For each kind of worker that has nothing to do, the pool as it could hold it; its most
        urgent batches. What is alike is cut once."""
        kinds: dict[WorkerSnapshot, list[int]] = {}
        for i in self._idle():
            worker = self.workers[i]
            kind = worker if self.bind else replace(worker, number=0, shared_blocks=0)
            kinds.setdefault(kind, []).append(i)
        nothing = np.zeros(0, np.int64)
        known = Batches.of(nothing, nothing, self.sizes)
        for same in kinds.values():
            pool, worker = self._pool(), self.workers[same[0]]
            seat = self.standing.seat[pool]
            pool = pool[self.able[same[0], pool] & ((seat == 0) | (seat == worker.number))]
            if not len(pool):
                continue
            for level in levels(pool, self.level):
                if self.cut.in_order and self.of_batch is None:
                    level = level[: len(same) * self.rooms[same[0]].places]
                labels = self.cut.cut(self.sizes, level, known, self.rooms[same[0]], self.params)
                batches = Batches.of(level, labels, self.sizes)
                for i, nth in zip(same, self._by_urgency(batches, worker), strict=False):
                    members = batches.of_batch(nth)
                    self.standing.batch[members] = self.standing.new_ids(1)
                    self._send(i, members)
                same = same[len(batches) :]
                if not same:
                    break

    def _send(self, i: int, members: Ints) -> None:
        """This worker begins with these."""
        worker, standing = self.workers[i], self.standing
        self.sent[i] = members
        batch = Batches.of(members, np.ones(len(members), np.int64), self.sizes)
        standing.sent[members] = True
        standing.seat[members] = worker.number
        standing.serve_s[members] = self._serve_s(worker, batch)[0]

    # What is said of it

    def _share(self, i: int, worker: WorkerSnapshot) -> WorkerDecision:
        runs = self.contest.is_running & (self.contest.jobs.home == worker.number)
        begins = self.sent.get(i, np.zeros(0, np.int64))
        line = np.concatenate([np.flatnonzero(runs), begins])
        run = np.concatenate([~self.standing.paused[runs], np.ones(len(begins), bool)])
        lockstep = self.preset.static and len(begins) > 0
        return worker_decision(self.contest, worker, self.preset, line, run, 0.0, lockstep)

    def _next_s(self) -> float:
        now = self.contest.now
        if self.standing.paused.any():
            return float(np.nextafter(now, np.inf))  # who came back can be looked at once it has
        if self.interval.ahead and not self.cut.inserts and len(self._pool()):
            return max(self.until_s, float(np.nextafter(now, np.inf)))
        return float("inf")

    def _whys(self) -> WaitExplanations:
        """Of everybody who waits, in columns."""
        contest, standing = self.contest, self.standing
        reasons = np.full(len(contest.rows), WaitReason.NO_WORKER, np.int64)
        a, b = np.zeros(len(reasons)), np.zeros(len(reasons))
        pool = self._pool()
        if self.interval.ahead:
            reasons[pool], a[pool] = WaitReason.CUT_SCHEDULED, max(0.0, self.until_s - contest.now)
        else:
            reasons[pool], a[pool] = WaitReason.CUT_ON_IDLE, np.arange(len(pool))
        at = np.flatnonzero(self._waits() & (standing.batch > 0))
        if len(at):
            batches = Batches.of(at, standing.batch[at], self.sizes)
            seats, which = batches.first(standing.seat), batches.members
            bound = np.repeat(seats > 0, batches.size)
            reasons[which] = np.where(bound, WaitReason.ASSIGNED, WaitReason.IN_BATCH)
            a[which] = np.repeat(self._before(batches, seats), batches.size)
            b[which] = np.repeat(np.where(seats > 0, seats, batches.size), batches.size)
        for i, members in self.sent.items():
            tokens = self.sizes.length[members].max() + self.sizes.makes[members].max()
            reasons[members] = WaitReason.ADMITTED
            a[members], b[members] = len(members) * tokens, self.rooms[i].tokens
        told = ~contest.is_running
        return WaitExplanations(contest.rows[told], reasons[told], a[told], b[told])

    def _before(self, batches: Batches, seats: Ints) -> Ints:
        """How many batches each worker, or all of them, would take before each."""
        turn = np.zeros(len(batches), np.int64)
        turn[self._by_urgency(batches, self.workers[0])] = np.arange(len(batches))
        order = np.lexsort((turn, seats))
        begins = np.flatnonzero(np.diff(seats[order], prepend=-1))
        before = np.zeros(len(batches), np.int64)
        sizes = np.diff(begins, append=len(order))
        before[order] = np.arange(len(order)) - np.repeat(begins, sizes)
        return before


def _able(contest: Candidates, worker: WorkerSnapshot) -> Bools:
    jobs = contest.jobs
    reach = jobs.prompt + jobs.cap
    able: Bools = (jobs.model == worker.model) & (reach <= worker.reach_tokens)
    return able & (worker.max_running > 0)


def _sizes(contest: Candidates, preset: Preset, foresees: bool) -> Sizes:
    """In whole tokens, one at least."""
    jobs, everybody = contest.jobs, np.arange(len(contest.rows))
    limits = SLICES[preset.slice].limits(contest, contest.workers[0], everybody, preset.params)
    most = np.maximum(limits - jobs.output, 1)
    expected = np.clip(np.ceil(jobs.expected_remaining).astype(np.int64), 1, most)
    return Sizes(jobs.context, expected if foresees else most, expected)
