"""Static batches at a worker, as transcripts: waiting members, padding and invalid tokens."""

from services.core import Grant, Pause, Residency, StaticBatch
from services.worker.requests.pending import HELD_S
from tests.worker.requests.static_batches import together, wasted
from tests.worker.requests.worker_oracle import EOS
from tests.worker.requests.worker_transcript import Transcript


def test_static_batch_waits_for_all_prompts():
    t = Transcript()
    t.prompt("a", 2)
    together(t, a=2, b=2)
    t.step()
    t.prompt("b", 2)
    t.step(times=2)
    t.reads("""
        nothing runs
          report plan 1, free 16: a:0/0
        a[0:2] b[0:2] -> a+0 b+0
        a@2 b@2 -> a+1 b+1
          report plan 1, free 14: a:2/3, b:2/3
    """)
    assert wasted(t) == (0, 0, 0)


def test_padding_is_prefilled_and_held_until_the_batch_is_over():
    """Contexts of 2, 5 and 9: 7 + 4 tokens of padding, in 2 + 1 blocks besides the 1 + 2 + 3 of the
    members. With 8 tokens per step, 16 of prompts and 11 of padding take four steps, and no member
    decodes before. After the fifth step each member has drawn two tokens; then all padding blocks
    are free."""
    t = Transcript()
    for name, length in (("a", 2), ("b", 5), ("c", 9)):
        t.prompt(name, length)
    together(t, a=2, b=2, c=2)
    t.step(times=6)
    t.reads("""
        a[0:2] b[0:5] c[0:1] -> a+0 b+0
          report plan 1, free 12: a:1/2, b:1/5, c:0/1
        c[1:9] -> c+0
        a~pad[0:7] b~pad[0:1] -> -
        b~pad[1:4] -> -
        c@9 b@5 a@2 -> c+1 b+1 a+1
          report plan 1, free 10: a:2/3, b:2/6, c:2/10
        nothing runs
    """)
    assert wasted(t) == (11, 0, 0)
    assert t.state.pool.held() == {"a": 1, "b": 2, "c": 3}


def test_ended_member_continues_unsent_until_the_last_one_ends():
    """`a` stops at its second token, and `b` has its last one with the third; `c` draws five. So
    `a` draws 3 invalid tokens and `b` 2, and their ends are not sent before. A plan for an ended
    member changes nothing."""
    t = Transcript()
    t.prompt("a", 2, ignore_eos=False)
    t.prompt("b", 2, max_tokens=3)
    t.prompt("c", 2)
    together(t, a=5, b=5, c=5)
    t.step()
    t.step({"a": EOS})
    t.step()
    t.plan(admit=[Grant("a", 1)], extend=[Grant("a", 9), Grant("b", 9)])
    t.step(times=2)
    t.reads("""
        a[0:2] b[0:2] c[0:2] -> a+0 b+0 c+0
          report plan 1, free 13: a:1/2, b:1/2, c:1/2
        a@2 b@2 c@2 -> b+1 c+1
        a@3 b@3 c@3 -> c+2
        a@4 b@4 c@4 -> c+3
          report plan 2, free 10: a:1/5, b:2/5, c:4/5
        a@5 b@5 c@5 -> c+4 a+1=stop b+2=length
          report plan 2, free 14: c:5/6, finished a:2 stop, finished b:3 length
    """)
    assert wasted(t) == (0, 0, 5)


def test_batch_is_over_when_all_members_have_ended():
    t = Transcript()
    t.prompt("a", 2, max_tokens=1)
    t.prompt("b", 4, max_tokens=2)
    together(t, a=9, b=9)
    t.step(times=4)
    t.reads("""
        a[0:2] b[0:4] a~pad[0:2] -> b+0
          report plan 1, free 13: a:0/2, b:1/4
        b@4 a@2 -> a+0=length b+1=length
          report plan 1, free 16: finished a:1 length, finished b:2 length
        nothing runs
        nothing runs
    """)
    assert wasted(t) == (2, 0, 1)


def test_member_at_its_budget_waits_for_the_others():
    """Its budget may be extended meanwhile: the batch is over when that is used up, too."""
    t = Transcript()
    for name in "ab":
        t.prompt(name, 2)
    together(t, a=2, b=3)
    t.step(times=2)
    t.plan(extend=[Grant("a", 3)])
    t.step(times=2)
    t.reads("""
        a[0:2] b[0:2] -> a+0 b+0
          report plan 1, free 14: a:1/2, b:1/2
        a@2 b@2 -> a+1 b+1
        a@3 b@3 -> a+2 b+2
          report plan 2, free 14: a:3/4, b:3/4
        nothing runs
    """)


def test_members_are_ordinary_or_begin_another_batch_afterwards():
    t = Transcript()
    for name in "ab":
        t.prompt(name, 3)
    together(t, a=1, b=1)
    t.step()
    t.plan(extend=[Grant("a", 2)])
    t.step()
    t.plan(extend=[Grant("a", 3), Grant("b", 2)], batches=[StaticBatch(2, ("a", "b"))])
    t.step(times=3)
    t.reads("""
        a[0:3] b[0:3] -> a+0 b+0
          report plan 1, free 14: a:1/3, b:1/3
        a@3 -> a+1
          report plan 2, free 14: a:2/4, b:1/3
        b~pad[0:1] -> -
          report plan 3, free 13: a:2/4, b:1/3
        a@4 b@3 -> a+2 b+1
          report plan 3, free 13: a:3/5, b:2/4
        nothing runs
    """)


