"""What is read of requests, answers, metrics and lists of endpoints."""

import json
from array import array
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core import FinishReason
from services.picker.core.answers import BodyFollower, StreamFollower, follower
from services.picker.core.endpoints import (
    EndpointsError,
    Reading,
    is_address,
    parse_endpoints,
    parse_metrics,
)
from services.picker.core.questions import (
    OBJECTIVE_HEADER,
    TPOT_HEADER,
    TTFT_HEADER,
    HeaderError,
    Question,
    Terms,
    read_question,
    read_terms,
)


def question(**fields) -> Question:
    return read_question(json.dumps(fields).encode())


def test_question_of_a_completion():
    asked = question(model="m", prompt="Hello", max_tokens=7, stream=True, cache_salt="s")
    assert asked == Question("m", b"Hello", "", "Hello", 0, 7, 1, True, "s")
    tokens = question(prompt=[5, 6, 7], n=3)
    assert (tokens.prefix, tokens.prompt_tokens) == (array("I", [5, 6, 7]).tobytes(), 3)
    assert (tokens.choices, tokens.max_tokens, tokens.streams) == (3, 0, False)
    several = question(prompt=["one", "two"], n=2)
    assert (several.prefix, several.choices) == (b"one", 4)
    parts = [asked.whole_text, tokens.whole_text, several.whole_text]
    assert parts == [True, False, False] and question(prompt=["one"]).whole_text


def test_question_of_a_conversation_begins_like_that_of_its_next_turn():
    system = {"role": "system", "content": "Be brief."}
    user = {"role": "user", "content": "Hello"}
    reply = {"role": "assistant", "content": "Hi"}
    again = {"role": "user", "content": [{"type": "text", "text": "Bye"}]}
    first = question(messages=[system, user], max_completion_tokens=9)
    later = question(messages=[system, user, reply, again])
    assert (first.instruction, first.user_input, first.max_tokens) == ("Be brief.", "Hello", 9)
    assert later.prefix.startswith(first.prefix)
    assert later.user_input == "Bye" and later.whole_text
    with_tools = question(messages=[system, user], tools=[{"type": "function"}])
    assert not with_tools.prefix.startswith(first.prefix[:4])


def test_only_the_text_of_parts_counts_and_other_parts_tell_prompts_apart():
    def asked(image: str) -> Question:
        shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
        text = {"type": "text", "text": "What is it?"}
        return question(messages=[{"role": "user", "content": [text, shown]}])

    first, other = asked("A" * 50_000), asked("B" * 50_000)
    assert first.user_input == "What is it?" and not first.whole_text
    assert len(first.prefix) == len("user\0What is it?\0") + 16
    assert first == asked("A" * 50_000) and first.prefix != other.prefix
    strings = question(messages=[{"role": "user", "content": ["a", "b"]}])
    assert (strings.user_input, strings.whole_text) == ("ab", True)


def test_body_of_too_many_values_is_known_by_its_bytes_alone():
    fields = {"model": "m", "prompt": "one, two: [{" * 200_000, "max_tokens": 7}
    assert question(**fields).max_tokens == 7  # what its strings contain is no value
    for wide in (
        b"[" * 2**20,
        b'{"model": "m", "prompt": [' + b"1," * 2**18 + b"1]}",
        b'{"model": "m", "x": [' + b'{"\\"a": 1},' * 2**18 + b"1]}",
    ):
        assert read_question(wide) == Question(prefix=wide, whole_text=False)
    endless = b'"' + b'\\",' * 2**19  # no string of it ends
    assert read_question(endless) == Question(prefix=endless)


def test_names_are_bounded_and_have_bytes():
    asked = question(model="m\ud800" + "x" * 999, cache_salt="\udfff", prompt="\ud800")
    assert (asked.model[:3], len(asked.model), asked.salt) == ("m?x", 256, "?")


@given(st.binary(max_size=60) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda deeper: st.lists(deeper, max_size=3) | st.dictionaries(
        st.sampled_from(["model", "prompt", "messages", "n", "max_tokens", "role", "content"]),
        deeper, max_size=5),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_body_is_a_question(body: bytes):
    asked = read_question(body)
    assert 1 <= asked.choices <= 1_024
    assert 0 <= asked.max_tokens < 2**24


def test_terms_are_read_from_headers():
    assert read_terms({}) == Terms("", inf, inf)
    given = {OBJECTIVE_HEADER: "chat", TTFT_HEADER: "200", TPOT_HEADER: " 12.5 "}
    assert read_terms(given) == Terms("chat", 0.2, 0.0125)
    assert read_terms({"authorization": "Bearer " + "k" * 999}).api_key == "k" * 999
    assert read_terms({"x-api-key": "k"}).api_key == "k"


@pytest.mark.parametrize("text", ["-1", "0", "nan", "1e3", "inf", "1,5", "9" * 300])
def test_budget_that_is_no_number_is_refused(text: str):
    with pytest.raises(HeaderError, match=TTFT_HEADER):
        read_terms({TTFT_HEADER: text})


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def delta(text: str | None = None, reason: str | None = None, **more: str) -> dict:
    content = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": {**content, **more}, "finish_reason": reason}]}


CHAT = [delta("", role="assistant"), delta("a"), delta("b"), delta("", "stop")]


@pytest.mark.parametrize("size", [1, 7, 1_000])
def test_stream_is_counted_by_its_events_with_text(size: int):
    stream = b"".join(map(event, CHAT)) + b"data: [DONE]\n\n"
    reads = StreamFollower(1_000)
    for at in range(0, len(stream), size):
        reads.feed(stream[at : at + size])
    assert (reads.answer.tokens, reads.answer.reason) == (2, FinishReason.STOP)


def test_stream_is_counted_by_its_usage_if_it_states_one():
    reads = StreamFollower(1_000)
    usage = {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 40}}
    for each in [*CHAT[:-1], delta("", "length"), usage]:
        reads.feed(event(each))
    assert (reads.answer.tokens, reads.answer.prompt_tokens) == (40, 11)
    assert reads.answer.reason is FinishReason.LENGTH


