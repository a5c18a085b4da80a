"""The metadata that a client attaches to what is stored, within OpenAI's limits."""

from collections.abc import Mapping

from services.runtime.errors import InvalidArgument

MAX_PAIRS, MAX_KEY_CHARS, MAX_VALUE_CHARS = 16, 64, 512


def check_metadata(pairs: Mapping[str, str]) -> None:
    """Raises InvalidArgument for too many pairs, or for a long one."""
    if len(pairs) > MAX_PAIRS:
        raise InvalidArgument("metadata", f"at most {MAX_PAIRS} keys, got {len(pairs)}")
    for key, value in pairs.items():
        if len(key) > MAX_KEY_CHARS or len(value) > MAX_VALUE_CHARS:
            limits = f"{MAX_KEY_CHARS} characters of a key and {MAX_VALUE_CHARS} of a value"
            raise InvalidArgument("metadata", f"at most {limits}")
