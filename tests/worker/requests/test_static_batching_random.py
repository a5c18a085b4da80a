"""Static batches under random plans: what members, gateways and schedulers may observe, counted
waste, and unchanged answers of real models."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.core import Grant, Pause, Plan, Residency, StaticBatch
from services.worker.requests.pending import HELD_S
from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams
from services.worker.requests.types.sequence import SequencePhase
from tests.examples import examples
from tests.worker.requests.worker_oracle import EOS, RuleDevice, answer
from tests.worker.requests.worker_transcript import Account
from tests.worker.worker_fixtures import Feeder, clear_cases, engine_of

BLOCK = 4
IDS = [f"r{i}" for i in range(8)]
NAMES = st.sampled_from(IDS)
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


def length_of(prompt: Prompt) -> int:
    """The number of tokens of a request's answer, by the oracle."""
    for count in range(1, prompt.max_tokens):
        token = answer(prompt.request_id, prompt.prompt_tokens + count - 1)
        if token == EOS and not prompt.sampling.ignore_eos:
            return count
    return prompt.max_tokens


class LockstepMachine(RuleBasedStateMachine):
    """Which tokens of a member are sent, and when. `batch_of` are the batches of the plans, without
    members that were cancelled, paused, evicted or named in a later batch."""

    @initialize(
        blocks=st.sampled_from([9, 30]), host=st.sampled_from([0, 12]), sharing=st.booleans()
    )
    def begin(self, blocks, host, sharing):
        self.blocks = blocks
        limits = Limits(blocks, BLOCK, 5, 11, 34, 3, frozenset([EOS]), host, True, sharing)
        self.state = WorkerState(limits)
        self.device = RuleDevice(BLOCK)
        self.account = Account(blocks)
        self.account.begin(self.state.attach())
        self.seq = self.number = 0
        self.prompts: dict[str, Prompt] = {}
        self.output: Counter[str] = Counter()
        self.batch_of: dict[str, int] = {}
        self.ended: list[str] = []

    @rule(names=st.sets(NAMES, max_size=4), length=st.integers(1, 15), most=st.integers(1, 14),
          ignore=st.booleans())  # fmt: skip
    def prompts_arrive(self, names, length, most, ignore):
        for name in sorted(names - self.prompts.keys()):
            here = max(1, length - int(name[1:]))
            tokens = tuple(1 + i % 3 for i in range(here))
            sampling = ENDLESS if ignore else GREEDY
            prompt = Prompt(name, tokens, here, most, sampling)
            assert self.state.receive(prompt, 0.0) is None
            self.prompts[name], self.output[name] = prompt, 0

    @rule(
        limits=st.dictionaries(NAMES, st.integers(1, 14), min_size=1),
        beside=st.dictionaries(NAMES, st.integers(0, 14), max_size=2),
        cancel=st.sets(NAMES, max_size=1),
        pause=st.dictionaries(NAMES, st.sampled_from(Residency), max_size=1),
        residency=st.sampled_from(["", "swap", "defer"]),
    )
    def plan(self, limits, beside, cancel, pause, residency):
        """Members may be here, expected, or missing, and in a batch that continues."""
        self.number += 1
        grants = tuple(Grant(*item) for item in limits.items())
        self._plan(
            cancel=tuple(cancel),
            pause=tuple(Pause(*item) for item in pause.items()),
            admit=(*grants, *(Grant(*i) for i in beside.items() if i[0] not in limits)),
            batches=(StaticBatch(self.number, tuple(limits)),),
            residency=residency,
        )

    @rule(
        lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4),
        most=st.lists(st.integers(1, 12), min_size=4, max_size=4),
        limit=st.integers(3, 14),
        times=st.integers(0, 5),
    )
    def batch_begins(self, lengths, most, limit, times):
        """New requests with prompts that are here; most end at different times."""
        names = [name for name in IDS if name not in self.prompts][: len(lengths)]
        for name, length, tokens in zip(names, lengths, most, strict=False):
            self.prompts_arrive({name}, length + int(name[1:]), tokens, True)
        self.number += 1
        grants = tuple(Grant(name, limit) for name in names)
        self._plan(admit=grants, batches=(StaticBatch(self.number, tuple(names)),))
        self.steps(times)

    @rule(extend=st.dictionaries(NAMES, st.integers(1, 14), max_size=3))
    def extend(self, extend):
        self._plan(extend=tuple(Grant(*item) for item in extend.items()))

    def _plan(self, **directives: Any) -> None:
        self.seq += 1
        plan = Plan(self.seq, **directives)
        for request_id in plan.cancel:
            self._forget(request_id)
        paused = {pause.request_id for pause in plan.pause if self._is_here(pause)}
        to_tell = {r for r in paused - {*plan.cancel} if self.state.running[r].ended}
        self._leave(*paused)
        self.account.cancelled(*plan.cancel)
        self.state.apply_plan(plan, 0.0)
        late = self.state.ends.pop_late()
        assert {token.request_id for token in late} == to_tell, (
            "late tokens of paused requests only"
        )
        self._check_tokens(late)  # a request that the plan names again restarts and has not ended
        for batch in plan.batches:
            here = {*self.state.running, *self.state.pending.admissions}
            ended = {r for r, s in self.state.running.items() if s.ended}
            self.batch_of |= dict.fromkeys(here & {*batch.members} - ended, batch.number)

    def _is_here(self, pause: Pause) -> bool:
        return pause.request_id in self.state.running

    def _leave(self, *request_ids: str) -> None:
        """These requests leave their batches."""
        for request_id in request_ids:
            self.batch_of.pop(request_id, None)

    def _forget(self, request_id: str) -> None:
        self._leave(request_id)
        self.prompts.pop(request_id, None)

    @rule(times=st.integers(1, 8))
    def steps(self, times):
        for _ in range(times):
            self._step()

    def _step(self) -> bool:
        batch = self.state.steps.compose()
        self.state.check_integrity()
        self._leave(
            *(r for r, s in self.state.sequences.items() if s.phase is not SequencePhase.RUNNING)
        )
        self._leave_finished_batches()
        self.device.carry_out(self.state.pop_moves())
        if batch is None:
            self._check_tokens(self.state.ends.pop_late())
            assert self.device.pending or not self._could_run(), "a request could run"
            return False
        self._check_gate([*batch.decodes.sequences, *(c.sequence for c in batch.chunks)])
        pads = [c for c in batch.chunks if c.sequence.request_id not in self.prompts]
        assert not any(chunk.samples for chunk in pads)
        assert len(batch.decodes) + batch.prefill_tokens <= 11
        assert len(batch.decodes) + len(batch.chunks) - len(pads) <= 5
        result = self.state.steps.commit(batch, self.device.run(batch), [])
        self._check_tokens(result.tokens)
        self._leave_finished_batches()
        self.state.check_integrity()
        return True

    def _leave_finished_batches(self) -> None:
        """A batch is also over when all members have used up their budgets and none has ended."""
        going = {n for r, n in self.batch_of.items() if not self._is_spent(r)}
        self._leave(*(r for r, number in self.batch_of.items() if number not in going))

    def _is_spent(self, request_id: str) -> bool:
        sequence = self.state.running.get(request_id)
        return bool(sequence and not sequence.ended and not sequence.within_budget)

    def _could_run(self) -> bool:
        """With a batch, a request without budget left takes none of the 5 slots."""
        first = list(self.state.running.items())[: None if self.batch_of else 5]
        waiting = {self.batch_of.get(r, 0) for r in self.state.pending.admissions} - {0}
        return any(
            s.within_budget and not s.ended and self.batch_of.get(r, 0) not in waiting
            for r, s in first
        )

    def _check_gate(self, ran) -> None:
        """All members of a batch with a running member are here."""
        expected = self.state.pending.admissions
        numbers = {self.batch_of.get(s.request_id, 0) for s in ran} - {0}
        assert not [r for r in expected if self.batch_of.get(r) in numbers]

    def _check_tokens(self, tokens: list[NewToken]) -> None:
        """Sent tokens are those of the oracle, in order; ends of a batch are sent together."""
        for token in tokens:
            prompt = self.prompts[token.request_id]
            assert token.offset == self.output[token.request_id]
            length = prompt.prompt_tokens + token.offset
            assert token.token_id == answer(token.request_id, length)
            self.output[token.request_id] += 1
            is_last = self.output[token.request_id] == length_of(prompt)
            assert (token.finish is not None) == is_last
        ended = {token.request_id for token in tokens if token.finish}
        numbers = {self.batch_of[r] for r in ended if r in self.batch_of}
        for request_id, number in self.batch_of.items():
            if number in numbers and request_id not in ended:
                sequence = self.state.sequences[request_id]
                assert not sequence.within_budget, "sent before the batch was over"
        for request_id in [r for r, n in self.batch_of.items() if n in numbers]:
            self._leave(request_id)
        for request_id in ended:
            del self.prompts[request_id]
        self.ended += [token.request_id for token in tokens if token.finish]

    @rule()
    def arrive(self):
        self.device.carry_out(self.state.pop_moves())
        serials = list(self.device.pending)
        for serial in serials:
            self.device.finish(serial)
        self.state.complete_uploads(serials)

    @rule()
    def scheduler_is_replaced(self):
        """Batches of the old scheduler end in their present stage, and earlier ends are sent."""
        self.batch_of.clear()
        held = self.state.attach()
        self._check_tokens(self.state.ends.pop_late())
        assert {request.request_id for request in held} == self.prompts.keys()
        self.account.begin(held)
        self.seq = self.number = 0
        self.ended = [r for r in self.ended if r not in self.state.sequences]
        self.report()

    @rule()
    def missing_members_expire(self):
        lost = list(self.state.pending.admissions)
        self._leave(*lost)
        for name in list(self.prompts):
            if name in self.state.pending.prompts:
                del self.prompts[name]
        self.state.expire(2 * HELD_S)
        self.report(lost)

    @rule()
    def report(self, lost=()):
        report = self.state.report()
        if report is None:
            return
        self.account.check(report)
        finished = [f.request_id for f in report.finished]
        assert Counter(finished) == Counter([*self.ended, *lost])
        self.ended.clear()
        for progress in (*report.progress, *report.evicted):
            assert progress.output_tokens == self.output[progress.request_id]
            assert progress.request_id in self.prompts

    @rule()
    def finish_everything(self):
        """From any state, expiring missing members and admitting the others ends all requests."""
        self.missing_members_expire()
        for _ in range(300):
            if not self.prompts:
                break
            idle = tuple(Grant(k, 14) for k in self.prompts if k not in self.state.running)
            self._plan(admit=idle, extend=tuple(Grant(k, 14) for k in self.prompts))
            self._step()
            self.arrive()
        assert not self.prompts
        assert self.state.pool.free_blocks == self.blocks
        assert not self.state.host.owners() and self.state.idle

    @invariant()
    def agrees(self):
        self.state.check_integrity()


