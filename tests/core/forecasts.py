"""Hypothesis strategies for forecasts."""

from hypothesis import strategies as st

from services.forecast import Forecast, from_lengths


@st.composite
def forecasts(draw: st.DrawFn) -> Forecast:
    lengths = draw(st.lists(st.integers(1, 400), min_size=1, max_size=80))
    return from_lengths(lengths, draw(st.integers(max(lengths), 500)), "history")
