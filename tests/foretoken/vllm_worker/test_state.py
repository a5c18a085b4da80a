"""Prompts and plans at a worker with vLLM's engine: what they start, pause and report."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.vllm.worker.hosted_request import Generated
from services.core import (
    Completion,
    FinishReason,
    Grant,
    HeldRequest,
    Pause,
    Plan,
    RequestProgress,
    Residency,
)
from services.worker.requests.types.batch import TokenLogprobs
from services.worker.requests.types.prompt import Prompt, SamplingParams
from services.worker.requests.types.scores import Opening
from tests.examples import examples
from tests.foretoken.vllm_worker.scripted_vllm import ScriptedVllm


def prompt(name: str, tokens: int = 4, most: int = 5, delivered: int = 0, origin: str = "g"):
    return Prompt(name, (1,) * (tokens + delivered), tokens, most, origin=origin)


def admitted(*names: str, blocks: int = 20, limit: int = 5) -> ScriptedVllm:
    """An engine in which these requests are about to run."""
    vllm = ScriptedVllm(blocks)
    for name in names:
        assert vllm.state.receive(prompt(name), 0.0) is None
    vllm.state.apply_plan(Plan(1, admit=tuple(Grant(name, limit) for name in names)), 0.0)
    vllm.state.report()
    return vllm


@pytest.mark.parametrize("prompt_first", [True, False])
def test_prompt_and_plan_arrive_in_any_order(prompt_first: bool) -> None:
    vllm = ScriptedVllm(20)
    plan = Plan(1, admit=(Grant("a", 5),))
    if prompt_first:
        vllm.state.receive(prompt("a"), 0.0)
        assert not vllm.state.running
        vllm.state.apply_plan(plan, 0.0)
    else:
        vllm.state.apply_plan(plan, 0.0)
        assert vllm.state.awaited_since_s == [0.0]
        vllm.state.receive(prompt("a"), 0.0)
    assert list(vllm.state.running) == ["a"]
    tokens = [token for _ in range(5) for token in vllm.step().tokens]
    assert [token.offset for token in tokens] == [0, 1, 2, 3, 4]
    assert [token.finish for token in tokens] == [None] * 4 + [FinishReason.LENGTH]
    assert tokens[0].opening == Opening() and tokens[1].opening is None
    report = vllm.state.report()
    assert report and report.finished == (Completion("a", 5, FinishReason.LENGTH),)
    assert vllm.state.idle


def test_output_of_another_worker_counts_in_offsets_and_reports() -> None:
    vllm = ScriptedVllm(20)
    vllm.state.receive(prompt("a", tokens=4, most=9, delivered=6), 0.0)
    vllm.state.apply_plan(Plan(1, admit=(Grant("a", 9),)), 0.0)
    [token] = vllm.step().tokens
    assert token.offset == 6
    report = vllm.state.report()
    assert report and report.progress == (RequestProgress("a", 7, 10, 3),)
    assert report.free_blocks == 17


@pytest.mark.parametrize("residency", Residency)
def test_a_paused_request_loses_its_kv_and_continues_when_it_is_admitted(
    residency: Residency,
) -> None:
    vllm = admitted("a", "b")
    vllm.step()
    vllm.state.apply_plan(Plan(2, pause=(Pause("a", residency),)), 0.0)
    assert [token.request_id for token in vllm.step().tokens] == ["b"]
    report = vllm.state.report()
    assert report and report.applied_plan_seq == 2
    assert set(report.progress) == {RequestProgress("a", 1, 0, 0), RequestProgress("b", 2, 5, 2)}
    vllm.state.apply_plan(Plan(3, admit=(Grant("a", 5),)), 0.0)
    offsets = [token.offset for token in vllm.step().tokens if token.request_id == "a"]
    assert offsets == [1]


def test_a_preemption_by_vllm_is_reported_once_as_an_eviction() -> None:
    vllm = admitted("a", "b", blocks=3)
    vllm.step()
    vllm.step()  # needs four blocks
    report = vllm.state.report()
    assert report and report.evicted == (RequestProgress("b", 1, 0, 0),)
    assert vllm.state.counters.evicted_dropped == 1
    vllm.step()
    later = vllm.state.report()
    assert later is None or later.evicted == ()


def test_plans_say_which_request_vllm_preempts() -> None:
    vllm = admitted("a", "b", blocks=3)
    vllm.state.apply_plan(Plan(2, victims=("a", "b")), 0.0)
    vllm.step()
    vllm.step()
    report = vllm.state.report()
    assert report and [each.request_id for each in report.evicted] == ["a"]


def test_the_end_of_a_slice_is_reported_and_the_request_continues() -> None:
    vllm = admitted("a", limit=2)
    vllm.step()
    assert vllm.state.report() is None
    vllm.step()
    report = vllm.state.report()
    assert report and report.progress == (RequestProgress("a", 2, 5, 2),)
    assert len(vllm.step().tokens) == 1


def test_an_old_plan_changes_nothing() -> None:
    vllm = admitted("a")
    vllm.state.apply_plan(Plan(1, cancel=("a",)), 0.0)
    assert "a" in vllm.state.running


def test_a_cancel_frees_a_request_without_a_report_of_it() -> None:
    vllm = admitted("a")
    vllm.step()
    vllm.state.apply_plan(Plan(2, cancel=("a",)), 0.0)
    report = vllm.state.report()
    assert report and (report.progress, report.finished, report.free_blocks) == ((), (), 20)
    assert vllm.requests == {}


def test_a_request_that_returns_ignores_the_cancel_of_its_earlier_placement() -> None:
    vllm = admitted("a")
    [name] = vllm.requests
    vllm.state.receive(prompt("a", delivered=2), 0.0)
    vllm.state.apply_plan(Plan(2, cancel=("a",), admit=(Grant("a", 5),)), 0.0)
    # A step of the earlier placement has no effect.
    assert vllm.state.commit([Generated(name, [9])], []).tokens == []
    assert [token.offset for token in vllm.step().tokens] == [2]


def test_a_prompt_that_cannot_fit_is_refused_with_a_sentence() -> None:
    vllm = ScriptedVllm(2)
    why = vllm.state.receive(prompt("a", tokens=4, most=5), 0.0)
    assert why and "exceeds 8 tokens" in why
    report = vllm.state.report()
    assert report and report.finished == (Completion("a", 0, FinishReason.ERROR),)


def test_a_request_that_vllm_ends_with_an_error_is_returned() -> None:
    vllm = admitted("a")
    [name] = vllm.requests
    assert vllm.state.commit([Generated(name, [], FinishReason.ERROR)], []).tokens == []
    assert [each.request_id for each in vllm.state.pop_failed()] == ["a"]
    assert vllm.state.pop_failed() == []
    report = vllm.state.report()
    assert report and report.finished == (Completion("a", 0, FinishReason.ERROR),)


def test_a_new_scheduler_adopts_what_is_here() -> None:
    vllm = admitted("a", "b")
    vllm.state.receive(prompt("c"), 0.0)
    vllm.step()
    vllm.state.apply_plan(Plan(2, pause=(Pause("b", Residency.DROP),)), 0.0)
    held = vllm.state.attach()
    assert set(held) == {
        HeldRequest("a", 4, 5, 1, 4, 5, running=True, blocks=1),
        HeldRequest("b", 4, 5, 1, 0, 5, running=False),
        HeldRequest("c", 4, 5, 0, 0, 0, running=False),
    }
    vllm.state.apply_plan(Plan(1, admit=(Grant("c", 5),)), 0.0)
    assert {token.request_id for token in vllm.step().tokens} == {"a", "c"}


def test_requests_of_a_closed_stream_are_dropped() -> None:
    vllm = admitted("a")
    vllm.state.receive(prompt("b", origin="other"), 0.0)
    vllm.state.keep_only({"other"})
    assert not vllm.requests and list(vllm.state.pending.prompts) == ["b"]
    vllm.state.reset()
    assert vllm.state.idle


def test_each_request_gets_as_many_logprobs_as_it_asks_for() -> None:
    vllm = ScriptedVllm(20)
    asked = {"none": None, "one": 1, "chosen": 0}
    for name, most in asked.items():
        sampling = SamplingParams(temperature=0.0, logprobs=most)
        vllm.state.receive(Prompt(name, (1,), 1, 3, sampling), 0.0)
    vllm.state.apply_plan(Plan(1, admit=tuple(Grant(name, 3) for name in asked)), 0.0)
    rows = [TokenLogprobs(-0.5, (7, 8), (-0.5, -2.0))]
    made = [Generated(each, [7], logprobs=rows) for each in vllm.requests]
    found = {token.request_id: token.logprobs for token in vllm.state.commit(made, []).tokens}
    assert found == {
        "none": None,
        "one": TokenLogprobs(-0.5, (7,), (-0.5,)),
        "chosen": TokenLogprobs(-0.5),
    }


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_any_sequence_of_plans_delivers_each_token_once_and_counts_the_blocks(
    data: st.DataObject,
) -> None:
    """As the scheduler reads reports: the last reported blocks and the free ones are all blocks."""
    vllm = ScriptedVllm(data.draw(st.integers(4, 12), label="blocks"))
    names = "abcd"
    received: dict[str, list[int]] = defaultdict(list)
    sent: set[str] = set()
    blocks: dict[str, int] = {}
    for seq in range(1, data.draw(st.integers(1, 25), label="rounds")):
        for name in data.draw(st.sets(st.sampled_from(names)), label="prompts") - sent:
            sent.add(name)
            vllm.state.receive(prompt(name, tokens=3, most=8), 0.0)
        chosen = data.draw(st.permutations(names), label="order")
        cut = data.draw(st.integers(0, 4), label="admitted")
        here = sent & {*vllm.state.sequences, *vllm.state.pending.prompts}
        admit = tuple(Grant(name, seq) for name in chosen[:cut] if name in here)
        pause = tuple(Pause(name, Residency.KEEP) for name in chosen[cut:])
        vllm.state.apply_plan(Plan(seq, admit, pause=pause, victims=tuple(chosen)), 0.0)
        for _ in range(data.draw(st.integers(0, 3), label="steps")):
            for token in vllm.step().tokens:
                received[token.request_id].append(token.offset)
        vllm.state.check_integrity()
        assert {r.name for r in vllm.state.running.values()} == set(vllm.running)
        report = vllm.state.report()
        assert report and report.applied_plan_seq == seq
        blocks |= {each.request_id: each.blocks for each in (*report.progress, *report.evicted)}
        for ended in report.finished:
            blocks.pop(ended.request_id, None)
            assert ended.output_tokens == 8
        assert sum(blocks.values()) - report.shared_blocks + report.free_blocks == vllm.blocks
    for offsets in received.values():
        assert offsets == list(range(len(offsets)))
