"""`foretoken.LLM`: answers many prompts in this process, without a server.

with LLM("models/demo") as llm:
    for answer in llm.generate(["copy: a b"], SamplingParams(max_tokens=16)):
        print(answer.text)
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NoReturn, Self, TypeVar, Unpack

from foretoken.client.answers import Answer
from foretoken.offline.answers import to_answer
from foretoken.offline.background import BackgroundSystem
from foretoken.offline.job import IN_FLIGHT, Handlers, JobRunner, OfflineRequest
from foretoken.offline.sampling import (
    Message,
    Prompt,
    SamplingParams,
    chat_fields,
    completion_fields,
)
from foretoken.offline.settings import Settings, read_settings
from foretoken.running.console.bar import ProgressBar
from gateway.faces.http.offline.requests import CHAT_URL, COMPLETION_URL
from gateway.faces.http.schema import Json
from services.runtime.errors import InvalidArgument, ServiceError

T = TypeVar("T")


class LLM:
    """A model with its scheduler and workers, which run until `close` or the end of a `with`.

    At most `in_flight` requests run at a time. `by_forecast`: the requests of a job begin by the
    forecast lengths of their answers, longest first, else as given. `progress`: a job shows a bar
    on a terminal. Raises ValueError, with a sentence that names the setting, for a mistake.
    """

    def __init__(
        self,
        model: str = "",
        *,
        in_flight: int = IN_FLIGHT,
        by_forecast: bool = True,
        progress: bool = True,
        **settings: Unpack[Settings],
    ):
        if in_flight < 1:
            raise ValueError(f"in_flight: at least 1, not {in_flight}")
        self._progress = progress
        self.background = BackgroundSystem(read_settings(model, settings))
        self._closing = weakref.finalize(self, self.background.close)
        self._runner = JobRunner.for_system(self.background.system, in_flight, by_forecast)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Answer]:
        """The answers to texts or lists of token ids, in their order. `params`: for all, or one
        for each. Raises ValueError that names the prompt and the field before anything runs, and
        ServiceError if an answer fails."""
        listed = _list_prompts(prompts)
        return self._run(
            [
                _name_faults(
                    f"prompts[{at}]", COMPLETION_URL, partial(completion_fields, prompt, own)
                )
                for at, (prompt, own) in enumerate(_pair(listed, params))
            ]
        )

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Answer]:
        """The answers to one conversation or several, in their order; else like `generate`."""
        listed = _list_conversations(messages)
        return self._run(
            [
                _name_faults(f"messages[{at}]", CHAT_URL, partial(chat_fields, conversation, own))
                for at, (conversation, own) in enumerate(_pair(listed, params))
            ]
        )

    def close(self) -> None:
        """Stops all processes. Does nothing once closed."""
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self, requests: Sequence[OfflineRequest]) -> list[Answer]:
        total, answers = len(requests), dict[str, Answer]()
        with ProgressBar("reading the prompts", shown=self._progress) as bar:

            def on_answer(request: OfflineRequest, answer: Answer) -> None:
                answers[request.id] = answer
                bar.show("generating", len(answers), total, "generating")

            handlers = Handlers(
                lambda _, call, chunks: to_answer(call, chunks),
                on_answer,
                _raise_fault,
                lambda read: bar.show("reading the prompts", read, total),
            )
            # All are read before the first begins: a mistake costs no time.
            self.background.run(self._runner.run(iter(requests), total, handlers))
        return [answers[request.id] for request in requests]


def _raise_fault(request: OfflineRequest, error: ServiceError) -> NoReturn:
    if isinstance(error, InvalidArgument):
        raise ValueError(f"{request.name}: {error.message}")
    raise error


def _name_faults(name: str, url: str, make_fields: Callable[[], Json]) -> OfflineRequest:
    """The request, or ValueError with its name."""
    try:
        return OfflineRequest(name, name, url, make_fields())
    except InvalidArgument as error:
        raise ValueError(f"{name}: {error.message}") from None


def _list_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """One prompt, a text, token ids or an object of either, becomes a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    tokens = [item for item in prompts if isinstance(item, int)]
    if tokens and len(tokens) == len(prompts):
        return [tokens]
    return [item if isinstance(item, str | Mapping | Sequence) else [item] for item in prompts]


def _list_conversations(
    messages: Sequence[Message] | Sequence[Sequence[Message]],
) -> Sequence[Sequence[Message]]:
    """One conversation becomes a list."""
    single = [each for each in messages if isinstance(each, Mapping)]
    if single and len(single) == len(messages):
        return [single]
    return [[each] if isinstance(each, Mapping) else each for each in messages]


def _pair(
    listed: Sequence[T], params: SamplingParams | Sequence[SamplingParams] | None
) -> Iterator[tuple[T, SamplingParams]]:
    """Each item with its parameters. Raises ValueError for another number of them."""
    if params is None or isinstance(params, Mapping):
        params = [params or SamplingParams()] * len(listed)
    if len(params) != len(listed):
        raise ValueError(
            f"params: {len(params)} for {len(listed)} prompts; give one for all, or one for each"
        )
    return zip(listed, params, strict=True)
