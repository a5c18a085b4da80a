"""The SLA verdict that the gateway adds to a story."""

from gateway.sessions.outcome_history import OutcomeHistory
from gateway.types.outcome import ChoiceOutcome
from protos.generated import scheduler_pb2
from services.core import FinishReason, Sla
from services.sla import RequestTimeline, explain_sla

SLA = Sla("interactive", ttft_s=1.0, tpot_s=0.05, mtpot_s=0.5)


def timeline(first_s: float, *more_s: float) -> RequestTimeline:
    made = RequestTimeline(10.0, placed_s=10.1)
    for at_s in (first_s, *more_s):
        made.on_tokens(1, at_s)
    made.ended_s = made.last_token_s
    return made


def story(name: str) -> scheduler_pb2.Story:
    placed = scheduler_pb2.Chapter(at_s=0.1, kind="placed", text="admitted", times=1)
    return scheduler_pb2.Story(request_id=name, chapters=[placed])


def test_sla_explanation_states_result_and_budgets() -> None:
    kept = explain_sla(SLA, timeline(10.5, 10.54, 10.58), FinishReason.STOP)
    assert kept == (
        "SLA interactive met; first token after 0.500 s of 1 s, mean gap 0.040 s of 0.05 s, "
        "longest gap 0.040 s of 0.5 s"
    )
    late = explain_sla(SLA, timeline(12.0), FinishReason.STOP)
    assert late == (
        "SLA interactive missed (prefill): its prefill took too long; "
        "first token after 2.000 s of 1 s"
    )
    nothing = RequestTimeline(10.0, ended_s=11.0)
    assert explain_sla(Sla(), nothing, FinishReason.CANCELLED) == (
        "SLA default missed (client): its client disconnected"
    )


def test_sla_result_is_the_last_chapter_of_a_local_story() -> None:
    history = OutcomeHistory(10)
    history.add("a-0", ChoiceOutcome.judged(SLA, timeline(10.5), FinishReason.STOP))
    mine, other = story("a-0"), story("b-0")
    history.add_verdict(mine)
    history.add_verdict(other)
    assert [chapter.kind for chapter in mine.chapters] == ["placed", "judged"]
    assert mine.chapters[-1].text.startswith("as its client saw it, SLA interactive met; first")
    assert mine.chapters[-1].at_s == 0.5
    assert other == story("b-0")


def test_outcome_history_drops_the_oldest() -> None:
    history = OutcomeHistory(2)
    for name in ("a-0", "b-0", "c-0"):
        history.add(name, ChoiceOutcome.judged(SLA, timeline(10.5), FinishReason.STOP))
    reported = [story(name) for name in ("a-0", "b-0", "c-0")]
    for each in reported:
        history.add_verdict(each)
    assert [len(each.chapters) for each in reported] == [1, 2, 2]
