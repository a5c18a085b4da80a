"""Servers behind `--engine openai`: refusals, order under load, lost and late servers."""

import json
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from benchmarks.harness.system import read_metrics
from foretoken.running.ports import free_port
from tests.live import Live, wait_for
from tests.system.backends import KEY, complete, emulated, fleet, fronting, kill

pytestmark = pytest.mark.slow

PROMPTS = [f"Tell me about the number {number}." for number in range(24)]


def ask_all(live: Live, prompts: list[str], key: str = "", **fields: Any) -> list[str]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(complete, live, prompt, key, **fields) for prompt in prompts]
        return [each.result()["text"] for each in asked]


def running(live: Live) -> float:
    return read_metrics(live.http)["worker_requests_running"]


def test_servers_with_few_sessions_answer_everything(tmp_path: Path) -> None:
    """Both refuse with status 429 what exceeds 3 sessions. First come, first served interrupts no
    request: an interrupted one continues with another text on an emulated server."""
    few = ("--set", "gateway.max_sessions=3")
    with fleet(tmp_path, 2, "--policy", "fcfs", server=few) as system:
        (expected,) = ask_all(system.servers[0], PROMPTS[:1], KEY)
        answers = ask_all(system.front, PROMPTS)
        assert answers[0] == expected
        assert len(set(answers)) == len(PROMPTS)
        assert ask_all(system.front, PROMPTS) == answers


def test_short_request_overtakes_long_ones(tmp_path: Path) -> None:
    """Two run at a time; max_tokens bounds the forecast of the last one."""
    with fleet(tmp_path, 1, "--set", "worker.max_running=2", tokens=2_000) as system:
        ended: list[str] = []
        with ThreadPoolExecutor(16) as pool:

            def ask(prompt: str, tokens: int) -> None:
                complete(system.front, prompt, max_tokens=tokens)
                ended.append(prompt)

            long = [pool.submit(ask, prompt, 150) for prompt in PROMPTS[:8]]
            wait_for(lambda: running(system.front) == 2)
            time.sleep(0.3)  # all of them are in the queue
            wait([*long, pool.submit(ask, "short", 4)])
        assert ended.index("short") <= 3


def test_client_that_leaves_ends_its_request_at_the_server(tmp_path: Path) -> None:
    with fleet(tmp_path, 1, tokens=5_000) as system:
        body = {"model": "demo", "prompt": PROMPTS[0], "max_tokens": 4_000, "stream": True}
        headers = {"content-type": "application/json"}
        request = Request(f"{system.front.http}/v1/completions", json.dumps(body).encode(), headers)
        with urlopen(request, timeout=60) as answer:
            assert b"text_completion" in answer.readline()
            wait_for(lambda: running(system.servers[0]) == 1)
        wait_for(lambda: running(system.servers[0]) == 0)
        assert running(system.front) == 0


def test_late_server_is_attached_when_it_answers(tmp_path: Path) -> None:
    late = free_port()
    with ExitStack() as stack:
        first = stack.enter_context(emulated(tmp_path))
        urls = [first.http, f"http://127.0.0.1:{late}/v1"]
        front, log = stack.enter_context(fronting(tmp_path, urls))
        assert "cannot be reached" in log.read_text() and "waits for it" in log.read_text()
        expected = ask_all(front, PROMPTS)
        stack.enter_context(emulated(tmp_path, "--http-port", str(late)))
        wait_for(lambda: read_metrics(front.http)["worker_requests_running"] == 0)
        kill(first)
        assert ask_all(front, PROMPTS) == expected
