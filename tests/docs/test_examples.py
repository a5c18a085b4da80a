"""Every shell command and Python example of the documentation runs as printed."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from models.tasks import examples as tasks
from tests.docs.examples import Example, collect
from tests.live import Live, serving

EXAMPLES = list(collect())
RUN = [example for example in EXAMPLES if not example.not_run]
REASONS = {
    "downloads weights",
    "needs GPUs",
    "needs a container engine",
    "needs Kubernetes",
    "needs Envoy",
    "needs two servers",
    "needs Redis and several hosts",
    "needs several hosts",
    "takes minutes",
    "needs a file of requests",
    "keeps files",
    "takes an hour",
    "installs vLLM",
    "needs an adapter",
    "runs the tests",
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving("--batch-folder", str(tmp_path_factory.mktemp("batches"))) as system:
        yield system


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with what the examples name: an environment and a file of prompts."""
    path = tmp_path_factory.mktemp("examples")
    (path / ".venv").symlink_to(sys.prefix)
    rows = [
        {
            "id": str(number),
            "prompt": each.user,
            "model": "demo",
            "task": each.application,
            "input_tokens": len(each.user.split()),
            "output_tokens": len(each.answer.split()),
        }
        for number, each in enumerate(tasks(0, 600, held_out=False))
    ]
    (path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.environ.pop("FORETOKEN_API_KEY", None)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("example", RUN, ids=[example.name for example in RUN])
def test_example_runs_as_printed(example: Example, live: Live, folder: Path):
    output = example.run(live, folder)
    assert example.prints in " ".join(output.split())


def test_examples_that_do_not_run_give_a_known_reason():
    assert {example.not_run for example in EXAMPLES if example.not_run} <= REASONS


def test_documentation_has_examples_in_both_languages():
    assert {example.language for example in RUN} == {"sh", "python"}
    assert sum(bool(example.prints) for example in RUN) >= 4
