"""Stories of requests that wait, run, are preempted and end, as transcripts."""

from pathlib import Path
from typing import Any

import pytest

from services.core import (
    Completion,
    FinishReason,
    Report,
    Request,
    RequestProgress,
    Sla,
)
from services.forecast import certain
from services.runtime.errors import Code, ServiceError
from services.scheduler.core import events as ev
from services.scheduler.observe.event_log import EventLog, Head
from services.scheduler.observe.lookup import find_stories
from services.scheduler.observe.replay import replay
from services.scheduler.observe.story import FIRST_KEPT, MAX_CHAPTERS, Chapter, Kind, OpenStory
from services.scheduler.observe.story_recorder import StoryRecorder
from tests.scheduler.rounds.alise_driver import Driver
from tests.scheduler.state_driver import G, request, state, worker

EXPECTED_30 = "forecast by history: 30 output tokens expected, median 30, 90th percentile 30"


class Run:
    """A state, its stories, and every step as the event log stores it."""

    def __init__(self, s: Any, ended_most: int = 100):
        self.state = s
        self.recorder = StoryRecorder(ended_most)
        self.steps: list[ev.Step] = []

    def step(self, event: ev.Event, now: float) -> None:
        self.once(event, now)
        if self.state.round_due_s <= now:
            self.once(ev.Round(), now)

    def once(self, event: ev.Event, now: float) -> None:
        self.state.step(event, now)
        self.recorder.observe(self.state.last_step, self.state)
        self.steps.append(self.state.last_step)

    def submit(self, asked: Request, now: float, tokens: int = 0, link: str = G) -> None:
        self.step(ev.Submitted(link, asked), now)
        forecast = certain(tokens or asked.max_tokens, "history")
        self.step(ev.Forecasted(((asked.request_id, forecast),)), now)

    def sentences(self, name: str) -> list[str]:
        """The story as `foretoken why` prints it, without the words between time and sentence."""
        story = self.recorder.story(name, self.state)
        assert story is not None
        return [
            f"{line.at_s:.1f} {line.text}"
            + (f" [{line.times} to {line.until_s:.1f}]" if line.times > 1 else "")
            for line in story.lines
            if line.kind != Kind.RECEIVED
        ]


def run(policy: str = "fcfs", kv_tokens: int = 160, **limits: Any) -> Run:
    """A run with one worker of ten blocks of 16: fcfs may plan 152 tokens."""
    r = Run(state(policy, **limits))
    r.step(worker(kv_tokens=kv_tokens), 0.0)
    return r


def report(r: Run, seq: int, now: float, **what: Any) -> None:
    r.step(ev.Reported("w0#1", "w0", Report(seq, 99, **what)), now)


def test_story_tells_the_least_length() -> None:
    r = run()
    r.submit(Request("a", "demo", 20, 60, 10.0, min_tokens=25), 10.0, tokens=30)
    assert r.sentences("a")[0] == (
        "0.0 arrived with 20 prompt tokens and max_tokens 60; SLA default; "
        "at least 25 output tokens"
    )


def test_story_of_request_that_waits_for_memory() -> None:
    """Prompts of 90 and 70 tokens are 96 and 80 in whole blocks: 176 together, more than 152. Later
    80 and the 16 of "c" are admitted together."""
    r = run()
    r.submit(request("a", prompt=90, most=50, at=10.0), 10.0, tokens=20)
    sla = Sla("interactive", 1.0, 0.05)
    asked = Request("b", "demo", 70, 60, 10.0, deadline_s=30.0, sla=sla)
    r.submit(asked, 10.5, tokens=30)
    report(r, 1, 11.0, progress=(RequestProgress("a", 1, 91, 6),))
    assert r.sentences("b") == [
        "0.5 arrived with 70 prompt tokens and max_tokens 60; SLA interactive "
        "(TTFT 1 s, TPOT 0.05 s); deadline in 19.5 s",
        f"0.5 {EXPECTED_30}",
        "0.5 waits: needs 176 KV tokens in all, limit 152 [2 to 1.0]",
        "1.0 position 1 of 1 in the queue",
    ]
    r.submit(request("c", at=11.0), 11.0, tokens=30)
    report(r, 2, 12.0, finished=(Completion("a", 20, FinishReason.STOP),))
    report(r, 3, 12.5, progress=(RequestProgress("b", 1, 71, 5),))
    report(r, 4, 13.0, finished=(Completion("b", 60, FinishReason.LENGTH),))
    assert r.sentences("a") == [
        "0.0 arrived with 90 prompt tokens and max_tokens 50; SLA default",
        "0.0 forecast by history: 20 output tokens expected, median 20, 90th percentile 20",
        "0.0 admitted at w0, budget 50 output tokens: forecast peak 96 KV tokens of 152",
        "1.0 w0 reports the first output tokens: 1",
        "2.0 ended (stop) with 20 output tokens, queued 0.000 s",
    ]
    assert r.sentences("b")[2:] == [
        "0.5 waits: needs 176 KV tokens in all, limit 152 [3 to 1.0]",
        "2.0 admitted at w0, budget 60 output tokens: forecast peak 96 KV tokens of 152",
        "2.5 w0 reports the first output tokens: 1",
        "3.0 ended (length) with 60 output tokens, queued 2.000 s",
    ]
    assert r.sentences("c")[0].endswith("SLA default; 1 other request waits")
    assert r.sentences("c")[2] == "0.0 waits: queue position 2, behind a request that does not fit"


