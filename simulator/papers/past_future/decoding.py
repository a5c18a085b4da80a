"""A worker that decodes until the last request is admitted, in jumps of many steps."""

from dataclasses import dataclass

import numpy as np

from services.forecast import Ints
from services.policies.form.past_future import PrefixPeaks, largest
from simulator.papers.past_future.admission import NO_KV, Admission, Settings
from simulator.papers.past_future.queue import Queue
from simulator.workload.workload import Workload


@dataclass(frozen=True, slots=True)
class Measured:
    """Totals of a run.

    `held_tokens` sums the KV tokens after each of the `steps`. `future_tokens` sums over the
    `decisions`, after each, the most KV tokens that its batch will hold until all of it has ended,
    by true lengths.
    """

    steps: int
    decisions: int
    evictions: int
    held_tokens: int
    future_tokens: int


def decode(requests: Workload, admission: Admission, settings: Settings) -> Measured:
    """Decodes until the last request is admitted.

    One step makes one token for each running request. The policy decides every `interval_steps`,
    and when the batch is empty. If a step does not fit in memory, victims return to the front of
    the queue with their output; computing their KV again takes no step. Raises ValueError if a
    request exceeds the memory alone. O(decisions · batch).
    """
    longest = int((requests.input_tokens + requests.output_tokens).max()) - NO_KV
    if longest > settings.kv_tokens:
        raise ValueError(
            f"{requests.name}: a request needs {longest} KV tokens, the worker has "
            f"{settings.kv_tokens}"
        )
    run = _Run(requests, admission, settings)
    while run.decide_when_due():
        run.evict()
        run.advance()
    return run.measured()


class _Run:
    """The running rows in order of admission, and the totals so far."""

    def __init__(self, requests: Workload, admission: Admission, settings: Settings):
        self._prompt, self._length = admission.jobs.prompt, requests.output_tokens
        self._output, self._admitted = admission.jobs.output, admission.jobs.admitted
        self._admission, self._queue = admission, Queue(admission.jobs)
        self._settings = settings
        self._running: Ints = np.zeros(0, np.int64)
        self._held = self._peak = 0  # of the running rows: now, and the most to come
        self._refused = False  # the next decision refuses too
        self._due_step = 0
        self._steps = self._decisions = self._admissions = self._evictions = 0
        self._held_total = self._future_total = 0

    def measured(self) -> Measured:
        return Measured(
            self._steps, self._decisions, self._evictions, self._held_total, self._future_total
        )

    def decide_when_due(self) -> bool:
        """Decides if a decision is due. Returns whether requests still wait."""
        if self._steps >= self._due_step or not len(self._running):
            if not self._refused:
                self._decide()
            self._due_step = self._steps + self._settings.interval_steps
            self._decisions += 1
            self._future_total += self._peak
        return len(self._queue) > 0

    def _decide(self) -> None:
        admitted = self._admission.admit(self._running, self._held, self._queue)
        self._refused = admitted.stands
        if admitted.count:
            rows = self._queue.pop(admitted.count)
            self._admitted[rows] = self._admissions + np.arange(1, admitted.count + 1)
            self._admissions += admitted.count
            self._replace_batch(np.concatenate([self._running, rows]))

    def evict(self) -> None:
        """Evicts victims until the next step fits."""
        need = self._held + len(self._running)
        if need <= self._settings.kv_tokens:
            return
        order = self._admission.victims(self._running)
        rows = self._running[order]
        left = need - np.cumsum(self._prompt[rows] + self._output[rows] + 1)
        count = 1 + int(np.argmax(left <= self._settings.kv_tokens))
        for row in rows[:count].tolist():
            self._queue.put_back(row)
        self._evictions += count
        self._admission.count_evictions(count)
        self._leave(np.delete(self._running, order[:count]))

    def advance(self) -> None:
        """Decodes to the next decision, the next end, or the last step that fits in memory."""
        running, count = self._running, len(self._running)
        remaining = self._length[running] - self._output[running]
        fitting = (self._settings.kv_tokens - self._held) // count
        steps = min(self._due_step - self._steps, int(remaining.min()), fitting)
        self._output[running] += steps
        self._steps += steps
        self._held_total += steps * self._held + count * (steps * (steps + 1) // 2)
        self._held += count * steps
        ended = remaining == steps
        if ended.any():
            self._admission.learn(running[ended])
            self._leave(running[~ended])

    def _leave(self, stay: Ints) -> None:
        self._refused = False
        self._replace_batch(stay)

    def _replace_batch(self, rows: Ints) -> None:
        self._running = rows
        held = self._prompt[rows] + self._output[rows]
        self._held = int(held.sum())
        remaining = (self._length[rows] - self._output[rows])[np.newaxis].astype(float)
        self._peak = int(PrefixPeaks(len(rows), held.astype(float), remaining, largest)(0))
