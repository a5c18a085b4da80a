"""Random plans, prompts and steps against a simple oracle, with an integrity check after each."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.core import FinishReason, Grant, Pause, Plan, QueueOrder, Residency
from services.costs import KVCosts
from services.worker.kv.residency import RESIDENCIES
from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import NewToken, PrefillChunk, StepBatch
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.lookup import NO_DRAFTS, DraftLimits
from services.worker.requests.types.prompt import Prompt, SamplingParams
from services.worker.requests.types.sequence import Sequence, SequencePhase
from tests.examples import examples
from tests.worker.requests.worker_loop import RuleLoop
from tests.worker.requests.worker_oracle import EOS, RuleDevice, answer, check_opening
from tests.worker.requests.worker_transcript import Account

BLOCK, BLOCKS, BATCH, RUNNING = 4, 9, 11, 5
NO_GRANTS: dict[str, int] = {}
NO_PAUSES: dict[str, Residency] = {}
IDS = st.sampled_from([f"r{i}" for i in range(8)])
GATEWAYS = st.sampled_from(["g0", "g1"])


class WorkerMachine(RuleBasedStateMachine):
    """WorkerState against what a client receives: every token once, in order, by the oracle. Some
    prompts begin alike; KV moves to a small host pool and back, with random arrival. Schedulers and
    the streams of two gateways come and go; plans may be invalid. With `overlap`, a step is in
    flight during all of this."""

    @initialize(
        host=st.sampled_from([0, 3, 30]),
        sharing=st.booleans(),
        exact=st.booleans(),
        overlap=st.booleans(),
        scored_tokens=st.sampled_from([3, 256]),
        drafts=st.sampled_from([NO_DRAFTS, DraftLimits(3, 1, 2)]),
    )
    def begin(self, host, sharing, exact, overlap, scored_tokens, drafts=NO_DRAFTS):
        limits = Limits(
            BLOCKS, BLOCK, RUNNING, BATCH, 10**6, 3, frozenset([EOS]), host, exact, sharing,
            max_scored_tokens=scored_tokens, drafts=NO_DRAFTS if overlap else drafts,
        )  # fmt: skip
        self.state = WorkerState(limits)
        self.device = RuleDevice(BLOCK)
        self.loop = RuleLoop(self.state, self.device, overlap)
        self.loop.compose = self._compose
        self.owed: set[str] = set()  # cancels of earlier placements that have not arrived
        self.seq = 0
        self.prompts: dict[str, Prompt] = {}  # received, not ended
        self.output: dict[str, int] = {}
        self.drafted: list[PrefillChunk] = []  # in the current step
        self.unopened: set[str] = set()  # nothing was reported of their placement
        self.victims: tuple[str, ...] = ()
        self.residency = ""
        self.reported = 0
        self.ended: list[str] = []  # finished, and not reported to a scheduler
        self.runs: set[str] = set()  # the scheduler's knowledge
        self.streams = {"g0": 1, "g1": 1}  # the open stream of each gateway
        self.account = Account(BLOCKS)
        self._attach()

    @rule(
        request_id=IDS, length=st.integers(1, 12), most=st.integers(1, 14),
        ignore=st.booleans(), least=st.integers(0, 3), stops=st.sampled_from([(), (), (3, 4)]),
        scored=st.sampled_from([None, None, 0, 2]),
    )  # fmt: skip
    def prompt(self, request_id, length, most, ignore, least, stops=(), scored=None):
        if request_id in self.prompts:
            return
        sampling = SamplingParams(
            temperature=0, ignore_eos=ignore, min_tokens=least,
            stop_token_ids=stops, prompt_logprobs=scored,
        )  # fmt: skip
        alike = int(request_id[1:]) % 3
        tokens = (*(1 + (alike * i) % 5 for i in range(length)),)
        salt = "tenant" if request_id == "r7" else ""
        origin = sorted(self._origins())[int(request_id[1:]) % 2]
        prompt = Prompt(request_id, tokens, length, most, sampling, origin, salt)
        assert self.state.receive(prompt, 0.0) is None
        self.prompts[request_id], self.output[request_id] = prompt, 0
        self.unopened.add(request_id)

    @rule(request_id=IDS)
    def resubmit(self, request_id):
        """A request was moved away, and returns before its first placement is cancelled."""
        prompt = self.prompts.get(request_id)
        if prompt is None or request_id not in self.state.sequences:
            return
        length = prompt.prompt_tokens + self.output[request_id]
        delivered = [answer(request_id, i) for i in range(prompt.prompt_tokens, length)]
        tokens = (*prompt.token_ids[: prompt.prompt_tokens], *delivered)
        again = replace(prompt, token_ids=tokens)
        assert self.state.receive(again, 0.0) is None
        self.prompts[request_id] = again
        self.unopened.add(request_id)
        self.owed.add(request_id)
        self.account.cancelled(request_id)
        self.runs.discard(request_id)

    @rule(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=5), limit=st.integers(4, 14))
    def crowd(self, lengths, limit):
        """Enough requests at once to exceed the memory."""
        names = [f"r{i}" for i in range(8) if f"r{i}" not in self.prompts][: len(lengths)]
        for name, length in zip(names, lengths, strict=False):
            self.prompt(name, length, 14, True, 0)
        self._plan(admit=dict.fromkeys(names, limit))

    @rule(
        admit=st.dictionaries(IDS, st.integers(0, 14), max_size=4),
        extend=st.dictionaries(IDS, st.integers(0, 14), max_size=3),
        pause=st.dictionaries(IDS, st.sampled_from(Residency), max_size=2),
        cancel=st.sets(IDS, max_size=1),
        victims=st.lists(IDS, max_size=3),
        order=st.one_of(st.lists(IDS, max_size=8), st.permutations([f"r{i}" for i in range(8)])),
        prefetch=st.lists(IDS, max_size=2),
        residency=st.sampled_from(["", "nonsense", *RESIDENCIES]),
        token_s=st.sampled_from([0.0, 0.5]),
    )
    def plan(self, **directives):
        self._plan(**directives)

    def _plan(
        self,
        admit: dict[str, int],
        extend: dict[str, int] = NO_GRANTS,
        pause: dict[str, Residency] = NO_PAUSES,
        cancel: Iterable[str] = (),
        victims: Iterable[str] = (),
        order: Iterable[str] = (),
        prefetch: Iterable[str] = (),
        residency: str = "",
        token_s: float = 0.0,
    ) -> None:
        self.seq += 1
        plan = Plan(
            self.seq,
            admit=tuple(Grant(*item) for item in admit.items()),
            extend=tuple(Grant(*item) for item in extend.items()),
            pause=tuple(Pause(*item) for item in pause.items()),
            cancel=tuple(cancel),
            victims=tuple(victims),
            prefetch=tuple(prefetch),
            order=QueueOrder.of((name, float(i)) for i, name in enumerate(order)),
            residency=residency,
            costs=KVCosts(0.6, token_s, token_s),
        )
        self.state.apply_plan(plan, 0.0)
        before = self._snapshot()
        self.state.apply_plan(plan, 0.0)
        assert self._snapshot() == before
        for request_id in set(cancel) - self.owed:
            self.prompts.pop(request_id, None)
            self.account.cancelled(request_id)
        self.owed -= set(cancel)
        self.victims, self.residency = plan.victims, residency
        self.runs -= pause.keys()
        self.runs |= admit.keys() & self.state.running.keys()

    def _snapshot(self) -> Any:
        return {
            k: (s.phase, s.serial, s.computed, s.limit_length, len(s.tokens))
            for k, s in self.state.sequences.items()
        }, dict(self.state.pending.admissions)

    @rule(times=st.integers(1, 6))
    def steps(self, times):
        for _ in range(times):
            self._step()
            self.state.check_integrity()

    def _step(self) -> None:
        self.drafted = []
        for token in self.loop.step() or ():
            self._check(token)
        pool = self.state.pool
        for sequence in (chunk.sequence for chunk in self.drafted):
            if self.state.sequences.get(sequence.request_id) is sequence:
                held = len(pool.table(sequence.request_id))
                assert held == pool.blocks_for(sequence.computed), "a draft left a block behind"

    def _compose(self) -> StepBatch | None:
        """Behind a step in flight, dependent requests wait, and no request is evicted."""
        ahead = self.state.steps.in_flight
        first = list(self.state.running.values())[:RUNNING]
        runnable = [s for s in first if s.within_budget and not s.upload_serial and not s.waits]
        running, decodes = len(self.state.running), [s for s in runnable if s.is_decode]
        batch = self.state.steps.compose()
        if ahead:
            assert len(self.state.running) == running
        if batch is None:
            left = [s for s in runnable if s.phase is SequencePhase.RUNNING and not s.upload_serial]
            assert ahead or not left, "a request could run"
            return None
        planned = {s.request_id for s in batch.sequences}
        out = [
            s for s in runnable if s.request_id not in planned and s.phase is SequencePhase.RUNNING
        ]
        self._check_left(out, {*decodes} & {*out}, batch)
        self.drafted = batch.drafted
        assert len(batch.decodes) + sum(chunk.tokens for chunk in batch.chunks) <= BATCH
        for chunk in self.drafted:
            self._check_draft(chunk)
        assert len(planned) == len(batch.sequences) <= RUNNING
        eldest = first[0]
        may_evict = eldest.request_id in self.victims or self.residency == "defer"
        if eldest in runnable and not may_evict:
            getting_on = eldest.request_id in planned or eldest.upload_serial
            assert getting_on or ahead, "the oldest request must progress"
        return batch

    def _check_draft(self, chunk: PrefillChunk) -> None:
        """A draft leaves a token of the budget, and has memory."""
        sequence, table = chunk.sequence, self.state.pool.table(chunk.sequence.request_id)
        assert chunk.start == sequence.computed == len(sequence.tokens) - 1
        assert chunk.end < min(sequence.limit_length, sequence.max_length)
        assert chunk.table.tolist() == table and chunk.end <= len(table) * BLOCK

    def _check_left(self, out: list[Sequence], decodes: set[Sequence], batch: StepBatch) -> None:
        """Requests that could run and are not in the step lack memory or room, or wait for a
        prefill in flight that computes their blocks."""
        if len(batch.decodes) + batch.prefill_tokens == BATCH or self.residency == "defer":
            return
        reach = self.state.pool.reach
        assert not [s for s in decodes if reach(s.request_id) > s.computed], "a decode is left out"
        flight = self.state.steps._flight.batch
        if out and not out[0].host_tokens and not batch.chunks and not (flight and flight.chunks):
            assert reach(out[0].request_id) <= out[0].computed, "a prefill is left out"

    def _check(self, token: NewToken) -> None:
        prompt = self.prompts[token.request_id]
        length = prompt.prompt_tokens + self.output[token.request_id]
        assert token.offset == self.output[token.request_id]
        assert token.token_id == answer(token.request_id, length)
        self.output[token.request_id] += 1
        assert token.finish is self._expected_finish(prompt, token)
        assert (token.opening is not None) == (token.request_id in self.unopened)
        if token.opening:
            self.unopened.remove(token.request_id)
            check_opening(prompt, token.opening, self.state.limits.prefix_sharing)
        if token.finish:
            del self.prompts[token.request_id]
            self.owed.discard(token.request_id)
            self.ended.append(token.request_id)

    def _expected_finish(self, prompt: Prompt, token: NewToken) -> FinishReason | None:
        count = self.output[token.request_id]
        sampling = prompt.sampling
        ends = sampling.stop_token_ids if sampling.ignore_eos else (EOS, *sampling.stop_token_ids)
        if token.token_id in ends and count > sampling.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count == prompt.max_tokens else None

    @rule(data=st.data())
    def arrive(self, data):
        """Completes uploads in order, some now and some later."""
        self.device.carry_out(self.state.pop_moves())
        pending = list(self.device.pending)
        self._arrive(pending[: data.draw(st.integers(0, len(pending)))])

    def _arrive(self, serials: list[int]) -> None:
        for serial in serials:
            self.device.finish(serial)
        self.state.complete_uploads(serials)
        self.state.check_integrity()

    @rule(request_id=IDS)
    def host_memory_fails(self, request_id):
        self.state.drop_lost_kv([request_id])

    def _origins(self) -> set[str]:
        return {f"{gateway}#{stream}" for gateway, stream in self.streams.items()}

    @rule(gateway=GATEWAYS)
    def gateway_reconnects(self, gateway):
        """A scheduler, if any, cancels the requests of the old stream."""
        self.streams[gateway] += 1

    def _forget_unread(self) -> None:
        self.state.keep_only(self._origins())
        for request_id, prompt in list(self.prompts.items()):
            if prompt.origin not in self._origins():
                del self.prompts[request_id]
        assert self.state.sequences.keys() <= self.prompts.keys()

    @rule(unsent=st.booleans(), times=st.integers(0, 6), left=st.sets(GATEWAYS))
    def scheduler_is_replaced(self, unsent, times, left):
        """The last report may be lost. Without a scheduler, gateways may leave, too."""
        report = self.state.report() if unsent else None
        self.state.return_reports([report] if report else [])
        self._forget_unread()
        self.steps(times)
        for gateway in left:
            self.streams[gateway] += 1
        self._forget_unread()
        self._attach()

    def _attach(self) -> None:
        """The scheduler has only the hello and the first report."""
        held = self.state.attach()
        self.owed.clear()
        self.seq = self.reported = 0
        self.ended = [r for r in self.ended if r not in self.state.sequences]
        self.account.begin(held)
        self.runs = {request.request_id for request in held if request.running}
        assert [r.request_id for r in held] == list(self.state.sequences)
        assert self.runs == self.state.running.keys()
        waiting = {r.request_id: (r.prompt_tokens, r.max_tokens, r.output_tokens) for r in held}
        assert waiting == {
            k: (p.prompt_tokens, p.max_tokens, self.output[k]) for k, p in self.prompts.items()
        }
        self._report()

    @rule()
    def report(self):
        self._report()

    def _report(self) -> None:
        report = self.state.report()
        if report is None:
            return
        self.account.check(report)
        assert [f.request_id for f in report.finished] == self.ended
        self.ended.clear()
        self.runs -= {progress.request_id for progress in report.evicted}
        assert self.runs & self.state.sequences.keys() <= self.state.running.keys()
        self.reported += 1
        assert report.seq == self.reported and report.applied_plan_seq == self.seq
        assert report.free_blocks == self.state.pool.free_blocks
        if self.state.limits.host_blocks == 0:
            assert all(progress.held_tokens == 0 for progress in report.evicted)
        for progress in report.progress:
            sequence = self.state.sequences[progress.request_id]
            assert progress.output_tokens == self.output[progress.request_id]
            assert (progress.output_tokens, progress.held_tokens) == (
                sequence.output_tokens, sequence.reported_tokens
            )  # fmt: skip

    @precondition(lambda self: self.prompts)
    @rule()
    def finish_everything(self):
        """From any state, repeated admission of the remaining requests ends all of them."""
        for _ in range(400):
            if not self.prompts:
                break
            idle = [k for k in self.prompts if k not in self.state.running]
            self.seq += 1
            admit = tuple(Grant(k, 14) for k in idle)
            extend = tuple(Grant(k, 14) for k in self.prompts)
            self.state.apply_plan(Plan(self.seq, admit=admit, extend=extend), 0.0)
            self.victims, self.residency = (), ""
            self._step()
            self._arrive(list(self.device.pending))
        assert not self.prompts
        self._step()
        assert self.state.idle or self.state.pending.admissions
        assert self.state.pool.free_blocks == BLOCKS
        assert self.state.host.free_blocks == self.state.limits.host_blocks

    @invariant()
    def blocks_and_phases_agree(self):
        self.state.check_integrity()
        self.runs &= self.state.sequences.keys()


TestWorkerState = WorkerMachine.TestCase
TestWorkerState.settings = settings(
    max_examples=examples(150), stateful_step_count=30, deadline=None
)
