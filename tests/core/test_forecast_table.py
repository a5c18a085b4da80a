"""ForecastTable: every row gives the same results as its forecast."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.forecast import UNCAPPED, Forecast, Ints, certain, from_lengths
from services.forecasttable import ForecastTable
from tests.core.forecasts import forecasts
from tests.examples import examples
from tests.policies.made_snapshots import table as interned


@given(st.lists(forecasts(), min_size=1, max_size=5), st.data())
def test_points_of_rows_match_forecasts(fs: list[Forecast], data: st.DataObject) -> None:
    """Each row is written twice: no part of an earlier, longer forecast remains."""
    table = interned(*fs)
    for row, f in enumerate(fs):
        table.put(row, f.points, f.weights)
    table.put(0, [4.0, 9.0], [0.5, 0.5])
    fs = [Forecast((4.0, 9.0), (0.5, 0.5), fs[0].max_tokens + 9), *fs[1:]]
    rows = np.arange(len(fs))
    generated = np.array([data.draw(st.integers(0, f.max_tokens)) for f in fs])
    caps = np.array([data.draw(st.integers(1, f.max_tokens)) for f in fs])
    after = table.after(rows, generated, caps)
    parts = [after.points(rows, begin, 16) for begin in range(0, 64, 16)]
    points, masses = (np.concatenate(part).T for part in zip(*parts, strict=True))
    assert masses.sum(axis=1) == pytest.approx(np.ones(len(fs)))
    for row, f in enumerate(fs):
        found: dict[float, float] = {}
        for point, mass in zip(points[row].tolist(), masses[row].tolist(), strict=True):
            if mass:
                found[point] = found.get(point, 0.0) + mass
        g, cap = int(generated[row]), int(caps[row])
        assert (points[row][masses[row] > 0] >= min(g, cap)).all()
        if g >= f.points[-1]:  # 64 equal shares of the exponential, cut at the cap
            assert (masses[row] == 1 / 64).all()
            levels = (np.arange(64) + 0.5) / 64
            ends = np.minimum(g - f.points[-1] * np.log1p(-levels), cap)
            assert points[row] == pytest.approx(ends)
            continue
        ahead = [(min(p, cap), w) for p, w in zip(f.points, f.weights, strict=True) if p > g]
        total = sum(w for _, w in ahead)
        expected: dict[float, float] = {}
        for point, mass in ahead:
            expected[point] = expected.get(point, 0.0) + mass / total
        assert found == pytest.approx(expected)
        assert (np.diff(points[row]) >= 0).all()


def test_table_handles_long_outputs_and_empty_queries() -> None:
    rng = np.random.default_rng(0)
    table = interned(certain(5), certain(7))
    rows, huge = np.array([0, 1]), np.array([2**31, 2**31])
    assert table.sample(rng, rows, huge, huge + 1).tolist() == [[2**31 + 1, 2**31 + 1]]
    assert list(table.mean(rows, np.zeros(2, np.int64), huge)) == [5, 7]
    empty = np.array([], np.int64)
    assert ForecastTable().sample(rng, empty, empty, empty).shape == (1, 0)


@settings(max_examples=examples(25))
@given(st.lists(forecasts(), min_size=1, max_size=5), st.integers(0, 2**32))
def test_batch_draws_each_row_from_its_forecast(fs: list[Forecast], seed: int) -> None:
    rng = np.random.default_rng(seed)
    which = rng.integers(0, len(fs), 200)
    caps = np.array([fs[i].max_tokens for i in which])
    generated = rng.integers(0, caps)
    (drawn,) = interned(*fs).sample(rng, which, generated, caps)
    for i, g, length in zip(which, generated, drawn, strict=True):
        allowed = [p for p in fs[i].points if p > g] or [float(fs[i].max_tokens)]
        assert length in allowed


@st.composite
def shared(draw: st.DrawFn, key: str = "history/demo") -> Forecast:
    """Shared forecasts: UNCAPPED, with or without mass on UNCAPPED."""
    lengths = draw(st.lists(st.integers(1, 400), min_size=1, max_size=40))
    longest = draw(st.booleans())
    plain = from_lengths(lengths, UNCAPPED, "history", 1, key)
    if not longest:
        return plain
    weights = (*(w / 2 for w in plain.weights), 0.5)
    return Forecast((*plain.points, float(UNCAPPED)), weights, UNCAPPED, "history", 1, key)


@settings(max_examples=examples(300))
@given(st.lists(st.one_of(forecasts(), shared()), min_size=1, max_size=4), st.data())
def test_table_matches_scalar_forecasts(fs: list[Forecast], data: st.DataObject) -> None:
    """Caps below the first point, mass on UNCAPPED, and more output than any forecast point."""
    table = ForecastTable(1)
    rows = [table.intern(f) for f in fs]
    asked = data.draw(
        st.lists(
            st.tuples(st.integers(0, len(fs) - 1), st.integers(0, 520), st.integers(1, 520)),
            min_size=1, max_size=20,
        )
    )  # fmt: skip
    latest = {
        f.shared_key: f for f in reversed(fs) if f.shared_key
    }  # a shared row keeps the first forecast interned
    which, generated, caps = (np.array(column, np.int64) for column in zip(*asked, strict=True))
    means = table.mean(np.array(rows)[which], generated, caps)
    drawn = table.sample(np.random.default_rng(1), np.array(rows)[which], generated, caps, 3)
    shares, ahead = np.array([0.0, 0.3, 0.9, 1.0]), np.array([0, 1, 7, 60, 400])
    after = table.after(np.array(rows)[which], generated, caps)
    all_shares = np.repeat(shares[:, None], len(asked), 1)
    ends = after.quantiles(all_shares)
    upto = generated + data.draw(st.integers(0, 200))
    early, of = after.quantiles_upto(upto, all_shares)
    for at in range(len(asked)):
        found, expected = early[of == at].tolist(), ends[:, at].tolist()
        assert found == expected[: len(found)]  # the shares ascend
        assert all(end > upto[at] or end == caps[at] for end in expected[len(found) :])
    alive = after.survival(np.repeat(ahead[:, None], len(asked), 1))
    assert drawn.shape == (3, len(asked))
    assert (drawn <= caps).all()
    for at, ((i, g, cap), mean, draws) in enumerate(zip(asked, means, drawn.T, strict=True)):
        # The cap is not in the row: it is an argument of each query.
        f = replace(latest.get(fs[i].shared_key, fs[i]), max_tokens=UNCAPPED)
        assert mean == pytest.approx(min(f.mean(g, cap), cap))
        points = {min(p, float(cap)) for p in f.points if p > g} or {float(cap)}
        assert set(draws) <= points
        quantiles = [min(f.quantile(share, g), cap) for share in shares]
        assert ends[:, at].tolist() == pytest.approx(quantiles, rel=1e-12)
        chances = [f.survival(g + n, g) if g + n < cap else 0.0 for n in ahead.tolist()]
        assert alive[:, at].tolist() == pytest.approx(chances)


@settings(max_examples=examples(100))
@given(shared(), st.integers(0, 450), st.integers(1, 500), st.integers(0, 2**32))
def test_draw_of_shared_forecast_equals_draw_of_truncated_one(
    f: Forecast, g: int, cap: int, seed: int
) -> None:
    one: Ints = np.zeros(1, np.int64)
    drawn = interned(f).sample(np.random.default_rng(seed), one, one + g, one + cap)
    rng = np.random.default_rng(seed)
    expected = min(f.truncated(max(cap, g)).sample(rng, g), cap)
    assert drawn.tolist() == [[expected]]


def means(table: ForecastTable, *rows: int) -> list[float]:
    which: Ints = np.array(rows, np.int64)
    found: list[float] = table.mean(which, 0 * which, 0 * which + 1_000).tolist()
    return found


def test_rows_are_reused_and_none_leaks() -> None:
    table = ForecastTable(2)
    rows = [table.intern(certain(length)) for length in (1, 2, 3, 4, 5)]
    assert len(set(rows)) == 5
    assert (len(table), table.rows) == (5, 8)
    assert means(table, *rows) == [1, 2, 3, 4, 5]
    for row in rows[1:4]:
        table.release(row)
    assert len(table) == 2
    again = [table.intern(certain(length)) for length in range(10, 16)]
    assert (len(table), table.rows) == (8, 8)
    assert means(table, rows[0], rows[4], *again) == [1, 5, 10, 11, 12, 13, 14, 15]


def test_population_has_one_row_while_in_use() -> None:
    table = ForecastTable(2)
    first, newer = (
        Forecast((float(length),), (1.0,), UNCAPPED, "history", version, "history/demo")
        for version, length in enumerate((10, 20))
    )
    row = table.intern(first)
    assert table.intern(first) == row
    assert (len(table), means(table, row), table.edition(row)) == (1, [10], 1)
    assert table.renew(newer) == [row]
    assert (means(table, row), table.edition(row)) == ([20], 2)
    table.release(row)
    assert table.renew(first) == [row]
    table.release(row)
    assert len(table) == 0
    assert table.renew(newer) == []
    assert table.intern(certain(7)) == row
    assert table.renew(newer) == []
    assert (means(table, row), table.edition(row)) == ([7], 4)


def test_population_has_a_row_for_each_least_length() -> None:
    table = ForecastTable(2)
    before = Forecast((10.0, 30.0), (0.5, 0.5), UNCAPPED, "history", 1, "history/demo")
    after = replace(before, points=(20.0, 40.0), version=2)
    plain, long = table.intern(before), table.intern(before, 11)
    assert table.intern(before, 11) == long != plain
    assert [means(table, row) for row in (plain, long)] == [[20], [30]]
    assert sorted(table.renew(after)) == sorted([plain, long])
    assert [means(table, row) for row in (plain, long)] == [[30], [30]]
    table.release(plain)
    assert table.renew(before) == [long] and means(table, long) == [30]
    table.release(long)
    table.release(long)
    assert len(table) == 0 and table.renew(after) == []


@given(forecasts(), forecasts(), st.integers(0, 40))
def test_mirror_row_matches_whatever_it_held_before(
    before: Forecast, f: Forecast, row: int
) -> None:
    table, mirror = interned(f), ForecastTable(2)
    mirror.put(row, before.points, before.weights)
    mirror.put(row, *table.points_of(0))
    assert [column.tolist() for column in mirror.points_of(row)] == [
        list(f.points),
        list(f.weights),
    ]
    assert mirror.edition(row) == 2
    assert mirror.rows > row
    generated = np.arange(520)
    rows, caps = np.full(520, row), np.full(520, f.max_tokens)
    found = mirror.mean(rows, generated, caps).tolist()
    assert found == table.mean(0 * rows, generated, caps).tolist()


@settings(max_examples=examples(100))
@given(
    st.lists(
        st.one_of(
            forecasts(),
            shared("a"),
            shared("b"),
            st.integers(0, 9),
        ),
        max_size=30,
    )
)
def test_references_match_model_under_random_interning(news: list[Forecast | int]) -> None:
    """A number releases one of the users; a population's forecast renews it first."""
    table, used = ForecastTable(1), list[tuple[int, Forecast]]()
    for new in news:
        if isinstance(new, int):
            if used:
                table.release(used.pop(new % len(used))[0])
        else:
            rows = table.renew(new) if new.shared_key else []
            key = new.shared_key
            used = [(r, new if key and f.shared_key == key else f) for r, f in used]
            used.append((table.intern(new), new))
            assert rows in ([], [used[-1][0]])
        assert len(table) == len({row for row, _ in used})
        for row, f in used:
            points, weights = table.points_of(row)
            assert (tuple(points), tuple(weights)) == (f.points, f.weights)
