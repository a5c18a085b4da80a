"""Admission and eviction on one simulated worker, by the forms and victims that serve."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf

import numpy as np

from services.core import FinishReason
from services.costs import CostModel
from services.forecast import UNCAPPED, Ints, certain
from services.forecasttable import ForecastTable
from services.lengths import LengthWindow
from services.policies.form.demand import WorkerQueues
from services.policies.form.fill import fill
from services.policies.form.registry import FORMS
from services.policies.form.sums import SumDemand
from services.policies.memory import PolicyMemory
from services.policies.parameters import Params, resolve
from services.policies.snapshot import RequestColumns, Snapshot, WorkerSnapshot
from services.policies.victim import VICTIMS
from simulator.papers.past_future.queue import Queue
from simulator.workload.workload import Workload

NO_KV = 1  # the latest token of a request has no KV before the next step
UNTIMED = CostModel(0.0, 0.0, 0.0, 0.0)  # the simulation counts steps, not seconds
HISTORY = "history"  # the population that all requests share


class Foresight(Enum):
    """The output lengths that the policy receives: each one, those of ended requests, or the
    max_tokens of the requests."""

    TRUE_LENGTHS = "true lengths"
    HISTORY = "history"
    MAX_TOKENS = "max_tokens"


@dataclass(frozen=True, slots=True)
class Rules:
    """A form with its parameters, a victim, and the lengths that the form receives. With
    `slice_tokens`, the form is told that a request stops after so many tokens, as under an order
    that may pause it there; here none pauses it."""

    form: str
    params: Params = field(default_factory=dict)
    foresight: Foresight = Foresight.HISTORY
    victim: str = "newest"
    slice_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """The simulated worker and its clients.

    The worker holds `kv_tokens`. The policy decides every `interval_steps`. Each request sets
    `max_tokens`. The window of ended lengths holds `window` of them and starts with `prior` entries
    of `max_tokens`.
    """

    kv_tokens: int = 120_000
    interval_steps: int = 10
    max_tokens: int = 4_096
    window: int = 1_000
    prior: int = 10


@dataclass(frozen=True, slots=True)
class Admitted:
    """The number of requests admitted from the head of the queue. If the refusal of the next one
    `stands`, it is repeated until a request leaves the batch."""

    count: int
    stands: bool


class Admission:
    """Decides over the rows of a workload.

    `jobs` are their columns. The owner writes `output` and `admitted`. `rng` draws lengths once for
    each decision.
    """

    def __init__(
        self, requests: Workload, rules: Rules, settings: Settings, rng: np.random.Generator
    ):
        self.jobs = _columns(requests, _caps(requests, rules.foresight, settings.max_tokens))
        self._outputs = requests.output_tokens
        self._form, self._victim = FORMS[rules.form], VICTIMS[rules.victim]
        self._slice_tokens = rules.slice_tokens
        self._params = resolve(rules.form, self._form.params, rules.params)
        self._most_tokens = settings.kv_tokens * max(1.0, self._params.get("overcommit", 1.0))
        self._worker = WorkerSnapshot(
            0, 0, settings.kv_tokens, 1, len(requests), UNCAPPED, UNTIMED
        )  # fmt: skip
        self._history: LengthWindow | None = None
        if rules.foresight is Foresight.HISTORY:
            self._history = LengthWindow(settings.window, prior=0)
        self._max_tokens, self._rng = settings.max_tokens, rng
        self._forecasts = ForecastTable(1)
        # Without a history, a request's length is its cap.
        self._forecasts.intern(replace(certain(UNCAPPED), shared_key=HISTORY))
        self._add_lengths([settings.max_tokens] * settings.prior)
        self._memory = PolicyMemory()
        self._evictions = self._endings = 0

    def admit(self, running: Ints, held_tokens: int, queue: Queue) -> Admitted:
        """Decides over the running rows, in order of admission, and as many rows of the queue as
        could fit if no request grew, with the one after them. `held_tokens` are those of the
        running rows. O(rows considered)."""
        self._renew()
        queued = queue.head(self._most_tokens - held_tokens)
        rows = np.concatenate([running, queued])
        jobs, runs = self.jobs.select(rows), np.arange(len(rows)) < len(running)
        numbers = self._reflect(running, queued)
        limits = jobs.cap
        if self._slice_tokens:
            limits = np.minimum(limits, jobs.output + self._slice_tokens)
        tables = self._forecasts, numbers
        queues = WorkerQueues.single(jobs, runs, limits, self._worker, *tables)
        demand = self._form.demand(queues, self._params, self._rng)
        filled = fill(queues.lines, runs, demand, queues.lines.sizes, np.array([not len(running)]))
        # A sum of held or of worst-case tokens does not fall while its requests run.
        return Admitted(int(filled.runs_next.sum()) - len(running), isinstance(demand, SumDemand))

    def victims(self, running: Ints) -> Ints:
        """Positions in `running` in the order of eviction."""
        self._renew()
        jobs = self.jobs.select(running)
        total = self._forecasts.mean(jobs.forecast, jobs.output, jobs.cap)
        runs = np.ones(len(running), bool)
        return self._victim(jobs.replaced(total=total), runs, jobs.arrival_s)

    def count_evictions(self, count: int) -> None:
        self._evictions += count

    def learn(self, ended: Ints) -> None:
        """Counts ended rows, and adds their lengths to the history."""
        self._endings += len(ended)
        self._add_lengths(self._outputs[ended].tolist())

    def _add_lengths(self, lengths: list[int]) -> None:
        self._stale = self._history is not None
        if self._history is not None:
            for tokens in lengths:
                self._history.add(tokens, FinishReason.STOP, self._max_tokens)

    def _renew(self) -> None:
        if self._history is not None and self._stale:
            self._forecasts.renew(self._history.forecast(HISTORY, shared_key=HISTORY))
            self._stale = False

    def _reflect(self, running: Ints, queued: Ints) -> Mapping[str, float]:
        if self._form.reflect is not None:
            snapshot = Snapshot(
                0.0, self.jobs, queued, running, (self._worker,), self._forecasts,
                evictions=self._evictions, endings=self._endings,
            )  # fmt: skip
            self._memory = self._form.reflect(snapshot, self._params, self._memory)
        return self._memory.numbers


def _caps(requests: Workload, foresight: Foresight, max_tokens: int) -> Ints:
    match foresight:
        case Foresight.TRUE_LENGTHS:
            return requests.output_tokens
        case Foresight.HISTORY:
            # Outputs of D2 are longer than max_tokens. The history that contains them is not cut.
            longest = max(max_tokens, int(requests.output_tokens.max()))
        case Foresight.MAX_TOKENS:
            longest = max_tokens + NO_KV  # the worst case is prompt + max_tokens in full
    return np.full(len(requests), longest)


def _columns(requests: Workload, caps: Ints) -> RequestColumns:
    """Columns with the tokens with KV as context: prompt + output − NO_KV."""
    count = len(requests)
    zeros, none, never = np.zeros(count, np.int64), np.zeros(count), np.full(count, inf)
    return RequestColumns(
        serial=np.arange(1, count + 1),
        model=zeros,
        home=zeros,
        prompt=requests.input_tokens - NO_KV,
        output=zeros.copy(),
        held=zeros,
        blocks=zeros,
        limit=caps,
        cap=caps,
        admitted=zeros.copy(),
        preemptions=zeros,
        evictions=zeros,
        tenant=zeros,
        priority=zeros,
        adapter=zeros,
        forecast=zeros,
        total=none,
        arrival_s=none,
        since_s=none,
        deadline_s=never,
        first_s=never,
        ttft_s=never,
        tpot_s=never,
        mtpot_s=never,
        weight=np.ones(count),
    )
