"""The Python clients and `foretoken chat`, against a gateway on a real socket."""

import asyncio
import io
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import pytest
from rich.console import Console
from typer import Typer
from typer.testing import CliRunner

from foretoken import (
    AsyncClient,
    Chunk,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    Unavailable,
)
from foretoken.commands.chat import Conversation, chat
from protos.generated import common_pb2 as common
from protos.generated import gateway_pb2, gateway_pb2_grpc
from protos.generated import scheduler_pb2 as sched
from protos.generated.worker_pb2 import Prompt
from services.core import FinishReason
from services.runtime.server import Mount, listening
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of


def answer(prompt: Prompt) -> Sequence[int]:
    return tokens_of(f"answer to {prompt.prompt_tokens} tokens 😀")


@pytest.fixture
async def house() -> AsyncIterator[Harness]:
    async with run_harness(answer) as made:
        yield made


async def test_client_streams_and_completes(house: Harness) -> None:
    def work() -> None:
        with Client(house.grpc_address) as client:
            stream = client.generate("1,", max_tokens=50)
            chunks = list(stream)
            text = "".join(chunk.text for chunk in chunks)
            assert text == "answer to 2 tokens 😀"
            assert chunks[-1].finish_reason is FinishReason.STOP
            assert stream.usage is not None
            assert stream.usage.completion_tokens == len(tokens_of(text))
            whole = client.complete(tokens=tokens_of("123"))
            assert whole.text == "answer to 3 tokens 😀"
            assert client.models() == ["demo"]

    await asyncio.to_thread(work)


async def test_client_receives_forecasts(house: Harness) -> None:
    forecast = common.Forecast(points=[4, 60])
    house.scheduler.forecast = sched.ForecastUpdate(forecast=forecast, token_s=0.1, ttft_s=0.3)

    def work() -> None:
        with Client(house.grpc_address) as client:
            chunks = list(client.generate("1,", max_tokens=50, include_forecast=True))
            plain = list(client.generate("1,", max_tokens=50))
        first, last = chunks[0].forecast, chunks[-1].forecast
        assert first and last
        assert (first.high_tokens, first.sla_expected) == (50, True)
        assert first.ttft_s == pytest.approx(2 * 0.3 + 0.02)  # before any calibration
        assert last.expected_tokens == sum(len(chunk.token_ids) for chunk in chunks)
        assert all(chunk.forecast is None for chunk in plain)

    await asyncio.to_thread(work)


async def test_async_client_accepts_all_inputs_and_options(house: Harness) -> None:
    async with AsyncClient(house.grpc_address) as client:
        turns = [{"role": "user", "content": "1,"}]
        whole = await client.complete(
            messages=turns, n=2, logprobs=1, stop="never", sla="interactive", timeout_s=30,
            temperature=0.5, top_p=0.9, top_k=3, min_p=0.1, seed=-1, min_tokens=1,
            ignore_eos=True, repetition_penalty=1.5, presence_penalty=1, frequency_penalty=1,
            cache_salt="mine",
        )  # fmt: skip
        assert {prompt.cache_salt for prompt in house.worker.prompts} == {"mine"}
        assert [choice.text for choice in whole.choices] == ["answer to 5 tokens 😀"] * 2
        assert [len(c.logprobs) for c in whole.choices] == [len(c.token_ids) for c in whole.choices]
        assert whole.usage.prompt_tokens == 5
        assert await client.models() == ["demo"]
        with pytest.raises(TypeError, match="exactly one of prompt, messages and tokens"):
            client.generate("1,", tokens=[1])
        with pytest.raises(TypeError, match="unknown SLA budget ttft"):
            client.generate("1,", sla={"ttft": 1.0})


async def test_leaving_a_stream_cancels_the_request(house: Harness) -> None:
    house.worker.script = lambda _: tokens_of("1" * 400)
    async with AsyncClient(house.grpc_address) as client:
        stream = client.generate("1,")
        async for _ in stream:
            stream.cancel()
        await house.until(lambda: bool(house.scheduler.cancels))
        assert house.scheduler.cancels[0].reason == common.FINISH_REASON_CANCELLED

    def work() -> None:
        with Client(house.grpc_address) as client:
            for _ in client.generate("1,"):
                break

    await asyncio.to_thread(work)
    await house.until(lambda: len(house.scheduler.cancels) == 2)


