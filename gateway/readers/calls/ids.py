"""Ids of calls, as the models' chat templates accept them."""

from uuid import uuid4

MISTRAL_ID_CHARS = 9  # what Mistral's templates accept


def make_call_id(name: str, index: int) -> str:
    return f"call_{uuid4().hex[:24]}"


def make_mistral_id(name: str, index: int) -> str:
    return uuid4().hex[:MISTRAL_ID_CHARS]


def make_kimi_id(name: str, index: int) -> str:
    return f"functions.{name}:{index}"
