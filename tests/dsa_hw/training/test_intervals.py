"""Intervals cover the truth as often as they say: exactly, by enumerating every outcome, or in simulated samples."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dsa_hw.training.intervals import difference_interval, mean_interval, ratio_interval, share_interval


@given(total=st.integers(1, 500), data=st.data(), confidence=st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_the_interval_of_a_share_is_that_of_scipy(total: int, data: st.DataObject, confidence: float) -> None:
    count = data.draw(st.integers(0, total))
    found = share_interval(count, total, confidence)
    wanted = stats.binomtest(count, total).proportion_ci(confidence, "wilson")
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high), abs=1e-12)
    assert found.low <= found.value <= found.high


@pytest.mark.parametrize("total", [20, 100, 500])
def test_the_interval_of_a_share_covers_it(total: int) -> None:
    """Over all outcomes, for accuracies from 5% to 95%; Wilson's coverage oscillates around what it claims."""
    intervals = [share_interval(k, total, 0.95) for k in range(total + 1)]
    covered = []
    for p in np.linspace(0.05, 0.95, 91):
        chances = stats.binom.pmf(np.arange(total + 1), total, p)
        covered.append(sum(c for c, i in zip(chances, intervals, strict=True) if i.low <= p <= i.high))
    assert np.mean(covered) > 0.945
    assert min(covered) > 0.91


@pytest.mark.parametrize(("lost", "won"), [(0.01, 0.01), (0.03, 0.01), (0.1, 0.05), (0.2, 0.2), (0.3, 0.02)])
@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_the_interval_of_a_paired_difference_covers_it(lost: float, won: float, confidence: float) -> None:
    """Over all outcomes of 60 inputs, on which the networks differ with the given chances."""
    total, covered = 60, 0.0
    for b in range(total + 1):
        for c in range(total + 1 - b):
            chance = stats.multinomial.logpmf([b, c, total - b - c], total, [lost, won, 1 - lost - won])
            if chance < -14:
                continue
            dense = np.array([1.0] * b + [0.0] * (total - b))
            small = np.array([0.0] * b + [1.0] * c + [0.0] * (total - b - c))
            found = difference_interval(dense, small, confidence)
            assert found.value == pytest.approx((b - c) / total)
            covered += math.exp(chance) * (found.low <= lost - won <= found.high)
    assert covered > confidence - 0.02


def test_networks_that_never_differ_still_have_an_interval() -> None:
    """Nothing was seen on 50 inputs; that is no proof of a difference of zero."""
    same = np.ones(50)
    few, many = (difference_interval(np.ones(n), np.ones(n), 0.9) for n in (len(same), 5000))
    assert few.value == 0.0
    assert few.high > 0.03
    assert many.high < 0.001


def test_other_scores_have_the_interval_of_student() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(3, 1, 12), rng.normal(2, 1, 12)
    for found, sample in ((mean_interval(a, 0.9), a), (difference_interval(a, b, 0.9), a - b)):
        wanted = stats.ttest_1samp(sample, 0).confidence_interval(0.9)
        assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    assert mean_interval(a[:1], 0.9).high == math.inf, "one score says nothing about its spread"


def test_the_interval_of_a_relative_error_covers_it() -> None:
    """Errors are a tenth of the outputs, in squares, and inputs differ in size."""
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(400):
        size = rng.lognormal(0, 0.5, (80, 2))
        parts = np.stack([0.01 * size * rng.chisquare(4, (80, 2)) / 4, size], 2)
        found = ratio_interval(parts, 0.9)
        covered.append(found.low <= 0.1 <= found.high)
    assert 0.85 < np.mean(covered) < 0.95
    assert ratio_interval(np.stack([np.zeros((5, 1)), np.ones((5, 1))], 2), 0.9).high == 0.0
