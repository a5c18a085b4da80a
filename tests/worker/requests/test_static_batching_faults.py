"""Static batches as transcripts: exhausted memory, and failing steps."""

from tests.worker.requests.static_batches import together, wasted
from tests.worker.requests.worker_oracle import EOS
from tests.worker.requests.worker_transcript import Transcript


def test_padding_is_limited_by_memory():
    """16 tokens of KV: contexts of 1 and 9 take 4 blocks, so that none is free for 8 tokens of
    padding."""
    t = Transcript(kv_tokens=16)
    t.prompt("a", 1, max_tokens=2)
    t.prompt("b", 9, max_tokens=3)
    together(t, a=2, b=3)
    t.step(times=5)
    t.reads("""
        a[0:1] b[0:7] -> a+0
          report plan 1, free 1: a:1/1, b:0/7
        b[7:9] -> b+0
        b@9 a@1 -> b+1
        b@10 a@2 -> a+1=length b+2=length
          report plan 1, free 4: finished a:2 length, finished b:3 length
        nothing runs
    """)
    assert wasted(t) == (0, 8, 1)


def test_padding_then_ended_members_give_way_when_memory_runs_out():
    """24 tokens of KV in 6 blocks. `a` (1 token) is padded by 7 to the 8 of `b`: 1 + 2 + 2 blocks
    leave one, which the 9th token of `b` takes. `a` has ended: its 5th token evicts nothing and
    waits. For the 13th token of `b` the padding is dropped, which leaves a block for `a`. For the
    17th token of `b`, `a` loses both blocks and is not computed any more: 7 invalid tokens, and `b`
    was never evicted."""
    t = Transcript(kv_tokens=24, max_batch_tokens=16)
    t.prompt("a", 1, max_tokens=1)
    t.prompt("b", 8, max_tokens=16)
    together(t, a=16, b=16)
    t.step(times=17)
    t.reads("""
        a[0:1] b[0:8] a~pad[0:7] -> b+0
          report plan 1, free 1: a:0/1, b:1/8
        b@8 a@1 -> b+1
        b@9 a@2 -> b+2
        b@10 a@3 -> b+3
        b@11 -> b+4
        b@12 a@4 -> b+5
        b@13 a@5 -> b+6
        b@14 a@6 -> b+7
        b@15 a@7 -> b+8
        b@16 -> b+9
        b@17 -> b+10
        b@18 -> b+11
        b@19 -> b+12
        b@20 -> b+13
        b@21 -> b+14
        b@22 -> a+0=length b+15=length
          report plan 1, free 6: finished a:1 length, finished b:16 length
        nothing runs
    """)
    assert wasted(t) == (7, 0, 7)


def test_evicted_member_leaves_its_batch():
    """16 tokens of KV, two members that need 14 each: the newest is evicted, and the other ends
    without it."""
    t = Transcript(kv_tokens=16)
    for name in "ab":
        t.prompt(name, 6, max_tokens=8)
    together(t, a=8, b=8)
    t.step(times=5)
    t.reads("""
        a[0:6] b[0:2] -> a+0
          report plan 1, free 1: a:1/6, b:0/2
        b[2:6] -> b+0
        a@6 b@6 -> a+1 b+1
        a@7 b@7 -> a+2 b+2
        a@8 -> a+3
          report plan 1, free 1: a:4/9, evicted b:3
    """)
    t.step(times=4)
    assert t.lines[-2:] == ["a@12 -> a+7=length", "  report plan 1, free 4: finished a:8 length"]


def test_faulty_member_ends_alone_and_others_stay_in_lockstep():
    """The step of three is computed in parts: `a`, which has ended, and `b`; each alone; then
    `c`."""
    t = Transcript()
    for name in "abc":
        t.prompt(name, 1, ignore_eos=False)
    together(t, a=9, b=9, c=9)
    t.step({"a": EOS})
    t.step(times=6, poison="b")
    t.reads("""
        a[0:1] b[0:1] c[0:1] -> b+0 c+0
          report plan 1, free 13: a:0/1, b:1/1, c:1/1
        b@1 c@1 a@1 breaks
        b@1 a@1 breaks
        a@1 -> -
        b@1 breaks b
          report plan 1, free 14: finished b:1 error
        c@1 -> c+1
        c@2 a@2 -> c+2
    """)
    t.step({"c": EOS})
    assert [token.request_id for token in t.state.ends.pop_late()] == []
    t.reads("""
        c@3 a@3 -> a+0=stop c+3=stop
          report plan 1, free 16: finished a:1 stop, finished c:4 stop
    """)


def test_faulty_ended_member_stops_and_its_own_end_is_sent():
    t = Transcript()
    for name in "ab":
        t.prompt(name, 1, ignore_eos=False)
    together(t, a=3, b=3)
    t.step({"a": EOS})
    t.step(times=4, poison="a")
    t.reads("""
        a[0:1] b[0:1] -> b+0
          report plan 1, free 14: a:0/1, b:1/1
        b@1 a@1 breaks
        a@1 breaks
        b@1 -> b+1
        b@2 -> b+2 a+0=stop
          report plan 1, free 15: b:3/3, finished a:1 stop
    """)


def test_padding_is_omitted_after_a_failed_step():
    """7 tokens of padding, none of which is computed before `a` and `b` are computed separately."""
    t = Transcript(max_batch_tokens=32)
    t.prompt("a", 1)
    t.prompt("b", 8)
    together(t, a=2, b=2)
    batch = t.state.steps.compose()
    assert batch and batch.prefill_tokens == 16 and t.state.steps.fail(batch) == []
    t.step(times=3)
    t.reads("""
        a[0:1] -> a+0
          report plan 1, free 11: a:1/1, b:0/0
        b[0:8] -> b+0
        b@8 a@1 -> b+1 a+1
          report plan 1, free 12: a:2/2, b:2/9
    """)
    assert wasted(t) == (0, 7, 0)