def test_story_of_eviction_worker_loss_move_and_gateway_loss() -> None:
    """80 prompt tokens beside 48 and 48 are 176. At 2 s "a" has 70 tokens, five blocks, and "b",
    evicted with 68, needs as many: 160."""
    r = run()
    r.submit(request("a", prompt=40, most=90), 0.0)
    r.submit(request("b", prompt=40, most=90), 0.1)
    r.submit(request("c", prompt=80, most=20), 0.2)
    report(r, 1, 1.0, progress=(RequestProgress("a", 20, 60, 4), RequestProgress("b", 18, 58, 4)))
    evicted = (RequestProgress("b", 28, 0, 0),)
    report(r, 2, 2.0, progress=(RequestProgress("a", 30, 70, 5),), evicted=evicted)
    report(r, 3, 3.0, finished=(Completion("a", 60, FinishReason.STOP),))
    r.step(worker("w1", kv_tokens=160), 4.0)
    r.step(ev.WorkerLost("w0#1", "w0"), 5.0)
    r.step(ev.Cancelled(G, "c", FinishReason.CANCELLED, 0), 6.0)
    r.step(ev.GatewayLost(G), 7.0)
    full = "waits: needs 160 KV tokens in all, limit 152"
    room = "budget 90 output tokens: forecast peak 80 KV tokens of 152"
    assert r.sentences("b")[3:] == [
        "1.0 w0 reports the first output tokens: 18",
        "2.0 evicted by w0 after 28 output tokens: memory ran out; KV dropped",
        f"2.0 {full}",
        f"3.0 resumed at w0, KV recomputed, {room}",
        "5.0 worker w0 was lost; the request waits again without KV",
        f"5.0 {full}",
        f"6.0 moved from w0 to w1, KV recomputed, {room}",
        "7.0 ended because the gateway's stream ended",
    ]
    assert r.sentences("c")[2:] == [
        "0.2 waits: needs 176 KV tokens in all, limit 152 [2 to 1.0]",
        "2.0 waits: queue position 2, behind a request that does not fit",
        f"3.0 {full}",
        "4.0 admitted at w1, budget 20 output tokens: forecast peak 80 KV tokens of 152",
        "6.0 cancelled with 0 output tokens",
    ]
    assert (
        len(r.recorder.store.live) == 0
        and r.recorder.store.ended_count == r.recorder.store.kept_count == 3
    )


class Telling(Driver):
    """The ALISE driver with a story recorder."""

    def __init__(self, **choices: Any):
        self.run: Run | None = None
        super().__init__(**choices)

    def step(self, event: ev.Event, now: float) -> None:
        self.run = self.run or Run(self.state)
        self.now = now = max(now, self.now)
        self.run.step(event, now)

    def sentences_of(self, name: str) -> list[str]:
        assert self.run
        return self.run.sentences(name)


def test_story_of_pause_and_swap() -> None:
    """One slot: "short", 3 tokens, preempts "long" of 400; the KV of "long" moves to host memory.
    A slice has 32 tokens, and is extended to the whole answer while no request waits.
    From 3.0 to 6.0 there are three intervals of 1 s from plan to plan. Their mean, from 0 on, is
    0.271 s, or 27.1 steps: the next slice has 32 + 54 tokens."""
    d = Telling(places=1)
    d.submit("long", 400)
    for at, output in ((1.0, 20), (2.0, 40)):
        d.progress("long", output, at)
    d.submit("short", 3, 3.0)
    d.report(
        4.0, progress=(RequestProgress("long", 45, 55, 55), RequestProgress("short", 1, 11, 11))
    )
    d.report(5.0, progress=(RequestProgress("long", 45, 55, 0),))
    d.report(6.0, finished=(Completion("short", 3, FinishReason.STOP),))
    d.report(7.0, progress=(RequestProgress("long", 46, 56, 56),))
    assert d.sentences_of("long")[2:] == [
        "0.0 admitted at w0, budget 32 output tokens: forecast peak 10 KV tokens of 300",
        "1.0 w0 reports the first output tokens: 20",
        "1.0 slice extended, budget 1000 output tokens",
        "3.0 paused at w0 by the plan after 40 output tokens, for short",
        "4.0 waits: 1 requests run, the worker runs at most 1",
        "5.0 55 KV tokens moved to host memory",
        "5.0 waits: 1 requests run, the worker runs at most 1",
        "6.0 resumed at w0, 55 KV tokens kept, budget 131 output tokens: "
        "forecast peak 55 KV tokens of 300",
        "7.0 56 KV tokens moved back to the device",
        "7.0 slice extended, budget 1000 output tokens",
    ]


