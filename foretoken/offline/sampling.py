"""Prompts and sampling parameters of offline requests, as the fields of HTTP bodies."""

from collections.abc import Mapping, Sequence

from foretoken.client.answers import SamplingOptions
from gateway.faces.http.schema import Json
from services.runtime.errors import InvalidArgument

Prompt = str | Sequence[int] | Mapping[str, object]
Message = Mapping[str, object]
PROMPT_FIELDS = ("prompt", "prompt_token_ids")  # of vLLM's TextPrompt and TokensPrompt


class SamplingParams(SamplingOptions, total=False):
    """What applies to a prompt; missing fields have the server's defaults. `max_tokens` is 16 for a
    prompt, and the remaining context for a conversation.

    response_format, structured_outputs: what the answer must follow, as in HTTP requests.
    """

    response_format: Mapping[str, object]
    structured_outputs: Mapping[str, object]
    application: str
    cache_salt: str
    user: str
    priority: int
    truncate_prompt_tokens: int
    add_special_tokens: bool
    chat_template_kwargs: Mapping[str, object]


def completion_fields(prompt: Prompt, params: SamplingParams) -> Json:
    """The body for a prompt: a text, token ids, or vLLM's object of either. Raises
    InvalidArgument."""
    if isinstance(prompt, Mapping):
        given = [name for name in PROMPT_FIELDS if name in prompt]
        if len(given) != 1 or len(prompt) != 1:
            raise InvalidArgument("prompt", f"an object has one of {', '.join(PROMPT_FIELDS)}")
        prompt = _plain(prompt[given[0]])  # type: ignore[assignment]  # the body's schema checks it
    return {"prompt": _plain(prompt), **_fields(params)}


def chat_fields(messages: Sequence[Message], params: SamplingParams) -> Json:
    """The body for a conversation."""
    fields = _fields(params)
    if "logprobs" in fields:  # the number of alternatives has a name of its own in chats
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    return {"messages": [dict(message) for message in messages], **fields}


def _fields(params: SamplingParams) -> dict[str, object]:
    fields: dict[str, object] = {name: _plain(value) for name, value in params.items()}
    if isinstance(bias := params.get("logit_bias"), Mapping):
        fields["logit_bias"] = {str(token): value for token, value in bias.items()}
    return fields


def _plain(value: object) -> object:
    """The value with lists and dicts as JSON has them."""
    match value:
        case str():
            return value
        case Mapping():
            return dict(value)
        case Sequence():
            return list(value)
    return value
