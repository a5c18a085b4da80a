"""Errors about stored responses."""

from services.runtime.errors import InvalidArgument

MAX_ID_CHARS = 80  # of an id that an error repeats


class ResponseNotFound(InvalidArgument):
    """No response of this id is stored for the caller's key."""

    def __init__(self, response_id: str):
        super().__init__("", f"Response with id '{response_id[:MAX_ID_CHARS]}' not found.")


class PreviousNotFound(InvalidArgument):
    """The response to continue is not stored. The wording is OpenAI's."""

    def __init__(self, response_id: str):
        named = f"Previous response with id '{response_id[:MAX_ID_CHARS]}' not found."
        super().__init__("previous_response_id", named)


class PreviousUnfinished(InvalidArgument):
    """The response to continue still runs."""

    def __init__(self, response_id: str):
        named = f"{response_id[:MAX_ID_CHARS]} still runs; poll it until it ends"
        super().__init__("previous_response_id", named)
