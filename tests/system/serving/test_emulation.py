"""An emulated system: real processes and protocol, answers of known lengths, no model."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import grpc
import pytest

from benchmarks.harness.system import read_metrics
from foretoken import Client
from protos.generated import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.live import Live, serving, wait_for

# Steps of 1 to 2 ms; KV for a third of the requests below.
HARDWARE = """
about = "fast"
[cost]
base_s = 0.001
prefill_token_s = 1e-6
decode_seq_s = 1e-5
context_token_s = 1e-8
offload_token_s = 1e-7
upload_token_s = 1e-7
[memory]
kv_tokens = 640
host_tokens = 1_280
[engine]
max_batch_tokens = 256
"""
LENGTHS = {f"Tell me about the number {number}.": 5 + 7 * number for number in range(16)}
LONGEST = 400


@pytest.fixture(scope="module", params=[["--workers", "2"], ["--separate"]], ids=" ".join)
def live(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    folder = tmp_path_factory.mktemp("emulation")
    hardware, lengths = folder / "fast.toml", folder / "lengths.jsonl"
    hardware.write_text(HARDWARE)
    rows = ({"prompt": prompt, "output_tokens": tokens} for prompt, tokens in LENGTHS.items())
    lengths.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn = ["--set", f"emulation.median_tokens={LONGEST}", "--set", "emulation.sigma=0"]
    given = ["--emulate", str(hardware), "--emulate-lengths", str(lengths), *drawn]
    with serving(*given, *request.param) as system:
        yield system


def post(live: Live, **body: Any) -> str:
    """The body of the answer to a chat."""
    headers = {"content-type": "application/json"}
    request = Request(f"{live.http}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def chat(live: Live, content: str, system: str = "") -> dict[str, Any]:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": content})
    whole: dict[str, Any] = json.loads(post(live, messages=messages, max_tokens=LONGEST))
    return whole


@pytest.mark.slow
def test_answers_end_at_their_known_lengths_when_memory_is_short(live: Live):
    """Three of each prompt at once, some with a system message. Requests wait, are preempted or
    evicted; lengths and texts stay the same."""
    asked = [(prompt, system) for prompt in LENGTHS for system in ("", "", "Be brief.")]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: chat(live, *each), asked))
    assert [a["usage"]["completion_tokens"] for a in answers] == [LENGTHS[p] for p, _ in asked]
    assert {a["choices"][0]["finish_reason"] for a in answers} == {"stop"}
    texts = [answer["choices"][0]["message"]["content"] for answer in answers]
    assert texts[0::3] == texts[1::3]
    assert {answer["system_fingerprint"] for answer in answers} == {"emulated-fast"}


@pytest.mark.slow
def test_every_answer_says_that_it_is_emulated(live: Live):
    messages = [{"role": "user", "content": "What is this?"}]
    whole = json.loads(post(live, messages=messages, max_tokens=3))
    lines = post(live, messages=messages, max_tokens=3, stream=True).split("\n\n")
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert chunks
    assert {each["system_fingerprint"] for each in (whole, *chunks)} == {"emulated-fast"}
    with grpc.insecure_channel(live.grpc) as channel:
        sampling = common_pb2.Sampling(max_tokens=2)
        request = gateway_pb2.GenerateRequest(prompt="What?", sampling=sampling)
        call = gateway_pb2_grpc.GatewayStub(channel).Generate(request)
        assert dict(call.initial_metadata())["system-fingerprint"] == "emulated-fast"
        assert sum(len(response.token_ids) for response in call) == 2


@pytest.mark.slow
def test_prompts_are_not_scored(live: Live):
    """The worker refuses the request, so that it is invalid."""
    messages = [{"role": "user", "content": "What is this?"}]
    with pytest.raises(HTTPError) as refused:
        post(live, messages=messages, max_tokens=3, prompt_logprobs=0)
    assert refused.value.code == 400
    assert "leave out prompt_logprobs" in json.loads(refused.value.read())["error"]["message"]


@pytest.mark.slow
def test_stream_is_cut_by_max_tokens_and_can_be_cancelled(live: Live):
    with Client(live.grpc) as client:
        stream = client.generate("No file has this prompt.", max_tokens=9, ignore_eos=True)
        chunks = list(stream)
        assert sum(len(chunk.token_ids) for chunk in chunks) == 9
        assert chunks[-1].finish_reason == "length"
        stream = client.generate("Nor this one.", max_tokens=LONGEST)
        next(iter(stream))
        stream.cancel()
    wait_for(lambda: read_metrics(live.http)["num_requests_running"] == 0)
    metrics = read_metrics(live.http)
    assert metrics["worker_busy_seconds_total"] > 0
    with urlopen(f"{live.http}/health", timeout=10) as answer:
        assert answer.status == 200
