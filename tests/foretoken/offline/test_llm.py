"""`foretoken.LLM` and file jobs with the real demo model, all on one system."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.offline.file_job import FileJob
from foretoken.offline.files import AnswerFile
from foretoken.offline.sampling import Prompt
from services.core import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
COPIES = [
    [{"role": "user", "content": f"Copy: {words}"}]
    for words in ("pear fig", "sun", "red blue cat dog")
]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(in_flight=2, progress=False) as made:
        yield made


@pytest.mark.slow
def test_answers_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = llm.chat(COPIES, GREEDY)
    assert together[0].text == "pear fig"
    assert [each.text for each in together] == [llm.chat(c, GREEDY)[0].text for c in COPIES]
    first = together[0]
    assert first.finish_reason is FinishReason.STOP
    assert first.usage.completion_tokens == len(first.choices[0].token_ids) > 0


@pytest.mark.slow
def test_prompts_and_parameters_may_differ(llm: LLM) -> None:
    long = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=1, n=2, logit_bias={5: 1.0})
    prompts: list[Prompt] = ["1, 2,", [5, 6, 7], {"prompt": "a"}]
    answers = llm.generate(prompts, [GREEDY, long, long])
    assert [len(each.choices) for each in answers] == [1, 2, 2]
    assert answers[1].usage.prompt_tokens == 3 and answers[1].usage.completion_tokens == 10
    assert len(answers[1].choices[1].logprobs) == 5
    assert llm.generate([]) == []
    assert len(llm.generate("1, 2,", GREEDY)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "params", "fault"),
    [
        (["a", "b"], [{}, {"temprature": 0}], r"prompts\[1\]: temprature: unknown field; did you"),
        (["a", 5.5], {}, r"prompts\[1\]: prompt: must be a string"),
        (["a"], {"max_tokens": 10**6}, r"prompts\[0\]: This model's maximum context length"),
        (["a"], [{}, {}], "params: 2 for 1 prompts"),
        ([{"text": "a"}], {}, r"prompts\[0\]: prompt: an object has one of"),
    ],
)
def test_mistake_names_the_prompt(llm: LLM, prompts: Any, params: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        llm.generate(prompts, params)


@pytest.mark.slow
def test_file_job_runs_longest_first_and_resumes(llm: LLM, tmp_path: Path) -> None:
    lengths = {"short": 2, "long": 64, "middle": 16}
    lines = [
        {"custom_id": name, "prompt": "1, 2,", "max_tokens": tokens, "ignore_eos": True}
        for name, tokens in lengths.items()
    ]
    file, out = tmp_path / "in", tmp_path / "out"
    file.write_text("\n".join(map(json.dumps, [*lines, {"prompt": "a", "seed": "x"}])))

    def run(by_forecast: bool) -> tuple[list[str], list[str], int]:
        faults: list[str] = []
        ends: list[tuple[int, int]] = []
        job = FileJob(file, AnswerFile(out), faults.append, lambda *end: ends.append(end))
        job.run(llm.background, 1, by_forecast)
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        for row in rows:
            tokens = lengths.get(row["custom_id"])
            body = row["response"]["body"]
            assert tokens is None or body["usage"]["completion_tokens"] == tokens
        return [row["custom_id"] for row in rows], faults, len(ends)

    ids, faults, ends = run(by_forecast=True)
    assert ids == ["line-4", "long", "middle", "short"] and ends == 4
    assert faults == [f"{file}, line 4: seed: input should be a valid integer"]
    out.write_text(out.read_text().splitlines(keepends=True)[1] + '{"custom_id": "sho')
    ids, faults, ends = run(by_forecast=False)
    assert ids == ["long", "line-4", "short", "middle"] and ends == 3


def test_setting_with_a_mistake_is_named() -> None:
    for settings, fault in (
        ({"kv_tokenz": 1}, "LLM has no setting 'kv_tokenz'; did you mean kv_tokens?"),
        ({"engine": "tpu"}, "engine: one of foretoken, vllm, openai, not 'tpu'"),
        ({"in_flight": 0}, "in_flight: at least 1, not 0"),
    ):
        with pytest.raises(ValueError, match=fault.replace("?", r"\?")):
            LLM(**settings)


def test_import_of_the_package_is_cheap() -> None:
    """The engine and gRPC are imported on first use."""
    code = "import foretoken, sys; print(sorted({'grpc', 'torch', 'gateway'} & sys.modules.keys()))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
