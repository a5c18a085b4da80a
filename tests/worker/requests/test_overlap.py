"""A step composed and launched behind one with tokens that are not known yet."""

import pytest

from services.core import Grant, Pause, Residency, StaticBatch
from services.worker.requests.types.batch import StepBatch
from tests.worker.requests.worker_oracle import EOS
from tests.worker.requests.worker_transcript import Transcript, drew, ran


class OverlapTranscript(Transcript):
    """One line per step: what it computed, what was launched behind it, and what it drew. If
    something was launched behind it, that step is in flight between two lines."""

    def __init__(self, kv_tokens: int = 64, **limits: int):
        super().__init__(kv_tokens, **limits)
        self.flight: StepBatch | None = None
        self.ran = ""

    def step(self, drawn: dict[str, int] | None = None, times: int = 1, poison: str = "") -> None:
        """If a request of `poison` was in the step in flight, that step fails."""
        for _ in range(times):
            self._step(drawn or {}, poison)
            self.state.check_integrity()
            self._report()

    def _step(self, drawn: dict[str, int], poison: str) -> None:
        batch, how = self.flight, self.ran
        if batch is None:
            batch, how = self._launch()
        if batch is None:
            self.lines.append("nothing runs")
            return
        if not self.state.steps.in_flight:
            self.state.steps.advance(batch)
        behind, then = self._launch()
        line = f"{how} | {then or '-'}"
        self.flight = None
        if any(s.request_id in poison for s in batch.sequences):
            failed = self.state.steps.fail(batch)
            self.lines.append(" ".join([line, "breaks", *(s.request_id for s in failed)]))
            return
        tokens = [drawn.get(s.request_id, 7) for s in batch.sampling]
        result = self.state.steps.commit(batch, tokens, [])
        self.lines.append(f"{line} -> {' '.join(map(drew, result.tokens)) or '-'}")
        if behind:
            self.state.steps.advance(behind)
            self.flight, self.ran = behind, then

    def _launch(self) -> tuple[StepBatch | None, str]:
        batch = self.state.steps.compose()
        self._carry_out(self.state.pop_moves())
        if batch is None:
            return None, ""
        self.device.run(batch)
        self.device.drawn = [7] * len(batch.sampling)
        return batch, ran(batch)

    @property
    def strays(self) -> int:
        return self.state.counters.stray_rows


def test_decode_continues_from_an_unknown_token():
    """One request ends its budget, the other its length; neither is in a step after its last
    token."""
    t = OverlapTranscript()
    t.prompt("a", 3, max_tokens=3)
    t.prompt("b", 7)
    t.admit(a=9, b=2)
    t.step(times=4)
    t.reads("""
        a[0:3] b[0:5] | a@3 b[5:7] -> a+0
          report plan 1, free 13: a:1/3, b:0/6
        a@3 b[5:7] | b@7 a@4 -> a+1 b+0
        b@7 a@4 | - -> b+1 a+2=length
          report plan 1, free 14: b:2/8, finished a:3 length
        nothing runs
    """)
    assert t.strays == 0


def test_end_in_flight_drops_the_next_row():
    """The row is neither reported nor shared, and the other request continues."""
    t = OverlapTranscript(prefix_sharing=True)
    t.prompt("a", 3, ignore_eos=False)
    t.prompt("b", 3, salt="other")
    t.admit(a=9, b=9)
    t.step()
    t.step({"a": EOS})
    assert t.strays == 1
    assert t.state.pool.owners() == ["b"]
    t.step(times=2)
    t.reads("""
        a[0:3] b[0:3] | a@3 b@3 -> a+0 b+0
          report plan 1, free 14: a:1/3, b:1/3
        a@3 b@3 | a@4 b@4 -> a+1=stop b+1
          report plan 1, free 14: b:2/4, finished a:2 stop
        a@4 b@4 | b@5 -> b+2
        b@5 | b@6 -> b+3
    """)


def test_commands_during_a_step_in_flight_apply_to_the_next():
    t = OverlapTranscript(kv_tokens=512, max_batch_tokens=256)
    t.prompt("old", 3)
    t.admit(old=9)
    t.step()
    names = [f"n{i}" for i in range(64)]
    for name in names:
        t.prompt(name, 3)
    t.admit(**dict.fromkeys(names, 9))
    t.step()
    came = " ".join(f"{name}[0:3]" for name in names)
    assert t.lines[-2] == f"old@3 | old@4 {came} -> old+1"


