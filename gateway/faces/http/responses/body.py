"""The body of `/v1/responses`, and its conversion to a ClientRequest."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import PrivateAttr

from gateway.faces.http.dialect.constraints import read_text_format
from gateway.faces.http.dialect.content import decode_messages
from gateway.faces.http.dialect.fields import FieldRule
from gateway.faces.http.dialect.metadata import check_metadata
from gateway.faces.http.dialect.responses_fields import RESPONSES_FIELDS
from gateway.faces.http.responses.errors import PreviousNotFound, PreviousUnfinished
from gateway.faces.http.responses.items import Entry, decode_input, name_items
from gateway.faces.http.responses.store import StoredResponse
from gateway.faces.http.responses.tools import read_response_tools
from gateway.faces.http.schema import Body, Int32, Json, read_body, read_budget
from gateway.requests.prompts import check_template_size
from gateway.requests.sampling import find_range_fault
from gateway.types.client_request import ClientRequest, Conversation
from gateway.types.constraint import Constraint
from services.runtime.errors import InvalidArgument

TRUNCATION = {"auto": -1, "disabled": None}
SCORES = "message.output_text.logprobs"
INCLUDED = (  # of OpenAI; all but the first add nothing here
    SCORES,
    "reasoning.encrypted_content",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
TEXT_FIELDS = ("format", "verbosity")


class ResponsesBody(Body):
    """`POST /v1/responses`."""

    fields: ClassVar[Mapping[str, FieldRule]] = RESPONSES_FIELDS

    input: object = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool = True
    background: bool = False
    max_output_tokens: Int32 | None = None
    text: dict[str, object] | None = None
    reasoning: dict[str, object] | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: Int32 | None = None
    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, object] | None = None
    thinking_token_budget: Int32 | None = None

    _history: Sequence[Entry] = PrivateAttr(default=())
    _said: Sequence[Entry] = PrivateAttr(default=())
    _recalled: Sequence[Entry] = PrivateAttr(default=())
    _inputs: Sequence[Entry] | None = PrivateAttr(default=None)

    @property
    def inputs(self) -> Sequence[Entry]:
        """All items before the answer. They get their ids once."""
        if self._inputs is None:
            self._inputs = [*self._recalled, *name_items(self.input)]
        return self._inputs

    @property
    def recalled_bytes(self) -> int:
        """Characters of the earlier conversation, about its bytes."""
        return sum(len(str(message.get("content", ""))) for message in self._history)

    @property
    def scored(self) -> bool:
        """Whether the output has the scores of its tokens."""
        return SCORES in (self.include or ())

    def recall(self, find: Callable[[str], StoredResponse | None]) -> None:
        """Loads the conversation that the response continues. Raises InvalidArgument."""
        self._said = decode_input(self.input)
        name = self.previous_response_id
        if name is None:
            return
        stored = find(name)
        if stored is None:
            raise PreviousNotFound(name)
        if stored.running:
            raise PreviousUnfinished(name)
        self._recalled = stored.items
        self._history = decode_input(self._recalled)

    def client_requests(self) -> list[ClientRequest]:
        """A list of one."""
        instructed = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages = decode_messages([*instructed, *self._history, *self._said])
        if not messages:
            raise InvalidArgument("input", "must not be empty")
        tools, use = read_response_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        shown = () if use is None else tools
        conversation = Conversation(messages, self._template_kwargs(), tools=shown)
        if self.truncate_prompt_tokens is None:
            self.truncate_prompt_tokens = TRUNCATION[self.truncation]
        logprobs = (self.top_logprobs or 0) if self.scored else None
        sampling = self._sampling(logprobs, self.max_output_tokens)
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise InvalidArgument("max_output_tokens", "must be at least 1")
        request = self._client_request(conversation, sampling)
        return [
            replace(
                request,
                tools=use,
                separates_reasoning=True,
                reasoning_tokens=read_budget(self.thinking_token_budget),
            )
        ]

    def _template_kwargs(self) -> Mapping[str, object]:
        given: dict[str, object] = {}
        effort = (self.reasoning or {}).get("effort")
        if effort is not None:
            if not isinstance(effort, str):
                raise InvalidArgument("reasoning.effort", "must be a string")
            given = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        given |= self.chat_template_kwargs or {}
        if given:
            check_template_size(json.dumps(given))
        return given


def read_responses_body(
    find: Callable[[str], StoredResponse | None], fields: Json
) -> ResponsesBody:
    """`find` returns a stored response by its id. Raises InvalidArgument naming the first wrong or
    refused field."""
    body = read_body(ResponsesBody, fields)
    if body.background and not body.store:
        raise InvalidArgument("store", "must be true with background: the response is named again")
    _check_scores(body)
    check_metadata(body.metadata or {})
    body.constrain(_read_format(body.text or {}))
    body.recall(find)
    return body


def _check_scores(body: ResponsesBody) -> None:
    for at, name in enumerate(body.include or ()):
        if name not in INCLUDED:
            known = ", ".join(INCLUDED)
            raise InvalidArgument(f"include[{at}]", f"must be one of {known}, not {name[:80]!r}")
    alternatives = body.top_logprobs or 0
    if fault := find_range_fault("logprobs", alternatives):
        raise InvalidArgument("top_logprobs", fault)
    if alternatives and not body.scored:
        raise InvalidArgument("top_logprobs", f"needs include with {SCORES}")


def _read_format(text: Mapping[str, object]) -> Constraint | None:
    """OpenAI's `text.format`, which has the fields of a schema beside its type."""
    unknown = next((name for name in text if name not in TEXT_FIELDS), None)
    if unknown is not None:
        raise InvalidArgument(f"text.{unknown[:80]}", "is not a field of it; remove it")
    given = text.get("format")
    return None if given is None else read_text_format("text.format", given)
