"""Forming batches from the pool, assigning them to workers, and sending them."""

from dataclasses import replace

import numpy as np

from services.forecast import Ints
from services.policies.arrange.batch_placement import UNASSIGNED
from services.policies.arrange.batch_round import (
    BatchRound,
    as_one_batch,
    by_urgency,
    estimate_s,
    group,
    idle_workers,
    loads_s,
    pooled,
    serveable,
    waiting,
    waiting_batches,
)
from services.policies.arrange.batch_state import BatchState
from services.policies.form.pool import Batches
from services.policies.order.priority import split_by_priority
from services.policies.snapshot import WorkerSnapshot


def form_batches(batch_round: BatchRound, state: BatchState) -> BatchState:
    """The whole pool in batches, each cut for the largest worker that can serve its members, and
    assigned to workers where the placement assigns."""
    pool = pooled(batch_round, state)
    if len(pool):
        hosts = _largest_hosts(batch_round)
        for host in np.unique(hosts[pool]).tolist():
            here = pool[hosts[pool] == host]
            for level in split_by_priority(here, batch_round.priority):
                state = _cut_for_host(batch_round, state, host, level, hosts)
    return assign_batches(batch_round, state)


def assign_batches(batch_round: BatchRound, state: BatchState) -> BatchState:
    """Each formed batch that has no worker is assigned to one."""
    loose = np.flatnonzero(waiting(batch_round, state) & (state.batch > 0))
    return _assign(batch_round, state, loose, state.batch)


def assign_requests(batch_round: BatchRound, state: BatchState) -> BatchState:
    """Each request of the pool that has no worker is assigned to one."""
    ids = np.arange(1, len(state.batch) + 1)
    return _assign(batch_round, state, pooled(batch_round, state), ids)


def send_formed(batch_round: BatchRound, state: BatchState) -> BatchState:
    """Each idle worker begins the most urgent batch that waits for it or for any worker. A worker
    that can serve none of these whole begins the part of one that fits."""
    idle, batches = idle_workers(batch_round, state), waiting_batches(batch_round, state)
    if not idle or not len(batches):
        return state
    could, assigned = serveable(batch_round, batches), batches.first_values(state.worker)
    left: list[Ints] = []
    for nth in by_urgency(batch_round, batches, batch_round.workers[idle[0]]).tolist():
        if not idle:
            break
        worker, members = int(assigned[nth]), batches.members_of(nth)
        takers = (i for i in idle if could[i, nth] and worker in (0, batch_round.workers[i].number))
        taker = next(takers, None)
        if taker is not None:
            state = _send(batch_round, state, taker, members)
            idle.remove(taker)
        elif not worker:
            left.append(members)
    for i in idle:
        for nth, members in enumerate(left):
            part = _fitting_part(batch_round, i, members)
            if len(part):
                state, ids = state.new_ids(1)
                state = _send(batch_round, state.updated(part, batch=ids), i, part)
                left[nth] = np.setdiff1d(members, part)
                break
    return state


def cut_for_idle(batch_round: BatchRound, state: BatchState) -> BatchState:
    """The pool is cut once for each kind of idle worker; these begin its most urgent batches."""
    kinds: dict[WorkerSnapshot, list[int]] = {}
    for i in idle_workers(batch_round, state):
        worker = batch_round.workers[i]
        kind = worker if batch_round.assign else replace(worker, number=0, shared_blocks=0)
        kinds.setdefault(kind, []).append(i)
    for same in kinds.values():
        state = _cut_for_kind(batch_round, state, same)
    return state


def _largest_hosts(batch_round: BatchRound) -> Ints:
    """For each position, the index of the worker with the most KV memory that can serve it."""
    largest = sorted(batch_round.fastest, key=lambda i: -batch_round.workers[i].kv_tokens)
    hosts: Ints = np.array(largest)[batch_round.able[largest].argmax(axis=0)]
    return hosts


def _cut_for_host(
    batch_round: BatchRound, state: BatchState, host: int, at: Ints, hosts: Ints
) -> BatchState:
    """`at` have one priority. An inserting cut also considers the host's open batches."""
    known = group(batch_round, at[:0], state.batch)
    if batch_round.cut.inserts:
        open_ = waiting(batch_round, state) & (state.batch > 0) & ~state.closed
        level = batch_round.priority == batch_round.priority[at[0]]
        known = group(batch_round, np.flatnonzero(open_ & (hosts == host) & level), state.batch)
    params, room = batch_round.preset.params, batch_round.rooms[host]
    labels = batch_round.cut.cut(batch_round.sizes, at, known, room, params)
    new = max(0, int(labels.max()) + 1 - len(known))
    state, new_ids = state.new_ids(new)
    ids = np.concatenate([known.ids, new_ids])
    workers = np.concatenate([known.first_values(state.worker), np.zeros(new, np.int64)])
    return state.updated(at, batch=ids[labels], worker=workers[labels])


