"""Real servers behind `--engine openai`: answers are those of the servers, also when a request is
paused or moved in the midst of its answer. In float32, they do not depend on the batch."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from benchmarks.harness.system import read_metrics
from foretoken.running.options import demo_model
from services.worker.backend.answer import BackendAnswer
from services.worker.backend.client import BackendClient
from services.worker.backend.config import BackendConfig
from services.worker.backend.dialect import Dialect, encode_request
from services.worker.folder import load_tokenizer
from services.worker.requests.types.prompt import Prompt
from tests.live import Live, serving, wait_for
from tests.system.backends import KEY, NO_DRAIN, ONE_PROCESS, Fleet, complete, fronting, kill

pytestmark = pytest.mark.slow

OPTIONS = ("--dtype", "float32", "--kv-tokens", "8192", "--api-key", KEY, *ONE_PROCESS, *NO_DRAIN)
COUNTS = [f"Count from {first} to {first + 60}.\n" for first in range(1, 13)]
TOKENS = 150
WORDS = "([a-z]{2,9} ){40}"
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CHOICES: dict[str, Any] = {"guided_choice": ["certainly not", "perhaps"]}
CALL = {"type": "function", "function": {"name": "f", "parameters": OBJECT}}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Slices in turn and room for four at a time, so that twelve requests are paused often."""
    folder = tmp_path_factory.mktemp("fleet")
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(*OPTIONS)) for _ in range(2)]
        room = ("--policy", "mlfq", "--set", "worker.max_running=2")
        front, log = stack.enter_context(
            fronting(folder, [server.http for server in servers], *room)
        )
        yield Fleet(front, tuple(servers), log)


def ask_all(live: Live, key: str = "", **fields: Any) -> list[dict[str, Any]]:
    """The choices of all prompts, asked at once."""
    given = {"max_tokens": TOKENS, "ignore_eos": True, **fields}
    with ThreadPoolExecutor(len(COUNTS)) as pool:
        return list(pool.map(lambda prompt: complete(live, prompt, key, **given), COUNTS))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 0, "min_tokens": 9, "ignore_eos": False, "stop": [" 20"]},
        {"temperature": 0, "logit_bias": {"40": 5.0}, "repetition_penalty": 1.1, "top_k": 5},
        {"temperature": 0, "regex": WORDS},
        {"temperature": 0, "structured_outputs": {"json": OBJECT}},
    ],
    ids=["greedy", "stop", "biased", "regex", "schema"],
)
def test_answers_are_those_of_a_server(fleet: Fleet, fields: dict[str, Any]) -> None:
    expected = ask_all(fleet.servers[0], KEY, **fields)
    assert ask_all(fleet.front, **fields) == expected


def test_seeded_answers_are_those_of_a_server(fleet: Fleet) -> None:
    """One at a time: a server counts a request's draws from where it begins there, so that another
    answer follows a pause."""
    for seed in (7, 2**31 - 1):
        given: dict[str, Any] = {"temperature": 1.0, "seed": seed, "max_tokens": 40}
        expected = complete(fleet.servers[0], COUNTS[0], KEY, **given)
        assert complete(fleet.front, COUNTS[0], **given) == expected


def test_logprobs_are_those_of_a_server(fleet: Fleet) -> None:
    given: dict[str, Any] = {"max_tokens": 40, "logprobs": 2}
    theirs = complete(fleet.servers[0], COUNTS[0], KEY, **given)["logprobs"]
    ours = complete(fleet.front, COUNTS[0], **given)["logprobs"]
    assert (ours["tokens"], ours["text_offset"]) == (theirs["tokens"], theirs["text_offset"])
    assert ours["token_logprobs"] == pytest.approx(theirs["token_logprobs"], abs=1e-4)
    assert [list(top) for top in ours["top_logprobs"]] == [
        list(top) for top in theirs["top_logprobs"]
    ]


def test_streams_of_openai_client(fleet: Fleet) -> None:
    def chat(live: Live, key: str) -> list[str | None]:
        client = OpenAI(base_url=f"{live.http}/v1", api_key=key)
        asked: Any = [{"role": "user", "content": "Reverse: red blue green"}]
        stream: Any = client.chat.completions.create(
            model="demo", messages=asked, temperature=0, stream=True
        )
        return [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]

    assert "".join(map(str, chat(fleet.front, "none"))) == "green blue red"
    assert "".join(map(str, chat(fleet.servers[0], KEY))) == "green blue red"


def test_constraints_are_handed_on_or_refused(fleet: Fleet) -> None:
    assert complete(fleet.front, "a", **CHOICES)["text"] in CHOICES["guided_choice"]
    client = OpenAI(base_url=f"{fleet.front.http}/v1", api_key="none")
    chat: Any = client.chat.completions.create
    asked = [{"role": "user", "content": "hi"}]
    with pytest.raises(BadRequestError, match="no constraint for calls of tools"):
        chat(model="demo", messages=asked, tools=[CALL], tool_choice="required")


@pytest.mark.parametrize("takes_ids", [True, False])
async def test_text_of_a_server_without_token_ids_is_tokenized(
    fleet: Fleet, takes_ids: bool
) -> None:
    tokenizer = load_tokenizer(demo_model())
    ids = tokenizer.encode(COUNTS[0], add_special_tokens=False).ids
    dialect = Dialect(takes_ids, returns_ids=False)
    body = encode_request(Prompt("r", ids, len(ids), 50), ids, dialect, "demo", tokenizer.decode)
    answer = BackendAnswer(dialect, tokenizer, eos_id=1)
    config = BackendConfig(api_key=KEY)
    async with BackendClient(fleet.servers[0].http, config) as client:
        arrivals = [
            arrival
            async for events in client.events(body)
            for event in events
            for arrival in answer.read(event)
        ]
    expected = complete(
        fleet.servers[0], COUNTS[0], KEY, max_tokens=50, return_token_ids=True, temperature=0
    )
    assert [arrival.token_id for arrival in arrivals] == expected["token_ids"]
    assert arrivals[-1].reason == expected["finish_reason"]


def test_requests_of_a_killed_server_move(fleet: Fleet) -> None:
    """The last test of this module: it leaves one server."""
    kinds: tuple[dict[str, Any], ...] = ({}, {"regex": WORDS})
    expected, words = (ask_all(fleet.servers[0], KEY, **kind) for kind in kinds)
    with ThreadPoolExecutor(2) as pool:
        asked, asked_words = (pool.submit(ask_all, fleet.front, **kind) for kind in kinds)
        wait_for(
            lambda: all(
                read_metrics(server.http)["worker_requests_running"] > 0 for server in fleet.servers
            )
        )
        kill(fleet.servers[1])
        assert asked.result() == expected
        assert asked_words.result() == words
    wait_for(lambda: "its requests move to other workers" in fleet.log.read_text())
    assert ask_all(fleet.front) == expected