@pytest.mark.parametrize("wrong", [-1, 2**24, 2**40, True, 1.5, "9", None])
def test_usage_that_is_no_number_of_tokens_is_ignored(wrong: object):
    for usage, expected in (
        ({"completion_tokens": wrong, "prompt_tokens": 3}, (2, 0)),
        ({"completion_tokens": 2**24 - 1, "prompt_tokens": wrong}, (2**24 - 1, 0)),
    ):
        reads = StreamFollower(1_000)
        for each in [*CHAT, {"choices": [], "usage": usage}]:
            reads.feed(event(each))
        assert (reads.answer.tokens, reads.answer.prompt_tokens) == expected


def test_event_of_a_stream_is_kept_up_to_a_bound():
    reads = StreamFollower(1_000)
    reads.feed(b"data: " + b"x" * 2_000)
    reads.feed(b"\n\n" + event(delta("a")))
    assert reads.answer.tokens == 1


def test_stream_that_is_not_understood_is_passed_over():
    reads = StreamFollower(1_000)
    for each in (b"data: {oops\n\n", event([1]), event({"choices": 3}), b": ping\n\n", b"\xff\n\n"):
        reads.feed(each)
    reads.feed(event(delta("a")))
    reads.end()
    assert reads.answer.tokens == 1


def test_body_is_read_at_its_end_up_to_a_bound():
    body = json.dumps(
        {
            "choices": [{"text": 'say "completion_tokens": 9', "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 3, "completion_tokens": 5},
        }
    ).encode()
    for most, expected in ((1_000, (5, 3)), (20, (0, 0))):
        reads = BodyFollower(most)
        reads.feed(body[:30])
        reads.feed(body[30:])
        assert reads.answer.tokens == 0
        reads.end()
        assert (reads.answer.tokens, reads.answer.prompt_tokens) == expected
    assert isinstance(follower("text/event-stream; charset=utf-8", 10), StreamFollower)
    assert isinstance(follower("application/json", 10), BodyFollower)


METRICS = b"""\
# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{reason="capacity"} 77.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="100"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="50"} 1.0
"""


def test_metrics_of_all_engines_add_up():
    assert parse_metrics(METRICS) == Reading(7, 1, 0.5, 2_400)
    plain = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
    assert parse_metrics(plain) == Reading(1, 0)
    with pytest.raises(ValueError, match="lack vllm:num_requests_running"):
        parse_metrics(b"process_cpu_seconds_total 3\n")


@pytest.mark.parametrize(
    ("running", "usage", "sentence"),
    [("+Inf", "0", "not finite"), ("NaN", "0", "not finite"), ("1", "NaN", "not finite"),
     ("1e9", "0", "count 1e.09 running and 0 waiting"), ("-1", "0", "count -1 running"),
     ("65537", "0", "count 65537 running")],
)  # fmt: skip
def test_metrics_that_cannot_be_are_refused(running: str, usage: str, sentence: str):
    text = f"vllm:num_requests_running {running}\nvllm:num_requests_waiting 0\n"
    with pytest.raises(ValueError, match=sentence):
        parse_metrics(f"{text}vllm:kv_cache_usage_perc {usage}\n".encode())


def test_capacity_that_cannot_be_is_unknown():
    blocks = b'vllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1\n' % (b"9" * 400)
    plain = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
    assert parse_metrics(plain + blocks) == Reading(1, 0)


@pytest.mark.parametrize(
    ("address", "valid"),
    [("10.0.0.1:80", True), ("[::1]:8000", True), ("::1:8000", False), ("host:80", False),
     ("10.0.0.1", False), ("10.0.0.1:0", False), ("10.0.0.1:70000", False), ("", False),
     ("10.0.0.1:8²", False), ("10.0.0.1:٣", False), ("10.0.0.1:" + "9" * 5_000, False)],
)  # fmt: skip
def test_address_is_ip_and_port(address: str, valid: bool):
    assert is_address(address) is valid


def test_endpoints_are_listed_in_toml_or_json():
    expected = ("10.0.0.1:80", "10.0.0.2:80")
    listed = '["10.0.0.1:80", "10.0.0.2:80", "10.0.0.1:80"]'
    assert parse_endpoints(f"endpoints = {listed}", ".toml") == expected
    assert parse_endpoints(f'{{"endpoints": {listed}}}', ".json") == expected
    assert parse_endpoints(listed, ".json") == expected


@pytest.mark.parametrize(
    ("text", "suffix", "sentence"),
    [
        ("endpoints = [", ".toml", "not valid TOML"),
        ("{", ".json", "not valid JSON"),
        ("endpoints = 3", ".toml", "it needs a list"),
        ('["a:80"]', ".json", "'a:80' is not IP:PORT"),
        ('["10.0.0.1:²"]', ".json", "'10.0.0.1:²' is not IP:PORT"),
        ("[" * 100_000, ".json", "not valid JSON"),
        ("", ".yaml", "name it"),
    ],
)
def test_endpoints_file_that_cannot_be_used_is_explained(text: str, suffix: str, sentence: str):
    with pytest.raises(EndpointsError, match=sentence):
        parse_endpoints(text, suffix)
