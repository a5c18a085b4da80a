"""Prefix keys from gateway to worker, reports of cached prefixes, and placement by prefix."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.peers import messages
from gateway.peers.fleet import MAX_PREFIX_BLOCKS, read_fleet
from gateway.types.client_request import ClientRequest
from gateway.types.generation import GenerationRequest, Sampling
from protos.generated import scheduler_pb2 as sched
from services.core import FinishReason, Grant, Plan, Report, Request, Sla, WorkerView
from services.forecast import certain
from services.policies.preset import choose
from services.policies.snapshot import CHAIN
from services.runtime.prefix import (
    MAX_PREFIX_CHANGES,
    MAX_REPORTED_PREFIXES,
    decode_hashes,
    encode_hashes,
    extend_keys,
    hash_of,
    prompt_hashes,
)
from services.scheduler.codec import decode_request
from services.scheduler.core import events as ev
from services.scheduler.core.jobs import PrefixIndex
from services.scheduler.core.state import SchedulerState
from services.worker.kv.prefixes import CachedPrefixes
from tests.scheduler.state_driver import G, run_step
from tests.worker.requests.worker_transcript import Transcript

KEYS = [number.to_bytes(16, "little") for number in range(1, 9)]


def fleet(*block_tokens: int, asks: int = CHAIN) -> Any:
    workers = [
        sched.WorkerInfo(worker_id=f"w{i}", model="demo", block_tokens=n)
        for i, n in enumerate(block_tokens)
    ]
    return read_fleet(sched.FleetView(workers=workers, prefix_blocks=asks), "demo", 0.0)


def generation(tokens: Iterable[int], salt: str = "", user: str = "") -> GenerationRequest:
    sampling = Sampling(seed=1, max_tokens=9)
    client = ClientRequest(None, cache_salt=salt, user=user)
    return GenerationRequest(client, tuple(tokens), sampling, Sla(), 0.0)


def sharing() -> Transcript:
    """A worker with reports that the test reads itself."""
    t = Transcript(prefix_sharing=True)
    t.listened = False
    return t


# Keys


def test_gateway_hashes_equal_worker_keys() -> None:
    """The hashes of a prompt equal those of the worker's cached blocks, except for the block of the
    last token, which is always computed."""
    t = sharing()
    t.prompt("a", 12, salt="mine")
    t.plan(admit=[Grant("a", 9)], prefix_blocks=CHAIN)
    t.step(times=2)
    t.plan()
    report = t.state.report()
    assert report is not None and len(report.prefixes_added) == 3
    asked = fleet(4).prefix_hashes(generation(range(1, 13), "mine"))
    assert decode_hashes(asked, CHAIN) == report.prefixes_added[:2]
    longer = fleet(4).prefix_hashes(generation(range(1, 14), "mine"))
    assert decode_hashes(longer, CHAIN) == report.prefixes_added
    other = fleet(4).prefix_hashes(generation(range(1, 14), "yours"))
    assert not set(decode_hashes(other, CHAIN)) & set(report.prefixes_added)


def test_gateway_hashes_equal_worker_keys_of_the_same_api_key_only() -> None:
    """The prompt that the worker receives and the hashes for placement have the same salt."""
    request, other = (
        replace(generation(range(1, 14), "mine"), prefix_owner=name) for name in ("ann", "bob")
    )
    t = sharing()
    t.prompt("a", 13, salt=messages.prompt("a", request, 0, []).prompt.cache_salt)
    t.plan(admit=[Grant("a", 9)], prefix_blocks=CHAIN)
    t.step(times=2)
    t.plan()
    report = t.state.report()
    assert report is not None and len(report.prefixes_added) == 3
    assert decode_hashes(fleet(4).prefix_hashes(request), CHAIN) == report.prefixes_added
    hashes = decode_hashes(fleet(4).prefix_hashes(other), CHAIN)
    assert not set(hashes) & set(report.prefixes_added)


def test_gateway_hashes_only_requested_blocks() -> None:
    asked = generation(range(5_000))
    assert len(fleet(16).prefix_hashes(asked)) == 8 * CHAIN
    assert len(fleet(16, asks=10**6).prefix_hashes(asked)) == 8 * MAX_PREFIX_BLOCKS
    assert fleet(16, asks=0).prefix_hashes(asked) == b""
    assert (
        fleet(16, 32).prefix_hashes(asked)
        == fleet(0, 0).prefix_hashes(asked)
        == fleet().prefix_hashes(asked)
        == b""
    )
    assert fleet(16, 16).prefix_hashes(asked) == fleet(16).prefix_hashes(asked)
    assert fleet(16).prefix_hashes(generation(range(16))) == b""


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.integers(0, 9))
def test_hashes_cover_the_first_full_blocks(
    tokens: list[int], block_tokens: int, most: int
) -> None:
    keys: list[bytes] = []
    extend_keys(keys, tokens, len(tokens) // block_tokens, block_tokens, "s")
    whole = [hash_of(key) for key in keys]
    found = prompt_hashes(tokens, most, block_tokens, "s")
    assert found == whole[: min(most, max(0, len(tokens) - 1) // block_tokens)]
    assert 0 not in found


@given(st.lists(st.integers(-(2**63), 2**63 - 1).filter(bool), max_size=9))
def test_hashes_round_trip(hashes: list[int]) -> None:
    assert decode_hashes(encode_hashes(hashes), 9) == tuple(hashes)
    assert decode_hashes(encode_hashes(hashes), 3) == tuple(hashes[:3])


def test_invalid_hashes_decode_to_none() -> None:
    assert hash_of(bytes(16)) == 1
    assert decode_hashes(b"1234567", 9) == decode_hashes(encode_hashes([5, 0]), 9) == ()


# Reports of a worker


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 7)),
            st.tuples(st.just("remove"), st.integers(0, 7)),
            st.tuples(st.just("take"), st.just(0)),
            st.tuples(st.just("attach"), st.integers(0, 5)),
        ),
        max_size=60,
    )
)
def test_reported_prefixes_equal_the_cached_ones(steps: list[tuple[str, int]]) -> None:
    """Key n is at depth n. The reported changes add up to the cached keys within the requested
    depth, and no change is reported twice."""
    cached, here, known, asked = CachedPrefixes(), set[int](), set[int](), 0
    for what, number in steps:
        key = KEYS[number]
        if what == "add" and number not in here:
            cached.add(key, number)
            here.add(number)
        elif what == "remove" and number in here:
            cached.remove(key)
            here.remove(number)
        elif what == "attach":
            cached.ask(0)
            cached.ask(number)
            known, asked = set(), number
        elif what == "take":
            added, gone = cached.pop_changes()
            assert not known & set(added) and known >= set(gone)
            known = (known - set(gone)) | set(added)
            assert known == {hash_of(KEYS[n]) for n in here if n < asked}


def test_prefix_changes_are_reported_in_bounded_parts() -> None:
    cached = CachedPrefixes()
    keys = [number.to_bytes(16, "little") for number in range(1, MAX_REPORTED_PREFIXES + 1_001)]
    for key in keys:
        cached.add(key, 0)
    cached.ask(1)
    reported = [cached.pop_changes() for _ in range(6)]
    assert [len(added) for added, _ in reported] == [MAX_PREFIX_CHANGES] * 4 + [0, 0]
    for key in keys[:5_000]:
        cached.remove(key)
    reported = [cached.pop_changes() for _ in range(3)]
    assert [(len(a), len(g)) for a, g in reported] == [(1_000, 4_096), (0, 904), (0, 0)]
    assert reported[0][0] == tuple(hash_of(key) for key in keys[MAX_REPORTED_PREFIXES:])


def test_worker_reports_prefixes_only_on_request() -> None:
    t = sharing()
    t.prompt("a", 9)
    t.admit(a=9)
    t.step(times=3)
    t.plan()
    before = t.state.report()
    assert before is not None and before.prefixes_added == ()
    t.plan(prefix_blocks=CHAIN)
    first = t.state.report()
    assert first is not None and len(first.prefixes_added) == 2
    t.plan(prefix_blocks=CHAIN)
    again = t.state.report()
    assert again is not None and again.prefixes_added == again.prefixes_gone == ()
    t.state.attach()
    anew = t.state.report()
    assert anew is not None and anew.prefixes_added == ()
    t.state.apply_plan(Plan(1, prefix_blocks=1), 0.0)
    shallow = t.state.report()
    assert shallow is not None and shallow.prefixes_added == first.prefixes_added[:1]


def test_overwritten_prefix_is_reported_gone() -> None:
    """Sixteen blocks of four; the second request needs them all."""
    t = sharing()
    t.prompt("a", 9, max_tokens=1)
    t.plan(admit=[Grant("a", 1)], prefix_blocks=CHAIN)
    t.step(times=2)
    t.prompt("b", 60, max_tokens=4, salt="other")
    t.plan(admit=[Grant("b", 4)])
    reports = [t.state.report()]
    while "b" in t.state.sequences:
        t.step()
        t.plan()
        reports.append(t.state.report())
    added = [h for r in reports if r for h in r.prefixes_added]
    gone = [h for r in reports if r for h in r.prefixes_gone]
    assert len(gone) == 2 and sorted(gone) == sorted(added[:2])


# On the board


def test_board_keeps_prefixes_sorted_and_bounded() -> None:
    known = PrefixIndex()
    assert known.sorted.tolist() == []
    known.update(Report(1, 0, prefixes_added=(5, -7, 3)))
    known.update(Report(2, 0, prefixes_added=(9,), prefixes_gone=(5, 1)))
    assert known.sorted.tolist() == [-7, 3, 9]
    known.update(Report(3, 0, prefixes_added=tuple(range(100, 100 + 2 * MAX_REPORTED_PREFIXES))))
    assert len(known.sorted) == MAX_REPORTED_PREFIXES


def test_request_hashes_are_limited_to_a_chain() -> None:
    most = encode_hashes(range(1, 2 * CHAIN))
    message = sched.NewRequest(request_id="a", prefix_hashes=most, tenant="t" * 300)
    request = decode_request(message, 0.0)
    assert request.prefix_hashes == tuple(range(1, CHAIN + 1))
    assert request.tenant == "t" * 256
    assert decode_request(sched.NewRequest(prefix_hashes=b"odd"), 0.0).prefix_hashes == ()


def served(place: str) -> Any:
    s: Any = SchedulerState(choose("fcfs", {"place": place}))
    for name in ("w0", "w1"):
        view = WorkerView(name, f"unix:/{name}", "demo", 10_000, 16, 8, 5_000)
        run_step(s, ev.WorkerAttached(f"{name}#1", view), 0.0)
    return s


@pytest.mark.parametrize(("place", "asks"), [("least_load", 0), ("prefix_aware", CHAIN)])
def test_only_prefix_placements_request_hashes(place: str, asks: int) -> None:
    s: Any = SchedulerState(choose("fcfs", {"place": place}))
    view = WorkerView("w0", "unix:/w0", "demo", 10_000, 16, 8, 5_000)
    plans = [
        a.plan
        for a in run_step(s, ev.WorkerAttached("w0#1", view), 0.0)
        if isinstance(a, ev.SendPlan)
    ]
    assert [plan.prefix_blocks for plan in plans] == ([asks] if asks else [])
    assert s.fleet().prefix_blocks == asks


def test_request_is_placed_at_its_prefix() -> None:
    """The second worker has the first 30 blocks of the prompt; without them, the first worker is
    preferred. After it loses the first block, the others do not count."""
    s = served("prefix_aware")
    chain = tuple(range(1, 31))
    s.step(ev.Reported("w1#1", "w1", Report(1, 1, prefixes_added=chain, free_blocks=625)), 1.0)

    def place_request(name: str) -> str:
        asked = Request(name, "demo", 500, 10, 1.0, prefix_hashes=chain)
        s.step(ev.Submitted(G, asked), 1.0)
        actions = run_step(s, ev.Forecasted(((name, certain(10)),)), 1.0)
        [place] = [a.worker_id for a in actions if isinstance(a, ev.Place)]
        s.step(ev.Cancelled(G, name, FinishReason.CANCELLED, 0), 1.0)
        return str(place)

    assert place_request("a") == "w1"
    s.step(ev.Reported("w1#1", "w1", Report(2, 1, prefixes_gone=(1,), free_blocks=625)), 1.0)
    assert place_request("b") == "w0"


def test_chains_leave_the_board_with_their_request() -> None:
    s = served("prefix_aware")
    for name, chain in (("a", (5, 6)), ("b", ())):
        s.step(ev.Submitted(G, Request(name, "demo", 50, 10, 1.0, prefix_hashes=chain)), 1.0)
        row = s.jobs[name].row
        seen = s.ledger.board.snapshot(1.0, ()).chains[row]
        assert seen.tolist() == [*chain, *[0] * (CHAIN - len(chain))]
        s.step(ev.Cancelled(G, name, FinishReason.CANCELLED, 0), 1.0)
    assert np.array_equal(seen, np.zeros(CHAIN))
