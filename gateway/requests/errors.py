"""Request errors that clients distinguish from other invalid arguments."""

from services.runtime.errors import Code, InvalidArgument, ServiceError


class UnknownModel(ServiceError):
    """A model that this server does not have."""

    def __init__(self, name: str, known: str):
        super().__init__(Code.NOT_FOUND, f"model: {name!r} is not served here; known: {known}")


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
