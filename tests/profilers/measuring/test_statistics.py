"""Estimates, moderated variances, repeated looks and quantiles, against simulations with known truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dsa_hw.errors import ProfileError
from profilers.measuring import statistics
from profilers.measuring.statistics import Estimate

estimates = st.builds(Estimate, st.floats(-10, 10), st.floats(1e-10, 1.0), st.floats(1, 100))


@given(estimates, estimates)
@settings(max_examples=100)
def test_products_and_quotients_add_logarithms_and_variances(a: Estimate, b: Estimate) -> None:
    product, quotient = a.times(b), a.over(b)
    assert product.value == pytest.approx(a.value * b.value)
    assert quotient.value == pytest.approx(a.value / b.value)
    for found in (product, quotient):
        assert found.variance == pytest.approx(a.variance + b.variance)
        assert min(a.freedom, b.freedom) * (1 - 1e-9) <= found.freedom <= (a.freedom + b.freedom) * (1 + 1e-9)
    assert b.times(a) == product
    assert product.over(b).log == pytest.approx(a.log, abs=1e-9)
    assert a.widened(b.variance, b.freedom) == Estimate(a.log, product.variance, product.freedom)


@given(estimates, st.floats(0.5, 0.99))
@settings(max_examples=100)
def test_interval_is_students_on_the_logarithmic_scale(a: Estimate, confidence: float) -> None:
    low, high = a.interval(confidence)
    expected = stats.t(a.freedom, a.log, math.sqrt(a.variance)).interval(confidence)
    assert (low, high) == pytest.approx(np.exp(np.minimum(expected, 700.0)))
    wider = a.interval((1 + confidence) / 2)
    assert wider[0] < low < a.value < high < wider[1] or high > 1e300
    assert a.halfwidth(confidence) == pytest.approx((high - low) / 2 / a.value)


def test_exact_number_has_no_interval_and_adds_no_error() -> None:
    exact, vague = Estimate(math.log(3.0)), Estimate(0.0, 1e-4, 5.0)
    assert exact.interval() == (exact.value, exact.value)
    assert exact.halfwidth() == 0.0
    assert exact.times(exact) == Estimate(2 * exact.log)
    assert exact.times(vague) == Estimate(exact.log, vague.variance, vague.freedom)


def test_degrees_of_freedom_of_a_product_give_its_coverage() -> None:
    """Two means with very different, estimated variances: the product's interval contains the true one."""
    rng = np.random.default_rng(0)
    hits = []
    for _ in range(1500):
        parts = [rng.normal(0.3, sd, n) for sd, n in ((0.05, 4), (0.02, 8))]
        a, b = (Estimate(float(x.mean()), float(x.var(ddof=1)) / len(x), len(x) - 1) for x in parts)
        low, high = a.times(b).interval()
        hits.append(low <= math.exp(0.6) <= high)
    assert 0.93 <= np.mean(hits) <= 0.98


@pytest.mark.parametrize("blocks", [2, 3])
def test_moderated_variance_covers_with_a_fraction_of_the_plain_width(blocks: int) -> None:
    """The pooled variance is as uncertain as an estimate with four degrees of freedom."""
    rng = np.random.default_rng(1)
    sd, hits, widths, plain = 0.02, [], [], []
    for _ in range(1500):
        values = rng.normal(-1.0, sd, blocks)
        found = statistics.mean_of_blocks(values, sd**2 * rng.chisquare(4) / 4)
        low, high = found.interval()
        hits.append(low <= math.exp(-1.0) <= high)
        widths.append(found.halfwidth())
        alone = Estimate(found.log, float(values.var(ddof=1)) / blocks, blocks - 1)
        plain.append(alone.halfwidth())
    assert 0.93 <= np.mean(hits) <= 0.98
    assert np.mean(widths) < 0.7 * np.mean(plain)


