"""Tenants take turns in queues, and in the compiler's."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.grammars.compiling.turns import TenantQueues
from gateway.types.errors import RequestRefused
from tests.gateway.grammars.test_compiler import LIMITS, compiling, many_choices, regex


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers()), max_size=12))
def test_tenants_take_turns_and_keep_their_own_order(items: list[tuple[str, int]]) -> None:
    queues = TenantQueues[tuple[str, int]]()
    for tenant, item in items:
        queues.push(tenant, (tenant, item))
    assert len(queues) == len(items) == len([*queues])
    taken = [queues.pop(lambda _: True) for _ in items]
    for tenant in {tenant for tenant, _ in items}:
        assert [each for each in taken if each and each[0] == tenant] == [
            each for each in items if each[0] == tenant
        ]
    waiting = {tenant: [name for name, _ in items].count(tenant) for tenant in "abc"}
    for at, each in enumerate(taken):  # the same tenant's next turn follows all others'
        assert each is not None
        waiting[each[0]] -= 1
        others = {tenant for tenant, count in waiting.items() if count and tenant != each[0]}
        following = [name for name, _ in filter(None, taken[at + 1 : at + 1 + len(others)])]
        assert {*following} == others
    assert queues.pop(lambda _: True) is None


def test_tenant_without_a_place_is_passed_over() -> None:
    queues = TenantQueues[int]()
    queues.push("a", 1)
    queues.push("b", 2)
    assert queues.pop(lambda tenant: tenant != "a") == 2
    assert queues.pop(lambda tenant: tenant != "a") is None
    assert queues.count("a") == 1 and queues.count("b") == 0


@pytest.mark.slow
async def test_tenant_with_expensive_constraints_delays_no_other() -> None:
    async with compiling() as compiler:
        await compiler.compile(regex("ready"))
        hostile = [
            asyncio.ensure_future(compiler.compile(many_choices(at), "hostile")) for at in range(6)
        ]
        for count in range(1, 4):
            assert await compiler.compile(regex(f"a{{{count}}}"), "other")
        assert sum(each.done() for each in hostile) <= 3
        for each in hostile:
            each.cancel()


async def test_backlog_of_each_tenant_is_bounded() -> None:
    async with compiling(replace(LIMITS, max_waiting_per_tenant=1)) as compiler:
        first = asyncio.ensure_future(compiler.compile(regex("a"), "one"))
        await asyncio.sleep(0)  # it waits for the start of the process
        with pytest.raises(RequestRefused, match="1 grammars of this tenant wait"):
            await compiler.compile(regex("b"), "one")
        equal = asyncio.ensure_future(compiler.compile(regex("a"), "two"))
        assert await first == await equal == await compiler.compile(regex("a"), "one")
