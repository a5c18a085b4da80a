"""The worker's state as transcripts: what was planned, what ran, what was reported."""

from services.core import Grant, Pause, Residency
from services.worker.requests.types.prompt import Prompt, SamplingParams
from tests.worker.requests.worker_oracle import EOS
from tests.worker.requests.worker_transcript import Transcript


def test_prompt_is_admitted_prefilled_in_chunks_decoded_and_finished():
    t = Transcript()
    t.prompt("a", 13, max_tokens=3)
    t.step()
    t.admit(a=3)
    t.step(times=5)
    t.reads("""
        nothing runs
        a[0:8] -> -
          report plan 1, free 14: a:0/8
        a[8:13] -> a+0
        a@13 -> a+1
        a@14 -> a+2=length
          report plan 1, free 16: finished a:3 length
        nothing runs
    """)


def test_plan_may_precede_the_prompt():
    t = Transcript()
    t.admit(a=9)
    t.step()
    t.prompt("a", 3)
    t.step()
    t.reads("""
        nothing runs
          report plan 1, free 16: -
        a[0:3] -> a+0
    """)


def test_decodes_come_first_and_prefill_fills_the_step():
    t = Transcript()
    for name, length in (("a", 2), ("b", 10), ("c", 4)):
        t.prompt(name, length)
    t.admit(a=9, b=9, c=9)
    t.step(times=4)
    t.reads("""
        a[0:2] b[0:6] -> a+0
          report plan 1, free 13: a:1/2, b:0/6, c:0/0
        a@2 b[6:10] c[0:3] -> a+1 b+0
        b@10 a@3 c@3 -> b+1 a+2 c+0
        b@11 a@4 c@4 -> b+2 a+3 c+1
    """)


def test_end_of_sequence_stops_unless_ignored_or_too_early():
    t = Transcript()
    t.prompt("a", 1, ignore_eos=False)
    t.prompt("b", 1, ignore_eos=True)
    t.prompt("c", 1, ignore_eos=False, min_tokens=1)
    t.admit(a=9, b=9, c=9)
    t.step({"a": EOS, "b": EOS, "c": EOS})
    t.step({"b": EOS, "c": EOS})
    t.reads("""
        a[0:1] b[0:1] c[0:1] -> a+0=stop b+0 c+0
          report plan 1, free 14: b:1/1, c:1/1, finished a:1 stop
        b@1 c@1 -> b+1 c+1=stop
          report plan 1, free 15: finished c:2 stop
    """)


def test_request_at_its_budget_keeps_its_memory_until_extended():
    t = Transcript()
    t.prompt("a", 4)
    t.admit(a=2)
    t.step(times=3)
    t.plan(extend=[Grant("a", 3), Grant("unknown", 5)])
    t.step(times=2)
    t.reads("""
        a[0:4] -> a+0
          report plan 1, free 15: a:1/4
        a@4 -> a+1
          report plan 1, free 14: a:2/5
        nothing runs
        a@5 -> a+2
          report plan 2, free 14: a:3/6
        nothing runs
    """)


def test_newest_request_is_evicted_and_recomputed_on_readmission():
    t = Transcript(kv_tokens=16)
    t.prompt("old", 6, max_tokens=7)
    t.prompt("new", 5, max_tokens=7)
    t.admit(old=9, new=9)
    t.step(times=5)
    t.admit(new=9)
    t.step(times=2)
    t.reads("""
        old[0:6] new[0:2] -> old+0
          report plan 1, free 1: old:1/6, new:0/2
        old@6 new[2:5] -> old+1 new+0
        old@7 new@5 -> old+2 new+1
        old@8 -> old+3
          report plan 1, free 1: old:4/9, evicted new:2
        old@9 -> old+4
        old@10 new[0:4] -> old+5
          report plan 2, free 0: old:6/11, new:2/4
        old@11 -> old+6=length
          report plan 2, free 3: finished old:7 length
    """)
    t.step(times=2)
    t.reads("""
        new[4:7] -> new+2
        new@7 -> new+3
    """)


def test_plan_orders_victims():
    t = Transcript(kv_tokens=12)
    for name in "abc":
        t.prompt(name, 3, max_tokens=6)
    t.admit(a=6, b=6, c=6)
    t.plan(victims=["b", "unknown", "a"])
    t.step(times=3)
    t.reads("""
        a[0:3] b[0:3] c[0:2] -> a+0 b+0
          report plan 2, free 0: a:1/3, b:1/3, c:0/2
        a@3 b@3 c@2 -> a+1 b+1 c+0
        a@4 c@3 -> a+2 c+1
          report plan 2, free 0: a:3/5, evicted b:2
    """)


def test_prefill_evicts_only_later_requests():
    """`b` needs a second block: it gets that of `c`, admitted after it, never that of `a`."""
    t = Transcript(kv_tokens=16, max_batch_tokens=6)
    t.prompt("c", 4)
    t.admit(c=9)
    t.step()
    t.plan(pause=[Pause("c", Residency.KEEP)])
    t.prompt("a", 3)
    t.prompt("b", 7, max_tokens=9)
    t.admit(a=9, b=9, c=9)
    t.lines.clear()
    t.step(times=3)
    t.reads("""
        c@4 a[0:3] b[0:2] -> c+1 a+0
          report plan 3, free 0: a:1/3, b:0/2, c:2/5
        a@3 b[2:6] -> a+1
          report plan 3, free 1: b:0/6, evicted c:2
        b@6 a@4 -> b+0 a+2
    """)


