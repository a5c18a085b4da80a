"""The answers of `/v1/responses`, complete and streamed."""

import time
from collections.abc import Callable, Mapping, Sequence

from gateway.faces.http.answers.items import (
    AnswerItems,
    Ended,
    Grown,
    Item,
    ItemKind,
    Started,
    Step,
)
from gateway.faces.http.answers.logprobs import encode_scores
from gateway.faces.http.answers.parts import count_tokens, note_content
from gateway.faces.http.answers.sse import COMMENT, encode_typed_event
from gateway.faces.http.errors import http_status
from gateway.faces.http.responses.body import ResponsesBody
from gateway.requests.text import Text
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk, Logprob
from services.core import FinishReason
from services.runtime.errors import ServiceError

Entry = dict[str, object]

PREFIXES = {ItemKind.CONTENT: "msg_", ItemKind.REASONING: "rs_", ItemKind.CALL: "fc_"}
# The events of an item's text, and the name of the text in the last one.
EVENTS: Mapping[ItemKind, tuple[str, str]] = {
    ItemKind.CONTENT: ("response.output_text", "text"),
    ItemKind.REASONING: ("response.reasoning_text", "text"),
    ItemKind.CALL: ("response.function_call_arguments", "arguments"),
}
CANCELLED = "cancelled"
CUT_REASONS = {FinishReason.LENGTH: "max_output_tokens"}


def describe_response(call: ClientCall, model: str, body: ResponsesBody) -> Entry:
    """The fields of a response that do not change while it is generated."""
    sampling = call.choices[0].request.sampling
    return {
        "id": f"resp_{call.request_id}",
        "object": "response",
        "created_at": call.created_unix_s,
        "model": model,
        "background": body.background,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": None, "summary": None, **(body.reasoning or {})},
        "service_tier": "default",
        "store": body.store,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **(body.text or {})},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": body.truncation,
        "user": body.user or None,
    }


def with_status(described: Entry, status: str, **changed: object) -> Entry:
    """The response in a state of its generation."""
    state: Entry = {"status": status, "error": None, "incomplete_details": None, "output": []}
    return {**described, **state, "usage": None, "completed_at": None, **changed}


def with_error(described: Entry, error: ServiceError) -> Entry:
    """The response that an error ended."""
    code = "rate_limit_exceeded" if http_status(error).status == 429 else "server_error"
    return with_status(described, "failed", error={"code": code, "message": error.message})


def encode_stream_error(error: ServiceError | None) -> bytes:
    """The event of an error of a stream that is not one of its response; it has no number."""
    if error is None:
        return b""
    code = http_status(error).code
    return encode_typed_event({"type": "error", "code": code, "message": error.message})


