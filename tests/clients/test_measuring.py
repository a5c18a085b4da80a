"""Load and evaluation tools at pinned versions against a real server: each answer has
the requested number of tokens, and lm-eval's scores equal the model's."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.train import DEMO, load
from tests.clients.conftest import SCRIPTS, Run

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

REQUESTS, STREAMS = 24, 4
PROMPT_TOKENS, TOKENS = 32, 16
Python = Callable[[str], Path]


def test_guidellm_receives_the_requested_output_tokens(
    run: Run, python: Python, url: str, tmp_path: Path
) -> None:
    run(
        python("measure").with_name("guidellm"), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={url},model=demo",
        "--profile", f"kind=concurrent,streams={STREAMS}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={DEMO}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={TOKENS}",
        "--output", "kind=json,path=result.json",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "result.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    errors = [each["info"]["error"] for each in benchmark["requests"]["errored"] or ()]
    assert (totals["successful"], totals["errored"]) == (REQUESTS, 0), errors[:1]
    answered = benchmark["requests"]["successful"]
    assert [each["output_metrics"]["text_tokens"] for each in answered] == [TOKENS] * REQUESTS


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_aiperf_receives_the_requested_output_tokens(
    run: Run, python: Python, url: str, tmp_path: Path, endpoint: str
) -> None:
    # Offline it accepts no folder as tokenizer; an unreachable hub makes it use the cache.
    online = {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": "", "HF_ENDPOINT": "http://127.0.0.1:9"}
    run(
        python("measure").with_name("aiperf"), "profile", "--model", "demo", "--url", url,
        "--endpoint-type", endpoint, "--streaming", "--use-server-token-count",
        "--tokenizer", DEMO, "--concurrency", STREAMS, "--request-count", REQUESTS,
        "--isl", PROMPT_TOKENS, "--osl", TOKENS, "--extra-inputs", "ignore_eos:true",
        "--ui-type", "none", "--artifact-dir", "made", "--random-seed", 1,
        env=online,
    )  # fmt: skip
    seen = json.loads((tmp_path / "made" / "profile_export_aiperf.json").read_text())
    assert seen["error_summary"] == [] and seen["is_complete"] and not seen["was_cancelled"]
    assert seen["completed_request_count"]["avg"] == REQUESTS
    lengths = seen["output_sequence_length"]
    assert (lengths["min"], lengths["max"], lengths["count"]) == (TOKENS, TOKENS, REQUESTS)


@pytest.mark.parametrize(
    ("backend", "path"),
    [("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")],
)
def test_vllm_bench_receives_the_requested_output_tokens(
    run: Run, python: Python, url: str, tmp_path: Path, backend: str, path: str
) -> None:
    interpreter = os.environ.get("CLIENTS_VLLM_PYTHON") or python("measure")
    run(
        interpreter, SCRIPTS / "vllm_bench.py", "--backend", backend, "--base-url", url,
        "--endpoint", path, "--model", "demo", "--tokenizer", DEMO, "--dataset-name", "random",
        "--random-input-len", PROMPT_TOKENS, "--random-output-len", TOKENS, "--ignore-eos",
        "--num-prompts", REQUESTS, "--max-concurrency", STREAMS,
        "--save-result", "--save-detailed", "--result-filename", "result.json",
    )  # fmt: skip
    seen = json.loads((tmp_path / "result.json").read_text())
    assert (seen["completed"], seen["failed"]) == (REQUESTS, 0), seen["errors"][:1]
    assert seen["output_lens"] == [TOKENS] * REQUESTS


def test_locust_load_has_no_failures(run: Run, python: Python, url: str) -> None:
    printed = run(
        python("locust").with_name("locust"), "--locustfile", SCRIPTS / "locustfile.py", "--host",
        url, "--headless", "--users", 8, "--spawn-rate", 8, "--run-time", "100s", "--json",
    )  # fmt: skip
    counts = {
        row["name"]: (row["num_requests"], row["num_failures"]) for row in json.loads(printed)
    }
    assert counts == {
        "/v1/chat/completions": (40, 0),
        "/v1/completions": (40, 0),
    }


QUESTIONS = [
    # question, choices, index of the right one
    ("Reverse: red blue green", ["red blue green", "green blue red", "blue red green"], 1),
    ("Sort: pear apple fig", ["apple fig pear", "pear apple fig", "fig apple pear"], 0),
    ("Count from 0 to 5.", ["1 2 3 4 5", "0 1 2 3 4 5 6", "0 1 2 3 4 5"], 2),
    ("Copy: sun moon", ["moon sun", "sun moon"], 1),
]
TASK = """\
task: likelihood
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
target_delimiter: "\\n"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def test_lm_eval_scores_equal_the_model_s(
    run: Run, python: Python, url: str, tmp_path: Path
) -> None:
    data = tmp_path / "likelihood.jsonl"
    rows = [{"question": q, "choices": choices, "right": right} for q, choices, right in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "likelihood.yaml").write_text(TASK.format(data=data))
    model = f"model=demo,base_url={url}/v1/completions,tokenizer={DEMO},num_concurrent={STREAMS}"
    run(
        python("measure").with_name("lm_eval"), "run", "--model", "local-completions",
        "--model_args", f"{model},max_retries=1,tokenizer_backend=huggingface",
        "--tasks", "likelihood", "--include_path", tmp_path,
        "--log_samples", "--output_path", "out.json",
    )  # fmt: skip
    (written,) = tmp_path.glob("samples_likelihood_*.jsonl")
    samples = [json.loads(line) for line in written.read_text().splitlines()]
    assert {each["doc"]["question"]: each["acc"] for each in samples} == {
        q: 1.0 for q, *_ in QUESTIONS
    }
    for sample in samples:
        question, choices, _ = QUESTIONS[sample["doc_id"]]
        scores = [float(answer) for ((answer, _greedy),) in sample["resps"]]
        assert scores == pytest.approx(
            [_score(question, f"\n{each}") for each in choices], abs=0.05
        )


@torch.inference_mode()
def _score(context: str, continuation: str) -> float:
    """The log-probability that transformers gives a continuation."""
    model, tokenizer = load(DEMO)
    before = len(tokenizer.encode(context))
    ids = torch.tensor(tokenizer.encode(context + continuation))
    logprobs = model(ids[None]).logits[0].log_softmax(-1)
    found = logprobs[before - 1 : -1].gather(1, ids[before:, None])
    return float(found.sum())
