"""Servers behind `--engine openai`: refusals, order under load, lost and late servers."""

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from shutil import copytree
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from benchmarks.harness.system import read_metrics
from foretoken.running.options import demo_model
from foretoken.running.ports import free_port
from tests.live import ROOT, Live, command, environment, wait_for
from tests.system.backends import KEY, ONE_PROCESS, complete, emulated, fleet, fronting, kill

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
        learned = read_metrics(system.front.http)["estimator_samples_total"]
        assert learned > 0  # step times, from the pace of the tokens


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


def test_server_says_why_it_refuses_a_request(tmp_path: Path) -> None:
    """A given limit wins over the one that the server tells, and is wrong here."""
    wrong = ("--max-model-len", "1000")
    with fleet(tmp_path, 1, *wrong, server=("--max-model-len", "64")) as system:
        with pytest.raises(HTTPError) as refused:
            complete(system.front, PROMPTS[0], max_tokens=500)
        assert refused.value.code == 400
        assert "64" in json.loads(refused.value.read())["error"]["message"]
        assert complete(system.front, PROMPTS[0], max_tokens=5)["finish_reason"] == "length"


def other_model(folder: Path) -> Path:
    """The demo model's folder, with a tokenizer that knows fewer words."""
    copied = folder / "other"
    copytree(demo_model(), copied)
    content = json.loads((copied / "tokenizer.json").read_text())
    del content["model"]["merges"][20:]
    (copied / "tokenizer.json").write_text(json.dumps(content))
    return copied


def test_unusable_server_is_a_one_line_error(tmp_path: Path) -> None:
    ports = ("--http-port", "0", "--grpc-port", "0", *ONE_PROCESS)
    with emulated(tmp_path) as server:
        front = ("serve", "--engine", "openai", "--backend", server.http, *ports)
        keyed = (*front, "--backend-key", KEY)
        for arguments, sentence in (
            (front, "refuses the API key"),
            ((*keyed, "--set", "backend.model=demi"), "serves no 'demi', did you mean demo?"),
            ((*keyed, "--model", str(other_model(tmp_path))), "has another tokenizer; give the"),
        ):
            done = subprocess.run(
                command(*arguments),
                capture_output=True,
                text=True,
                timeout=120,
                env=environment(),
                cwd=ROOT,
                check=False,
            )
            assert done.returncode == 2
            assert sentence in done.stderr.splitlines()[-1]
            assert "Traceback" not in done.stderr