def _assign(batch_round: BatchRound, state: BatchState, at: Ints, ids: Ints) -> BatchState:
    """Assign the batches of those of `at` that have no worker; `ids` is a column of batch ids."""
    if batch_round.assign is None:
        return state
    state = _refresh_assigned(batch_round, state)
    loose = at[state.worker[at] == 0]
    if not len(loose):
        return state
    workers = batch_round.workers
    batches = group(batch_round, loose, ids)
    serve_s = np.array([estimate_s(batch_round, worker, batches) for worker in workers])
    numbers = np.array([worker.number for worker in workers], np.int64)
    last = int(np.count_nonzero(numbers <= state.last_worker)) - 1
    could = serveable(batch_round, batches)
    chosen = batch_round.assign(loads_s(batch_round, state), serve_s, could, last)
    found = chosen != UNASSIGNED
    if found.any():
        state = replace(state, last_worker=int(numbers[chosen[found][-1]]))
    which = np.repeat(np.arange(len(batches)), batches.size)
    rows, which = batches.members[found[which]], which[found[which]]
    worker, taken_s = numbers[chosen[which]], serve_s[chosen[which], which]
    return state.updated(rows, worker=worker, serve_s=taken_s)


def _refresh_assigned(batch_round: BatchRound, state: BatchState) -> BatchState:
    """Estimates of assigned batches as they are now. A batch that has outgrown its worker loses its
    assignment."""
    waits = waiting(batch_round, state) & (state.batch > 0)
    for i, worker in enumerate(batch_round.workers):
        at = np.flatnonzero(waits & (state.worker == worker.number))
        if len(at):
            batches = group(batch_round, at, state.batch)
            could = serveable(batch_round, batches)[i]
            serve_s = np.where(could, estimate_s(batch_round, worker, batches), 0.0)
            state = state.updated(
                batches.members,
                serve_s=np.repeat(serve_s, batches.size),
                worker=np.repeat(could * worker.number, batches.size),
            )
    return state


def _fitting_part(batch_round: BatchRound, i: int, members: Ints) -> Ints:
    """The most urgent of these that fit worker `i` together."""
    members, sizes = members[batch_round.able[i, members]], batch_round.sizes
    length = np.maximum.accumulate(sizes.length[members])
    max_output = np.maximum.accumulate(sizes.max_output[members])
    fits = batch_round.rooms[i].fits_each(np.arange(1, len(members) + 1), length, max_output)
    return members[fits]


def _cut_for_kind(batch_round: BatchRound, state: BatchState, same: list[int]) -> BatchState:
    """The idle workers `same`, which are alike, begin batches of the pool, lower priority first."""
    pool, index = pooled(batch_round, state), same[0]
    worker, room = batch_round.workers[index], batch_round.rooms[index]
    assigned = state.worker[pool]
    free = (assigned == 0) | (assigned == worker.number)
    pool = pool[batch_round.able[index, pool] & free]
    nothing = np.zeros(0, np.int64)
    known = Batches.group(nothing, nothing, batch_round.sizes)
    by_member = batch_round.batch_key is None
    for level in split_by_priority(pool, batch_round.priority):
        if batch_round.cut.in_order and by_member:
            level = level[: len(same) * room.slots]
        params = batch_round.preset.params
        labels = batch_round.cut.cut(batch_round.sizes, level, known, room, params)
        batches = Batches.group(level, labels, batch_round.sizes)
        for i, nth in zip(same, by_urgency(batch_round, batches, worker), strict=False):
            members = batches.members_of(nth)
            state, ids = state.new_ids(1)
            state = _send(batch_round, state.updated(members, batch=ids), i, members)
        same = same[len(batches) :]
        if not same:
            break
    return state


def _send(batch_round: BatchRound, state: BatchState, i: int, members: Ints) -> BatchState:
    """Worker `i` begins this batch."""
    worker = batch_round.workers[i]
    serve_s = estimate_s(batch_round, worker, as_one_batch(batch_round, members))[0]
    state = replace(state, begins={**state.begins, i: members})
    return state.updated(members, sent=True, worker=worker.number, serve_s=serve_s)
