"""Random plans, prompts and steps against a dumb oracle; integrity after each."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.core import FinishReason, Grant, Pause, Plan, Residency
from services.worker.batch import NewToken
from services.worker.blocks import BlockPool
from services.worker.prompt import Prompt, Sampling
from services.worker.state import Limits, WorkerState
from tests.worker_oracle import EOS, DumbDevice, answer

BLOCK, BLOCKS, BATCH, RUNNING = 4, 9, 11, 5
IDS = st.sampled_from([f"r{i}" for i in range(8)])


class BlockMachine(RuleBasedStateMachine):
    """BlockPool against a dict of counts."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK)
        self.held: dict[str, int] = {}

    @rule(owner=IDS, tokens=st.integers(1, 20))
    def grow(self, owner, tokens):
        table = list(self.pool.table(owner))
        wanted = max(self.held.get(owner, 0), -(-tokens // BLOCK))
        fits = sum(self.held.values()) - self.held.get(owner, 0) + wanted <= BLOCKS
        assert self.pool.grow(owner, tokens) == fits
        if fits:
            self.held[owner] = wanted
        assert self.pool.table(owner)[: len(table)] == table

    @rule(owner=IDS)
    def release(self, owner):
        self.pool.release(owner)
        self.held.pop(owner, None)

    @invariant()
    def agrees(self):
        self.pool.check_integrity()
        assert {o: len(self.pool.table(o)) for o in self.pool.owners()} == self.held
        assert self.pool.free_tokens == (BLOCKS - sum(self.held.values())) * BLOCK


class WorkerMachine(RuleBasedStateMachine):
    """WorkerState against what a client has seen: every token once, in order, by the rule."""

    def __init__(self):
        super().__init__()
        limits = Limits(BLOCKS, BLOCK, RUNNING, BATCH, 10**6, 3, frozenset([EOS]))
        self.state = WorkerState(limits)
        self.device = DumbDevice(BLOCK)
        self.seq = 0
        self.prompts: dict[str, Prompt] = {}  # received, not ended
        self.output: dict[str, int] = {}
        self.victims: tuple[str, ...] = ()
        self.reported = 0
        self.over: set[str] = set()

    @rule(
        request_id=IDS, length=st.integers(1, 12), most=st.integers(1, 14),
        ignore=st.booleans(), least=st.integers(0, 3),
    )  # fmt: skip
    def prompt(self, request_id, length, most, ignore, least):
        if request_id in self.prompts:
            return
        sampling = Sampling(temperature=0, ignore_eos=ignore, min_tokens=least)
        prompt = Prompt(request_id, tuple(range(1, length + 1)), length, most, sampling)
        assert self.state.receive(prompt, 0.0) is None
        self.prompts[request_id], self.output[request_id] = prompt, 0
        self.over.discard(request_id)

    @rule(
        admit=st.dictionaries(IDS, st.integers(1, 14), max_size=4),
        extend=st.dictionaries(IDS, st.integers(1, 14), max_size=3),
        pause=st.dictionaries(IDS, st.sampled_from(Residency), max_size=2),
        cancel=st.sets(IDS, max_size=1),
        victims=st.lists(IDS, max_size=3, unique=True),
    )
    def plan(self, admit, extend, pause, cancel, victims):
        self.seq += 1
        plan = Plan(
            self.seq,
            admit=tuple(Grant(*item) for item in admit.items()),
            extend=tuple(Grant(*item) for item in extend.items()),
            pause=tuple(Pause(*item) for item in pause.items()),
            cancel=tuple(cancel),
            victims=tuple(victims),
        )
        self.state.apply(plan, 0.0)
        before = self._snapshot()
        self.state.apply(plan, 0.0)
        assert self._snapshot() == before
        for request_id in cancel:
            self.prompts.pop(request_id, None)
        self.victims = plan.victims

    def _snapshot(self) -> Any:
        return {
            k: (s.phase, s.serial, s.computed, s.limit_length, len(s.tokens))
            for k, s in self.state.sequences.items()
        }, dict(self.state.matching.admissions)

    @rule(times=st.integers(1, 6))
    def steps(self, times):
        for _ in range(times):
            self._step()
            self.state.check_integrity()

    def _step(self) -> None:
        runnable = [s for s in list(self.state.running.values())[:RUNNING] if s.within_budget]
        batch = self.state.compose()
        if batch is None:
            return
        planned = {
            s.request_id for s in [*batch.decodes.sequences, *(c.sequence for c in batch.chunks)]
        }
        assert len(batch.decodes) + batch.prefill_tokens <= BATCH
        assert len(planned) == len(batch.decodes) + len(batch.chunks) <= RUNNING
        if runnable and runnable[0].request_id not in self.victims:
            assert runnable[0].request_id in planned, "the eldest must get on"
        result = self.state.commit(batch, self.device.run(batch), 0.01)
        for token in result.tokens:
            self._check(token)

    def _check(self, token: NewToken) -> None:
        prompt = self.prompts[token.request_id]
        length = prompt.prompt_tokens + self.output[token.request_id]
        assert token.offset == self.output[token.request_id]
        assert token.token_id == answer(token.request_id, length)
        self.output[token.request_id] += 1
        assert token.finish is self._expected_finish(prompt, token)
        if token.finish:
            del self.prompts[token.request_id]
            self.over.add(token.request_id)

    def _expected_finish(self, prompt: Prompt, token: NewToken) -> FinishReason | None:
        count = self.output[token.request_id]
        may_stop = not prompt.sampling.ignore_eos and count > prompt.sampling.min_tokens
        if token.token_id == EOS and may_stop:
            return FinishReason.STOP
        return FinishReason.LENGTH if count == prompt.max_tokens else None

    @rule()
    def report(self):
        report = self.state.report()
        if report is None:
            return
        self.reported += 1
        assert report.seq == self.reported and report.applied_plan_seq == self.seq
        assert report.free_tokens == self.state.pool.free_tokens
        for progress in report.evicted:
            assert progress.held_tokens == 0
        for progress in report.progress:
            sequence = self.state.sequences[progress.request_id]
            assert (progress.output_tokens, progress.held_tokens) == (
                sequence.output_tokens, sequence.computed
            )  # fmt: skip

    @precondition(lambda self: self.prompts)
    @rule()
    def finish_everything(self):
        """However it got here, admitting what is left often enough ends it."""
        for _ in range(400):
            if not self.prompts:
                break
            idle = [k for k in self.prompts if k not in self.state.running]
            self.seq += 1
            admit = tuple(Grant(k, 14) for k in idle)
            extend = tuple(Grant(k, 14) for k in self.prompts)
            self.state.apply(Plan(self.seq, admit=admit, extend=extend), 0.0)
            self.victims = ()
            self._step()
            self.state.check_integrity()
        assert not self.prompts
        assert self.state.pool.free_blocks == BLOCKS

    @invariant()
    def blocks_and_phases_agree(self):
        self.state.check_integrity()


TestBlocks = BlockMachine.TestCase
TestWorkerState = WorkerMachine.TestCase
TestBlocks.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestWorkerState.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