async def test_client_errors_are_actionable(house: Harness) -> None:
    full = sched.Rejected(
        reason=sched.REJECT_REASON_QUEUE_FULL, message="queue is full", retry_after_s=4
    )

    def work() -> None:
        with Client(house.grpc_address) as client:
            with pytest.raises(InvalidRequest, match="temperature: must be between 0 and 2"):
                client.complete("1,", temperature=3)
            with pytest.raises(InvalidRequest, match="known: demo"):
                client.complete("1,", model="gpt-9")
            house.scheduler.answers = lambda _: sched.RequestEvent(rejected=full)
            with pytest.raises(Overloaded, match="queue is full") as caught:
                client.complete("1,")
            assert caught.value.retry_after_s == 4
            house.scheduler.answers, house.scheduler.place = lambda _: None, False
            with pytest.raises(DeadlineExceeded):
                client.complete("1,", timeout_s=1)
        with Client("127.0.0.1:1") as client:
            with pytest.raises(Unavailable, match=r"no server answers at 127.0.0.1:1"):
                client.complete("1,")
            with pytest.raises(Unavailable, match=r"is `foretoken serve` running\?"):
                client.models()

    await asyncio.to_thread(work)


class FakeStream:
    """Yields chunks and raises exceptions, in the given order."""

    def __init__(self, *items: Any):
        self.items, self.cancelled = items, False

    def __iter__(self) -> Iterator[Any]:
        for item in self.items:
            if isinstance(item, BaseException):
                raise item
            yield item

    def cancel(self) -> None:
        self.cancelled = True


def _conversation(generate: Any, console: Console) -> Conversation:
    return Conversation(generate, console, console, "be kind")


def conversation(*streams: Any) -> tuple[Conversation, io.StringIO]:
    out, queue = io.StringIO(), list(streams)
    return _conversation(lambda _: queue.pop(0), Console(file=out)), out


def piece(text: str, reason: FinishReason | None = None) -> Any:
    return Chunk(0, text, [], (), reason)


def test_conversation_sends_earlier_turns() -> None:
    talk, out = conversation(
        FakeStream(piece("hel"), piece("lo", FinishReason.STOP)),
        FakeStream(piece("[x]", FinishReason.LENGTH)),
    )
    talk.ask("hi")
    talk.ask("more")
    assert [turn["content"] for turn in talk.turns] == ["be kind", "hi", "hello", "more", "[x]"]
    assert out.getvalue() == "hello\n[x] [cut at max_tokens]\n\n"


def test_ctrl_c_cancels_an_answer_and_keeps_its_text() -> None:
    stream = FakeStream(piece("hel"), KeyboardInterrupt())
    talk, out = conversation(stream)
    talk.ask("hi")
    assert stream.cancelled
    assert [turn["content"] for turn in talk.turns] == ["be kind", "hi", "hel"]
    assert "hel [cancelled]" in out.getvalue()


def test_failed_answer_removes_its_question() -> None:
    talk, out = conversation(FakeStream(Overloaded("queue is full", 4)))
    talk.ask("hi")
    assert [turn["role"] for turn in talk.turns] == ["system"]
    assert "queue is full" in out.getvalue()


@pytest.mark.parametrize("leave", ["/exit\n", ""])
async def test_chat_command_ends_at_exit_or_end_of_input(house: Harness, leave: str) -> None:
    app = Typer()
    app.command()(chat)
    lines = f"12\n\nand more\n{leave}"
    result = await asyncio.to_thread(
        CliRunner().invoke, app, ["--server", house.grpc_address, "--system", "be kind"], lines
    )
    assert result.exit_code == 0, result.output
    assert result.output.count("answer to") == 2
    assert len(house.scheduler.requests) == 2
    first, second = house.scheduler.requests
    assert (first.text.instruction, second.text.user_input) == ("be kind", "and more")
    assert second.prompt_tokens > first.prompt_tokens


def test_chat_reports_an_unreachable_grpc_server() -> None:
    app = Typer()
    app.command()(chat)
    result = CliRunner().invoke(app, ["--server", "127.0.0.1:1"])
    assert result.exit_code == 1
    assert "is `foretoken serve` running?" in result.output


def type_lines(talk: Conversation, *lines: str) -> None:
    for line in lines:
        talk.handle(line)


