"""Failing steps: the faulty request is isolated, and other answers stay the same."""

from math import ceil, log2
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core import FinishReason, Grant, Plan, StaticBatch
from services.worker.config import EngineConfig
from services.worker.engine.interface import StepFailed
from services.worker.engine.step import Engine
from services.worker.requests.state import WorkerState
from services.worker.requests.suspects import Suspects
from services.worker.requests.types.batch import StepBatch
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams
from services.worker.requests.types.sequence import Sequence
from tests.worker.requests.worker_loop import RuleLoop
from tests.worker.requests.worker_oracle import RuleDevice, answer
from tests.worker.requests.worker_transcript import Transcript
from tests.worker.worker_fixtures import Feeder, engine_of, prompt_tokens

ENDLESS = SamplingParams(temperature=0, ignore_eos=True)
ROWS, NEW_TOKENS = 32, 12
POISON = 1_290  # the demo model's last token, which is in no good prompt or answer


# Parts


def sequences(count: int) -> list[Sequence]:
    made = [Sequence.start(Prompt(f"r{i}", (1,), 1, 1), 1) for i in range(count)]
    for serial, sequence in enumerate(made):
        sequence.serial = serial
    return made


def test_suspects_are_split_in_halves_older_first():
    """Five requests are split into three and two; the three fail again and are split into two and
    one."""
    rows = sequences(5)
    suspects = Suspects()
    assert suspects.narrow(rows) == rows, "no request is suspected"
    suspects.split(list(reversed(rows)))
    assert suspects.narrow(rows) == rows[:3]
    suspects.split(rows[:3])
    seen = []
    while suspects:
        seen.append(suspects.narrow(rows))
        suspects.pass_part()
    assert seen == [rows[:2], rows[2:3], rows[3:]]


@given(rows=st.integers(2, 100), data=st.data())
def test_suspects_compute_every_row_once_and_find_faults_in_logarithmic_time(rows, data):
    """k faulty rows of n cost at most k (⌈log2 n⌉ + 1) failed attempts, and as many computations of
    each row."""
    everybody = sequences(rows)
    bad = set(data.draw(st.sets(st.sampled_from(everybody), min_size=1)))
    suspects, failed = Suspects(), 0
    computed: list[Sequence] = []
    found: list[Sequence] = []
    tried = dict.fromkeys(everybody, 1)
    suspects.split(everybody)
    while suspects:
        part = suspects.narrow(everybody)
        tried |= {row: tried[row] + 1 for row in part}
        if not bad & set(part):
            computed += part
            suspects.pass_part()
        elif len(part) == 1:
            found += part
            failed += 1
            suspects.pass_part()
        else:
            failed += 1
            suspects.split(part)
    assert set(found) == bad and len(found) == len(bad)
    assert sorted(row.serial for row in (*computed, *found)) == list(range(rows))
    assert failed + 1 <= len(bad) * (ceil(log2(rows)) + 1)
    assert max(tried.values()) <= ceil(log2(rows)) + 1


# The state


def test_faulty_prefill_ends_alone_and_is_not_shared():
    """KV of a failed step is not shared: `c` begins like `b`, and the first block of `b` was not
    computed; `a` belongs to another tenant."""
    t = Transcript(prefix_sharing=True, max_batch_tokens=32)
    for name, salt in (("a", "s"), ("b", "")):
        t.prompt(name, 6, salt=salt)
    t.admit(a=9, b=9)
    t.step(times=3, poison="b")
    t.prompt("c", 6)
    t.admit(c=9)
    t.step()
    t.reads("""
        a[0:6] b[0:6] breaks
          report plan 1, free 12: a:0/0, b:0/0
        a[0:6] -> a+0
        b[0:6] breaks b
          report plan 1, free 14: finished b:0 error
        a@6 c[0:6] -> a+1 c+0
          report plan 2, free 12: a:2/7, c:1/6
    """)


def test_new_request_waits_while_suspects_are_tried():
    t = Transcript()
    for name in "ab":
        t.prompt(name, 1)
    t.admit(a=9, b=9)
    t.step()
    t.step(poison="b")
    t.prompt("c", 1)
    t.plan(cancel=["b"], admit=[Grant("c", 9)])
    t.step(times=2, poison="b")
    t.reads("""
        a[0:1] b[0:1] -> a+0 b+0
          report plan 1, free 14: a:1/1, b:1/1
        a@1 b@1 breaks
        a@1 -> a+1
          report plan 2, free 15: a:2/2, c:0/0
        a@2 c[0:1] -> a+2 c+0
    """)


