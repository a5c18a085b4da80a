"""A backend's requests: plans, prompts and tokens, against what a scheduler expects."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.core import (
    Completion,
    FinishReason,
    Grant,
    Pause,
    Plan,
    Report,
    RequestProgress,
    Residency,
)
from services.worker.backend.requests import SURPLUS_MAX, Arrival, BackendRequests, Changes
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams
from services.worker.requests.types.sequence import Sequence as WorkerSequence

EOS = 9
LIMITS = Limits(kv_blocks=100, block_tokens=4, max_running=8, eos_ids=frozenset({EOS}))
STOP, LENGTH, ERROR = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR


def prompt(name: str = "a", most: int = 100, tokens: Sequence[int] = (1, 2, 3)) -> Prompt:
    return Prompt(name, tokens, 3, most, GREEDY, "gateway")


def started(*names: str, limit: int = 100) -> BackendRequests:
    """Requests that run at the server."""
    requests = BackendRequests(LIMITS)
    requests.attach()
    for name in names:
        requests.receive(prompt(name), 0.0)
    requests.apply_plan(Plan(1, admit=tuple(Grant(name, limit) for name in names)), 0.0)
    assert [s.request_id for s in requests.pop_changes().begin] == list(names)
    requests.report(8)
    return requests


def report(requests: BackendRequests, max_running: int = 8) -> Report:
    found = requests.report(max_running)
    assert found is not None
    return found


def arrivals(*ids: int) -> list[Arrival]:
    return [Arrival(token) for token in ids]


def test_request_runs_once_prompt_and_plan_are_here() -> None:
    for order in (0, 1):
        requests = BackendRequests(LIMITS)
        steps = [
            lambda r: r.receive(prompt(), 0.0),
            lambda r: r.apply_plan(Plan(1, admit=(Grant("a", 5),)), 0.0),
        ]
        steps[order](requests)
        assert requests.pop_changes().begin == ()
        steps[1 - order](requests)
        (sequence,) = requests.pop_changes().begin
        assert sequence.tokens == [1, 2, 3]
        assert requests.pop_changes() == type(requests.pop_changes())()  # begins once


def started_with_grammar() -> tuple[BackendRequests, WorkerSequence]:
    """A request with a budget of 2 tokens, which runs at the server."""
    requests = BackendRequests(replace(LIMITS, grammars=True))
    requests.attach()
    requests.receive(replace(prompt(), sampling=SamplingParams(grammar="{}")), 0.0)
    requests.apply_plan(Plan(1, admit=(Grant("a", 2),)), 0.0)
    (sequence,) = requests.pop_changes().begin
    return requests, sequence


def test_answer_with_a_grammar_is_not_cut_off_by_a_pause() -> None:
    requests, _ = started_with_grammar()
    assert len(requests.add("a", arrivals(*[7] * 80))) == 2
    requests.apply_plan(Plan(2, pause=(Pause("a", Residency.DROP),)), 0.0)
    assert requests.add("a", arrivals(8)) == []
    assert requests.pop_changes() == Changes()
    assert len(requests.apply_plan(Plan(3, admit=(Grant("a", 90),)), 0.0)) == 79
    assert requests.pop_changes() == Changes()
    assert [t.offset for t in requests.add("a", arrivals(7))] == [81]


def test_answer_with_a_grammar_is_cut_off_by_a_cancel_and_begins_anew_after_a_loss() -> None:
    requests, sequence = started_with_grammar()
    requests.add("a", arrivals(7))
    requests.evict("a")
    requests.apply_plan(Plan(2, admit=(Grant("a", 9),)), 0.0)
    assert requests.pop_changes() == Changes(begin=(sequence,))
    requests.apply_plan(Plan(3, pause=(Pause("a", Residency.DROP),)), 0.0)
    requests.apply_plan(Plan(4, cancel=("a",)), 0.0)
    assert requests.pop_changes() == Changes(cut=("a",))


def test_tokens_have_offsets_and_the_first_one_opens() -> None:
    requests = started("a")
    first, second = requests.add("a", arrivals(7, 8))
    assert (first.offset, second.offset) == (0, 1)
    assert first.opening is not None and second.opening is None
    assert first.origin == "gateway"
    requests.record_interval(())
    (progress,) = report(requests).progress
    assert progress == RequestProgress("a", 2, 4, 2)  # 5 tokens, the newest without KV


def test_end_by_end_token_length_or_word_of_the_server() -> None:
    requests = started("a", "b", "c")
    assert [t.finish for t in requests.add("a", arrivals(7, EOS, 8))] == [None, STOP]
    assert [t.finish for t in requests.add("b", [Arrival(7, None, LENGTH)])] == [LENGTH]
    ends = requests.add("c", arrivals(*[7] * 100))
    assert len(ends) == 100 and ends[-1].finish is LENGTH
    assert set(report(requests).finished) == {
        Completion("a", 2, STOP),
        Completion("b", 1, LENGTH),
        Completion("c", 100, LENGTH),
    }
    assert set(requests.pop_changes().cut) == {"a", "b", "c"}
    assert requests.held.sequences == {}


def test_what_arrives_after_the_end_is_dropped() -> None:
    requests = started("a")
    requests.add("a", arrivals(7, EOS))
    assert requests.add("a", arrivals(8)) == []  # before the call is cut
    requests.receive(prompt(), 0.0)  # the same request again
    assert requests.apply_plan(Plan(2, admit=(Grant("a", 5),)), 0.0) == []
    assert [s.tokens for s in requests.pop_changes().begin] == [[1, 2, 3]]


def test_used_blocks_are_those_of_the_last_changes() -> None:
    requests = started("a", "b")
    assert requests.used_blocks == 2  # of 4 tokens each
    requests.add("a", arrivals(5, 6))
    requests.pop_changes()
    assert requests.used_blocks == 3
    requests.cancel("a")
    requests.pop_changes()
    assert requests.used_blocks == 1
    requests.restart(LIMITS)
    assert requests.used_blocks == 0


def test_drain_waits_for_what_runs_and_a_second_for_a_prompt() -> None:
    requests = BackendRequests(LIMITS)
    assert requests.is_drained(0.0)
    requests.apply_plan(Plan(1, admit=(Grant("a", 5),)), 10.0)
    assert not requests.is_drained(11.0)
    assert requests.is_drained(11.5)
    requests.receive(prompt(), 12.0)
    assert not requests.is_drained(60.0)
    requests.add("a", arrivals(EOS))
    assert requests.is_drained(60.0)


def test_tokens_beyond_a_budget_wait_for_the_next_one() -> None:
    requests = started("a", limit=2)
    assert [t.token_id for t in requests.add("a", arrivals(5, 6, 7, 8))] == [5, 6]
    assert report(requests).progress[0].output_tokens == 2
    assert requests.pop_changes().cut == ()  # it goes on meanwhile
    extended = requests.apply_plan(Plan(2, extend=(Grant("a", 3),)), 0.0)
    assert [t.token_id for t in extended] == [7]
    assert [t.token_id for t in requests.add("a", arrivals(9))] == []
    last = requests.apply_plan(Plan(3, extend=(Grant("a", 9),)), 0.0)
    assert [(t.token_id, t.offset, t.finish) for t in last] == [(8, 3, None), (9, 4, STOP)]


def test_server_is_cut_off_when_too_many_tokens_wait() -> None:
    requests = started("a", limit=1)
    requests.add("a", arrivals(*[5] * (SURPLUS_MAX + 1)))
    assert requests.pop_changes().cut == ("a",)
    released = requests.apply_plan(Plan(2, extend=(Grant("a", 90),)), 0.0)
    assert len(released) == SURPLUS_MAX
    (again,) = requests.pop_changes().begin
    assert len(again.tokens) == 3 + 1 + SURPLUS_MAX  # goes on behind what arrived


def test_paused_request_continues_from_its_tokens() -> None:
    requests = started("a", limit=50)
    requests.add("a", arrivals(5, 6))
    requests.apply_plan(Plan(2, pause=(Pause("a", Residency.KEEP),)), 0.0)
    assert requests.pop_changes().cut == ("a",)
    paused = report(requests)
    assert paused.applied_plan_seq == 2
    assert paused.progress == (RequestProgress("a", 2, 0, 0),)
    assert paused.free_blocks == 100
    requests.apply_plan(Plan(3, admit=(Grant("a", 60),)), 0.0)
    (again,) = requests.pop_changes().begin
    assert again.tokens == [1, 2, 3, 5, 6]
    (token,) = requests.add("a", arrivals(7))
    assert (token.offset, token.opening) == (2, None)


def test_given_back_request_is_reported_as_evicted() -> None:
    requests = started("a", "b")
    requests.add("a", arrivals(5))
    requests.evict("a")
    assert requests.pop_changes().cut == ()  # the server has ended it
    found = report(requests, max_running=3)
    assert found.evicted == (RequestProgress("a", 1, 0, 0),)
    assert found.max_running == 3
    requests.apply_plan(Plan(2, admit=(Grant("a", 60),)), 0.0)
    assert [s.request_id for s in requests.pop_changes().begin] == ["a"]


def test_failed_request_is_reported_once() -> None:
    requests = started("a")
    assert requests.fail("a") is not None
    assert requests.fail("a") is None
    assert report(requests).finished == (Completion("a", 0, ERROR),)


def test_request_that_can_never_run_is_refused() -> None:
    requests = started()
    assert "exceeds 400 tokens" in requests.receive(prompt(most=398), 0.0)
    assert report(requests).finished == (Completion("a", 0, ERROR),)


def test_cancel_of_an_earlier_placement_is_ignored() -> None:
    requests = started("a")
    requests.add("a", arrivals(5))
    requests.receive(prompt(tokens=(1, 2, 3, 5)), 0.0)  # moved away and back
    requests.apply_plan(Plan(2, cancel=("a",)), 0.0)
    requests.apply_plan(Plan(3, admit=(Grant("a", 60),)), 0.0)
    changes = requests.pop_changes()
    assert changes.cut == ("a",)
    assert [s.tokens for s in changes.begin] == [[1, 2, 3, 5]]
    (token,) = requests.add("a", arrivals(6))
    assert token.offset == 1
    requests.apply_plan(Plan(4, cancel=("a",)), 0.0)
    assert requests.pop_changes().cut == ("a",)


def test_next_scheduler_receives_all_requests() -> None:
    requests = started("a", limit=50)
    requests.add("a", arrivals(5, 6))
    requests.receive(prompt("b"), 0.0)  # no plan has admitted it
    running, waiting = requests.attach()
    assert (running.request_id, running.output_tokens, running.limit_tokens) == ("a", 2, 50)
    assert running.running and running.blocks == 2
    assert (waiting.request_id, waiting.running, waiting.blocks) == ("b", False, 0)
    assert report(requests).seq == 1


def test_unsent_reports_are_repeated() -> None:
    requests = started("a", "b")
    requests.add("a", arrivals(EOS))
    requests.evict("b")
    unsent = report(requests)
    requests.attach()
    requests.return_reports([unsent])
    again = report(requests)
    assert (again.finished, again.evicted) == (unsent.finished, unsent.evicted)


def test_requests_of_closed_streams_are_dropped() -> None:
    requests = started("a")
    requests.receive(prompt("b"), 0.0)
    requests.keep_only({"gateway"})
    assert set(requests.held.sequences) == {"a"} and "b" in requests.pending.prompts
    requests.keep_only({"another"})
    assert not requests.held.sequences and not requests.pending


def test_restart_cuts_what_runs() -> None:
    requests = started("a", "b")
    requests.restart(LIMITS)
    assert set(requests.pop_changes().cut) == {"a", "b"}


class Server:
    """A server that answers any prompt with the numbers from 10 on, in the order of its tokens: an
    output is that sequence however often its request is cut off."""

    def __init__(self) -> None:
        self.requests = BackendRequests(LIMITS)
        self.requests.attach()
        self.calls: dict[str, int] = {}  # the next token of each
        self.output: dict[str, int] = {}  # delivered tokens of each request
        self._plans = 0

    def plan(self, **directives: Any) -> list[NewToken]:
        self._plans += 1
        return self.requests.apply_plan(Plan(self._plans, **directives), 0.0)

    def send_prompt(self, name: str, _: int) -> list[NewToken]:
        known = range(10, 10 + self.output.setdefault(name, 0))
        if len(known) < 90:
            self.requests.receive(prompt(name, 90, (1, 2, 3, *known)), 0.0)
        return []

    def answer(self, name: str, number: int) -> list[NewToken]:
        if name not in self.calls:
            return []
        first = self.calls[name]
        self.calls[name] += number
        return self.requests.add(name, arrivals(*range(first, first + number)))

    def give_back(self, name: str, _: int) -> list[NewToken]:
        if self.calls.pop(name, None) is not None:
            self.requests.evict(name)
        return []

    def deliver(self, tokens: list[NewToken]) -> None:
        for token in tokens:
            assert token.offset == self.output[token.request_id]
            assert token.token_id == 10 + token.offset
            self.output[token.request_id] = 0 if token.finish else token.offset + 1

    def follow(self) -> None:
        """Carries out the changes."""
        changes = self.requests.pop_changes()
        for gone in changes.cut:
            self.calls.pop(gone, None)
        for sequence in changes.begin:
            self.calls[sequence.request_id] = 10 + len(sequence.tokens) - sequence.prompt_tokens


ACTIONS: dict[str, Callable[[Server, str, int], list[NewToken]]] = {
    "prompt": Server.send_prompt,
    "admit": lambda server, name, number: server.plan(admit=(Grant(name, number),)),
    "extend": lambda server, name, number: server.plan(extend=(Grant(name, number),)),
    "pause": lambda server, name, _: server.plan(pause=(Pause(name, Residency.DROP),)),
    "cancel": lambda server, name, _: server.plan(cancel=(name,)),
    "tokens": Server.answer,
    "give back": Server.give_back,
}


@given(
    st.lists(
        st.tuples(st.sampled_from([*ACTIONS]), st.sampled_from("ab"), st.integers(1, 70)),
        max_size=60,
    )
)
def test_any_order_keeps_offsets_and_calls(steps: list[tuple[str, str, int]]) -> None:
    server = Server()
    for action, name, number in steps:
        server.deliver(ACTIONS[action](server, name, number))
        server.follow()
        running = server.requests.running
        assert set(server.calls) >= {r for r, s in running.items() if s.within_budget}
        assert set(server.calls) <= set(running)
        assert 0 <= server.requests.held.pool.free_blocks <= 100
        server.requests.report(8)