def test_variance_of_a_network_that_differs_from_the_others_is_its_own_with_many_blocks() -> None:
    rng = np.random.default_rng(2)
    values = rng.normal(0.0, 0.05, 200)
    found = statistics.mean_of_blocks(values, 0.01**2)
    assert found.variance == pytest.approx(values.var(ddof=1) / 200, rel=0.05)


@given(st.lists(st.lists(st.floats(-1, 1), min_size=1, max_size=5), max_size=6))
@settings(max_examples=60)
def test_pooled_variance_is_that_within_groups_and_of_the_prior(groups: list[list[float]]) -> None:
    arrays = [np.asarray(group) for group in groups]
    variance, freedom = statistics.pooled_variance(arrays)
    squares = sum(float(a.var(ddof=1)) * (len(a) - 1) for a in arrays if len(a) > 1)
    assert freedom == pytest.approx(4 + sum(len(a) - 1 for a in arrays))
    assert variance * freedom == pytest.approx(4 * statistics.PRIOR_BLOCK**2 + squares)
    shifted = statistics.pooled_variance([a + 7.0 * i for i, a in enumerate(arrays)])
    assert shifted == pytest.approx((variance, freedom)), "differences between groups do not count"


@given(st.floats(0.5, 0.99), st.integers(1, 200))
@settings(max_examples=50)
def test_error_rates_of_all_looks_add_up_to_at_most_the_stated_one(confidence: float, looks: int) -> None:
    spent = sum(1 - statistics.confidence_at_look(confidence, look) for look in range(1, looks + 1))
    assert spent <= (1 - confidence) * (1 + 1e-9)
    assert statistics.confidence_at_look(confidence, 0) == confidence, "a single look"


def test_intervals_of_all_looks_together_have_the_stated_confidence() -> None:
    """The data doubles from look to look, and the mean is known with its true variance."""
    rng = np.random.default_rng(3)
    sizes = [2**look for look in range(1, 9)]
    missed = {"adjusted": 0, "plain": 0}
    trials = 800
    for _ in range(trials):
        values = rng.normal(0.0, 1.0, sizes[-1])
        misses = dict.fromkeys(missed, False)
        for look, n in enumerate(sizes, 1):
            found = Estimate(float(values[:n].mean()), 1 / n)
            for name, confidence in (("adjusted", statistics.confidence_at_look(0.9, look)), ("plain", 0.9)):
                low, high = found.interval(confidence)
                misses[name] |= not low <= 1.0 <= high
        for name in missed:
            missed[name] += misses[name]
    assert missed["adjusted"] <= 0.1 * trials
    assert missed["plain"] > 0.2 * trials, "or the looks would need no adjustment"


@pytest.mark.parametrize(("runs", "blocks"), [(15, 3), (30, 3), (100, 4), (400, 4)])
@pytest.mark.parametrize("sigma", [0.05, 0.5])
def test_interval_of_a_tail_covers_that_of_a_lognormal_distribution(runs: int, blocks: int, sigma: float) -> None:
    rng = np.random.default_rng(runs)
    truth = float(stats.lognorm(sigma).ppf(0.95))
    block = np.arange(runs) % blocks
    hits = []
    for _ in range(400):
        low, high = statistics.quantile_estimate(rng.lognormal(0.0, sigma, runs), block, 0.95).interval()
        hits.append(low <= truth <= high)
    assert np.mean(hits) >= 0.9


def test_interval_of_a_tail_contains_differences_between_blocks() -> None:
    rng = np.random.default_rng(4)
    block = np.repeat(np.arange(6), 40)
    alike = rng.lognormal(0.0, 0.02, 240)
    apart = alike * np.exp(0.2 * rng.normal(size=6))[block]
    widths = [statistics.quantile_estimate(values, block, 0.95).halfwidth() for values in (alike, apart)]
    assert widths[1] > 5 * widths[0]


def test_unknown_statistic_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"Available statistics: .*quiet"):
        statistics.order_of("mean")
