"""`foretoken serve --engine vllm`: answers do not depend on
memory, on pauses, or on the loss of a worker; greedy ones are those of foretoken's own engine."""

import asyncio
import json
import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foretoken import AsyncClient
from foretoken.running.options import demo_model
from models.tasks import examples
from tests.clients import environments
from tests.clients.conftest import QUIET, SCRIPTS, Run
from tests.live import Live, command, counted, serving, wait_for
from tests.system.children import children, is_alive

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]

*EARLIER, NEWEST = environments.VLLM_VERSIONS
GROUP = f"vllm-{NEWEST}"
REQUESTS, IN_FLIGHT = 120, 60
# 60 requests need about 5,000 tokens at once. Prompts are computed in parts of 64 tokens.
SIZES = (
    *("--kv-tokens=1280", "--set=worker.block_tokens=32"),
    *("--set=worker.max_running=64", "--set=worker.max_batch_tokens=64"),
)
EAGER = '--set=worker.vllm_args={"enforce_eager": true}'  # vLLM compiles for minutes otherwise
START_S = 300.0  # vLLM compiles parts of its sampler
LONGEST = 120
MODULE = "foretoken.vllm.worker"
DISTURBED = 60  # requests to an engine without a server
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": LONGEST}
PROPERTIES = {"n": {"type": "integer", "minimum": 0}, "s": {"type": "string", "maxLength": 20}}
SCHEMA = "start: %json " + json.dumps(
    {
        "type": "object",
        "properties": PROPERTIES,
        "required": ["n", "s"],
        "additionalProperties": False,
    }
)
WORDS = "start: /([a-c]{2,8} )+/"


@dataclass(frozen=True)
class Choice:
    """What a client has received for one choice."""

    tokens: tuple[int, ...]
    text: str
    reason: str
    logprobs: tuple[tuple[float, ...], ...]  # of each token: the drawn one's, then the best ones'


def sampling(number: int) -> dict[str, Any]:
    """Options of request `number`; kinds follow one another."""
    seeded: dict[str, Any] = {"temperature": 1.0, "seed": number, "max_tokens": LONGEST}
    kinds: tuple[dict[str, Any], ...] = (
        GREEDY,
        {**GREEDY, "ignore_eos": True},
        {**seeded, "ignore_eos": True},
        {**seeded, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "n": 2},
        {**GREEDY, "max_tokens": 1 + number % 7},
        {**seeded, "frequency_penalty": 0.5, "presence_penalty": 0.2, "min_tokens": 20},
        {**seeded, "repetition_penalty": 1.2, "stop": " the", "ignore_eos": True},
        {**GREEDY, "logprobs": 2, "min_tokens": 12},
        {**GREEDY, "bad_words": [" I", "e"], "logit_bias": {5: -50.0}},
        {**seeded, "allowed_token_ids": list(range(10, 200)), "max_tokens": 30},
        {**seeded, "grammar": SCHEMA, "temperature": 1.5},
        {**seeded, "grammar": WORDS, "min_tokens": 25, "ignore_eos": True, "bad_words": ["a"]},
    )
    return kinds[number % len(kinds)]


async def ask(client: AsyncClient, user: str, options: dict[str, Any]) -> list[Choice]:
    messages = [{"role": "user", "content": user}]
    answer = await client.generate(messages=messages, **options).complete()
    return [
        Choice(
            tuple(each.token_ids),
            each.text,
            str(each.finish_reason),
            tuple((one.logprob, *sorted(one.top.values())) for one in each.logprobs or ()),
        )
        for each in answer.choices
    ]


async def leave(client: AsyncClient, user: str) -> None:
    """A client that leaves after some tokens."""
    messages = [{"role": "user", "content": user}]
    stream = client.generate(messages=messages, **{**GREEDY, "ignore_eos": True})
    async for _ in stream:
        stream.cancel()
        return


async def ask_all(live: Live, users: Sequence[str], in_flight: int) -> list[list[Choice]]:
    """Every seventh request is cancelled and then sent once more."""
    gate = asyncio.Semaphore(in_flight)
    async with AsyncClient(live.grpc) as client:

        async def one(number: int, user: str) -> list[Choice]:
            async with gate:
                if number % 7 == 3:
                    await leave(client, user)
                return await ask(client, user, sampling(number))

        return await asyncio.gather(*(one(n, user) for n, user in enumerate(users)))


@pytest.fixture(scope="module")
def users() -> list[str]:
    distinct = dict.fromkeys(each.user for each in examples(9, 4 * REQUESTS, held_out=True))
    return list(distinct)[:REQUESTS]


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    if not environments.current(GROUP):
        pytest.skip(f"{GROUP} is not installed; run `make clients`")
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {**QUIET, "HOME": str(home), "VLLM_CPU_KVCACHE_SPACE": "1"}.items():
            patch.setenv(key, value)
        with serving(
            "--engine=vllm", "--dtype=float32", *SIZES, EAGER, stderr=home / "stderr",
            python=environments.python_of(GROUP), started_s=START_S,
        ) as live:  # fmt: skip
            yield live


