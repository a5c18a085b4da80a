"""The endpoints that answer with choices: `/v1/chat/completions` and `/v1/completions`."""

from functools import partial

from gateway.faces.http.answers.chunks import ChunkWriter
from gateway.faces.http.answers.formats import ChatFormat, CompletionFormat
from gateway.faces.http.answers.part_events import make_writer
from gateway.faces.http.generate import GenerationEndpoint
from gateway.faces.http.schema import ChatBody, CompletionBody, read_body
from gateway.gateway import Gateway
from gateway.sessions.call import ClientCall
from observability import genai


def _write_chat(gateway: Gateway, call: ClientCall, body: ChatBody) -> ChunkWriter:
    form = ChatFormat(gateway.text, call, body)
    slow = body.prompt_top_n is not None
    return make_writer(form, call, _labels(gateway, call), body.stream_options, slow)


def _write_completion(gateway: Gateway, call: ClientCall, body: CompletionBody) -> ChunkWriter:
    form = CompletionFormat(gateway.text, call, body)
    slow = body.prompt_top_n is not None
    return ChunkWriter(form, call, _labels(gateway, call), body.stream_options, slow)


def _labels(gateway: Gateway, call: ClientCall) -> dict[str, str]:
    """The fields that say what produced the answer."""
    return {**gateway.config.answer_labels, "model": call.model_name}


CHAT = GenerationEndpoint(partial(read_body, ChatBody), _write_chat, genai.CHAT)
COMPLETIONS = GenerationEndpoint(
    partial(read_body, CompletionBody), _write_completion, genai.TEXT_COMPLETION
)
