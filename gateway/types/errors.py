"""Errors that clients distinguish from other invalid arguments, and refusals under load."""

from collections.abc import Mapping
from enum import StrEnum

from services.runtime.errors import Code, InvalidArgument, ServiceError

MIN_RETRY_S = 1.0  # the least retry time sent to a refused client


class UnknownModel(ServiceError):
    """A model that this server does not have; `known`: those that it has."""

    def __init__(self, name: str, known: str):
        super().__init__(Code.NOT_FOUND, f"model: {name!r} is not served here; known: {known}")


class AdaptersUnknown(ServiceError):
    """A name that may be that of an adapter: the models of `waiting` have had no worker since the
    gateway started. `known`: all names that are known."""

    def __init__(self, name: str, known: str, waiting: str):
        sentence = f"adapters of {waiting} are known once a worker is attached; retry later"
        message = f"model: {name!r} is not served here yet; known: {known}; {sentence}"
        super().__init__(Code.UNAVAILABLE, message, MIN_RETRY_S)


class ContextOverflow(InvalidArgument):
    """A prompt and answer longer than any worker can hold.

    The message has OpenAI's wording, which clients match to shorten a conversation or to fall back
    to another model.
    """

    def __init__(self, field: str, sentence: str):
        ServiceError.__init__(self, Code.INVALID_ARGUMENT, sentence)
        self.field = field

    @classmethod
    def counted(
        cls, prompt_tokens: int, answer_tokens: int, max_tokens: int, bound: str
    ) -> "ContextOverflow":
        """`bound`: what sets `max_tokens`, such as the model or the cache."""
        field = "prompt" if prompt_tokens >= max_tokens else "max_tokens"
        return cls(
            field,
            f"This model's maximum context length is {max_tokens} tokens. However, you requested "
            f"{prompt_tokens + answer_tokens} tokens ({prompt_tokens} in the messages, "
            f"{answer_tokens} in the completion). Please reduce the length of the messages or "
            f"completion. ({max_tokens} tokens are what {bound} can hold.)",
        )


class RefusalReason(StrEnum):
    """The limit that a refused request exceeds; a metric label."""

    SESSIONS = "sessions"
    QUEUE = "queue"
    DEADLINE = "deadline"
    ARRIVING = "arriving"
    READING = "reading"
    GRAMMAR = "grammar"
    KEY_REQUESTS = "key_requests"
    KEY_TOKENS = "key_tokens"
    KEY_CONCURRENCY = "key_concurrency"
    KEY_QUEUE = "key_queue"


class RequestRefused(ServiceError):
    """The gateway is too busy for one more request."""

    def __init__(self, reason: RefusalReason, message: str, retry_after_s: float):
        retry_after_s = max(MIN_RETRY_S, retry_after_s)
        super().__init__(Code.RESOURCE_EXHAUSTED, f"{message}; retry later", retry_after_s)
        self.reason = reason


class KeyLimitReached(RequestRefused):
    """An API key has used one of its limits. `headers` say what is left of them."""

    def __init__(
        self, reason: RefusalReason, message: str, retry_after_s: float, headers: Mapping[str, str]
    ):
        super().__init__(reason, message, retry_after_s)
        self.headers = headers
