"""Lengths of a conversation's earlier answers, estimated for the predictor."""

from gateway.config import GatewayConfig
from gateway.faces.grpc.decode import decode_request
from gateway.peers.messages import new_request
from gateway.requests.parser import MAX_ANSWERS, Parser
from gateway.types.generation import ContextLimit, RequestArrival
from protos.generated import gateway_pb2
from tests.gateway.gateway_fakes import demo_folder, demo_text


def reported(*turns: tuple[str, str]) -> tuple[list[int], int]:
    """(answer_tokens, prompt_tokens) of a chat."""
    messages = [gateway_pb2.ChatMessage(role=role, content=content) for role, content in turns]
    request = gateway_pb2.GenerateRequest(chat=gateway_pb2.Chat(messages=messages))
    parser = Parser(GatewayConfig(model=demo_folder()), demo_text(), lambda: 0)
    generation = parser.parse(
        decode_request(request), ContextLimit(10_000, "the cache"), RequestArrival(0.0)
    )
    text = new_request("r", generation, 0, 0.0).request.text
    return list(text.answer_tokens), generation.prompt_tokens


def test_answer_tokens_are_estimated_by_share_of_the_prompt() -> None:
    answers, prompt_tokens = reported(
        ("system", "s" * 10), ("user", "u" * 20), ("assistant", "a" * 40), ("user", "v" * 10),
        ("assistant", ""), ("user", "w" * 20),
    )  # fmt: skip
    assert answers == [round(40 / 100 * prompt_tokens), 0]


def test_first_question_and_raw_prompt_have_no_answer_tokens() -> None:
    assert reported(("user", "hello"))[0] == []
    parser = Parser(GatewayConfig(model=demo_folder()), demo_text(), lambda: 0)
    raw = gateway_pb2.GenerateRequest(prompt="hello")
    generation = parser.parse(
        decode_request(raw), ContextLimit(10_000, "the cache"), RequestArrival(0.0)
    )
    assert generation.answer_tokens == ()


def test_answer_tokens_are_limited_to_the_last_answers() -> None:
    turns = [("user", "q"), ("assistant", "a" * 50)] * 39
    answers, _ = reported(*turns, ("user", "q"), ("assistant", "a" * 500), ("user", "q"))
    assert len(answers) == MAX_ANSWERS == 32
    assert answers[-1] > 5 * answers[-2] > 0
