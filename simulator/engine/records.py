"""Records of a run: what happened to each request, and the state of workers over time."""

from collections.abc import Sequence
from math import inf

import numpy as np

from services.core import Sla
from services.forecast import Floats, Ints
from services.policies.snapshot import Bools


class Records:
    """One row per request of the workload; times in seconds of the run, infinite before they come.

    Token times are those at the worker; `reach_client` adds the way to the client.
    """

    def __init__(self, requests: int):
        self.arrival_s: Floats = np.full(requests, inf)
        self.first_s: Floats = np.full(requests, inf)
        self.last_s: Floats = np.full(requests, inf)
        self.longest_gap_s: Floats = np.zeros(requests)
        self.tokens: Ints = np.zeros(requests, np.int64)
        self.finished: Bools = np.zeros(requests, bool)
        self.rejected: Bools = np.zeros(requests, bool)
        self.preemptions: Ints = np.zeros(requests, np.int64)
        self.evictions: Ints = np.zeros(requests, np.int64)

    def on_tokens(self, rows: Ints, times_s: Floats) -> None:
        """Each of these requests gets one token at each of these ascending times. O(rows)."""
        made, first_s = self.tokens[rows], times_s[0]
        gap_s = first_s - self.last_s[rows]
        if not made.all():
            self.first_s[rows[made == 0]] = first_s
            gap_s[made == 0] = 0.0
        if len(times_s) > 1:
            gap_s = np.maximum(gap_s, (times_s[1:] - times_s[:-1]).max())
        self.longest_gap_s[rows] = np.maximum(self.longest_gap_s[rows], gap_s)
        self.last_s[rows] = times_s[-1]
        self.tokens[rows] = made + len(times_s)

    def reach_client(self, hop_s: float) -> None:
        """Adds the way from worker to client to the token times."""
        self.first_s += hop_s
        self.last_s += hop_s

    def select(self, rows: Ints) -> "Records":
        """The records of these requests, in this order."""
        chosen = Records(len(rows))
        for column, values in vars(self).items():
            setattr(chosen, column, values[rows])
        return chosen

    # Of finished requests

    @property
    def ttft_s(self) -> Floats:
        return self.first_s - self.arrival_s

    @property
    def tpot_s(self) -> Floats:
        """Mean time per token after the first; 0 for a single token."""
        with np.errstate(invalid="ignore"):
            decode_s = self.last_s - self.first_s
        tpot_s: Floats = np.where(self.tokens > 1, decode_s / np.maximum(self.tokens - 1, 1), 0.0)
        return tpot_s

    @property
    def e2e_s(self) -> Floats:
        return self.last_s - self.arrival_s

    @property
    def normalized_s(self) -> Floats:
        """End-to-end seconds per output token."""
        return self.e2e_s / np.maximum(self.tokens, 1)

    def meets(self, sla: Sla) -> Bools:
        """Which requests finished within their SLA, by the inequalities of `services.sla`."""
        met: Bools = (
            self.finished
            & (self.ttft_s <= sla.ttft_s)
            & (self.longest_gap_s <= sla.mtpot_s)
            & (self.tpot_s <= sla.tpot_s)
        )
        return met


class WorkerUsage:
    """Totals and time integrals of one worker's use, from which means follow. O(1) per span.

    `end_s` is when its last step ended. `batches` are static batches, with `batch_members` in
    total, prefilled `padding_tokens`, and `invalid_tokens` that members draw after their end.
    """

    def __init__(self) -> None:
        self.end_s = 0.0
        self.batches = self.batch_members = 0
        self.padding_tokens = self.invalid_tokens = 0
        self.busy_s = 0.0
        self.steps = 0
        self.prefill_tokens = 0
        self.row_s = 0.0  # decode rows · seconds
        self.kv_token_s = 0.0  # KV tokens in use · seconds
        self.prefix_asked_tokens = 0  # of contexts looked up in the prefix cache
        self.prefix_hit_tokens = 0  # of those, found
        self.kv_peak_tokens = 0  # most KV tokens in use

    def on_batches(self, sizes: Sequence[int]) -> None:
        """Static batches of these sizes begin."""
        self.batches += len(sizes)
        self.batch_members += sum(sizes)

    def on_span(
        self, end_s: float, elapsed_s: float, steps: int, rows: int, prefill: int, kv: int
    ) -> None:
        """A span of steps is over; `kv` are the tokens of blocks in use in its last step."""
        self.end_s = end_s
        self.busy_s += elapsed_s
        self.steps += steps
        self.prefill_tokens += prefill
        self.row_s += rows * elapsed_s
        self.kv_token_s += kv * elapsed_s
        self.kv_peak_tokens = max(self.kv_peak_tokens, kv)
