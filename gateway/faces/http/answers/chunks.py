"""A stream's events, and the usage that they and whole answers tell."""

import json

from gateway.faces.http.answers.logprobs import Entry
from gateway.faces.http.answers.shapes import Shape
from gateway.faces.http.schema import StreamOptions
from gateway.sessions.call import ClientCall
from gateway.sessions.foresight import Foreseen
from gateway.sessions.session import ChoiceChunk


def usage(call: ClientCall) -> Entry:
    return {
        **_counts(call.prompt_tokens, call.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": call.cached_tokens},
    }


class ChunkWriter:
    """Writes a stream's events; what all of them share is rendered once."""

    def __init__(self, shape: Shape, call: ClientCall, model: str, options: StreamOptions):
        head = json.dumps(
            {
                "id": shape.id_prefix + call.answer_id,
                "object": shape.chunk_object,
                "created": call.created_unix_s,
                "model": model,
            }
        )
        counted = options.include_usage and options.continuous_usage_stats
        self._head = f'data: {head[:-1]}, "choices": ['
        self._end = ', "usage": null}\n\n' if options.include_usage and not counted else "}\n\n"
        self._shape, self._call = shape, call
        self._made: dict[int, int] | None = {} if counted else None

    def chunk(self, chunk: ChoiceChunk) -> bytes:
        choice = json.dumps(self._shape.part(chunk), ensure_ascii=False)
        around = self._shape.around_part(chunk)
        if chunk.forecast:
            around = {**around, "forecast": foreseen(chunk.forecast)}
        if self._made is not None:
            around = {**around, "usage": self._so_far(chunk, self._made)}
        beside = f", {json.dumps(around)[1:-1]}" if around else ""
        return f"{self._head}{choice}]{beside}{self._end}".encode()

    def usage(self, call: ClientCall) -> bytes:
        return f'{self._head}], "usage": {json.dumps(usage(call))}}}\n\n'.encode()

    def _so_far(self, chunk: ChoiceChunk, made: dict[int, int]) -> Entry:
        """Of the chunk's own choice, as at vLLM."""
        made[chunk.index] = made.get(chunk.index, 0) + len(chunk.token_ids)
        prompt_tokens = self._call.lives[chunk.index].generation.prompt_tokens
        return _counts(prompt_tokens, made[chunk.index])


def foreseen(seen: Foreseen) -> dict[str, float | bool]:
    """To a tenth of a token and of a millisecond; what is not known is left out."""
    fields: dict[str, float | bool] = {
        "expected_tokens": round(seen.expected_tokens, 1),
        "low_tokens": seen.low_tokens,
        "high_tokens": seen.high_tokens,
        "end_s": round(seen.end_s, 4),
    }
    if seen.ttft_s is not None:
        fields["ttft_s"] = round(seen.ttft_s, 4)
    if seen.sla_expected is not None:
        fields["sla_expected"] = seen.sla_expected
    return fields


def _counts(prompt_tokens: int, completion_tokens: int) -> Entry:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
