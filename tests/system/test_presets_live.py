"""Every preset serves a load of every kind on real workers, and changes no answer."""

import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from foretoken.client.answers import Choice
from services.core import FinishReason
from services.policies.order.registry import ORDERS
from services.policies.preset import RESIDENCIES, Preset, presets
from tests.reach import until
from tests.system.mixed_load import Ask, Expected, asks, expected, lengths
from tests.system.paused_workers import System, Workers, counted, standing, system

KV_TOKENS = 192  # a worker's: room for some two of the load at once, however slowly it comes
ANSWERED_S = 120.0  # a test machine may be busy

# Numbers that are made for long answers and slow machines, where a preset takes them.
SMALL: Mapping[str, float] = {"slice_tokens": 24, "interval_s": 0.02}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with standing(KV_TOKENS) as started:
        expected()  # while they start
        yield started


@pytest.fixture(scope="module")
def oracle_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    told = [
        {"prompt": prompt, "output_tokens": tokens}
        | ({} if instruction is None else {"instruction": instruction})
        for prompt, instruction, tokens in lengths()
    ]
    path = tmp_path_factory.mktemp("oracle") / "lengths.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in told))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(presets()))
async def test_served_answers_equal_the_engine(
    policy: str, workers: Workers, oracle_file: Path
) -> None:
    takes = presets()[policy].takes()
    small = {key: value for key, value in SMALL.items() if key in takes}
    async with system(workers, policy, small, str(oracle_file)) as live:
        before = await counted(workers, "kv_uploads")
        async with asyncio.timeout(ANSWERED_S):
            answers = await asyncio.gather(*(answer(live, ask) for ask in asks()))
        wrong = [
            number
            for number, (ask, choices, right) in enumerate(
                zip(asks(), answers, expected(), strict=True)
            )
            if not same(ask, choices, right)
        ]
        assert not wrong, f"{len(wrong)} of {len(asks())} differ: {wrong[:9]}"
        await until(lambda: live.empty)
        uploads = await counted(workers, "kv_uploads") - before
        check_memory_was_short(live, uploads)


async def answer(live: System, ask: Ask) -> Sequence[Choice]:
    """The choices; of one that hangs up, as far as it came."""
    await asyncio.sleep(ask.at_s)
    stream = live.client.generate(
        messages=ask.turns,
        sla=ask.sla,
        cache_salt=ask.tenant,
        timeout_s=ask.timeout_s,
        application=f"kind-{len(ask.sampling)}",
        **ask.sampling,
    )
    choices = [Choice() for _ in range(ask.choices)]
    async for chunk in stream:
        choices[chunk.index].add(chunk)
        if ask.hangs_up and len(choices[0].token_ids) >= ask.hangs_up:
            stream.cancel()
    return choices


def same(ask: Ask, choices: Sequence[Choice], right: Sequence[Expected]) -> bool:
    pairs = list(zip(choices, right, strict=True))
    if ask.hangs_up:
        return all(tuple(got.token_ids) == want.tokens[: len(got.token_ids)] for got, want in pairs)
    if "stop" in ask.sampling:
        return all((got.text, got.finish_reason) == (want.text, want.reason) for got, want in pairs)
    return all(
        (tuple(got.token_ids), got.text, got.finish_reason) == (want.tokens, want.text, want.reason)
        for got, want in pairs
    )


def check_memory_was_short(live: System, uploads: float) -> None:
    """Whoever may be evicted or paused was, and KV came back where it may rest."""
    preset, state = live.preset, live.control.scheduler.state
    evictions = state.ledger.board.evictions
    stopped = live.counted("num_preemptions")
    if never_evicts(preset):
        assert evictions == 0
    if preset.form == "aggressive" and not RESIDENCIES[preset.residency].held_fast:
        assert stopped > 0  # with deferred residency, requests wait for memory instead
    if ORDERS[preset.order].preempts and preset.residency == "swap":
        assert uploads > 0


def never_evicts(preset: Preset) -> bool:
    if preset.form == "conservative":
        return preset.params["overcommit"] <= 1
    return preset.form == "fixed"


def test_recorded_load_covers_every_event() -> None:
    reasons = {choice.reason for choices in expected() for choice in choices}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    made = sorted(len(choice.tokens) for choices in expected() for choice in choices)
    assert made[0] == 1 and made[-1] > 70 and len(set(made)) > 40
    assert sum(bool(ask.hangs_up) for ask in asks()) == len(asks()) // 20
