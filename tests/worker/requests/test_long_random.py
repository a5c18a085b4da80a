"""100,000 steps under random plans and cancels, with and without overlap, and an integrity check
after each.

Where hypothesis searches for a short failing sequence (test_random.py), this test reaches states
that take hundreds of steps. Each seed is a separate run, so that processes can share them.
"""

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from services.core import FinishReason, Grant, Pause, Plan, QueueOrder, Residency, StaticBatch
from services.costs import KVCosts
from services.worker.kv.residency import RESIDENCIES
from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import NewToken, StepBatch
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import Prompt, SamplingParams
from tests.worker.requests.worker_loop import RuleLoop
from tests.worker.requests.worker_oracle import EOS, RuleDevice, answer, check_opening
from tests.worker.requests.worker_transcript import Account

SEEDS, STEPS = 10, 10_000
BLOCK = 4
MOST = 24  # requests at once
ADAPTERS = ("", "", "", "a", "b", "c", "d")
COSTS = (KVCosts(), KVCosts(0.6, 0.5, 0.5), KVCosts(0.1, 1.0, 1.0))


class LongRun:
    """A worker that is always busy. Sent tokens must be the oracle's, each once, in order. The loop
    checks the integrity after every step and all changes before it."""

    def __init__(self, seed: int, overlap: bool):
        self.random = draw = Random(seed)
        self.blocks = draw.choice([14, 40, 100])
        limits = Limits(
            self.blocks,
            BLOCK,
            max_running=draw.choice([4, 16]),
            max_batch_tokens=draw.choice([9, 40]),
            report_every_steps=3,
            eos_ids=frozenset([EOS]),
            host_blocks=draw.choice([0, 5, 100]),
            exact_swaps=draw.random() < 0.5,
            prefix_sharing=draw.random() < 0.8,
            max_scored_tokens=draw.choice([5, 256]),
            adapter_slots=draw.choice([1, 2, 3]),
            adapter_turn_steps=draw.choice([1, 7]),
            adapters=True,
        )
        self.state = WorkerState(limits)
        self.device = RuleDevice(BLOCK)
        self.poisoned: set[str] = set()  # fail every step that they are in
        early = draw.random() < 0.5
        self.loop = RuleLoop(self.state, self.device, overlap, early, self._breaks)
        self.loop.compose = self._compose
        self.account = Account(self.blocks)
        self.account.begin(self.state.attach())
        self.prompts: dict[str, Prompt] = {}
        self.output: Counter[str] = Counter()
        self.unopened: set[str] = set()  # nothing was reported of their placement
        self.owed: set[str] = set()
        self.did: Counter[str] = Counter()
        self.seq = self.names = self.batches = 0

    def _compose(self) -> StepBatch | None:
        batch = self.state.steps.compose()
        self.did["waited for a slot"] += self.state.steps.adapter_slots.waiting > 0
        self.did["behind"] += self.state.steps.in_flight and batch is not None
        if batch and self.random.random() < 0.003:
            self.poisoned.add(self.random.choice(batch.sequences).request_id)
        return batch

    def _breaks(self, batch: StepBatch) -> bool:
        return any(sequence.request_id in self.poisoned for sequence in batch.sequences)

    def live(self, steps: int) -> None:
        changes = (
            (0.30, self.add_requests),
            (0.25, self.plan),
            (0.05, self.cancel),
            (0.03, self.resubmit),
            (0.30, self.arrive),
            (0.01, self.lose),
            (0.02, self.gather),
            (0.002, self.attach),
        )
        for _ in range(steps):
            for chance, change in changes:
                if self.random.random() < chance:
                    change()
                    self.check_tokens(self.state.ends.pop_late())
                    self.did[change.__name__] += 1
            self.step()

    def step(self) -> None:
        tokens = self.loop.step()
        self.did["steps"] += tokens is not None
        self.check_tokens([*(tokens or ()), *self.state.ends.pop_late()])
        if self.random.random() < 0.4:
            self.report()

    def check_tokens(self, tokens: list[NewToken]) -> None:
        for token in tokens:
            prompt = self.prompts[token.request_id]
            assert token.offset == self.output[token.request_id]
            length = prompt.prompt_tokens + token.offset
            assert token.token_id == answer(token.request_id, length)
            self.output[token.request_id] += 1
            assert (token.opening is not None) == (token.request_id in self.unopened)
            if token.opening:
                self.unopened.remove(token.request_id)
                self.did["scored"] += token.opening.prompt_logprobs is not None
                check_opening(prompt, token.opening, self.state.limits.prefix_sharing)
            if token.finish:
                self.forget(token.request_id)

    def report(self) -> None:
        report = self.state.report()
        if report is None:
            return
        self.account.check(report)
        for ended in report.finished:
            if ended.reason is FinishReason.ERROR and ended.request_id in self.prompts:
                self.did["errors"] += 1  # it was alone in a failed step
                assert ended.output_tokens == self.output[ended.request_id]
                self.forget(ended.request_id)
        for progress in (*report.progress, *report.evicted):
            assert progress.output_tokens == self.output[progress.request_id]

    def forget(self, name: str) -> None:
        del self.prompts[name]
        self.owed.discard(name)
        self.unopened.discard(name)

    def add_requests(self) -> None:
        """Adds requests; some prompts and salts are equal."""
        if len(self.prompts) >= MOST:
            return
        draw = self.random
        self.names += 1
        name = f"r{self.names}"
        length, alike = draw.randint(1, 22), draw.randint(0, 2)
        tokens = tuple(1 + (alike * i) % 5 for i in range(length))
        how = SamplingParams(
            temperature=0,
            ignore_eos=draw.random() < 0.5,
            min_tokens=draw.choice([0, 0, 3]),
            stop_token_ids=draw.choice([(), (), (2, 5)]),
            prompt_logprobs=draw.choice([None, None, None, 0, 3]),
        )
        most = draw.choice([1, 2, 9, 30])
        salt, adapter = draw.choice(["", "", "t"]), draw.choice(ADAPTERS)
        prompt = Prompt(name, tokens, length, most, how, cache_salt=salt, adapter=adapter)
        assert self.state.receive(prompt, 0.0) is None
        self.prompts[name] = prompt
        self.unopened.add(name)
        if draw.random() < 0.8:
            self.apply(admit=(self.grant(name),))

    def grant(self, name: str) -> Grant:
        return Grant(name, self.output[name] + self.random.choice([0, 1, 4, 40]))

    def some(self, most: int) -> list[str]:
        names = list(self.prompts)
        return self.random.sample(names, min(len(names), self.random.randint(0, most)))

    def apply(self, **directives) -> None:
        self.seq += 1
        self.state.apply_plan(Plan(self.seq, **directives), 0.0)

    def plan(self) -> None:
        draw = self.random
        self.apply(
            admit=tuple(self.grant(name) for name in self.some(4)),
            extend=tuple(self.grant(name) for name in self.some(6)),
            pause=tuple(Pause(name, draw.choice(list(Residency))) for name in self.some(2)),
            victims=tuple(self.some(3)),
            prefetch=tuple(self.some(2)),
            order=QueueOrder.of((name, draw.random()) for name in self.some(draw.choice([0, 20]))),
            residency=draw.choice([*RESIDENCIES]),
            costs=draw.choice(COSTS),
        )

    def cancel(self) -> None:
        for name in self.some(2):
            self.apply(cancel=(name,))
            if name in self.owed:
                self.owed.remove(name)
            else:
                self.forget(name)
                self.account.cancelled(name)

    def resubmit(self) -> None:
        """Requests that are here arrive again, before the cancel of their first placement."""
        for name in self.some(2):
            sequence = self.state.sequences.get(name)
            if sequence is None or sequence.ended:
                continue
            prompt = self.prompts[name]
            first = prompt.prompt_tokens
            delivered = [answer(name, first + i) for i in range(self.output[name])]
            tokens = (*prompt.token_ids[:first], *delivered)
            again = replace(prompt, token_ids=tokens)
            assert self.state.receive(again, 0.0) is None
            self.prompts[name] = again
            self.unopened.add(name)
            self.owed.add(name)
            self.account.cancelled(name)

    def arrive(self) -> None:
        self.device.carry_out(self.state.pop_moves())
        serials = list(self.device.pending)
        serials = serials[: self.random.randint(0, len(serials))]
        for serial in serials:
            self.device.finish(serial)
        self.state.complete_uploads(serials)

    def lose(self) -> None:
        self.state.drop_lost_kv(self.some(1))

    def gather(self) -> None:
        self.batches += 1
        names = tuple(self.some(4))
        grants = tuple(self.grant(name) for name in names)
        self.apply(admit=grants, batches=(StaticBatch(self.batches, names),))

    def attach(self) -> None:
        self.report()
        held = self.state.attach()
        self.owed.clear()
        self.seq = 0
        self.account.begin(held)
        for request in held:
            assert request.output_tokens == self.output[request.request_id]

    def end(self) -> None:
        """From any state, repeated admission of the remaining requests ends all of them."""
        self.poisoned.clear()
        for _ in range(5_000):
            if not self.prompts:
                break
            self.apply(
                admit=tuple(Grant(n, 40) for n in self.prompts if n not in self.state.running),
                extend=tuple(Grant(n, 40) for n in self.prompts),
            )
            self.step()
            self.arrive()
        self.step()
        assert not self.prompts and not self.state.sequences and not self.state.steps.in_flight
        assert self.state.pool.free_blocks == self.blocks
        assert not self.state.host.owners()


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_long_random_life_keeps_integrity(seed, overlap):
    life = LongRun(seed, overlap)
    life.live(STEPS)
    life.end()
    assert life.did["steps"] > STEPS / 2 and life.did["errors"] > 0 and life.did["scored"] > 0
    assert life.did["waited for a slot"] > STEPS / 100
    assert (life.did["behind"] > STEPS / 10) == overlap
    assert bool(life.state.counters.stray_rows) == overlap