def test_cancelled_member_leaves_at_once():
    t = Transcript()
    for name in "ab":
        t.prompt(name, 1, ignore_eos=False)
    together(t, a=9, b=9, c=9)
    t.step()
    t.plan(cancel=["c"])
    t.step({"a": EOS})
    t.plan(cancel=["b"])
    t.step()
    t.reads("""
        nothing runs
          report plan 1, free 16: a:0/0, b:0/0
        a[0:1] b[0:1] -> b+0
          report plan 2, free 14: a:0/1, b:1/1
        nothing runs
          report plan 3, free 16: finished a:1 stop
    """)
    assert [(token.request_id, token.finish) for token in t.state.ends.pop_late()] == [
        ("a", "stop")
    ]
    assert t.state.ends.pop_late() == [] and t.state.idle


def test_ended_member_cancelled_before_its_end_is_sent_reports_nothing():
    t = Transcript()
    for name in "ab":
        t.prompt(name, 1, ignore_eos=False)
    together(t, a=3, b=3)
    t.step({"a": EOS})
    t.plan(cancel=["a"])
    t.step(times=2)
    t.reads("""
        a[0:1] b[0:1] -> b+0
          report plan 1, free 14: a:0/1, b:1/1
        b@1 -> b+1
          report plan 2, free 15: b:2/2
        b@2 -> b+2
          report plan 2, free 15: b:3/3
    """)
    assert t.state.ends.pop_late() == []


def test_refused_or_missing_member_is_not_awaited():
    t = Transcript(kv_tokens=16)
    t.prompt("a", 1)
    together(t, a=1, b=1, c=1)
    t.prompt("b", 12)
    t.step()
    t.state.expire(HELD_S + 1)
    t.step()
    t.reads("""
        refused b: prompt (12) + max_tokens (9) exceeds 16 tokens, the longest request that fits
        nothing runs
          report plan 1, free 4: a:0/0, finished b:0 error
        a[0:1] -> a+0
          report plan 1, free 3: a:1/1, finished c:0 error
    """)


def test_paused_member_leaves_its_batch_and_an_ended_one_is_reported():
    t = Transcript()
    for name in "abc":
        t.prompt(name, 1, ignore_eos=False)
    together(t, a=3, b=3, c=3)
    t.step({"a": EOS})
    t.plan(pause=[Pause("a", Residency.KEEP), Pause("b", Residency.DROP)])
    t.step(times=2)
    t.reads("""
        a[0:1] b[0:1] c[0:1] -> b+0 c+0
          report plan 1, free 13: a:0/1, b:1/1, c:1/1
        c@1 -> c+1 a+0=stop
          report plan 2, free 15: c:2/2, b:1/0, finished a:1 stop
        c@2 -> c+2
          report plan 2, free 15: c:3/3
    """)


def test_end_reported_by_a_pause_is_not_of_a_later_batch():
    """`b` has ended, unreported. A plan from before pauses it, and names it in another batch with
    `a`. The pause reports its end. `a`, removed from the first batch, waits in the second for a
    restart of `b`, which expires and is not awaited any more."""
    t = Transcript()
    t.prompt("a", 1, max_tokens=2)
    t.prompt("b", 1, max_tokens=1)
    together(t, a=3, b=3)
    t.step()
    t.plan(
        pause=[Pause("b", Residency.KEEP)],
        admit=[Grant("a", 2), Grant("b", 1)],
        batches=[StaticBatch(2, ("a", "b"))],
    )
    late = [(token.request_id, token.offset, token.finish) for token in t.state.ends.pop_late()]
    assert late == [("b", 0, "length")]
    t.step()
    t.state.expire(HELD_S + 1)
    t.step()
    t.reads("""
        a[0:1] b[0:1] -> a+0
          report plan 1, free 14: a:1/1, b:0/1
        nothing runs
          report plan 2, free 15: a:1/1, finished b:1 length
        a@1 -> a+1=length
          report plan 2, free 16: finished b:0 error, finished a:2 length
    """)


def test_batches_end_with_their_scheduler():
    t = Transcript()
    for name in "ab":
        t.prompt(name, 1 if name == "a" else 5, ignore_eos=False)
    together(t, a=9, b=9)
    t.prompt("c", 1)
    together(t, 2, c=2, d=2)
    t.step({"a": EOS})
    t.detach()
    t.attach()
    t.step()
    t.reads("""
        a[0:1] b[0:5] a~pad[0:2] -> b+0
          report plan 2, free 12: a:0/1, b:1/5, c:0/0
        hello
          has b:1/5 in 2 runs to 9 of 9
          has c:0/0 in 0 runs to 2 of 9
          report plan 0, free 14: b:1/5, c:0/0, finished a:1 stop
        b@5 c[0:1] -> b+1 c+0
    """)
    assert [(token.request_id, token.offset) for token in t.state.ends.pop_late()] == [("a", 0)]


def test_non_member_changes_nothing():
    """A batch without members, with a member of an earlier one, and with a repeated number."""
    t = Transcript()
    t.prompt("a", 1)
    t.admit(a=9)
    t.plan(batches=[StaticBatch(1, ()), StaticBatch(2, ("x", "y")), StaticBatch(3, ("a", "a"))])
    t.plan(batches=[StaticBatch(3, ("a",))])
    t.step(times=2)
    t.reads("""
        a[0:1] -> a+0
          report plan 3, free 15: a:1/1
        a@1 -> a+1
    """)
