"""README's examples, run as printed against a live system (only the ports are its own)."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.live import ROOT, Live, serving

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def curls() -> list[str]:
    return [block for block in blocks("sh") if block.startswith("curl")]


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving() as system:
        yield system


def here(live: Live, text: str) -> str:
    return text.replace("http://127.0.0.1:8000", live.http).replace("127.0.0.1:50051", live.grpc)


def output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def streamed(text: str) -> str:
    return "".join(re.findall(r'"content": ?"([^"]*)"', text))


@pytest.mark.slow
def test_curl_streams_the_right_answer(live: Live):
    said = output(["bash", "-c", here(live, curls()[0])])
    assert streamed(said).strip() == "green blue red"
    assert said.strip().endswith("data: [DONE]")


@pytest.mark.slow
def test_curl_with_budgets_answers(live: Live):
    [choice] = json.loads(output(["bash", "-c", here(live, curls()[1])]))["choices"]
    assert (choice["text"].strip(), choice["finish_reason"]) == ("apple fig pear", "stop")


@pytest.mark.slow
def test_python_examples_print_right_answers(live: Live):
    openai, grpc = (output([sys.executable, "-c", here(live, b)]) for b in blocks("python"))
    assert openai.split() == [str(n) for n in range(3, 13)]
    assert grpc.strip() == "green blue red"


def test_the_house_is_as_drawn():
    for folder in re.findall(r"^([a-z]+)/ ", README, re.MULTILINE):
        assert (ROOT / folder).is_dir(), folder
    for name in re.findall(r"`((?:services|deploy|protos)/[a-z_/]+\.(?:py|yaml))`", README):
        assert (ROOT / name).exists(), name
