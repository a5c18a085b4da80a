"""The number of examples of a property test."""

from hypothesis import settings

FEWER = ("fixed", "sample")  # profiles that try a third


def examples(count: int) -> int:
    """`count` for `make soak`; a third of it for `make test` and for the sample that CI draws."""
    fewer = settings.get_current_profile_name() in FEWER
    return max(1, count // 3) if fewer else count
