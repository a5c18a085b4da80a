"""The readers of a model's answers, and requests with what their answers need."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.readers.calls.formats import HERMES
from gateway.readers.constraints import constrain_calls, last_message
from gateway.readers.formats import AnswerFormats, check_names, select_formats
from gateway.readers.opening import select_reader
from gateway.readers.reasoning import ReasoningFormat
from gateway.requests.text import Text
from gateway.types.client_request import ClientRequest
from gateway.types.generation import GenerationRequest, ReasoningLimit
from gateway.types.tools import ToolUse
from services.runtime.errors import InvalidArgument

END_TOKENS = 64  # of a prompt, which can open the reasoning
BUDGET = "thinking_token_budget"
UNKNOWN_REASONING = (
    "the marks of the model's reasoning are not known: start the server with --reasoning-parser, "
    "or use max_tokens"
)
NOT_SHOWN = (
    "the model's chat template does not show tools to the model: use another model or chat "
    "template, or force a call by tool_choice"
)
UNKNOWN_FORMAT = (
    "the format in which the model calls tools is not known: start the server with "
    "--tool-call-parser, or force a call by tool_choice"
)


class AnswerReading:
    """How the answers of one model are read. Raises ConfigError for an unknown name."""

    def __init__(self, text: Text, tool_call_parser: str, reasoning_parser: str):
        """Both are names of formats, `auto` or `none`."""
        self._text = text
        check_names(tool_call_parser, reasoning_parser)
        self.formats = select_formats(
            text.chat_template, tool_call_parser, reasoning_parser, text.response_template
        )
        self._shows_tools = "tools" in text.chat_template
        marks = {*_marks(self.formats, ToolUse()), *HERMES.begins}  # of forced calls, too
        self._special_marks = frozenset(filter(self._has_special, marks))

    def check(self, request: ClientRequest) -> None:
        """Raises InvalidArgument if the model cannot use the tools, or its reasoning has no marks
        to limit it by. O(1)."""
        use, tokens = request.tools, request.reasoning_tokens
        if tokens is not None and tokens < 0:
            raise InvalidArgument(BUDGET, f"must be at least 0, or -1 for no limit, not {tokens}")
        unknown = self.formats.reasoning is None and not request.limits_known_reasoning
        if tokens is not None and unknown:
            raise InvalidArgument(BUDGET, UNKNOWN_REASONING)
        if use is None or use.required:
            return
        if not self._shows_tools:
            raise InvalidArgument("tools", NOT_SHOWN)
        if self.formats.calls is None and self.formats.whole is None:
            raise InvalidArgument("tools", UNKNOWN_FORMAT)

    def apply(self, request: GenerationRequest) -> GenerationRequest:
        """The request with the reader of its answers, and with what they must follow."""
        client = request.client
        reasoning = self.formats.reasoning if client.separates_reasoning else None
        whole = self.formats.whole if client.separates_reasoning or client.tools else None
        if client.tools is None and reasoning is None and whole is None:
            return request
        formats = replace(self.formats, reasoning=reasoning, whole=whole)
        end = ""
        if reasoning is not None or whole is not None:
            end = self._text.decode(request.prompt_ids[-END_TOKENS:], skip_special_tokens=False)
        reader = select_reader(formats, client.tools, end)
        if reader is None:
            return request
        constraint = client.constraint
        if client.tools is not None:
            constraint = constrain_calls(formats, client.tools, constraint, self._spell)
        elif constraint is not None and whole is not None and (last := last_message(formats)):
            constraint = replace(constraint, after=self._spell(last))
        if constraint is not None and reasoning and reasoning.is_opened_by(end):
            constraint = replace(constraint, after=self._spell(reasoning.end))
        sampling, marks = request.sampling, _marks(formats, client.tools)
        if whole is not None or not self._special_marks.isdisjoint(marks):
            sampling = replace(sampling, skip_special_tokens=False)
        return replace(
            request,
            client=replace(client, constraint=constraint),
            sampling=sampling,
            open_reader=reader,
            reasoning_limit=self._limit(client.reasoning_tokens, reasoning, end),
        )

    def _limit(
        self, tokens: int | None, reasoning: ReasoningFormat | None, prompt_end: str
    ) -> ReasoningLimit | None:
        opened = reasoning and reasoning.is_opened_by(prompt_end)
        if tokens is None or reasoning is None or opened is False:
            return None
        start_ids, end_ids = (
            self._text.encode(mark, add_special_tokens=False)
            for mark in (reasoning.start, reasoning.end)
        )
        if not opened:
            tokens += len(start_ids)
        limit = max(1, tokens)  # a worker's first token tells that it has begun
        return ReasoningLimit(limit, reasoning.start, reasoning.end, end_ids, bool(opened))

    def _has_special(self, mark: str) -> bool:
        return any(special in mark for special in self._text.special_texts)

    def _spell(self, text: str) -> Sequence[str | int]:
        """The text, with special tokens as their ids."""
        return self._text.split_specials(text)


def _marks(formats: AnswerFormats, use: ToolUse | None) -> Sequence[str]:
    """The marks that the text of an answer must have."""
    reasoning = formats.reasoning
    marks = [] if reasoning is None else [reasoning.start, reasoning.end]
    if use is not None:
        call_format = formats.calls_of(use)
        marks += () if call_format is None else call_format.begins
    return marks