@pytest.mark.parametrize("residency", Residency)
def test_request_paused_with_a_token_in_flight_still_gets_it(residency):
    """The token is reported. If the request is admitted before the token is known, it waits for it,
    unless its KV stayed on the device."""
    t = OverlapTranscript(host_blocks=8)
    t.prompt("a", 3)
    t.prompt("b", 3)
    t.admit(a=9, b=9)
    t.step()
    t.plan(pause=[Pause("a", residency)])
    t.plan(admit=[Grant("a", 9)])
    t.step()
    rests = residency is Residency.OFFLOAD
    moved = [line for line in t.lines if "to host" in line or "back" in line]
    assert bool(moved) == rests
    behind = "b@4 a@4" if residency is Residency.KEEP else "b@4"
    assert f"a@3 b@3 | {behind} -> a+1 b+1" in t.lines
    assert not t.strays
    for _ in range(5):
        t.arrive()
        t.step()
    reported = " ".join(line.partition("->")[2] for line in t.lines).split()
    assert [token for token in reported if token[0] == "a"][:4] == ["a+0", "a+1", "a+2", "a+3"]


def test_pause_with_a_token_in_flight_is_reported_after_it():
    t = OverlapTranscript()
    t.prompt("a", 3)
    t.admit(a=9)
    t.step()
    t.plan(pause=[Pause("a", Residency.KEEP)])
    t.step(times=2)
    t.reads("""
        a[0:3] | a@3 -> a+0
          report plan 1, free 15: a:1/3
        a@3 | - -> a+1
          report plan 2, free 15: a:2/4
        nothing runs
    """)


def test_cancelled_and_resubmitted_request_gets_nothing_of_its_first_placement():
    """Requests are compared by identity: the new one has the same id."""
    t = OverlapTranscript()
    t.prompt("a", 3)
    t.prompt("b", 3)
    t.admit(a=9, b=9)
    t.step()
    t.plan(cancel=["a"])
    t.prompt("a", 2)
    t.admit(a=9)
    t.step(times=2)
    assert t.strays == 1
    t.reads("""
        a[0:3] b[0:3] | a@3 b@3 -> a+0 b+0
          report plan 1, free 14: a:1/3, b:1/3
        a@3 b@3 | b@4 a[0:2] -> b+1
          report plan 3, free 13: b:2/4, a:0/1
        b@4 a[0:2] | b@5 a@2 -> b+2 a+0
    """)


def test_blocks_are_published_once_their_tokens_are_known():
    """`b` begins like `a` and waits for its block until the commit. The block that a token in
    flight fills has no key before."""
    t = OverlapTranscript(prefix_sharing=True, max_batch_tokens=32)
    t.prompt("a", 11)
    t.prompt("b", 11)
    t.admit(a=9, b=9)
    t.step(times=2)
    assert t.state.counters.prefix_hit_tokens == 8
    t.step()
    assert t.state.pool.known(t.state.sequences["a"].keys) == 3, (
        "the third block has the drawn token"
    )
    t.reads("""
        a[0:11] | a@11 -> a+0
          report plan 1, free 13: a:1/11, b:0/0
        a@11 | a@12 b[8:11] -> a+1
        a@12 b[8:11] | a@13 b@11 -> a+2 b+0
    """)


def test_exhausted_memory_waits_for_the_step_in_flight():
    """The end of that step may free enough: `a` ends in it, when `b` and `c` need a block each."""
    t = OverlapTranscript(kv_tokens=24, max_batch_tokens=32)
    t.prompt("a", 4, max_tokens=4)
    t.prompt("b", 5, max_tokens=15)
    t.prompt("c", 5, max_tokens=15)
    t.admit(a=15, b=15, c=15)
    t.step(times=5)
    t.reads("""
        a[0:4] b[0:5] c[0:5] | b@5 c@5 a@4 -> a+0 b+0 c+0
          report plan 1, free 0: a:1/4, b:1/5, c:1/5
        b@5 c@5 a@4 | b@6 c@6 a@5 -> b+1 c+1 a+1
        b@6 c@6 a@5 | b@7 c@7 a@6 -> b+2 c+2 a+2
        b@7 c@7 a@6 | - -> b+3 c+3 a+3=length
          report plan 1, free 2: finished a:4 length
        b@8 c@8 | b@9 c@9 -> b+4 c+4
    """)


