"""The number of examples of a property test."""

from hypothesis import settings

SHARES = {"fixed": 6, "sample": 3}  # profiles that try a part: 1 of so many


def examples(count: int) -> int:
    """`count` for `make soak`; a part of it for `make test` and for the sample that CI draws."""
    return max(1, count // SHARES.get(settings.get_current_profile_name(), 1))
