"""`foretoken serve` publishes the prefix cache of its worker."""

import json
import urllib.request
from tempfile import TemporaryDirectory

import pytest

from tests.live import serving, wait_for
from tests.worker.kv_events.vllm_schema import Subscriber

pytestmark = pytest.mark.slow


def test_a_served_prompt_is_published() -> None:
    with TemporaryDirectory() as folder:
        endpoint, replay = f"ipc://{folder}/events", f"ipc://{folder}/replay"
        with serving(
            f"--set=worker.kv_events_endpoint={endpoint}",
            f"--set=worker.kv_events_replay_endpoint={replay}",
        ) as live:
            body = {"model": "demo", "prompt": "one two three " * 20, "max_tokens": 2}
            request = urllib.request.Request(
                f"{live.http}/v1/completions",
                json.dumps({**body, "return_token_ids": True}).encode(),
                {"content-type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                choice = json.load(answer)["choices"][0]
            tokens = tuple(choice["prompt_token_ids"])
            subscriber = Subscriber(endpoint, replay)
            longest = tokens[: len(tokens) // 16 * 16]

            def knows_the_prompt() -> bool:
                subscriber.catch_up()
                return longest in subscriber.texts.values()

            wait_for(knows_the_prompt)
            assert subscriber.cleared == 1
            subscriber.close()