class ResponseWriter:
    """Writes one response: an AnswerWriter."""

    ping = COMMENT

    def __init__(
        self,
        call: ClientCall,
        text: Text,
        described: Entry,
        items: AnswerItems,
        on_end: Callable[[Entry], None],
        slow_end: bool,
    ):
        """`described`: of `describe_response`. `on_end` receives the ended response. `slow_end`: a
        thread has to encode the end, which waits or has many scores."""
        self.described = described
        self._call, self._text = call, text
        self._items, self._on_end, self._slow_end = items, on_end, slow_end
        self._number = 0  # of the next event
        self._begun = False

    @property
    def response_id(self) -> str:
        return str(self.described["id"])

    @property
    def slow(self) -> bool:
        return self._slow_end and self._call.choices[0].session.over

    def encode_whole(self, choices: Sequence[Sequence[ChoiceChunk]]) -> Entry:
        (chunks,) = choices
        self._items.read(chunks)
        response = self.render_end(chunks[-1].reason, streamed=False)
        self._on_end(response)
        return response

    def encode_chunk(self, chunk: ChoiceChunk) -> bytes:
        events = self.encode_steps(chunk)
        if chunk.reason is not None:
            response = self.render_end(chunk.reason, streamed=True)
            self._on_end(response)
            events.append(self.encode_end(response))
        return b"".join(events)

    def encode_queued(self) -> list[bytes]:
        """The first events of a response that waits to begin."""
        queued = with_status(self.described, "queued")
        return self._encode_states(queued, "created", "queued")

    def encode_steps(self, chunk: ChoiceChunk) -> list[bytes]:
        """The events of a chunk, without the one that ends the response."""
        events: list[bytes] = []
        if not self._begun:
            self._begun = True
            running = with_status(self.described, "in_progress")
            states = ("in_progress",) if self._number else ("created", "in_progress")
            events += self._encode_states(running, *states)
        steps = self._items.read((chunk,))
        if any(isinstance(step, Grown) and step.is_content for step in steps):
            note_content(self._call.choices[0])
        entries = (entry for step in steps for entry in self._encode_step(step))
        return [*events, *map(self._encode_event, entries)]

    def encode_end(self, response: Entry) -> bytes:
        """The event of the ended response. OpenAI has none for a cancelled one: that is
        incomplete."""
        status = response["status"]
        (event,) = self._encode_states(response, "incomplete" if status == CANCELLED else status)
        return event

    def encode_tail(self) -> bytes:
        return b""

    def encode_last(self, error: ServiceError | None) -> bytes:
        if error is None:
            return b""
        response = with_error(self.described, error)
        self._on_end(response)
        return self.encode_end(response)

    def _encode_states(self, response: Entry, *states: object) -> list[bytes]:
        return [
            self._encode_event({"type": f"response.{state}", "response": response})
            for state in states
        ]

    def _encode_event(self, event: Entry) -> bytes:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return encode_typed_event(numbered)

    def render_end(self, reason: FinishReason | None, streamed: bool) -> Entry:
        """A malformed call is only in the output of a stream, which has its events already."""
        items = [item for item in self._items.items if streamed or not item.malformed]
        changed = {"output": [self._render_item(item) for item in items], "usage": self._usage()}
        if reason is FinishReason.STOP:
            now_s = int(time.time())
            return with_status(self.described, "completed", completed_at=now_s, **changed)
        cause = CUT_REASONS.get(reason, str(reason)) if reason else None
        details = {"reason": cause}
        return with_status(self.described, "incomplete", incomplete_details=details, **changed)

    def _usage(self) -> Entry:
        call = self._call
        thought = count_tokens(self._text, call.choices[0], self._items.reasoning_chars)
        return {
            "input_tokens": call.prompt_tokens,
            "input_tokens_details": {"cached_tokens": call.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": call.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": call.prompt_tokens + call.completion_tokens,
        }

    def _encode_step(self, step: Step) -> list[Entry]:
        item = step.item
        place: Entry = {"output_index": item.index}
        named = {**place, "item_id": self._item_id(item)}
        if item.kind is not ItemKind.CALL:
            named["content_index"] = 0
        name, text_field = EVENTS[item.kind]
        match step:
            case Started():
                rendered = self._render_item(item, "in_progress")
                added = {"type": "response.output_item.added", **place, "item": rendered}
                part = self._render_part(item)
                part = {"type": "response.content_part.added", **named, "part": part}
                return [added] if item.kind is ItemKind.CALL else [added, part]
            case Grown(_, text, scores):
                scored = self._render_scores(item, scores)
                return [{"type": f"{name}.delta", **named, "delta": text, **scored}]
            case Ended():
                scored = self._render_scores(item, item.scores)
                ended = {"type": f"{name}.done", **named, text_field: item.text, **scored}
                if item.kind is ItemKind.CALL:
                    ended["name"] = item.name
                part = self._render_part(item)
                part = {"type": "response.content_part.done", **named, "part": part}
                rendered = self._render_item(item)
                done = {"type": "response.output_item.done", **place, "item": rendered}
                return [ended, done] if item.kind is ItemKind.CALL else [ended, part, done]

    def _render_item(self, item: Item, status: str = "") -> Entry:
        """An item as of now. One that has just started has no parts."""
        started = bool(status)
        status = status or ("completed" if item.complete else "incomplete")
        named = {"id": self._item_id(item), "status": status}
        parts = [] if started else [self._render_part(item)]
        match item.kind:
            case ItemKind.CONTENT:
                return {**named, "type": "message", "role": "assistant", "content": parts}
            case ItemKind.REASONING:
                return {**named, "type": "reasoning", "summary": [], "content": parts}
            case ItemKind.CALL:
                arguments = {"name": item.name, "arguments": item.text}
                return {**named, "type": "function_call", "call_id": item.call_id, **arguments}

    def _item_id(self, item: Item) -> str:
        return f"{PREFIXES[item.kind]}{self._call.request_id}_{item.index}"

    def _render_part(self, item: Item) -> Entry:
        if item.kind is ItemKind.REASONING:
            return {"type": "reasoning_text", "text": item.text}
        scores = self._render_scores(item, item.scores)
        return {"type": "output_text", "text": item.text, "annotations": [], **scores}

    def _render_scores(self, item: Item, scores: Sequence[Logprob]) -> Entry:
        """What content has besides its text."""
        if item.kind is not ItemKind.CONTENT:
            return {}
        return {"logprobs": encode_scores(self._text, scores)}
