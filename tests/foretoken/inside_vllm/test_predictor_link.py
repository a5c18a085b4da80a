"""Forecasts of a predictor service: asked, answered by history while it is away, and taught."""

import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from foretoken.vllm.lengths import Asked
from foretoken.vllm.predictor_link import RemoteLengths
from services.core import FinishReason, LiveAnswers, Outcome, Request
from services.forecast import Forecast
from services.scheduler.core.events import Forecasted, Refreshed
from services.scheduler.observe.metrics import SchedulerMetrics

LIMIT_S = 120.0  # on an idle machine a predictor starts in 3 s, and learns words within 10


@contextmanager
def predictor(address: str, model: str) -> Iterator[None]:
    sets = (f"predictor.address={address}", f"predictor.model={model}", "log.path=")
    command = [sys.executable, "-m", "services.predictor"]
    with subprocess.Popen([*command, *(w for each in sets for w in ("--set", each))]) as process:
        try:
            yield
        finally:
            process.terminate()
            process.wait(20)


class Vllm:
    """What vLLM's loop has received."""

    def __init__(self, lengths: RemoteLengths):
        self.lengths = lengths
        self.news: deque[Forecasted | Refreshed] = deque()
        lengths.start(self.news.append)

    def ask(self, name: str, text: str = "Count to 9.") -> None:
        request = Request(name, "demo", len(text), 1_000, 0.0)
        assert self.lengths.forecast([Asked(request, [ord(letter) for letter in text])]) == []

    def end(self, name: str, tokens: int) -> None:
        reason = FinishReason.STOP
        self.lengths.learn([Outcome(name, "demo", "", 11, tokens, 1_000, reason, 1.0, 0)])

    def forecasts(self, name: str) -> list[Forecast]:
        given = [each.forecasts for each in list(self.news) if isinstance(each, Forecasted)]
        return [forecast for each in given for asked, forecast in each if asked == name]


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[Vllm]:
    decode = lambda ids: "".join(map(chr, ids))  # noqa: E731 -- the tokenizer of these prompts
    lengths = RemoteLengths(
        f"unix:{tmp_path}/predictor.sock", decode, SchedulerMetrics(CollectorRegistry())
    )
    received = Vllm(lengths)
    yield received
    lengths.stop()
    lengths.forecast([])  # nothing happens after the end


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.slow
def test_history_answers_until_the_predictor_does(vllm: Vllm, tmp_path: Path) -> None:
    vllm.ask("early")
    until(lambda: vllm.forecasts("early"))
    assert vllm.forecasts("early")[0].mean(0, 1_000) == 1_000  # nothing is known yet
    for number in range(40):
        vllm.end(f"r{number}", 20)
    with predictor(f"unix:{tmp_path}/predictor.sock", "history"):

        def forecast_by_the_predictor() -> bool:
            name = f"late{len(vllm.news)}"
            vllm.ask(name)
            until(lambda: vllm.forecasts(name))
            newest = vllm.forecasts(name)[-1]
            return newest.source == "history" and newest.mean(0, 1_000) < 100

        until(forecast_by_the_predictor)
        for number in range(100):
            vllm.end(f"s{number}", 300)
        vllm.lengths.observe_live([LiveAnswers("demo", "", (5, 6))])
        # The requests share a forecast. Its newer version comes unasked.
        until(lambda: any(isinstance(each, Refreshed) for each in list(vllm.news)))


@pytest.mark.slow
def test_the_text_of_prompts_reaches_the_predictor(vllm: Vllm, tmp_path: Path) -> None:
    """`words` tells long answers from short ones."""

    def ask(word: str) -> float:
        name = f"{word}{time.monotonic()}"
        vllm.ask(name, f"{word} the word number {time.monotonic():.3f}")
        until(lambda: vllm.forecasts(name))
        vllm.end(name, {"Spell": 20, "Explain": 400}[word])
        return vllm.forecasts(name)[-1].mean(0, 1_000)

    with predictor(f"unix:{tmp_path}/predictor.sock", "words"):
        until(lambda: ask("Spell") < 100 and ask("Explain") > 300)
