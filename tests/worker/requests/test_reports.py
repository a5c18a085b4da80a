"""Reports of a worker's state, also repeated after lost ones, as transcripts."""

from services.core import Grant, Pause, Residency
from tests.worker.requests.worker_transcript import Transcript


def test_attaching_scheduler_receives_all_requests_and_unreported_events():
    """`done` ends and `new` is evicted while detached; `early` was never admitted; the admission of
    `late` has no prompt and is dropped."""
    t = Transcript(kv_tokens=24)
    for name, length, most in (("done", 3, 3), ("old", 9, 9), ("new", 5, 9)):
        t.prompt(name, length, max_tokens=most)
    t.admit(done=3, old=7, new=9)
    t.step()
    t.prompt("early", 7)
    t.admit(late=9)
    t.step()
    t.detach()
    t.step(times=8)
    t.attach()
    t.prompt("late", 2)
    t.step()
    t.plan(cancel=["old"], admit=[Grant("early", 2), Grant("late", 9), Grant("new", 9)])
    t.step()
    t.reads("""
        done[0:3] old[0:5] -> done+0
          report plan 1, free 3: done:1/3, old:0/5, new:0/0
        done@3 old[5:9] new[0:3] -> done+1 old+0
          report plan 2, free 1: done:2/4, old:1/9, new:0/3
        old@9 done@4 new[3:4] -> old+1 done+2=length
        old@10 new@4 -> old+2 new+0
        old@11 new@5 -> old+3 new+1
        old@12 new@6 -> old+4 new+2
        old@13 new@7 -> old+5 new+3
        old@14 -> old+6
        nothing runs
        nothing runs
        hello
          has old:7/15 in 4 runs to 7 of 9
          has new:4/0 in 0 waits to 9 of 9
          has early:0/0 in 0 waits to 0 of 9
          report plan 0, free 2: old:7/15, finished done:3 length, evicted new:4
        nothing runs
        early[0:7] late[0:1] -> early+0
          report plan 1, free 3: early:1/7, late:0/1, new:4/0
    """)


def test_unsent_report_s_ends_and_evictions_are_reported_again():
    t = Transcript(kv_tokens=16)
    t.prompt("old", 6, max_tokens=4)
    t.prompt("new", 5, max_tokens=7)
    t.admit(old=9, new=9)
    t.step(times=3)
    t.lines.clear()
    t.listened = False
    t.step()
    unsent = t.state.report()
    assert unsent and unsent.evicted and unsent.finished
    t.detach(unsent)
    t.attach()
    t.reads("""
        old@8 -> old+3=length
        hello
          has new:2/0 in 0 waits to 9 of 7
          report plan 0, free 4: finished old:4 length, evicted new:2
    """)


def test_requests_of_closed_gateways_are_dropped_without_a_scheduler():
    t = Transcript()
    t.prompt("a", 4)
    t.prompt("unplanned", 4)
    t.admit(a=9)
    t.step()
    t.detach()
    t.state.keep_only({"another stream"})
    assert t.state.idle and t.state.pool.free_blocks == 16
    t.attach()
    t.reads("""
        a[0:4] -> a+0
          report plan 1, free 15: a:1/4
        hello
          report plan 0, free 16: -
    """)


def test_every_report_has_block_holders():
    """`b` shares the first two blocks of `a`; block counts are reported when they grow, and during
    an offload."""
    t = Transcript(prefix_sharing=True, max_batch_tokens=16)
    t.prompt("a", 10)
    t.admit(a=9)
    t.step()
    t.prompt("b", 11)
    t.admit(b=1)
    t.step()
    assert t.account.blocks == {"a": 3, "b": 3}
    t.step(times=2)
    t.plan(pause=[Pause("b", Residency.KEEP)])
    t.step()
    assert t.account.blocks == {"a": 4, "b": 3}
    t.plan(pause=[Pause("b", Residency.DROP)])
    t.step()
    assert t.account.blocks == {"a": 4, "b": 0}
    t.reads("""
        a[0:10] -> a+0
          report plan 1, free 13: a:1/10
        a@10 b[8:11] -> a+1 b+0
          report plan 2, free 12, shared 2: a:2/11, b:1/11
        a@11 -> a+2
        a@12 -> a+3
        a@13 -> a+4
          report plan 3, free 11, shared 2: a:5/14, b:1/11
        a@14 -> a+5
          report plan 4, free 12: a:6/15, b:1/0
    """)


def test_progress_is_reported_periodically():
    t = Transcript(report_every_steps=3)
    t.prompt("a", 1, max_tokens=20)
    t.admit(a=20)
    t.step(times=7)
    t.reads("""
        a[0:1] -> a+0
          report plan 1, free 15: a:1/1
        a@1 -> a+1
        a@2 -> a+2
        a@3 -> a+3
          report plan 1, free 15: a:4/4
        a@4 -> a+4
        a@5 -> a+5
        a@6 -> a+6
          report plan 1, free 14: a:7/7
    """)
