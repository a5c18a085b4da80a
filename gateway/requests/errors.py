"""What is wrong with a request, where a client must be able to tell it from other mistakes."""

from services.runtime.errors import Code, InvalidArgument, ServiceError


class UnknownModel(ServiceError):
    """A model that is not served here."""

    def __init__(self, name: str, known: str):
        super().__init__(Code.NOT_FOUND, f"model: {name!r} is not served here; known: {known}")


class ContextOverflow(InvalidArgument):
    """A prompt and answer that are longer than any worker can hold. Told in OpenAI's words: clients
    look for them before they shorten a conversation or fall back to another model."""

    def __init__(self, field: str, sentence: str):
        ServiceError.__init__(self, Code.INVALID_ARGUMENT, sentence)
        self.field = field

    @classmethod
    def counted(
        cls, prompt_tokens: int, answer_tokens: int, most_tokens: int, bound: str
    ) -> "ContextOverflow":
        """`bound`: what sets `most_tokens`, as the model or the cache."""
        field = "prompt" if prompt_tokens >= most_tokens else "max_tokens"
        return cls(
            field,
            f"This model's maximum context length is {most_tokens} tokens. However, you requested "
            f"{prompt_tokens + answer_tokens} tokens ({prompt_tokens} in the messages, "
            f"{answer_tokens} in the completion). Please reduce the length of the messages or "
            f"completion. ({most_tokens} tokens are what {bound} can hold.)",
        )
