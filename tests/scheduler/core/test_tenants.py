"""The tenant of a request, from client to board."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core import Completion, FinishReason, Request, WorkerView
from services.policies.preset import choose
from services.runtime.config import ConfigError, load
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import events as ev
from services.scheduler.core.state import SchedulerState
from services.scheduler.core.tenants import Tenants
from services.scheduler.service import scheduler_limits
from tests.gateway.gateway_fakes import run_harness
from tests.scheduler.state_driver import G, report, state, submitted


@pytest.mark.parametrize(
    ("message", "tenant"),
    [
        ({}, ""),
        ({"user": "ada"}, "ada"),
        ({"cache_salt": "house 1"}, "house 1"),
        ({"cache_salt": "house 1", "user": "ada"}, "house 1"),
        ({"user": None}, ""),
        ({"user": "u" * 256}, "u" * 256),
    ],
)
async def test_tenant_is_cache_salt_else_user(message: dict[str, str], tenant: str) -> None:
    async with run_harness(lambda _: [5]) as house:
        chat = {"messages": [{"role": "user", "content": "1,"}], **message}
        both = ("/v1/completions", {"prompt": "1,", **message}), ("/v1/chat/completions", chat)
        for path, body in both:
            assert (await house.http("POST", path, body)).status == 200
        assert [request.tenant for request in house.scheduler.requests] == [tenant] * 2


def on_board(weights: str = "{}") -> Any:
    config = load(SchedulerConfig, {"tenant_weights": weights})
    return SchedulerState(choose("fcfs"), scheduler_limits(config))


def test_board_holds_tenants_and_weights() -> None:
    s = on_board('{"ada": 2.5, "bob": 0.5}')
    for name, tenant in (("a", "ada"), ("b", "bob"), ("c", ""), ("d", "ada"), ("e", "eve")):
        s.step(ev.Submitted(G, Request(name, "demo", 5, 5, 0.0, tenant=tenant)), 0.0)
    board, rows = s.ledger.board, [s.jobs[name].row for name in "abcde"]
    assert board.jobs.tenant[rows].tolist() == [0, 1, 2, 0, 3]
    assert board.jobs.weight[rows].tolist() == [2.5, 0.5, 1.0, 2.5, 1.0]
    for name in "ab":
        s.step(ev.Cancelled(G, name, FinishReason.CANCELLED, 0), 1.0)
    s.step(ev.Submitted(G, Request("f", "demo", 5, 5, 1.0, tenant="fay")), 1.0)
    assert board.jobs.tenant[s.jobs["f"].row] == 1
    assert len(board.tenants) == 4
    s.step(ev.GatewayLost(G), 2.0)
    assert len(board.tenants) == 0


def test_a_request_with_a_weight_is_of_another_tenant_than_one_without() -> None:
    s = on_board('{"ada": 3}')
    for name, weight in (("a", 2.0), ("b", 0.0), ("c", 2.0)):
        asked = Request(name, "demo", 5, 5, 0.0, tenant="ada", weight=weight)
        s.step(ev.Submitted(G, asked), 0.0)
    board, rows = s.ledger.board, [s.jobs[name].row for name in "abc"]
    assert board.jobs.tenant[rows].tolist() == [0, 1, 0]
    assert board.jobs.weight[rows].tolist() == [2.0, 3.0, 2.0]


@pytest.mark.parametrize("kv_tokens", [100_000, 9 * 64])  # the places, or the memory, are scarce
def test_twice_the_weight_has_twice_the_service(kv_tokens: int) -> None:
    s = state("foretoken")
    view = WorkerView("w0", "unix:/w0", "demo", kv_tokens, 1, 9, 500)
    s.step(ev.WorkerAttached("w0#1", view), 0.0)
    for number in range(90):
        for tenant, weight in (("bob", 0.0), ("ada", 2.0)):
            name = f"{tenant}-{number}"
            asked = Request(name, "demo", 10, 50, number * 1e-3, tenant=tenant, weight=weight)
            submitted(s, asked, 1.0)
    served = Counter[str]()
    for turn in range(1, 16):
        running = sorted(s.workers["w0"].running)
        served.update(name.partition("-")[0] for name in running)
        done = tuple(Completion(name, 50, FinishReason.LENGTH) for name in running)
        report(s, turn, 1.0 + turn, finished=done, free_blocks=kv_tokens)
    assert served["ada"] == pytest.approx(2 * served["bob"], rel=0.15)
    assert served.total() >= 100


@pytest.mark.parametrize("weights", ['{"a": 0}', '{"a": -1}', '{"a": "x"}', '{"a": NaN}', "[1]"])
def test_tenant_weight_must_be_positive(weights: str) -> None:
    with pytest.raises(ConfigError, match="tenant_weights"):
        load(SchedulerConfig, {"tenant_weights": weights})


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcde")), max_size=40))
def test_tenant_number_is_stable_while_live(
    steps: list[tuple[bool, str]],
) -> None:
    tenants, live, numbers = Tenants({}), Counter[str](), dict[str, int]()
    for enters, name in steps:
        if enters:
            number, _ = tenants.enter(name)
            assert numbers.setdefault(name, number) == number
            live[name] += 1
        elif live[name]:
            tenants.leave(numbers[name])
            live[name] -= 1
            if not live[name]:
                del numbers[name]
        assert len(tenants) == len(numbers) == len(set(numbers.values()))
        assert max(numbers.values(), default=-1) < 5