def test_chat_conversation_handles_slash_commands() -> None:
    talk, out = conversation(FakeStream(piece("hello", FinishReason.STOP)))
    type_lines(talk, "hi", "/system  be short ", "/frobnicate now", "/help")
    assert [turn["content"] for turn in talk.turns] == ["be short", "hi", "hello"]
    printed = out.getvalue()
    assert "unknown command /frobnicate; /help lists commands" in printed
    assert all(name in printed for name in ("/help", "/exit", "/quit", "/system TEXT", "/clear"))
    type_lines(talk, "/clear")
    assert [turn["content"] for turn in talk.turns] == ["be short"]
    type_lines(talk, "/system")
    assert talk.turns == [] and not talk._over
    type_lines(talk, "/quit")
    assert talk._over


def test_double_slash_asks_a_question_with_a_slash() -> None:
    talk, _ = conversation(FakeStream(piece("yes", FinishReason.STOP)))
    type_lines(talk, "//etc is what?")
    assert talk.turns[-2:] == [
        {"role": "user", "content": "/etc is what?"},
        {"role": "assistant", "content": "yes"},
    ]


class KeyRecorder(gateway_pb2_grpc.GatewayServicer):
    """Records the API key of each call."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    async def ListModels(self, request: Any, context: Any) -> gateway_pb2.ListModelsResponse:
        self._record(context)
        return gateway_pb2.ListModelsResponse()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self._record(context)
        return
        yield

    async def Why(self, request: Any, context: Any) -> Any: ...

    def _record(self, context: Any) -> None:
        sent = dict(context.invocation_metadata())
        self.keys.append(sent.get("authorization", "none"))


async def test_client_sends_api_key_as_metadata() -> None:
    recorder = KeyRecorder()
    add = gateway_pb2_grpc.add_GatewayServicer_to_server
    async with listening([Mount("foretoken.v1.Gateway", add, recorder)], "127.0.0.1:0") as live:
        address = f"127.0.0.1:{live.port}"

        def work() -> None:
            with Client(address, api_key="sk-1") as client:
                client.models()
                client.complete("1,", timeout_s=9)
            with Client(address) as client:
                client.complete("1,")

        await asyncio.to_thread(work)
        async with AsyncClient(address, "sk-2") as client:
            await client.models()
            await client.complete("1,")
    assert recorder.keys == ["Bearer sk-1", "Bearer sk-1", "none", "Bearer sk-2", "Bearer sk-2"]


async def test_client_is_safe_across_threads(house: Harness) -> None:
    texts: list[str] = []

    def work() -> None:
        with Client(house.grpc_address) as client:
            threads = [
                threading.Thread(target=lambda: texts.append(client.complete("1,").text))
                for _ in range(8)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    await asyncio.to_thread(work)
    assert texts == ["answer to 2 tokens 😀"] * 8


async def test_async_client_accepts_vllm_option_names(house: Harness) -> None:
    house.worker.cached_tokens = 1
    turns = [{"role": "user", "content": "1,"}, {"role": "assistant", "content": "so"}]
    async with AsyncClient(house.grpc_address) as client:
        whole = await client.complete(
            messages=turns, user="ann", priority=-2, request_id="mine", prompt_logprobs=1,
            chat_template_kwargs={"mood": "good"}, continue_final_message=True,
            truncate_prompt_tokens=4, stop_token_ids=[5], logit_bias={3: -1.5},
            allowed_token_ids=[40, 41], bad_words=["apple"], skip_special_tokens=False,
            include_stop_str_in_output=True, spaces_between_special_tokens=False,
        )  # fmt: skip
        scored = await client.complete("1,2", max_tokens=0, prompt_logprobs=0)
        with pytest.raises(TypeError, match="add_generation_prompt requires messages"):
            client.generate("1,", add_generation_prompt=False)
        with pytest.raises(InvalidRequest, match="cannot set tools"):
            await client.complete(messages=turns, chat_template_kwargs={"tools": []})
        with pytest.raises(InvalidRequest, match="This model's maximum context length is 512"):
            await client.complete("1,", max_tokens=600)
    prompt, request = house.worker.prompts[0], house.scheduler.requests[0]
    assert (request.tenant, request.priority, whole.request_id) == ("ann", -2, "mine")
    assert len(prompt.token_ids) == 4
    assert [p.token_id for p in whole.choices[0].prompt_logprobs] == list(prompt.token_ids[1:])
    assert dict(prompt.sampling.logit_bias) == {3: -1.5}
    assert list(prompt.sampling.stop_token_ids) == [5]
    assert whole.usage.cached_tokens == 1
    [choice] = scored.choices
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("", [], FinishReason.LENGTH)
    assert [p.logprob for p in choice.prompt_logprobs] == [-1, -2]
    assert scored.usage.completion_tokens == 0