TestLockstep = LockstepMachine.TestCase
TestLockstep.settings = settings(max_examples=examples(80), stateful_step_count=30, deadline=None)


@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 20), st.booleans()), min_size=1, max_size=8
    ),
    limit=st.integers(1, 20),
)
@settings(deadline=None)
def test_waste_equals_the_papers_count(shapes, limit):
    """SCLS, §2.4: padding up to the longest prompt, and every member draws as many tokens as the
    one that draws most. Memory and steps suffice for all."""
    state = WorkerState(Limits(200, BLOCK, 8, 10**4, eos_ids=frozenset([EOS])))
    device = RuleDevice(BLOCK)
    prompts = []
    for number, (length, most, ignore) in enumerate(shapes):
        sampling = ENDLESS if ignore else GREEDY
        tokens = tuple([number + 1] * length)
        prompts.append(Prompt(f"r{number}", tokens, length, most, sampling))
        state.receive(prompts[-1], 0.0)
    names = tuple(prompt.request_id for prompt in prompts)
    grants = tuple(Grant(name, limit) for name in names)
    state.apply_plan(Plan(1, admit=grants, batches=(StaticBatch(1, names),)), 0.0)
    while batch := state.steps.compose():
        state.steps.commit(batch, device.run(batch), [])
    lengths = [length_of(prompt) for prompt in prompts]
    steps = max(min(limit, length) for length in lengths)
    ended = [length for length in lengths if length <= limit]
    longest = max(prompt.prompt_tokens for prompt in prompts)
    assert state.counters.padding_tokens == sum(longest - p.prompt_tokens for p in prompts)
    assert state.counters.padding_left_out_tokens == 0
    assert state.counters.invalid_tokens == sum(steps - length for length in ended)
    report = state.report()
    assert report and {ended.request_id for ended in report.finished} == {
        name for name, length in zip(names, lengths, strict=True) if length <= limit
    }