def test_out_of_memory_evicts_the_newest_request():
    """The policy allows no eviction. A single request cannot make room for itself."""
    t = Transcript()
    for name in "abc":
        t.prompt(name, 2)
    t.plan(admit=[Grant(name, 9) for name in "abc"], residency="defer")
    t.step()
    for makes_way in (True, True, False):
        batch = t.state.steps.compose()
        assert batch and t.state.steps.out_of_memory(batch) is makes_way
        t.state.check_integrity()
    t.step()
    t.reads("""
        a[0:2] b[0:2] c[0:2] -> a+0 b+0 c+0
          report plan 1, free 13: a:1/2, b:1/2, c:1/2
        a@2 -> a+1
          report plan 1, free 15: evicted c:1, evicted b:1
    """)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=9),
    bad=st.dictionaries(st.integers(0, 8), st.integers(0, 8), max_size=3),
    static=st.booleans(),
    room=st.sampled_from([5, 40]),
    blocks=st.sampled_from([8, 60]),
    overlap=st.booleans(),
    early=st.booleans(),
)
@settings(deadline=None)
def test_healthy_requests_end_as_without_faulty_ones(
    lengths, bad, static, room, blocks, overlap, early
):
    """`bad` requests fail every step with them once they have a given number of output tokens: at
    launch, or when the step is awaited and another one has been launched behind it."""
    state = WorkerState(Limits(blocks, 4, 256, room))
    device = RuleDevice(4)
    output: dict[str, int] = {}
    ended: dict[str, FinishReason] = {}
    names = [f"r{i}" for i in range(len(lengths))]
    for name, length in zip(names, lengths, strict=True):
        output[name] = 0
        state.receive(Prompt(name, tuple(range(length)), length, 9, ENDLESS), 0.0)
    grants = tuple(Grant(name, 9) for name in names)
    batches = (StaticBatch(1, tuple(names)),) if static else ()
    state.apply_plan(Plan(1, admit=grants, batches=batches), 0.0)

    def poisoned(batch: StepBatch) -> bool:
        here = [s for s in batch.sequences if s.request_id in output]
        made = {s.request_id: len(s.tokens) - s.prompt_tokens - s.unsent for s in here}
        return any(most >= bad.get(int(name[1:]), 99) for name, most in made.items())

    loop = RuleLoop(state, device, overlap, early, poisoned)
    for seq in range(2, 2_000):
        if len(ended) == len(names):
            break
        tokens = loop.step()
        for sequence in loop.failed:
            number = int(sequence.request_id[1:])
            assert output[sequence.request_id] == bad[number], "another request failed the step"
        for token in (*(tokens or ()), *state.ends.pop_late()):
            length = lengths[int(token.request_id[1:])] + token.offset
            assert token.offset == output[token.request_id]
            assert token.token_id == answer(token.request_id, length)
            output[token.request_id] += 1
        state.check_integrity()
        report = state.report()
        ended |= {f.request_id: f.reason for f in report.finished} if report else {}
        again = tuple(Grant(p.request_id, 9) for p in report.evicted) if report else ()
        state.apply_plan(Plan(seq, admit=again), 0.0)
    assert ended == {
        r: FinishReason.ERROR if int(r[1:]) in bad else FinishReason.LENGTH for r in names
    }
    assert all(output[r] == 9 for r in names if int(r[1:]) not in bad)
    assert state.pool.free_blocks == blocks


# Real models