def different(ours: list[list[Choice]], expected: list[list[Choice]]) -> list[int]:
    """The requests with other tokens, texts or reasons. Log-probabilities differ by rounding."""
    return [
        number
        for number, (a, b) in enumerate(zip(ours, expected, strict=True))
        if [(c.tokens, c.text, c.reason) for c in a] != [(c.tokens, c.text, c.reason) for c in b]
    ]


def assert_grammars_are_followed(answers: list[list[Choice]]) -> None:
    complete = 0
    for number, [choice, *_] in enumerate(answers):
        asked = sampling(number)
        complete += "grammar" in asked and choice.reason == "stop"
        if asked.get("grammar") == WORDS:
            pattern = "([a-c]{2,8} )+" if choice.reason == "stop" else "[a-c ]+"
            assert re.fullmatch(pattern, choice.text) and len(choice.tokens) > 25
        elif "grammar" in asked and choice.reason == "stop":
            assert json.loads(choice.text).keys() == PROPERTIES.keys()
    assert complete > 0


async def test_answers_survive_pauses_and_the_loss_of_a_worker(
    live: Live, users: list[str]
) -> None:
    calm = await ask_all(live, users, 2)
    assert all(choice.tokens for answer in calm for choice in answer)
    assert_grammars_are_followed(calm)
    busy = await ask_all(live, users, IN_FLIGHT)
    assert different(busy, calm) == []
    assert counted(live.http, "num_preemptions") > 0

    [before] = children(live.process.pid, MODULE)
    asking = asyncio.create_task(ask_all(live, users, IN_FLIGHT))
    generated = counted(live.http, "generation_tokens")
    await asyncio.to_thread(
        wait_for, lambda: counted(live.http, "generation_tokens") > generated + 500, 60.0
    )
    os.kill(before, signal.SIGKILL)
    assert different(await asking, calm) == []
    assert not is_alive(before)
    [after] = children(live.process.pid, MODULE)
    assert after != before
    assert counted(live.http, "worker_generated_tokens") > 0


async def test_greedy_answers_equal_those_of_foretokens_engine(
    live: Live, users: list[str]
) -> None:
    greedy = [user for number, user in enumerate(users) if number % 2]
    asked = (GREEDY, {**GREEDY, "logprobs": 2}, {**GREEDY, "grammar": SCHEMA})

    async def answers(of: Live) -> list[list[Choice]]:
        async with AsyncClient(of.grpc) as client:
            some = [ask(client, user, asked[n % 3]) for n, user in enumerate(greedy)]
            return await asyncio.gather(*some)

    theirs = await answers(live)
    with serving("--dtype=float32") as own:
        ours = await answers(own)
    assert different(theirs, ours) == []
    for a, b in zip(theirs, ours, strict=True):
        assert [len(c.logprobs) for c in a] == [len(c.logprobs) for c in b]
        for one, other in zip(a[0].logprobs, b[0].logprobs, strict=True):
            assert one == pytest.approx(other, abs=1e-3)


@pytest.mark.parametrize("version", EARLIER)
def test_answers_of_earlier_versions_survive_pauses(
    run: Run, python: Callable[[str], Path], version: str
) -> None:
    printed = run(
        python(f"vllm-{version}"), SCRIPTS / "vllm_worker.py", demo_model(), str(DISTURBED),
        env={
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        },
    )  # fmt: skip
    (line,) = (line for line in printed.splitlines() if line.startswith('{"different"'))
    result = json.loads(line)
    assert result["different"] == []
    assert (result["answered"], result["kv_in_use"]) == (DISTURBED, 0)
    assert min(result["evicted"], result["paused"], result["lost"]) > 0


def test_why_tells_the_story_of_a_request(live: Live) -> None:
    async def answered() -> str:
        async with AsyncClient(live.grpc) as client:
            answer = await client.complete("Count from 1 to 9.\n", **GREEDY)
            return answer.request_id

    story = subprocess.run(
        command("why", asyncio.run(answered()), "--server", live.grpc),
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert "worker-0" in story


def test_static_batches_are_refused(tmp_path: Path) -> None:
    python = environments.python_of(GROUP)
    if not python.exists():
        pytest.skip(f"{GROUP} is not installed; run `make clients`")
    refused = subprocess.run(
        command("serve", "--engine=vllm", "--policy=scls", "--port=0", python=python),
        capture_output=True, text=True, check=False, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert refused.returncode == 2
    assert "the policy scls serves static batches, but vLLM batches continuously" in refused.stderr
