"""foretoken's scheduler inside vLLM. In the newest engine, with less memory than requests need,
with cancels, patterns, schemas, seeds and several answers, it gives the answers of vLLM's own,
which schedules synchronously or a step ahead. Every tested version schedules without a model."""

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from benchmarks.overload.demo_load import demo_pool
from foretoken.running.options import demo_model
from foretoken.running.ports import free_port
from tests.clients.conftest import SCRIPTS, Run
from tests.clients.environments import VLLM_VERSIONS

pytestmark = [pytest.mark.clients, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
REQUESTS, IN_FLIGHT, BLOCKS = 300, 100, 60  # 100 requests need about 130 blocks at once
MAX_TOKENS, SEND_S = 200, 200
SERIES = (
    'foretoken_num_preemptions_total{cause="paused"}',
    'foretoken_num_preemptions_total{cause="evicted"}',
    'foretoken_scheduler_requests_waiting_for{reason="memory"}',
    'foretoken_predictor_coverage{interval="90"}',
    'foretoken_predictor_relative_error_count{source="history"}',
    "foretoken_scheduler_round_seconds_count",
)
# Two run at once, so neither has a core of its own.
VLLM = {
    "PYTHONPATH": str(ROOT),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
NEWEST = VLLM_VERSIONS[-1]  # starting an engine takes most of the time
SCHEDULED = 150  # requests for a scheduler without a model; its memory holds three at once
Python = Callable[[str], Path]


@cache
def prompts() -> str:
    """Chats of the demo model as text, a JSON string on each line."""
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    bodies = demo_pool().draw_bodies(REQUESTS, seed=7)
    chats = [json.loads(body)["messages"] for body in bodies]
    texts = [
        tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for chat in chats
    ]
    return "\n".join(map(json.dumps, texts))


@pytest.fixture
def answers(run: Run, python: Python, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs vLLM of a version with a scheduler, and returns what the script prints."""

    (tmp_path / "prompts.jsonl").write_text(prompts())

    def answers(version: str, scheduler: str, mode: str, **settings: str) -> dict[str, Any]:
        printed = run(
            python(f"vllm-{version}"), SCRIPTS / "vllm_inside.py", demo_model(),
            tmp_path / "prompts.jsonl", scheduler, mode, str(REQUESTS), str(IN_FLIGHT),
            str(BLOCKS), str(MAX_TOKENS), str(SEND_S),
            env={**VLLM, **settings},
        )  # fmt: skip
        (line,) = (line for line in printed.splitlines() if line.startswith('{"answers"'))
        result: dict[str, Any] = json.loads(line)
        return {**result, "log": printed}

    return answers


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_answers_equal_those_of_its_own_scheduler(
    answers: Callable[..., dict[str, Any]], mode: str
) -> None:
    port = {"FORETOKEN_VLLM_METRICS_PORT": str(free_port())}
    with ThreadPoolExecutor() as pool:  # one after another takes twice as long
        of_own = pool.submit(answers, NEWEST, "own", mode)
        of_ours = pool.submit(answers, NEWEST, "foretoken.vllm.Scheduler", mode, **port)
    own, ours = of_own.result(), of_ours.result()
    assert own["failed"] == ours["failed"] == {}
    assert own["alive"] and ours["alive"]
    used = {"sync": "Scheduler", "async": "AsyncScheduler"}[mode]
    policy = f"schedules by the policy foretoken, with forecasts by words, as {used}\n"
    assert f"foretoken {policy}" in ours["log"]
    assert "foretoken's scheduler failed" not in ours["log"]
    assert ours["preemptions"] > 0
    assert ours["kv_in_use"] == 0
    both = zip(own["answers"], ours["answers"], strict=True)
    different = [n for n, (a, b) in enumerate(both) if a != b and None not in (a, b)]
    assert different == []
    complete = [answer for answer in ours["answers"] if answer is not None]
    assert len(complete) >= REQUESTS * 0.85  # every tenth is cancelled
    assert set(SERIES) <= {line.rpartition(" ")[0] for line in ours["metrics"].splitlines()}
    assert 'foretoken_scheduler_preset{preset="foretoken"} 1.0\n' in ours["metrics"]
    assert "foretoken_scheduler_leads 1.0\n" in ours["metrics"]


@pytest.mark.parametrize("scheduler", ["own", "foretoken.vllm.Scheduler"])
@pytest.mark.parametrize("version", VLLM_VERSIONS)
def test_no_token_is_lost_or_repeated(
    run: Run, python: Python, version: str, scheduler: str
) -> None:
    """A scheduler with a computed model: each answer is known."""
    printed = run(
        python(f"vllm-{version}"), SCRIPTS / "vllm_scheduler.py", demo_model(), scheduler,
        str(SCHEDULED), env={"PYTHONPATH": str(ROOT), "FORETOKEN_VLLM_ROUND_SHARE": "1"},
    )  # fmt: skip
    results = [json.loads(line) for line in printed.splitlines() if line.startswith('{"ahead"')]
    assert len(results) == 4
    for result in results:
        assert result["wrong"] == []
        assert (result["kv_in_use"], result["left"]) == (0, 0)
        assert result["answered"] + result["cancelled"] == SCHEDULED
        assert result["preemptions"] > 0
        assert (result["loaded"] > 0) == result["loads"]
    assert "foretoken's scheduler failed" not in printed


def test_a_metrics_port_in_use_is_refused_with_a_sentence(run: Run, python: Python) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(AssertionError, match="set FORETOKEN_VLLM_METRICS_PORT to a free port"):
            run(
                python(f"vllm-{NEWEST}"), SCRIPTS / "vllm_scheduler.py", demo_model(),
                "foretoken.vllm.Scheduler", "1",
                env={"PYTHONPATH": str(ROOT), "FORETOKEN_VLLM_METRICS_PORT": port},
            )  # fmt: skip