def test_static_batch_is_computed_one_step_at_a_time():
    """The step in flight is committed first, and the batch begins after it."""
    t = OverlapTranscript()
    t.prompt("a", 3)
    t.prompt("b", 3)
    t.admit(a=3, b=3)
    t.step()
    t.plan(admit=[Grant("a", 4), Grant("b", 4)], batches=[StaticBatch(1, ("a", "b"))])
    t.step(times=3)
    t.reads("""
        a[0:3] b[0:3] | a@3 b@3 -> a+0 b+0
          report plan 1, free 14: a:1/3, b:1/3
        a@3 b@3 | - -> a+1 b+1
          report plan 2, free 14: a:2/4, b:2/4
        a@4 b@4 | - -> a+2 b+2
        a@5 b@5 | - -> a+3 b+3
          report plan 2, free 12: a:4/6, b:4/6
    """)


def test_failed_step_in_flight_takes_the_next_one_along():
    """`b` fails the step; `c`, offloaded meanwhile, is recomputed."""
    t = OverlapTranscript(host_blocks=8)
    for name in "abc":
        t.prompt(name, 2)
    t.admit(a=9, b=9, c=9)
    t.step()
    t.plan(pause=[Pause("c", Residency.OFFLOAD)])
    t.step(poison="b")
    assert not t.state.steps.in_flight
    assert {n: s.tokens for n, s in t.state.sequences.items()} == {n: [1, 2, 7] for n in "abc"}
    t.step(poison="b", times=3)
    t.admit(c=9)
    t.step(times=2)
    t.reads("""
        a[0:2] b[0:2] c[0:2] | a@2 b@2 c@2 -> a+0 b+0 c+0
          report plan 1, free 13: a:1/2, b:1/2, c:1/2
          c: 3 in 1 blocks to host
        a@2 b@2 c@2 | a@3 b@3 breaks
          report plan 2, free 14: a:1/2, b:1/2, evicted c:1
        a@2 b@2 | - breaks
        a@2 | - -> a+1
        b@2 | - breaks b
          report plan 2, free 15: finished b:1 error
        c[0:3] | - -> c+1
          report plan 3, free 14: a:2/3, c:2/3
        a@3 c@3 | a@4 c@4 -> a+2 c+2
    """)


def test_survivors_of_a_failed_step_in_flight_are_not_blamed():
    """`a`, which failed the step, is cancelled before the failure is known: `b` continues."""
    t = OverlapTranscript()
    t.prompt("a", 2)
    t.prompt("b", 2)
    t.admit(a=9, b=9)
    t.step()
    t.plan(cancel=["a"])
    t.step(poison="a")
    t.step(times=2)
    t.reads("""
        a[0:2] b[0:2] | a@2 b@2 -> a+0 b+0
          report plan 1, free 14: a:1/2, b:1/2
        a@2 b@2 | b@3 breaks
          report plan 2, free 15: b:1/2
        b@2 | - -> b+1
        b@3 | b@4 -> b+2
    """)


def test_step_that_could_not_be_launched_is_composed_again():
    """Kernels may keep state of the batch that failed."""
    t = OverlapTranscript()
    t.prompt("a", 2)
    t.admit(a=9)
    t.step(times=2)
    assert t.flight
    behind = t.state.steps.compose()
    assert behind is t.flight, "the batch advanced"
    t.state.steps.withdraw()
    t.state.steps.commit(t.flight, [7], [])
    again = t.state.steps.compose()
    assert again and again is not behind
    assert again.decodes.positions.tolist() == behind.decodes.positions.tolist() == [4]


def test_step_in_flight_without_requests_counts_as_work():
    t = OverlapTranscript()
    t.prompt("a", 3)
    t.admit(a=9)
    t.step()
    t.plan(cancel=["a"])
    assert not t.state.sequences and not t.state.idle
    t.step()
    assert t.state.idle and t.lines[-2:] != ["nothing runs"]


def test_attaching_scheduler_sees_known_tokens_only():
    t = OverlapTranscript()
    t.prompt("a", 3)
    t.admit(a=9)
    t.step()
    t.detach()
    t.attach()
    t.step()
    t.reads("""
        a[0:3] | a@3 -> a+0
          report plan 1, free 15: a:1/3
        hello
          has a:1/3 in 1 runs to 9 of 9
          report plan 0, free 15: a:1/3
        a@3 | a@4 -> a+1
    """)
