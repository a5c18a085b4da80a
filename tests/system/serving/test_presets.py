"""Presets of every kind serve the mixed load on real workers without changing an answer."""

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
from tests.system.mixed_load import (
    ExpectedAnswer,
    LoadRequest,
    expected_answers,
    load_requests,
    oracle_lengths,
)
from tests.system.shared_workers import System, Workers, running_system, running_workers, total_of

KV_TOKENS = 192  # per worker: room for about two requests, so that memory is short at any speed
ANSWERED_S = 120.0  # a test machine may be busy


def distinct_presets() -> list[str]:
    """Presets with each predictor, and with each way to admit, batch, preempt and keep KV. Tests of
    the scheduler and the simulator run all presets."""
    found: list[str] = []
    seen: set[object] = set()
    for name, preset in presets().items():
        way = (preset.form, preset.batch_mode, preset.residency, ORDERS[preset.order].preempts)
        if not {way, preset.predictor} <= seen:
            found.append(name)
        seen |= {way, preset.predictor}
    return found


# Replace values meant for long answers and slow machines, in the presets that have the key.
SMALL: Mapping[str, float] = {"slice_tokens": 24, "interval_s": 0.02}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with running_workers(KV_TOKENS) as started:
        expected_answers()  # computed while the workers start
        yield started


@pytest.fixture(scope="module")
def oracle_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {"prompt": prompt, "output_tokens": tokens}
        | ({} if instruction is None else {"instruction": instruction})
        for prompt, instruction, tokens in oracle_lengths()
    ]
    path = tmp_path_factory.mktemp("oracle") / "lengths.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("policy", distinct_presets())
async def test_served_answers_equal_the_engine(
    policy: str, workers: Workers, oracle_file: Path
) -> None:
    takes = presets()[policy].known_params()
    small = {key: value for key, value in SMALL.items() if key in takes}
    async with running_system(workers, policy, small, str(oracle_file)) as live:
        before = await total_of(workers, "kv_uploads")
        async with asyncio.timeout(ANSWERED_S):
            answers = await asyncio.gather(*(answer(live, request) for request in load_requests()))
        wrong = [
            number
            for number, (request, choices, right) in enumerate(
                zip(load_requests(), answers, expected_answers(), strict=True)
            )
            if not same(request, choices, right)
        ]
        assert not wrong, f"{len(wrong)} of {len(load_requests())} differ: {wrong[:9]}"
        await until(lambda: live.empty)
        uploads = await total_of(workers, "kv_uploads") - before
        check_memory_was_short(live, uploads)


async def answer(live: System, request: LoadRequest) -> Sequence[Choice]:
    """The choices of the answer; of a cancelled request, the tokens before it was cancelled."""
    await asyncio.sleep(request.at_s)
    stream = live.client.generate(
        messages=request.turns,
        sla=request.sla,
        cache_salt=request.tenant,
        timeout_s=request.timeout_s,
        application=f"kind-{len(request.sampling)}",
        **request.sampling,
    )
    choices = [Choice() for _ in range(request.choices)]
    async for chunk in stream:
        choices[chunk.index].add(chunk)
        if request.cancels_after and len(choices[0].token_ids) >= request.cancels_after:
            stream.cancel()
    return choices


def same(request: LoadRequest, choices: Sequence[Choice], right: Sequence[ExpectedAnswer]) -> bool:
    pairs = list(zip(choices, right, strict=True))
    if request.cancels_after:
        return all(tuple(got.token_ids) == want.tokens[: len(got.token_ids)] for got, want in pairs)
    if "stop" in request.sampling:
        return all((got.text, got.finish_reason) == (want.text, want.reason) for got, want in pairs)
    return all(
        (tuple(got.token_ids), got.text, got.finish_reason) == (want.tokens, want.text, want.reason)
        for got, want in pairs
    )


def check_memory_was_short(live: System, uploads: float) -> None:
    """Requests that the preset may evict or pause were, and swapped KV was uploaded again."""
    preset, state = live.preset, live.control.scheduler.state
    evictions = state.ledger.board.evictions
    stopped = live.total_of("num_preemptions")
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


@pytest.mark.slow
def test_recorded_load_covers_every_event() -> None:
    reasons = {choice.reason for choices in expected_answers() for choice in choices}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    answers = sorted(len(choice.tokens) for choices in expected_answers() for choice in choices)
    assert answers[0] == 1 and answers[-1] > 70 and len(set(answers)) > 40
    assert (
        sum(bool(request.cancels_after) for request in load_requests())
        == len(load_requests()) // 20
    )
