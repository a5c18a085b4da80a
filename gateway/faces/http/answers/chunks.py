"""The events of a streamed answer, and the `usage` of all answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring

from gateway.faces.http.answers.formats import AnswerFormat
from gateway.faces.http.answers.logprobs import Entry
from gateway.faces.http.answers.sse import COMMENT, DONE, encode_event
from gateway.faces.http.errors import error_body
from gateway.faces.http.schema import StreamOptions
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk
from gateway.types.forecasts import ClientForecast
from services.runtime.errors import ServiceError

TEXT_MARK = "\ue000text\ue001"  # private characters; the head of an event has only ASCII


def encode_usage(call: ClientCall, form: AnswerFormat) -> Entry:
    return {
        **_encode_counts(call.prompt_tokens, call.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": call.cached_tokens},
        **form.usage_details(),
    }


@dataclass(frozen=True, slots=True)
class EventTemplate:
    """An event of which only the text varies: the bytes before and after the text's JSON string."""

    before: bytes
    after: bytes

    @classmethod
    def of(cls, event: bytes) -> "EventTemplate":
        """The template of an event that has TEXT_MARK as its text."""
        before, _, after = event.partition(encode_basestring(TEXT_MARK).encode())
        return cls(before, after)

    def encode(self, text: str) -> bytes:
        """The event as `json.dumps` with `ensure_ascii=False` writes it."""
        return b"%b%b%b" % (self.before, encode_basestring(text).encode(), self.after)


class ChunkWriter:
    """The AnswerWriter of choices. In a stream, the part that all events share is encoded once, and
    so is all but the text of events that differ in nothing else."""

    ping = COMMENT

    def __init__(
        self,
        form: AnswerFormat,
        call: ClientCall,
        labels: Mapping[str, str],
        options: StreamOptions,
        slow: bool = False,
    ):
        """`labels`: fields that say what produced the answer. `slow`: a thread encodes."""
        self.slow = slow
        self._labels = {
            "id": form.id_prefix + call.answer_id,
            "object": form.chunk_object,
            "created": call.created_unix_s,
            **labels,
        }
        head = json.dumps(self._labels)
        counted = options.include_usage and options.continuous_usage_stats
        self._head = f'data: {head[:-1]}, "choices": ['
        self._end = ', "usage": null}\n\n' if options.include_usage and not counted else "}\n\n"
        self._format, self._call, self._options = form, call, options
        self._repeats = form.repeats and not counted
        self._templates: dict[int, EventTemplate] = {}  # by choice, from its second event on
        self._sent_tokens: dict[int, int] | None = {} if counted else None  # by choice

    def encode_chunk(self, chunk: ChoiceChunk) -> bytes:
        if self._repeats and chunk.reason is None and chunk.forecast is None:
            template = self._templates.get(chunk.index)
            if template is not None:
                return template.encode(chunk.text)
            if self._format.has_started(chunk.index):
                event = self._encode_chunk(ChoiceChunk(chunk.index, TEXT_MARK, (), ()))
                template = self._templates[chunk.index] = EventTemplate.of(event)
                return template.encode(chunk.text)
        return self._encode_chunk(chunk)

    def _encode_chunk(self, chunk: ChoiceChunk) -> bytes:
        return self._encode_choice(chunk, self._format.chunk_choice(chunk))

    def _encode_choice(self, chunk: ChoiceChunk, entry: Entry) -> bytes:
        """The event of a chunk, with its choice."""
        choice = json.dumps(entry, ensure_ascii=False)
        extras = self._format.chunk_extras(chunk)
        if chunk.forecast:
            extras = {**extras, "forecast": encode_forecast(chunk.forecast)}
        if self._sent_tokens is not None:
            extras = {**extras, "usage": self._encode_running_usage(chunk, self._sent_tokens)}
        rest = f", {json.dumps(extras)[1:-1]}" if extras else ""
        return f"{self._head}{choice}]{rest}{self._end}".encode()

    def encode_tail(self) -> bytes:
        """The usage, if the client asks for it."""
        if not self._options.include_usage:
            return b""
        usage = json.dumps(encode_usage(self._call, self._format))
        return f'{self._head}], "usage": {usage}}}\n\n'.encode()

    def encode_last(self, error: ServiceError | None) -> bytes:
        return DONE if error is None else encode_event(error_body(error))

    def encode_whole(self, choices: Sequence[Sequence[ChoiceChunk]]) -> Entry:
        return {
            **self._labels,
            "object": self._format.whole_object,
            "choices": [self._format.whole_choice(chunks) for chunks in choices],
            "usage": encode_usage(self._call, self._format),
            **self._format.whole_extras(choices),
        }

    def _encode_running_usage(self, chunk: ChoiceChunk, sent_tokens: dict[int, int]) -> Entry:
        """Counts of the chunk's choice alone, as vLLM reports them."""
        sent_tokens[chunk.index] = sent_tokens.get(chunk.index, 0) + len(chunk.token_ids)
        prompt_tokens = self._call.choices[chunk.index].request.prompt_tokens
        return _encode_counts(prompt_tokens, sent_tokens[chunk.index])


def encode_forecast(forecast: ClientForecast) -> dict[str, float | bool]:
    """Rounded to a tenth of a token and of a millisecond, without unknown fields."""
    fields: dict[str, float | bool] = {
        "expected_tokens": round(forecast.expected_tokens, 1),
        "low_tokens": forecast.low_tokens,
        "high_tokens": forecast.high_tokens,
        "end_s": round(forecast.end_s, 4),
    }
    if forecast.ttft_s is not None:
        fields["ttft_s"] = round(forecast.ttft_s, 4)
    if forecast.sla_expected is not None:
        fields["sla_expected"] = forecast.sla_expected
    return fields


def _encode_counts(prompt_tokens: int, completion_tokens: int) -> Entry:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
