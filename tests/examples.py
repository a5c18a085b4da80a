"""How many examples a property test tries."""

from hypothesis import settings


def examples(count: int) -> int:
    """`count` with fresh seeds (`make soak`); a third of it in `make test`, which tries the same
    examples every time."""
    fixed = settings.get_current_profile_name() == "fixed"
    return max(1, count // 3) if fixed else count
