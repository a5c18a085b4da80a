"""The election: a table of its rules, and random candidates over a slow, forgetful lease."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf, nextafter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.leadership.election import Election, Role

LEASE_S = 3.0  # a leader renews every 1 s and leads for 2.7 s; a standby claims every 0.3 s
END_S = 40.0


def elected() -> Election:
    election = Election("a", LEASE_S)
    election.on_answer("a", 10.0, 10.1)
    return election


def test_claim_makes_a_leader_from_before_it_was_sent():
    election = Election("a", LEASE_S)
    assert election.role(10.0) is Role.STANDBY
    election.on_answer("a", 10.0, 10.1)
    assert election.until_s == pytest.approx(12.7)
    assert election.next_claim_s == 11.0
    assert election.role(12.69) is Role.LEADER
    assert election.role(12.7) is Role.DEPOSED


def test_renewal_extends_the_time_and_an_older_answer_does_not_shorten_it():
    election = elected()
    election.on_answer("a", 11.0, 11.2)
    assert election.until_s == pytest.approx(13.7)
    election.on_answer("a", 10.5, 11.3)
    assert election.until_s == pytest.approx(13.7)


@pytest.mark.parametrize("holder", ["b", ""])
def test_leader_without_the_lease_is_deposed_at_once(holder: str):
    election = elected()
    election.on_answer(holder, 11.0, 11.2)
    assert election.role(11.2) is Role.DEPOSED


def test_deposed_candidate_stays_deposed():
    election = elected()
    election.on_answer("a", 12.0, 12.8)  # the answer is later than the end of its time
    assert election.role(12.8) is Role.DEPOSED
    election.on_answer("a", 12.9, 13.0)
    assert election.role(13.0) is Role.DEPOSED


def test_answer_later_than_its_lease_makes_no_leader():
    election = Election("a", LEASE_S)
    election.on_answer("a", 10.0, 12.7)
    assert election.role(12.7) is Role.STANDBY
    election.on_answer("a", 13.0, 13.1)
    assert election.role(13.1) is Role.LEADER


def test_failed_claim_is_repeated_soon_and_costs_nothing_else():
    election = elected()
    election.on_failure(11.5)
    assert election.role(11.5) is Role.LEADER
    assert election.next_claim_s == pytest.approx(11.8)


def test_claim_of_a_leader_waits_no_longer_than_it_leads():
    election = elected()
    assert election.patience_s(10.1) == pytest.approx(1.0)
    assert election.patience_s(12.5) == pytest.approx(0.2)
    assert Election("b", LEASE_S).patience_s(5.0) == pytest.approx(1.0)


def test_resigned_candidates_never_lead():
    leader, standby = elected(), Election("b", LEASE_S)
    for each in (leader, standby):
        each.resign(11.0)
        each.on_answer(each.token, 11.1, 11.2)
        assert each.role(11.2) is Role.DEPOSED


def test_changes_count_each_new_holder():
    election = Election("c", LEASE_S)
    for holder in ("a", "a", "", "a", "b", "c", "c"):
        election.on_answer(holder, 10.0, 10.1)
    assert election.changes == 3
    assert election.holder == "c"


# --- random candidates


@dataclass
class ForgetfulLease:
    """What the claim script does, in plain words. `lose` empties the store."""

    holder: str = ""
    expires_s: float = -inf
    since_s: float | None = None

    def claim(self, token: str, leads: bool, now_s: float) -> str:
        if self.since_s is None:
            self.since_s = now_s
        holder = self.holder if now_s < self.expires_s else ""
        settled = leads or now_s - self.since_s >= LEASE_S
        if holder == token or (not holder and settled):
            self.holder, self.expires_s = token, now_s + LEASE_S
            return token
        return holder

    def lose(self) -> None:
        self.holder, self.expires_s, self.since_s = "", -inf, None


@dataclass
class World:
    """Candidates in virtual time. Each claim has its own delays both ways; a lost one is not
    answered. Every interval in which a candidate leads is recorded."""

    draw: Callable[[st.SearchStrategy], float]
    lease: ForgetfulLease = field(default_factory=ForgetfulLease)
    led: list[tuple[float, float, str]] = field(default_factory=list)
    events: list = field(default_factory=list)
    number: count = field(default_factory=count)

    def at(self, time_s: float, call, *arguments) -> None:
        heappush(self.events, (time_s, next(self.number), call, arguments))

    def run(self) -> None:
        while self.events and self.events[0][0] < END_S:
            now_s, _, call, arguments = heappop(self.events)
            call(now_s, *arguments)

    def start(self, now_s: float, token: str) -> None:
        self.send(now_s, Election(token, LEASE_S))

    def send(self, now_s: float, election: Election) -> None:
        role = election.role(now_s)
        if role is Role.DEPOSED:  # the process restarts as another candidate
            self.at(now_s + 0.5, self.start, f"{election.token}'")
            return
        to_s, back_s = (self.draw(st.sampled_from([0.0, 0.01, 0.2, 0.9, 2.5])) for _ in range(2))
        limit_s = election.patience_s(now_s)
        self.at(now_s + to_s, self.arrive, election, role is Role.LEADER, now_s, back_s, limit_s)
        if to_s + back_s >= limit_s:
            self.at(now_s + limit_s, self.fail, election)

    def arrive(
        self, now_s: float, election: Election, leads: bool, sent_s: float, back_s: float,
        limit_s: float,
    ) -> None:  # fmt: skip
        holder = self.lease.claim(election.token, leads, now_s)
        if now_s + back_s < sent_s + limit_s:
            self.at(now_s + back_s, self.answer, election, holder, sent_s)

    def answer(self, now_s: float, election: Election, holder: str, sent_s: float) -> None:
        election.on_answer(holder, sent_s, now_s)
        if election.role(now_s) is Role.LEADER:
            self.led.append((now_s, election.until_s, election.token))
        self.wait(now_s, election)

    def fail(self, now_s: float, election: Election) -> None:
        election.on_failure(now_s)
        self.wait(now_s, election)

    def wait(self, now_s: float, election: Election) -> None:
        stalled_s = self.draw(st.sampled_from([0.0, 0.0, 0.0, 0.4, 4.0]))  # the process is stopped
        self.at(max(election.next_claim_s, nextafter(now_s, inf)) + stalled_s, self.send, election)

    def lose(self, now_s: float) -> None:
        self.lease.lose()


@pytest.mark.slow
@given(st.data())
def test_two_candidates_never_lead_at_once(data: st.DataObject):
    world = World(data.draw)
    for token in data.draw(st.sampled_from(["ab", "abc"])):
        world.at(data.draw(st.floats(0, 5)), world.start, token)
    for time_s in data.draw(st.lists(st.floats(0, END_S), max_size=4)):
        world.at(time_s, world.lose)
    world.run()
    for i, (begin, end, token) in enumerate(world.led):
        for other_begin, other_end, other in world.led[i + 1 :]:
            assert token == other or end <= other_begin or other_end <= begin


def test_candidates_of_a_reachable_lease_elect_one():
    world = World(lambda _: 0.0)
    for token in "ab":
        world.at(0.0, world.start, token)
    world.run()
    assert {token for *_, token in world.led} == {"a"}
    assert world.led[0][0] <= LEASE_S + 0.3
    assert world.led[-1][0] > END_S - 1.1
