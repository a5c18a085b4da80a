"""Weights and calibration of members per application."""

import numpy as np
import pytest

from services.predictor.blend.mixture import Mixture
from services.predictor.models import spread as sp


def spreads_around(centres: np.ndarray, width: float) -> sp.Floats:
    """Log-normal quantiles around each centre."""
    from scipy.stats import norm

    return np.asarray(centres[:, None] * np.exp(width * norm.ppf(sp.LEVELS))[None, :])


def test_mixture_starts_with_equal_weights() -> None:
    assert Mixture(4).weights("chat") == pytest.approx([0.25] * 4)


def test_mixture_weighs_best_member_per_application() -> None:
    rng = np.random.default_rng(0)
    centres = np.exp(rng.normal(4, 1, 400))
    right, wrong = spreads_around(centres, 0.2), spreads_around(rng.permutation(centres), 0.2)
    lengths = centres * np.exp(0.2 * rng.normal(size=400))
    mixture = Mixture(2)
    for start in range(0, 400, 20):
        now = slice(start, start + 20)
        mixture.observe([right[now], wrong[now]], ("a",) * 20, lengths[now])
        mixture.observe([wrong[now], right[now]], ("b",) * 20, lengths[now])
    assert mixture.weights("a")[0] > 0.8 and mixture.weights("b")[1] > 0.8


def test_mixture_start_weighs_members_by_out_of_fold_forecasts() -> None:
    """Two members err symmetrically, so each deserves half; a third is noise."""
    rng = np.random.default_rng(0)
    centres = np.exp(rng.normal(4, 1, 600))
    lengths = centres * np.exp(0.1 * rng.normal(size=600))
    members = [spreads_around(c, 0.2) for c in (centres * 2, centres / 2, rng.permutation(centres))]
    mixture = Mixture(3)
    mixture.start(members, ("a",) * 600, lengths)
    assert mixture.weights("a") == pytest.approx([0.5, 0.5, 0.0], abs=0.05)
    assert mixture.weights("unknown") == pytest.approx(mixture.weights("a"), abs=0.05)
    middles = mixture.combine(members, ("a",) * 600)[:, 31]
    assert np.median(np.abs(np.log(middles / centres))) < 0.1


@pytest.mark.parametrize("claimed", [0.1, 1.0])
def test_mixture_recalibrates_narrow_and_wide_forecasts(claimed: float) -> None:
    rng = np.random.default_rng(1)
    centres = np.exp(rng.normal(4, 1, 2_000))
    lengths = centres * np.exp(0.4 * rng.normal(size=2_000))
    reported = spreads_around(centres, claimed)
    mixture = Mixture(1)
    mixture.observe([reported[:1_000]], ("a",) * 1_000, lengths[:1_000])
    levels = sp.quantile_levels(
        mixture.combine([reported[1_000:]], ("a",) * 1_000), lengths[1_000:]
    )
    raw = sp.quantile_levels(reported[1_000:], lengths[1_000:])
    covered = ((levels > 0.05) & (levels < 0.95)).mean()
    assert abs(((raw > 0.05) & (raw < 0.95)).mean() - 0.9) > 0.05
    assert covered == pytest.approx(0.9, abs=0.04)


def test_mixture_bounds_number_of_applications() -> None:
    mixture = Mixture(1)
    one = spreads_around(np.array([50.0]), 0.3)
    for number in range(1_100):
        mixture.observe([one], (f"app{number}",), np.array([5.0 + number]))
    assert len(mixture._own) == 1_024