def test_prefill_waits_for_memory_of_older_requests():
    t = Transcript(kv_tokens=12)
    t.prompt("a", 6, max_tokens=3)
    t.prompt("b", 7, max_tokens=2)
    t.admit(a=9, b=9)
    t.step(times=4)
    t.reads("""
        a[0:6] b[0:2] -> a+0
          report plan 1, free 0: a:1/6, b:0/2
        a@6 b[2:4] -> a+1
        a@7 -> a+2=length
          report plan 1, free 2: finished a:3 length
        b[4:7] -> b+0
    """)


def test_pause_keeps_or_drops_memory():
    t = Transcript()
    for name in ("kept", "gone", "off"):
        t.prompt(name, 2)
    t.admit(kept=9, gone=9, off=9)
    t.step()
    t.plan(pause=[Pause("kept", Residency.KEEP), Pause("gone", Residency.DROP),
                  Pause("off", Residency.OFFLOAD)])  # fmt: skip
    t.step()
    t.admit(kept=9, gone=9)
    t.step()
    t.reads("""
        kept[0:2] gone[0:2] off[0:2] -> kept+0 gone+0 off+0
          report plan 1, free 13: kept:1/2, gone:1/2, off:1/2
        nothing runs
          report plan 2, free 15: kept:1/2, gone:1/0, off:1/0
        kept@2 gone[0:3] -> kept+1 gone+1
          report plan 3, free 14: kept:2/3, gone:2/3
    """)


def test_cancel_frees_everything_at_every_stage():
    t = Transcript()
    for name in ("unplanned", "prefilling", "decoding", "paused", "waiting"):
        t.prompt(name, 2 if name != "prefilling" else 30)
    t.admit(unprompted=9, decoding=9, paused=9, waiting=1, prefilling=9)
    t.step()
    t.plan(pause=[Pause("paused", Residency.KEEP)])
    assert t.state.pool.free_blocks < 16 and not t.state.idle
    t.plan(cancel=["unplanned", "unprompted", "prefilling", "decoding", "paused", "waiting", "x"])
    assert t.state.pool.free_blocks == 16 and t.state.idle
    t.lines.clear()
    t.step()
    t.reads("""
        nothing runs
          report plan 3, free 16: -
    """)


def test_plan_applied_twice_changes_nothing():
    t = Transcript()
    t.prompt("a", 4)
    t.admit(a=1)
    t.step()
    t.plan(seq=2, extend=[Grant("a", 2)])
    t.plan(seq=2, cancel=["a"])
    t.plan(seq=1, cancel=["a"])
    t.step(times=2)
    t.reads("""
        a[0:4] -> a+0
          report plan 1, free 15: a:1/4
        a@4 -> a+1
          report plan 2, free 14: a:2/5
        nothing runs
    """)


def test_request_that_can_never_fit_is_refused_with_both_numbers():
    t = Transcript(kv_tokens=16)
    t.prompt("a", 10, max_tokens=7)
    t.reads("""
        refused a: prompt (10) + max_tokens (7) exceeds 16 tokens, the longest request that fits
          report plan 0, free 4: finished a:0 error
    """)


def test_prompt_that_overtakes_the_cancel_of_its_first_placement_is_kept():
    """The request is moved away and back: the gateway's prompt may arrive before the scheduler's
    cancel."""
    t = Transcript()
    t.prompt("a", 4)
    t.admit(a=9)
    t.step()
    t.prompt("a", 6)
    t.plan(cancel=["a"])
    t.admit(a=9)
    t.step()
    t.reads("""
        a[0:4] -> a+0
          report plan 1, free 15: a:1/4
        a[0:6] -> a+0
          report plan 3, free 14: a:1/6
    """)


def test_delivered_output_is_prefilled_and_continued():
    t = Transcript()
    resumed = Prompt("a", (1, 2, 3, 4, 5), 3, 4, SamplingParams(temperature=0, ignore_eos=True))
    t.state.receive(resumed, now=0.0)
    t.admit(a=4)
    t.step(times=2)
    t.reads("""
        a[0:5] -> a+2
          report plan 1, free 14: a:3/5
        a@5 -> a+3=length
          report plan 1, free 16: finished a:4 length
    """)


def test_one_token_prompt_waits_for_its_first_block():
    t = Transcript(kv_tokens=8)
    t.prompt("elder", 6, max_tokens=2)
    t.admit(elder=2)
    t.step()
    t.prompt("one", 1, max_tokens=2)
    t.admit(one=1)
    t.step(times=2)
    t.reads("""
        elder[0:6] -> elder+0
          report plan 1, free 0: elder:1/6
        elder@6 -> elder+1=length
          report plan 2, free 2: one:0/0, finished elder:2 length
        one[0:1] -> one+0
          report plan 2, free 1: one:1/1
    """)


def test_unknown_residency_means_recompute():
    t = Transcript(kv_tokens=16, host_blocks=8)
    t.prompt("old", 6, max_tokens=7)
    t.prompt("new", 5, max_tokens=7)
    t.plan(admit=[Grant("old", 9), Grant("new", 9)], residency="levitate")
    t.step(times=4)
    t.reads("""
        old[0:6] new[0:2] -> old+0
          report plan 1, free 1: old:1/6, new:0/2
        old@6 new[2:5] -> old+1 new+0
        old@7 new@5 -> old+2 new+1
        old@8 -> old+3
          report plan 1, free 1: old:4/9, evicted new:2
    """)


def test_unmatched_prompt_or_admission_expires():
    t = Transcript()
    t.prompt("prompt only", 4)
    t.admit(plan_only=9)
    t.state.expire(now=59.0)
    assert not t.state.idle
    t.state.expire(now=61.0)
    assert t.state.idle
    t.step()
    t.reads("""
        nothing runs
          report plan 1, free 16: finished plan_only:0 error
    """)
