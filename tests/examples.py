"""The number of examples of a property test."""

from hypothesis import settings


def examples(count: int) -> int:
    """`count` with fresh seeds (`make soak`); a third of it with the fixed seeds of `make test`."""
    fixed = settings.get_current_profile_name() == "fixed"
    return max(1, count // 3) if fixed else count
