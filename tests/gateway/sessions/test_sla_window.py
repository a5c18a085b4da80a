"""SLA outcomes of the last minute: by hand, and compared with a recount."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.sla_window import WINDOW_S, SlaCounts, SlaWindow
from services.sla import SlaMissCause


def test_sla_window_counts_the_last_minute() -> None:
    window = SlaWindow()
    window.add("interactive", SlaMissCause.NONE, 40, 100.2)
    window.add("interactive", SlaMissCause.QUEUED, 7, 100.9)
    window.add("batch", SlaMissCause.REJECTED, 0, 100.9, choices=3)
    window.add("interactive", SlaMissCause.QUEUED, 0, 130.0)
    window.add("batch", SlaMissCause.NONE, 300, 159.99)
    assert window.by_class(159.99) == {
        "interactive": SlaCounts(met=1, missed={"queued": 2}, tokens=47, good_tokens=40),
        "batch": SlaCounts(met=1, missed={"rejected": 3}, tokens=300, good_tokens=300),
    }
    assert window.by_class(160.0) == {  # second 100 has expired
        "interactive": SlaCounts(missed={"queued": 1}),
        "batch": SlaCounts(met=1, tokens=300, good_tokens=300),
    }
    assert window.by_class(1e6) == {}


def test_sla_window_counts_a_late_outcome_in_the_last_second() -> None:
    window = SlaWindow()
    window.add("a", SlaMissCause.NONE, 1, 20.0)
    window.add("a", SlaMissCause.NONE, 1, 19.5)
    assert window.by_class(79.9) == {"a": SlaCounts(met=2, tokens=2, good_tokens=2)}
    assert window.by_class(80.0) == {}


ENDS = st.lists(
    st.tuples(
        st.sampled_from(("a", "b")),
        st.sampled_from(list(SlaMissCause)),
        st.integers(0, 9),
        st.floats(0, 40),  # since the previous end
    ),
    max_size=60,
)


@given(ENDS, st.floats(0, 90))
def test_sla_window_sums_equal_a_recount(
    ends: list[tuple[str, SlaMissCause, int, float]], wait_s: float
) -> None:
    window, reported, now_s = SlaWindow(), [], 5.0
    for name, cause, tokens, since_s in ends:
        now_s += since_s
        window.add(name, cause, tokens, now_s)
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
    assert window.by_class(now_s) == expected
