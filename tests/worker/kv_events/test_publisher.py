"""What a worker publishes of its prefix cache, read with vLLM's structures."""

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from random import Random
from tempfile import TemporaryDirectory

import pytest
from pydantic import ValidationError

from services.core import Grant, Plan
from services.runtime.prefix import extend_keys, key_salt
from services.worker.config import EngineConfig
from services.worker.kv_events.messages import block_hash
from services.worker.kv_events.publisher import BATCH_EVENTS, KVEventPublisher, offset_endpoint
from services.worker.requests.state import WorkerState
from services.worker.requests.types.limits import Limits
from services.worker.requests.types.prompt import Prompt
from tests.worker.kv_events.vllm_schema import BlockRemoved, BlockStored, KVEventBatch, Subscriber
from tests.worker.requests.worker_loop import RuleLoop
from tests.worker.requests.worker_oracle import RuleDevice

BLOCK, BLOCKS = 4, 12
TOPIC = "kv@pod@model"


class Worker:
    """A worker's state without a model, its publisher, and a subscriber."""

    def __init__(self, folder: str, queue: int = 10_000):
        endpoint, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        config = EngineConfig(
            block_tokens=BLOCK,
            kv_events_endpoint=endpoint,
            kv_events_replay_endpoint=replay,
            kv_events_topic=TOPIC,
            kv_events_queue=queue,
        )
        self.publisher = KVEventPublisher(config)
        self.subscriber = Subscriber(endpoint, replay, TOPIC)
        self.state = WorkerState(Limits(BLOCKS, BLOCK, adapters=True, adapter_slots=2))
        self.state.listen(self.publisher)
        self._loop = RuleLoop(self.state, RuleDevice(BLOCK), overlap=False)
        self._plans = 0

    def answer(self, prompt: Prompt) -> None:
        self.state.receive(prompt, 0.0)
        self._plans += 1
        grant = Grant(prompt.request_id, prompt.max_tokens)
        self.state.apply_plan(Plan(self._plans, admit=(grant,)), 0.0)
        while self._loop.step() is not None:
            pass

    def differences(self, prompts: list[Prompt]) -> list[str]:
        """Blocks of prompts that the pool or the subscriber has, and the other one has not."""
        wrong = []
        for prompt in prompts:
            keys: list[bytes] = []
            tokens = prompt.token_ids
            salt = key_salt(prompt.cache_salt, prompt.adapter)
            extend_keys(keys, tokens, len(tokens) // BLOCK, BLOCK, salt)
            for index, key in enumerate(keys):
                text = self.subscriber.texts.get(block_hash(key))
                held = self.state.pool.known([key]) == 1
                if (text == tuple(tokens[: (index + 1) * BLOCK])) != held:
                    wrong.append(f"{prompt.request_id}: block {index}")
        return wrong

    @asynccontextmanager
    async def published(self):
        running = asyncio.create_task(self.publisher.run())
        yield
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder with a path that is short enough for sockets."""
    with TemporaryDirectory() as folder:
        yield folder


@pytest.fixture
def worker(folder: str) -> Iterator[Worker]:
    made = Worker(folder)
    yield made
    made.publisher.close()
    made.subscriber.close()


def prompts_with_common_beginnings(count: int) -> list[Prompt]:
    draw = Random(3)
    begins = [[draw.randrange(1, 99) for _ in range(2 * BLOCK)] for _ in range(2)]
    made = []
    for number in range(count):
        tokens = begins[number % 2] + [draw.randrange(1, 99) for _ in range(draw.randrange(1, 14))]
        salt, adapter = ("", "salt")[number % 5 == 4], ("", "french")[number % 7 == 6]
        name = f"r{number}"
        made.append(Prompt(name, tokens, len(tokens), 3, cache_salt=salt, adapter=adapter))
    return made


async def test_a_subscriber_knows_the_prefix_cache(worker: Worker) -> None:
    prompts = prompts_with_common_beginnings(40)
    async with worker.published():
        seen: list[KVEventBatch] = []
        for prompt in prompts:
            worker.answer(prompt)
            while (prompt_known := worker.differences(prompts)) != []:
                seen += await asyncio.to_thread(worker.subscriber.receive)
            assert prompt_known == []
        events = [event for batch in seen for event in batch.events]
        assert {type(event) for event in events} >= {BlockStored, BlockRemoved}
        stored = [event for event in events if isinstance(event, BlockStored)]
        assert {event.lora_name for event in stored} == {None, "french"}
        extras = {extra for event in stored for extra in event.extra_keys or ()}
        assert extras >= {("salt",), ("french",), None}
        worker.state.reset()
        while worker.subscriber.texts:
            await asyncio.to_thread(worker.subscriber.receive)
    assert worker.publisher.dropped == 0


async def test_a_late_subscriber_catches_up(worker: Worker) -> None:
    prompts = prompts_with_common_beginnings(10)
    for prompt in prompts:
        worker.answer(prompt)
    async with worker.published():
        while worker.differences(prompts):
            await asyncio.to_thread(worker.subscriber.catch_up)
        assert worker.subscriber.cleared == 1  # at first
        assert await asyncio.to_thread(worker.subscriber.catch_up) == []


async def test_a_full_queue_drops_events_and_leaves_a_gap(folder: str) -> None:
    worker = Worker(folder, queue=2)
    for prompt in prompts_with_common_beginnings(3):
        worker.answer(prompt)
    assert worker.publisher.dropped
    async with worker.published():
        subscriber = worker.subscriber
        while not subscriber.next:
            await asyncio.to_thread(subscriber.catch_up)
        worker.publisher.cleared()
        before = subscriber.next
        while not await asyncio.to_thread(subscriber.catch_up):
            pass
        assert subscriber.next == before + 2
    subscriber.close()


async def test_messages_are_bounded(worker: Worker) -> None:
    for _ in range(2 * BATCH_EVENTS):
        worker.publisher.cleared()
    async with worker.published():
        batches: list[KVEventBatch] = []
        while len(batches) < 3:
            batches += await asyncio.to_thread(worker.subscriber.catch_up)
    assert [len(batch.events) for batch in batches] == [BATCH_EVENTS, BATCH_EVENTS, 1]


def test_an_endpoint_that_cannot_be_bound_is_refused_with_a_sentence(folder: str) -> None:
    config = EngineConfig(kv_events_endpoint=f"ipc://{folder}/missing/events")
    with pytest.raises(ValueError, match=r"worker.kv_events_endpoint: ipc://.* cannot be used"):
        KVEventPublisher(config)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"kv_events_endpoint": "*:5557"}, r"Input should be tcp://HOST:PORT"),
        ({"kv_events_topic": "kv"}, "kv_events_topic needs kv_events_endpoint"),
        ({"kv_events_endpoint": "tcp://*:1", "prefix_sharing": False}, "needs prefix_sharing"),
    ],
)
def test_settings_are_checked(settings: dict, sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        EngineConfig(**settings)


@pytest.mark.parametrize(
    ("endpoint", "second"),
    [
        ("tcp://*:5557", "tcp://*:5558"),
        ("tcp://[::]:5557", "tcp://[::]:5558"),
        ("tcp://router:5557", "tcp://router:5557"),
        ("ipc:///run/events", "ipc:///run/events.1"),
    ],
)
def test_workers_of_a_machine_bind_endpoints_of_their_own(endpoint: str, second: str) -> None:
    assert offset_endpoint(endpoint, 0) == endpoint
    assert offset_endpoint(endpoint, 1) == second