def test_story_of_refusal_and_resubmission() -> None:
    r = run(max_queue=1)
    r.submit(request("a", prompt=90, most=50), 0.0)
    r.submit(request("b", prompt=90, most=50), 0.0)
    r.step(ev.Submitted(G, request("c")), 0.1)
    r.step(
        ev.Submitted(G, request("a")), 0.2
    )  # the id is in use: the story of the live request stays open
    again = Request("b", "demo", 90, 50, 0.0, delivered_tokens=7)
    r.step(ev.Submitted("gateway#2", again), 0.3)
    assert r.sentences("c")[1:] == ["0.1 refused: 1 requests are waiting; try again in 1 s"]
    assert r.sentences("a")[0].startswith("0.0 arrived with 90") and len(r.sentences("a")) == 3
    assert r.sentences("b")[0].endswith("submitted again after 7 delivered output tokens")
    assert [story.live for story in (r.recorder.story(n, r.state) for n in "abc") if story] == [
        True,
        True,
        False,
    ]


def test_story_of_deadline_and_stop_string() -> None:
    r = run()
    r.submit(request("a", prompt=90, most=50), 0.0)
    r.submit(request("b", prompt=90, most=50, deadline=2.0), 0.0)
    r.step(ev.Cancelled(G, "a", FinishReason.STOP, 4), 1.0)
    r.step(ev.Tick(), 2.0)
    assert r.sentences("a")[-1] == "1.0 ended by a stop string with 4 output tokens"
    assert r.sentences("b")[-1] == (
        "2.0 ended (deadline) with 0 output tokens, queued 1.000 s: the deadline passed"
    )


def test_store_is_bounded_and_refusals_displace_no_others() -> None:
    r = run(max_queue=1)
    r.recorder = StoryRecorder(8)
    r.step(worker(), 0.0)
    for n in range(20):
        r.step(ev.Submitted(G, request(f"r{n}")), 1.0)
        r.step(ev.Cancelled(G, f"r{n}", FinishReason.CANCELLED, 0), 1.0)
    for name in ("x", "y", "w"):  # the third does not fit and fills the queue
        r.submit(request(name, prompt=400, most=90), 2.0)
    for n in range(50):
        r.step(ev.Submitted(G, request(f"z{n}")), 3.0)
    kept = r.recorder.store.ids("")
    assert kept == ["x", "y", "w", *(f"r{n}" for n in range(12, 20)), "z48", "z49"]
    assert (r.recorder.store.kept_count, r.recorder.store.ended_count) == (10, 70)


def test_story_begins_with_time_at_gateway() -> None:
    r = run()
    r.submit(request("a", at=10.0), 10.5)
    again = Request("b", "demo", 10, 50, 8.0, delivered_tokens=3)
    r.submit(again, 11.0)
    r.submit(request("c", at=11.0), 11.0)
    first = [story.lines[0] for n in "abc" if (story := r.recorder.story(n, r.state))]
    assert [(line.at_s, line.text) for line in first[:2]] == [
        (
            0.0,
            "received by the gateway; 0.500 s for parsing, tokenization and its queue until it "
            "reached the scheduler",
        ),
        (0.0, "received by the gateway, which submitted it again after 3.000 s"),
    ]
    assert first[2].kind == Kind.ARRIVED


def test_long_story_loses_its_middle() -> None:
    tale = OpenStory(request("a"), G, [])
    for n in range(MAX_CHAPTERS + 10):
        tale.add(Chapter(float(n), Kind.STOPPED, (n,)))
    sentences = list(tale.written())
    assert len(sentences) == MAX_CHAPTERS + 1
    assert sentences[FIRST_KEPT].text == "… 10 chapters omitted"
    kept = [chapter.values[0] for chapter in sentences if chapter.kind == Kind.STOPPED]
    assert kept == [*range(FIRST_KEPT), *range(FIRST_KEPT + 10, MAX_CHAPTERS + 10)]