class FailingModel:
    """A model with a forward that raises if its input has a given token."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, poison: int = POISON):
        forward = engine.model.forward
        self.out_of_memory_at: set[int] = set()  # numbers of the failing forwards
        self.calls = self.raised = 0

        def breaks(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
            self.calls += 1
            if self.calls in self.out_of_memory_at:
                raise torch.OutOfMemoryError("CUDA out of memory")
            logits = forward(tokens, *rest)  # KV is stored, but the step has no effect
            if poison in tokens.tolist():
                self.raised += 1
                raise RuntimeError("poison")
            return logits

        monkeypatch.setattr(engine.model, "forward", breaks)


class RecoveringFeeder(Feeder):
    """Continues after a failed step, as the engine's loop does. All its plans have one residency
    policy."""

    residency = ""

    def plan(self, **directives: Any) -> None:
        super().plan(residency=self.residency, **directives)

    def step(self) -> bool:
        try:
            return super().step()
        except StepFailed:
            self.engine.state.check_integrity()
            if report := self.engine.state.report():
                self._read(report)
            return True


def demo(**settings: Any) -> Engine:
    shape: dict[str, Any] = {"kv_tokens": 4096, "host_gib": 0, "device": "cpu"}
    return Engine.load(EngineConfig(model="models/demo", **{**shape, **settings}))


@pytest.fixture(scope="module")
def good() -> dict[str, tuple[tuple[int, ...], list[int]]]:
    """31 prompts and answers without the poison token. No drawn token is close to another one, so
    that the answers do not depend on how steps are composed."""
    feeder = Feeder(demo())
    how = SamplingParams(temperature=0, ignore_eos=True, logprobs=2)
    prompts = {f"r{seed}": prompt_tokens(seed, 3 + seed % 29) for seed in range(3 * ROWS)}
    for name, tokens in prompts.items():
        feeder.add(name, tokens, NEW_TOKENS, how)
    feeder.run()
    clear = {
        name: (prompts[name], [token.token_id for token in drawn])
        for name, drawn in feeder.drawn.items()
        if POISON not in feeder.output[name]
        and all(t.logprobs and t.logprobs.top[0] - t.logprobs.top[1] > 1e-3 for t in drawn)
    }
    assert len(clear) >= ROWS - 1
    return dict(list(clear.items())[: ROWS - 1])


def served(
    feeder: Feeder, good: dict[str, Any], *bad: int, static: bool = False
) -> dict[str, list[int]]:
    """Serves all prompts at once, with a bad prompt at each of the given places; returns the
    answers."""
    names = list(good)
    for place in sorted(bad, reverse=True):
        names.insert(place, f"bad{place}")
    for name in names:
        tokens = good[name][0] if name in good else (5, POISON, 7)
        prompt = Prompt(name, tokens, len(tokens), NEW_TOKENS, ENDLESS)
        assert feeder.engine.add(prompt, 0.0) is None
        feeder._max_tokens[name] = NEW_TOKENS
    batches = (StaticBatch(1, tuple(names)),) if static else ()
    feeder.plan(admit=tuple(Grant(name, NEW_TOKENS) for name in names), batches=batches)
    output = feeder.run()
    return {name: output[name] for name in good}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("bad", [(0,), (17,), (31,), (3, 20), (8, 9)])
def test_poisoned_prompt_ends_alone(good, bad, static, monkeypatch):
    feeder = RecoveringFeeder(demo())
    model = FailingModel(feeder.engine, monkeypatch)
    assert served(feeder, good, *bad, static=static) == {n: out for n, (_, out) in good.items()}
    for name, reason in feeder.finished.items():
        assert reason is (FinishReason.LENGTH if name in good else FinishReason.ERROR)
    assert len(feeder.finished) == ROWS - 1 + len(bad) and not feeder.evictions
    # One more attempt if prompts took several steps, or the failed step had padding.
    assert model.raised <= len(bad) * (ceil(log2(ROWS + 1)) + 2)


def test_token_that_breaks_decoding_ends_its_requests(good, monkeypatch):
    """For each good answer, a token that only this answer draws fails its step."""
    name, at = next(
        (name, at)
        for name, (_, output) in good.items()
        for at, token in enumerate(output[:-1])
        if at > 2
        and all(token not in (*p, *o) for n, (p, o) in good.items() if n != name)
        and output.index(token) == at
        and token not in good[name][0]
    )
    feeder = RecoveringFeeder(demo())
    FailingModel(feeder.engine, monkeypatch, good[name][1][at])
    answers = served(feeder, good)
    assert answers == {n: out[: at + 1] if n == name else out for n, (_, out) in good.items()}
    assert [n for n, r in feeder.finished.items() if r is FinishReason.ERROR] == [name]


@pytest.mark.parametrize("residency", ["recompute", "swap", "defer"])
def test_out_of_memory_costs_an_eviction_but_no_answer(good, residency, monkeypatch):
    """Memory runs out at the first prefill, and among decodes. The newest request is evicted and
    admitted again."""
    feeder = RecoveringFeeder(demo(host_gib=0.05))
    feeder.residency = residency
    FailingModel(feeder.engine, monkeypatch).out_of_memory_at |= {1, 8}
    assert served(feeder, good) == {n: out for n, (_, out) in good.items()}
    assert feeder.evictions == 2
    assert set(feeder.finished.values()) == {FinishReason.LENGTH}
    assert feeder.engine.state.counters.offloads == (1 if residency == "swap" else 0)


def test_out_of_memory_of_a_single_request_ends_it(monkeypatch):
    feeder = RecoveringFeeder(engine_of("llama"))
    FailingModel(feeder.engine, monkeypatch).out_of_memory_at.add(2)
    feeder.add("r", prompt_tokens(1, 5), 9, ENDLESS)
    assert len(feeder.run()["r"]) == 1
    assert feeder.finished == {"r": FinishReason.ERROR} and not feeder.evictions


def test_device_probe_leaves_no_trace(monkeypatch):
    engine = engine_of("llama", block_tokens=1, kv_tokens=8)
    engine.add(Prompt("r", prompt_tokens(1, 3), 3, 4, GREEDY), 0.0)
    engine.state.apply_plan(Plan(1, admit=(Grant("r", 4),)), 0.0)
    engine.step()
    free = engine.state.pool.free_blocks
    assert engine.can_compute() and engine.state.pool.free_blocks == free
    FailingModel(engine, monkeypatch, poison=0)
    assert not engine.can_compute() and engine.state.pool.free_blocks == free
    engine.state.check_integrity()
