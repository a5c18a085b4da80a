"""The compiler's process: hostile constraints, the cache, shared jobs, and its end."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.grammars.compiling.compiler import GrammarCompiler
from gateway.grammars.compiling.frames import Setup
from gateway.grammars.compiling.limits import GrammarLimits
from gateway.types.constraint import Constraint, ConstraintKind
from gateway.types.errors import RequestRefused
from services.runtime.errors import InvalidArgument, ServiceError
from services.runtime.tasks import background
from tests.gateway.gateway_fakes import demo_text
from tests.gateway.grammars.walks import accepts
from tests.reach import until

LIMITS = GrammarLimits(
    max_source_bytes=2**23,
    cache_bytes=2**20,
    max_waiting=64,
    max_waiting_per_tenant=32,
    limit_s=0.4,
    memory_bytes=512 * 2**20,
    slow_s=0.05,
)


def regex(pattern: str) -> Constraint:
    return Constraint(ConstraintKind.REGEX, pattern, field_name="regex")


def many_choices(salt: int = 0) -> Constraint:
    """Takes seconds to compile, and much memory: many times the limits here."""
    choices = [f"{salt}-value-{at}" for at in range(100_000)]
    return Constraint(ConstraintKind.CHOICE, json.dumps(choices), field_name="guided_choice")


@asynccontextmanager
async def compiling(limits: GrammarLimits = LIMITS) -> AsyncIterator[GrammarCompiler]:
    text = demo_text()

    def make_setup() -> Setup:
        return Setup(
            tokenizer=text.backend.to_str(),
            vocabulary_tokens=text.vocabulary_tokens,
            eos_ids=sorted(text.eos_ids),
            slow_s=limits.slow_s,
            limit_s=limits.limit_s,
            memory_bytes=limits.memory_bytes,
        )

    compiler = GrammarCompiler(limits, make_setup)
    async with background(compiler.run()):
        yield compiler


async def find_fault(compiler: GrammarCompiler, constraint: Constraint) -> str:
    with pytest.raises(InvalidArgument) as fault:
        await compiler.compile(constraint)
    assert fault.value.field == constraint.field_name
    return fault.value.message


async def test_grammar_is_compiled_and_cached() -> None:
    async with compiling() as compiler:
        constraint = regex("[a-c]+")
        assert not compiler.knows(constraint)
        grammar = await compiler.compile(constraint)
        assert accepts(grammar.text, "abc") and not accepts(grammar.text, "abd")
        assert grammar.least_tokens == 1
        assert compiler.knows(constraint)
        assert await compiler.compile(replace(constraint, field_name="ebnf")) == grammar


async def test_fault_is_cached_and_names_the_field_of_each_request() -> None:
    async with compiling() as compiler:
        assert "unclosed" in await find_fault(compiler, regex("("))
        again = replace(regex("("), field_name="guided_regex")
        assert compiler.knows(again)
        assert (await find_fault(compiler, again)).startswith("guided_regex: ")


async def test_cache_keeps_the_last_used_within_its_bytes() -> None:
    async with compiling(replace(LIMITS, cache_bytes=3_000)) as compiler:
        first, second = regex("a" * 600), regex("b" * 600)
        for constraint in (first, second, first, regex("c" * 600)):
            await compiler.compile(constraint)
        assert compiler.knows(first) and not compiler.knows(second)
        huge = regex("d" * 5_000)  # larger than the cache: compiled each time
        assert await compiler.compile(huge) and not compiler.knows(huge)
        assert compiler.knows(first)


@pytest.mark.parametrize(
    ("limits", "constraint", "fault"),
    [
        (LIMITS, many_choices(), "takes more than 0.4 s to compile"),
        (replace(LIMITS, memory_bytes=2**20, limit_s=9.0), many_choices(), "too much memory"),
        (
            LIMITS,
            Constraint(ConstraintKind.GRAMMAR, "start: " + "(" * 2_000),
            "too deeply nested",
        ),
        (
            LIMITS,
            Constraint(ConstraintKind.GRAMMAR, "root ::= " + "(" * 9_000),
            "nested too deeply",
        ),
        (replace(LIMITS, max_source_bytes=8), regex("123456789"), "at most 8 bytes, got 9"),
    ],
)
async def test_hostile_constraint_is_a_fault_and_others_are_compiled(limits, constraint, fault):
    async with compiling(limits) as compiler:
        hostile = asyncio.ensure_future(find_fault(compiler, constraint))
        assert await asyncio.gather(*(compiler.compile(regex(f"a{{{n}}}")) for n in range(1, 9)))
        assert fault in await hostile
        assert await compiler.compile(regex("after"))


async def test_slow_constraints_leave_room_for_others_and_wait_for_each_other() -> None:
    limits = replace(LIMITS, quick_jobs=1, slow_jobs=1)
    async with compiling(limits) as compiler:
        await compiler.compile(regex("ready"))
        slow = [asyncio.ensure_future(compiler.compile(many_choices(at))) for at in range(2)]
        quick = [asyncio.ensure_future(compiler.compile(regex(f"a{{{n}}}"))) for n in (1, 2, 3)]
        assert await asyncio.gather(*quick)
        for each in slow:  # the second begins again after the first
            with pytest.raises(InvalidArgument, match="takes more than"):
                await each


async def test_equal_constraints_share_one_compilation_and_a_full_queue_refuses() -> None:
    async with compiling(replace(LIMITS, max_waiting=1, quick_jobs=1)) as compiler:
        equal = [asyncio.ensure_future(compiler.compile(regex("a+"))) for _ in range(20)]
        await asyncio.sleep(0)
        with pytest.raises(RequestRefused):  # one waits for the start of the process
            await compiler.compile(regex("b+"))
        equal[0].cancel()  # others still get the result
        results = await asyncio.gather(*equal[1:])
        assert len({*results}) == 1
        assert await compiler.compile(regex("b+"))


async def test_process_starts_again_after_its_end() -> None:
    async with compiling() as compiler:
        await compiler.compile(regex("a"))
        process = compiler._process
        assert process is not None
        waiting = asyncio.ensure_future(compiler.compile(many_choices()))
        await until(lambda: bool(compiler._running), 10)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(InvalidArgument, match="takes more than"):  # tried again
            await waiting
        assert compiler._process is not process
        assert await compiler.compile(regex("b"))


async def test_starved_compilation_is_no_fault_of_its_constraint() -> None:
    async with compiling() as compiler:
        await compiler.compile(regex("a"))
        process = compiler._process
        assert process is not None
        starved = asyncio.ensure_future(compiler.compile(many_choices()))
        await until(lambda: bool(_find_children(process.pid)), 10)
        os.kill(_find_children(process.pid)[0], signal.SIGALRM)  # as at the end of its life
        with pytest.raises(ServiceError, match="too busy"):
            await starved
        assert not compiler.knows(many_choices())
        assert await compiler.compile(regex("b"))


async def test_process_that_cannot_start_fails_its_requests() -> None:
    compiler = GrammarCompiler(LIMITS, lambda: Setup("{}", 1, [], 1.0, 1.0, 1))
    async with background(compiler.run()):
        fault = await find_fault(compiler, regex("a"))
        assert "not available with this model's tokenizer" in fault


async def test_compilation_without_a_running_compiler_times_out() -> None:
    compiler = GrammarCompiler(replace(LIMITS, wait_s=0.05), _no_setup)
    with pytest.raises(ServiceError, match="too busy"):
        await compiler.compile(regex("a"))


def _find_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _no_setup() -> Setup:
    raise AssertionError("no process runs")
