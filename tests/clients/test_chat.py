"""Clients that talk, at pinned versions, against a real server of the demo model: every answer is
right, streamed or not, alone or together, and errors are those that they know how to treat."""

from collections.abc import Callable

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

REVERSED = "green blue red"
DRAWN = "🐱🌙"
SORTED = "apple fig pear"
RECORD = {"fruit": "plum", "number": 7}
# Of a conversation in which each question needs one call.
AGENT_CALLS = ["calculate", "get_weather", "calculate"]
AGENT_ANSWERS = ["It is 82.", "Oslo: snowy, 3 degrees", "It is 78."]


def counted(first: int, last: int) -> str:
    return " ".join(map(str, range(first, last + 1)))


TOGETHER = [counted(n, n + 5) for n in range(8)]
ScriptOutput = Callable[[str, str], dict]


def test_openai_python_client_completes_chats_and_texts(script_output: ScriptOutput) -> None:
    seen = script_output("openai", "openai_python.py")
    assert seen["models"] == ["demo"]
    assert seen["answer"] == seen["chunks"] == seen["streamed"] == REVERSED
    assert seen["reason"] == "stop" and seen["request_id"]
    assert seen["last_usage"]["completion_tokens"] == seen["usage"]["completion_tokens"] == 4
    assert seen["usage"]["total_tokens"] == seen["usage"]["prompt_tokens"] + 4
    assert seen["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0
    assert seen["text"] == DRAWN and seen["texts"] == [DRAWN, DRAWN]
    assert seen["tokens"] == seen["completion_tokens"]
    assert seen["scored"] == "Emoji: cat moon\n" and seen["scores"][0] is None
    assert all(each < 0 for each in seen["scores"][1:]) and len(seen["scores"]) > 4
    assert seen["parts"] == seen["joined"], "text parts are joined by a line feed"
    assert seen["instructed"] == [SORTED, SORTED]
    assert seen["together"] == TOGETHER
    assert seen["response"] == seen["response_streamed"] == seen["retrieved"] == REVERSED
    assert (seen["unknown"]["kind"], seen["unknown"]["status"]) == ("NotFoundError", 404)
    assert (seen["overflow"]["kind"], seen["overflow"]["code"]) == (
        "BadRequestError",
        "context_length_exceeded",
    )
    assert "This model's maximum context length is 2048 tokens" in seen["overflow"]["says"]


def test_anthropic_python_client_receives_messages(script_output: ScriptOutput) -> None:
    seen = script_output("anthropic", "anthropic_python.py")
    assert seen["answer"] == seen["streamed"] == seen["final"] == seen["async"] == REVERSED
    assert seen["stop"] == ["end_turn", None] and seen["usage"]["output_tokens"] == 4
    assert seen["final_usage"] == seen["usage"]
    assert seen["counted"] == seen["usage"]["input_tokens"]
    assert seen["instructed"] == SORTED
    assert seen["stopped"] == ["green ", "stop_sequence", "blue"]
    assert seen["limited"] == "max_tokens"
    assert (seen["unknown"]["kind"], seen["unknown"]["status"]) == ("NotFoundError", 404)
    assert seen["unknown"]["type"] == "not_found_error"
    assert (seen["overflow"]["kind"], seen["overflow"]["status"]) == ("BadRequestError", 400)
    assert "maximum context length is 2048 tokens" in seen["overflow"]["says"]
    assert seen["called"] == [["tool_use", "weather", "Paris"], "tool_use"]
    assert seen["called_in_stream"] == seen["called"]


def test_anthropic_batches_client_receives_results(script_output: ScriptOutput) -> None:
    seen = script_output("anthropic", "anthropic_batches.py")
    counted = {"processing": 0, "succeeded": 1, "errored": 1, "canceled": 0, "expired": 0}
    assert seen["listed"] and seen["counts"] == counted
    assert seen["answer"] == REVERSED and seen["fault"].startswith("temperature: ")
    assert seen["refused"] == "the batch has ended"
    assert seen["deleted"] == "message_batch_deleted"


def test_openai_node_client_completes_chats_and_texts(node_output: Callable[[str], dict]) -> None:
    seen = node_output("openai_node.cjs")
    assert seen["models"] == ["demo"]
    assert seen["answer"] == seen["chunks"] == seen["streamed"] == REVERSED
    assert seen["reason"] == "stop"
    assert seen["last_usage"] == seen["usage"] and seen["usage"]["completion_tokens"] == 4
    assert seen["text"] == DRAWN and seen["together"] == TOGETHER
    assert (seen["unknown"]["kind"], seen["unknown"]["status"]) == ("NotFoundError", 404)
    assert (seen["overflow"]["kind"], seen["overflow"]["code"]) == (
        "BadRequestError",
        "context_length_exceeded",
    )


def test_ai_sdk_client_streams_extracts_and_calls_tools(node_output: Callable[[str], dict]) -> None:
    seen = node_output("ai_sdk.cjs")
    assert seen["answer"] == seen["streamed"] == REVERSED
    assert seen["object"] == RECORD
    assert (seen["calls"], seen["answers"]) == (AGENT_CALLS, AGENT_ANSWERS)


def test_langchain_client_completes_chats_batches_and_chains(script_output: ScriptOutput) -> None:
    seen = script_output("openai", "langchain_chat.py")
    assert seen["answer"] == seen["streamed"] == seen["async"] == REVERSED
    assert seen["several"], "the answer came in chunks"
    assert seen["usage"]["output_tokens"] == seen["streamed_usage"]["output_tokens"] == 4
    assert seen["batch"] == [counted(n, 5) for n in range(4)]
    assert seen["chain"] == "fig pear"
    assert seen["text"] == seen["text_streamed"] == DRAWN
    assert seen["called"] == seen["streamed_call"] == ["get_weather", {"city": "Paris"}]
    assert seen["concluded"] == "Paris: sunny, 5 degrees"
    assert seen["by_schema"] == RECORD


def test_agents_client_extracts_and_calls_tools(script_output: ScriptOutput) -> None:
    seen = script_output("agents", "agents_python.py")
    assert seen["by_schema"] == RECORD
    assert (seen["calls"], seen["answers"]) == (AGENT_CALLS, AGENT_ANSWERS)


def test_llamaindex_client_completes_chats_and_texts(script_output: ScriptOutput) -> None:
    seen = script_output("litellm", "llamaindex_chat.py")
    assert seen["answer"] == seen["streamed"] == seen["async"] == REVERSED
    assert seen["completed_by_chat"] == "fig pear"
    assert seen["called"] == ["get_weather", {"city": "Paris"}]
    assert seen["text"] == DRAWN and seen["text_streamed"] == "sun"


def test_litellm_client_completes_chat_calls_tools_and_falls_back_on_overflow(
    script_output: ScriptOutput,
) -> None:
    seen = script_output("litellm", "litellm_chat.py")
    assert seen["answer"] == seen["streamed"] == seen["async"] == seen["hosted_vllm"] == REVERSED
    assert seen["streamed_tokens"] == seen["usage"]["completion_tokens"] == 4
    assert seen["text"] == DRAWN
    overflows = [seen["overflow"], seen["overflow_vllm"]]
    assert [each["kind"] for each in overflows] == ["ContextWindowExceededError"] * 2, overflows
    assert seen["fallen_back"] == "from the larger model"
    assert seen["called"] == seen["called_vllm"] == {
        "calls": [["get_weather", {"city": "Paris"}]] * 2,
        "reason": "tool_calls",
        "concluded": "Paris: sunny, 5 degrees",
    }  # fmt: skip


def test_aisuite_client_completes_chat(script_output: ScriptOutput) -> None:
    seen = script_output("locust", "aisuite_chat.py")
    assert seen == {"answer": REVERSED, "instructed": SORTED}