def test_replay_gives_same_stories(tmp_path: Path) -> None:
    d = Telling(places=2)
    for n, tokens in enumerate((400, 30, 120, 5)):
        d.submit(f"r{n}", tokens, float(n))
        d.progress("r0", 10 * n + 5, n + 0.5)
    d.report(5.0, evicted=(RequestProgress("r0", 50, 60, 0),))
    d.report(6.0, finished=(Completion("r1", 30, FinishReason.STOP),))
    d.step(ev.WorkerLost("w0#1", "w0"), 7.0)
    assert d.run
    path = tmp_path / "events.jsonl"
    with EventLog(path, 2**20, Head(d.state.preset, d.state.limits)) as log:
        for step in d.run.steps:
            log.append(step)
    again = replay(path, 100)
    assert again.differing == 0 and again.steps == len(d.run.steps)
    live = d.run.recorder
    assert live.store.ids("") == again.recorder.store.ids("") and len(live.store.ids("")) == 4
    for name in live.store.ids(""):
        assert live.story(name, d.state) == again.recorder.story(name, again.state)


def test_replay_judges_slas_by_reports(tmp_path: Path) -> None:
    """First token at 2 s of 1 s, placed at 0; of "b" placed at 0, 12 tokens in 1.1 s after the
    first, of 0.05 s a token."""
    r = run(kv_tokens=1_000)
    sla = Sla("interactive", 1.0, 0.05)
    for name in "ab":
        r.submit(Request(name, "demo", 10, 50, 0.0, sla=sla), 0.0)
    report(r, 1, 0.9, progress=(RequestProgress("b", 1, 11, 1),))
    report(r, 2, 2.0, progress=(RequestProgress("a", 1, 11, 1), RequestProgress("b", 12, 22, 2)))
    done = (Completion("a", 1, FinishReason.STOP), Completion("b", 12, FinishReason.STOP))
    report(r, 3, 2.0, finished=done)
    path = tmp_path / "events.jsonl"
    with EventLog(path, 2**20, Head(r.state.preset, r.state.limits)) as log:
        for step in r.steps:
            log.append(step)
    assert replay(path, 100).judge.verdicts == {
        "a": "by its worker's reports, without delivery to the client, "
        "SLA interactive missed (prefill): its prefill took too long; "
        "first token after 2.000 s of 1 s",
        "b": "by its worker's reports, without delivery to the client, "
        "SLA interactive missed (decode): decoding was too slow or did not finish; "
        "first token after 0.900 s of 1 s, mean gap 0.100 s of 0.05 s, longest gap 0.100 s",
    }


def several() -> Run:
    r = run(kv_tokens=1_000)
    for name in ("4fe1aa-0", "4fe1aa-1", "4fe1aa-1~1", "4fe2bb-0", "77-0"):
        r.submit(request(name), 0.0)
    return r


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("4fe1aa", ["4fe1aa-0", "4fe1aa-1", "4fe1aa-1~1"]),
        ("chatcmpl-4fe1aa", ["4fe1aa-0", "4fe1aa-1", "4fe1aa-1~1"]),
        ("cmpl-4fe2bb", ["4fe2bb-0"]),
        ("4fe1aa-0", ["4fe1aa-0"]),
        ("4fe1aa-1", ["4fe1aa-1"]),
        ("4fe1", ["4fe1aa-0", "4fe1aa-1", "4fe1aa-1~1"]),
        (" 4fe2 ", ["4fe2bb-0"]),
        ("77-0", ["77-0"]),
    ],
)
def test_client_id_resolves_to_its_choices(asked: str, found: list[str]) -> None:
    r = several()
    assert [story.request_id for story in find_stories(asked, r.recorder, r.state)] == found


@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        ("4fe", Code.INVALID_ARGUMENT, "give at least 4 characters of it"),
        ("", Code.INVALID_ARGUMENT, "give at least 4 characters of it"),
        ("4fe3", Code.NOT_FOUND, "no request '4fe3' is remembered: 5 are live, and 0 of the 0"),
    ],
)
def test_unknown_id_is_not_found(asked: str, code: Code, message: str) -> None:
    r = several()
    with pytest.raises(ServiceError, match=message) as raised:
        find_stories(asked, r.recorder, r.state)
    assert raised.value.code is code


def test_ambiguous_prefix_lists_matches() -> None:
    r = several()
    r.submit(request("4fe1ab-0"), 0.0)
    with pytest.raises(ServiceError, match="2 requests begin with '4fe1': 4fe1aa, 4fe1ab"):
        find_stories("4fe1", r.recorder, r.state)
