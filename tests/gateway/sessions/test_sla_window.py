"""The last minute's SLAs: a table by hand, and sums against counting everything anew."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.sla_window import WINDOW_S, SlaCounts, SlaWindow
from services.sla import SlaMissCause


def test_sla_window_over_a_minute() -> None:
    recent = SlaWindow()
    recent.add("interactive", SlaMissCause.NONE, 40, 100.2)
    recent.add("interactive", SlaMissCause.QUEUED, 7, 100.9)
    recent.add("batch", SlaMissCause.REJECTED, 0, 100.9, choices=3)
    recent.add("interactive", SlaMissCause.QUEUED, 0, 130.0)
    recent.add("batch", SlaMissCause.NONE, 300, 159.99)
    assert recent.by_class(159.99) == {
        "interactive": SlaCounts(met=1, missed={"queued": 2}, tokens=47, good_tokens=40),
        "batch": SlaCounts(met=1, missed={"rejected": 3}, tokens=300, good_tokens=300),
    }
    assert recent.by_class(160.0) == {  # second 100 is over the edge, whole
        "interactive": SlaCounts(missed={"queued": 1}),
        "batch": SlaCounts(met=1, tokens=300, good_tokens=300),
    }
    assert recent.by_class(1e6) == {}


def test_late_outcome_counts_in_the_last_second() -> None:
    recent = SlaWindow()
    recent.add("a", SlaMissCause.NONE, 1, 20.0)
    recent.add("a", SlaMissCause.NONE, 1, 19.5)
    assert recent.by_class(79.9) == {"a": SlaCounts(met=2, tokens=2, good_tokens=2)}
    assert recent.by_class(80.0) == {}


ENDS = st.lists(
    st.tuples(
        st.sampled_from(("a", "b")),
        st.sampled_from(list(SlaMissCause)),
        st.integers(0, 9),
        st.floats(0, 40),  # since the end before
    ),
    max_size=60,
)


@given(ENDS, st.floats(0, 90))
def test_sums_equal_a_recount(
    ends: list[tuple[str, SlaMissCause, int, float]], wait_s: float
) -> None:
    recent, reported, now_s = SlaWindow(), [], 5.0
    for name, cause, tokens, since_s in ends:
        now_s += since_s
        recent.add(name, cause, tokens, now_s)
        reported.append((name, cause, tokens, int(now_s)))
    now_s += wait_s
    expected: dict[str, SlaCounts] = {}
    for name, cause, tokens, second in reported:
        if second <= int(now_s) - WINDOW_S:
            continue
        kept = expected.setdefault(name, SlaCounts())
        kept.tokens += tokens
        if cause is SlaMissCause.NONE:
            kept.met += 1
            kept.good_tokens += tokens
        else:
            kept.missed[cause.value] = kept.missed.get(cause.value, 0) + 1
    assert recent.by_class(now_s) == expected
