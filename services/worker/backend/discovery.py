"""What a server is: its model's name, its capacity, and the dialect that it understands."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tokenizers import Tokenizer

from services.runtime.config import ConfigError
from services.worker.backend.capacity import (
    PAGES,
    Capacity,
    from_metrics,
    from_models,
    parse_metrics,
)
from services.worker.backend.client import BackendClient, Denied, Lost, Missing, Refused
from services.worker.backend.constraints import ONLY_ANSWER, REASONING_ENDS, STYLES
from services.worker.backend.dialect import NAME_IDS, TOKEN_ID, Dialect, Fields

PROBE = "Count from 3 to 12: "  # a text that tokenizers of different models split differently
MODELS, METRICS = "/v1/models", "/metrics"


@dataclass(frozen=True, slots=True)
class Backend:
    """A server that answers. `has_metrics`: whether it has Prometheus metrics."""

    model: str
    dialect: Dialect
    capacity: Capacity
    has_metrics: bool


async def discover(
    client: BackendClient, tokenizer: Tokenizer, asked_model: str, served_model: str
) -> Backend:
    """Asks a server what it is. `asked_model` is the configured name, empty for none, and
    `served_model` the name at this system's gateway.

    Raises Busy or Lost while it does not answer, and ConfigError with a sentence if it never will
    as it is configured: a wrong key, no such model, or another tokenizer.
    """
    try:
        card = _choose(await _read_models(client), client.url, asked_model, served_model)
        metrics = await _read_optional(client, METRICS)
        found = from_models(card) | from_metrics(parse_metrics(metrics))
        for path, read in PAGES.items():
            if not (found.kv_tokens and found.max_context_tokens and found.max_running):
                found = found | read(_as_object(await _read_optional(client, path)))
        dialect = await _probe(client, tokenizer, str(card["id"]))
    except Denied as error:
        raise ConfigError(
            f"the backend {client.url} refuses the API key ({error}); set it by --backend-key or "
            "FORETOKEN_BACKEND_API_KEY"
        ) from None
    return Backend(str(card["id"]), dialect, found, bool(metrics))


async def _read_models(client: BackendClient) -> list[Mapping[str, Any]]:
    try:
        listed = json.loads(await client.read_text(MODELS))["data"]
        return [{**card, "id": str(card["id"])} for card in listed]
    except (Refused, Missing, ValueError, KeyError, TypeError, RecursionError):
        raise ConfigError(
            f"the backend {client.url} is no OpenAI-compatible server: it lists no models at "
            f"{MODELS}"
        ) from None


def _choose(
    cards: Sequence[Mapping[str, Any]], url: str, asked: str, served: str
) -> Mapping[str, Any]:
    """The card of the model to use. Raises ConfigError if it is none of these, or one of several
    that nothing tells apart."""
    by_name = {card["id"]: card for card in cards}
    if chosen := by_name.get(asked or served):
        return chosen
    if len(cards) == 1 and not asked:
        return cards[0]
    names = ", ".join(by_name) or "none"
    if not asked:
        raise ConfigError(
            f"the backend {url} serves several models ({names}); name one with "
            "--set backend.model=NAME"
        )
    close = get_close_matches(asked, by_name, n=1)
    hint = f", did you mean {close[0]}?" if close else ""
    raise ConfigError(f"backend.model: {url} serves no {asked!r}{hint}; it serves: {names}")


async def _read_optional(client: BackendClient, path: str) -> str:
    """A page that a server may not have; empty without it."""
    try:
        return await client.read_text(path)
    except (Refused, Denied, Lost):
        return ""


def _as_object(text: str) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


async def _probe(client: BackendClient, tokenizer: Tokenizer, model: str) -> Dialect:
    """Asks for one token each, with a prompt as text and as token ids. Raises ConfigError if the
    tokens of the text are not those of `tokenizer`."""
    ids = list(tokenizer.encode(PROBE, add_special_tokens=False).ids)
    answer = await _try(client, _body(model, PROBE, returns_ids=True))
    if answer is not None:
        _require_same_tokens(answer, tokenizer, client.url)
    returns_ids = answer is not None and answer.get("token_ids") is not None
    takes_ids = await _try(client, _body(model, ids, returns_ids)) is not None
    if not takes_ids and await _try(client, _body(model, PROBE, returns_ids)) is None:
        raise ConfigError(f"the backend {client.url} answers no request at /v1/completions")
    names_ids = returns_ids and await _names_ids(client, model)
    constraints = await _find_constraints(client, tokenizer, model)
    return Dialect(takes_ids, returns_ids, names_ids, *constraints)


async def _names_ids(client: BackendClient, model: str) -> bool:
    """Whether the tokens of logprobs can be asked for by their ids."""
    asked = {"logprobs": 1, **NAME_IDS}
    answer = await _try(client, _body(model, PROBE, returns_ids=True) | asked)
    return TOKEN_ID in json.dumps((answer or {}).get("logprobs"))


async def _find_constraints(
    client: BackendClient, tokenizer: Tokenizer, model: str
) -> tuple[str, tuple[int, ...]]:
    """The style of constraints that the server has, empty for none, and the tokens that end the
    reasoning behind which it applies them. With a reasoning parser a server does not apply them
    to a prompt that does not end the reasoning."""
    if style := await _find_style(client, model, PROBE):
        return style, ()
    for end, token in REASONING_ENDS.items():
        if tokenizer.token_to_id(token) is None:
            continue
        if style := await _find_style(client, model, PROBE + end):
            return style, tuple(tokenizer.encode(end, add_special_tokens=False).ids)
    return "", ()


async def _find_style(client: BackendClient, model: str, prompt: str) -> str:
    """The name of the first style of constraints that has an effect; empty if none has. A server
    may fail on a field that it does not expect."""
    for style in STYLES:
        try:
            answer = await _try(client, _body(model, prompt, returns_ids=False) | style.probe)
        except Lost:
            continue
        text = (answer or {}).get("text")
        if isinstance(text, str) and text and ONLY_ANSWER.startswith(text):
            return style.name
    return ""


def _body(model: str, prompt: str | list[int], returns_ids: bool) -> Fields:
    body: Fields = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
    return body | {"stream": True} | ({"return_token_ids": True} if returns_ids else {})


async def _try(client: BackendClient, body: Fields) -> Fields | None:
    """The fields of all choices of an answer, merged; None if the server refuses the body, or has
    no such page."""
    merged: Fields = {}
    try:
        async for events in client.events(body):
            for event in events:
                for choice in _choices(event):
                    merged |= {name: v for name, v in choice.items() if v is not None}
    except (Refused, Missing):
        return None
    return merged


def _choices(event: bytes) -> list[Fields]:
    found = _as_object(event.decode(errors="replace")).get("choices")
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _require_same_tokens(answer: Fields, tokenizer: Tokenizer, url: str) -> None:
    theirs = answer.get("prompt_token_ids")
    ours = [list(tokenizer.encode(PROBE, add_special_tokens=add).ids) for add in (True, False)]
    if theirs is not None and theirs not in ours:
        raise ConfigError(
            f"MODEL: the backend {url} has another tokenizer; give the folder or hub name of the "
            "model that it serves"
        )
