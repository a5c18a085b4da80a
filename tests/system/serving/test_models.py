"""`foretoken serve NAME=MODEL NAME=MODEL`: two models behind one address.

The second model is the demo model with a chat template that always asks the same, so that an answer
tells which model gave it.
"""

import asyncio
import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from foretoken import AsyncClient, InvalidRequest
from foretoken.client.address import resolve_server
from foretoken.client.stories import fetch_stories
from foretoken.running.options import demo_model
from tests.live import Live, serving, wait_for
from tests.system.children import children

SCHEDULER = "foretoken.running.scheduling"
TEMPLATE = "<|user|>Count from 3 to 6.<|end|>{% if add_generation_prompt %}<|assistant|>{% endif %}"
ASKED = [{"role": "user", "content": "Reverse: red blue green"}]
ANSWERS = {"small": "green blue red", "large": "3 4 5 6"}
NAMES = list(ANSWERS)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(demo_model(), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(f"small={demo_model()}", f"large={folder}", "--kv-tokens=4096") as system:
        yield system


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.http}/v1", api_key="none", max_retries=0) as made:
        yield made


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def chat(client: openai.OpenAI, model: str) -> Any:
    messages: Any = ASKED
    return client.chat.completions.create(
        model=model, messages=messages, temperature=0, max_tokens=40
    )


def series(live: Live, name: str) -> Mapping[str, float]:
    """The values of the series of a name, by their labels."""
    with urllib.request.urlopen(f"{live.http}/metrics", timeout=20) as answer:
        lines = answer.read().decode().splitlines()
    found = [line.rpartition(" ") for line in lines if line.startswith(name + "{")]
    return {labels.removeprefix(name): float(value) for labels, _, value in found}


def of_model(values: Mapping[str, float], model: str) -> list[float]:
    return [value for labels, value in values.items() if f'model_name="{model}"' in labels]


def scheduler_of(live: Live, model: str) -> int:
    """The process id of a model's scheduler."""
    label = f"scheduler.model_label={model}".encode()
    [found] = [
        pid
        for pid in children(live.process.pid, SCHEDULER)
        if label in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("model", NAMES)
async def test_each_model_answers_by_its_name(
    model: str, live: Live, client: openai.OpenAI
) -> None:
    answer = chat(client, model)
    assert (answer.model, answer.choices[0].message.content) == (model, ANSWERS[model])
    async with AsyncClient(live.grpc) as grpc:
        said = await grpc.complete(messages=ASKED, model=model, temperature=0.0, max_tokens=40)
    assert said.text == ANSWERS[model]


@pytest.mark.slow
async def test_first_model_is_the_default_and_an_unknown_one_is_404(
    live: Live, client: openai.OpenAI
) -> None:
    with pytest.raises(openai.NotFoundError, match="known: small, large"):
        chat(client, "medium")
    async with AsyncClient(live.grpc) as grpc:
        assert await grpc.models() == NAMES
        assert (await grpc.complete(messages=ASKED, temperature=0.0)).text == ANSWERS["small"]
        with pytest.raises(InvalidRequest, match="known: small, large"):
            await grpc.complete("1", model="medium")
    assert [each.id for each in client.models.list()] == NAMES


@pytest.mark.slow
def test_status_and_metrics_are_of_both_models(live: Live, client: openai.OpenAI) -> None:
    assert get(f"{live.http}/health") == {"status": "ok", "models": dict.fromkeys(NAMES, "ok")}
    name = "foretoken_generation_tokens_total"
    before = series(live, name)
    chat(client, "large")
    after = series(live, name)
    assert of_model(after, "small") == of_model(before, "small")
    [had], [has] = of_model(before, "large"), of_model(after, "large")
    assert has > had
    # The schedulers' series are not merged into one: each has its model's label.
    assert series(live, "foretoken_workers_attached") == {
        f'{{model_name="{model}"}}': 1.0 for model in NAMES
    }
    wait_for(lambda: get(f"{live.http}/load") == {"server_load": 0})
    for model in NAMES:
        board = get(f"{live.http}/ui/board?model={model}")
        assert [worker["model"] for worker in board["workers"]] == [model]


@pytest.mark.slow
@pytest.mark.parametrize("model", NAMES)
def test_why_finds_requests_of_both_models(model: str, live: Live, client: openai.OpenAI) -> None:
    answer = chat(client, model)
    for address in (live.http, live.grpc):
        [story] = fetch_stories(answer.id, resolve_server(address), "")
        assert story.request_id.startswith(answer.id.removeprefix("chatcmpl-"))
        assert "judged" in [chapter.kind for chapter in story.chapters]


@pytest.mark.slow
async def test_other_model_answers_while_a_scheduler_is_dead(live: Live) -> None:
    """Requests of the dead scheduler's model wait until it is back."""
    killed = scheduler_of(live, "small")
    async with AsyncClient(live.grpc) as grpc:
        os.kill(killed, signal.SIGKILL)
        waiting = asyncio.create_task(
            grpc.complete(messages=ASKED, model="small", temperature=0.0, max_tokens=40)
        )
        for _ in range(8):
            said = await grpc.complete(
                messages=ASKED, model="large", temperature=0.0, max_tokens=40
            )
            assert said.text == ANSWERS["large"]
        assert (await waiting).text == ANSWERS["small"]
    assert scheduler_of(live, "small") != killed


@pytest.mark.slow
def test_paused_scheduler_of_one_model_leaves_the_other_its_metrics_and_answers(
    live: Live, client: openai.OpenAI
) -> None:
    """Its own requests wait, and the gateway stays healthy."""
    paused = scheduler_of(live, "large")
    os.kill(paused, signal.SIGSTOP)
    try:
        assert chat(client, "small").choices[0].message.content == ANSWERS["small"]
        assert get(f"{live.http}/health?model=small")["status"] == "ok"
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(f"{live.http}/health?model=medium")
        assert caught.value.code == 404
    finally:
        os.kill(paused, signal.SIGCONT)
    assert chat(client, "large").choices[0].message.content == ANSWERS["large"]
