"""What becomes of a request, by the server's answers over HTTP."""

import asyncio
from collections.abc import Sequence as Seq

import pytest

from foretoken.running.options import demo_model
from services.worker.backend.calls import BackendCalls
from services.worker.backend.capacity import Capacity
from services.worker.backend.client import BackendClient
from services.worker.backend.config import BackendConfig
from services.worker.backend.dialect import Dialect
from services.worker.backend.discovery import Backend
from services.worker.backend.requests import Arrival
from services.worker.folder import load_tokenizer
from services.worker.requests.types.prompt import GREEDY, Prompt, SamplingParams, SourceText
from services.worker.requests.types.sequence import Sequence
from tests.foretoken.bench.openai_fake import ScriptedAnswer, error_answer, event, fake_server

DEMO = load_tokenizer(demo_model())


class Seen:
    """Outcomes in order; `ended` is set by the last one."""

    def __init__(self) -> None:
        self.outcomes: list[tuple[str, object]] = []
        self.ended = asyncio.Event()

    def on_sent(self, request_id: str, context_tokens: int) -> None:
        self.outcomes.append(("sent", context_tokens))

    def on_arrivals(self, request_id: str, arrivals: object) -> None:
        self.outcomes.append(("arrivals", arrivals))

    def _end(self, outcome: str, why: str) -> None:
        self.outcomes.append((outcome, why))
        self.ended.set()

    def on_refused(self, request_id: str, why: str) -> None:
        self._end("refused", why)

    def on_busy(self, request_id: str, why: str) -> None:
        self._end("busy", why)

    def on_lost(self, request_id: str, why: str) -> None:
        self._end("lost", why)


async def outcomes(
    answer: ScriptedAnswer,
    returns_ids: bool = True,
    delivered: Seq[int] = (),
    sampling: SamplingParams = GREEDY,
) -> list[tuple[str, object]]:
    """Those of a request for which the server has this answer, after it is sent."""
    seen = Seen()
    prompt = Prompt("r", [5, 6, *delivered], 2, 9, sampling, "gateway")
    backend = Backend(
        "m", Dialect(True, returns_ids, constraints="structured_outputs"), Capacity(), False
    )
    async with (
        fake_server(lambda _: answer) as server,
        BackendClient(server.url, BackendConfig()) as client,
        asyncio.timeout(30),
        asyncio.TaskGroup() as tasks,
    ):
        calls = BackendCalls(client, backend, DEMO, 1, 1.0, tasks, seen)
        calls.begin(Sequence.start(prompt, 9))
        await seen.ended.wait()
    sent, *others = seen.outcomes
    assert sent == ("sent", 2)
    return others


TOKEN = event(choices=[{"token_ids": [7]}])
BROKEN = event(error="out of memory")
NO_FORMAT = "an event of the backend is not in OpenAI's format"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (  # in one read
            ScriptedAnswer([TOKEN + BROKEN + TOKEN]),
            [("arrivals", [Arrival(7)]), ("lost", "out of memory")],
        ),
        (
            ScriptedAnswer([event(choices=[{"token_ids": [-1]}])]),
            [("lost", NO_FORMAT)],
        ),
        (error_answer(404, "no model"), [("lost", "no model")]),
        (error_answer(400, "too long"), [("refused", "too long")]),
        (
            ScriptedAnswer([b'{"error": "full"}'], 429, "Retry-After: \N{SUPERSCRIPT TWO}\r\n"),
            [("busy", "full")],
        ),
    ],
)
async def test_outcome_by_answer(
    answer: ScriptedAnswer, expected: list[tuple[str, object]]
) -> None:
    assert await outcomes(answer) == expected


SIX = SamplingParams(temperature=0.0, grammar="{}", source=SourceText("regex", "6+"))


async def test_answer_with_a_grammar_begins_anew_behind_what_its_client_has() -> None:
    """With another answer it ends."""
    same = ScriptedAnswer([TOKEN + TOKEN, TOKEN + BROKEN])
    known = [7, 7]
    assert await outcomes(same, delivered=known, sampling=SIX) == [
        ("arrivals", [Arrival(7)]),
        ("lost", "out of memory"),
    ]
    ((outcome, why),) = await outcomes(same, delivered=[7, 8], sampling=SIX)
    assert outcome == "refused" and "gave another one" in str(why)


async def test_text_that_no_tokenizer_takes_concerns_its_request_alone() -> None:
    half = ScriptedAnswer([event(choices=[{"text": "\ud800"}])])
    ((outcome, why),) = await outcomes(half, returns_ids=False)
    assert outcome == "lost" and "cannot be read" in str(why)