class StaticFeeder(Feeder):
    """Serves all requests as one static batch, slice after slice."""

    def serve(self, cases, slice_tokens: int) -> None:
        self.cases = cases
        for request_id, (tokens, output) in cases.items():
            prompt = Prompt(request_id, tokens, len(tokens), len(output), ENDLESS)
            assert self.engine.add(prompt, 0.0) is None
        number = 0
        while left := [r for r in cases if r not in self.finished]:
            number += 1
            grants = tuple(Grant(r, len(self.output[r]) + slice_tokens) for r in left)
            self.plan(admit=grants, batches=(StaticBatch(number, tuple(left)),))
            while self.step():
                pass

    def _read(self, report) -> None:
        self.finished |= {f.request_id: f.reason for f in report.finished}
        self.evictions += len(report.evicted)


@pytest.mark.parametrize(("name", "kv_tokens"), [("llama", 512), ("llama", 64), ("gpt2", 96)])
def test_static_answers_equal_those_of_single_requests(name, kv_tokens):
    """Answers of several lengths, in slices of 5, padded and continued after ends; with memory for
    all requests and for fewer."""
    cases = clear_cases(name, lengths=[3, 30, 11, 18], new_tokens=12)
    cases = {r: (tokens, output[: 3 + 3 * int(r[1:])]) for r, (tokens, output) in cases.items()}
    feeder = StaticFeeder(engine_of(name, kv_tokens=kv_tokens, block_tokens=4, max_batch_tokens=32))
    feeder.serve(cases, slice_tokens=5)
    assert feeder.output == {request_id: output for request_id, (_, output) in cases.items()}
    counters = feeder.engine.state.counters
    assert counters.invalid_tokens > 0
    assert bool(feeder.evictions) == (kv_tokens == 64), "undelivered work is dropped first"
    assert bool(counters.padding_left_out_tokens) == (kv_tokens < 512)
    assert bool(counters.padding_tokens) == (kv_tokens > 64)
    assert feeder.engine.state.pool.free_blocks == feeder.engine.state.pool.blocks
