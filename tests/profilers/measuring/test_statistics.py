"""Quantiles and their confidence intervals."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsa_hw.errors import ProfileError
from profilers.measuring import statistics


@pytest.mark.parametrize(("q", "n"), [(0.25, 40), (0.5, 40), (0.9, 60)])
def test_intervals_have_their_coverage(q: float, n: int) -> None:
    rng = np.random.default_rng(1)
    truth = float(np.quantile(rng.gamma(2.0, 1.0, 2_000_000), q))
    hits = 0
    for _ in range(300):
        values = rng.gamma(2.0, 1.0, n)
        low, high = statistics.interval(values, np.arange(n), q)
        hits += low <= truth <= high
    assert hits / 300 >= 0.93


def test_correlated_visits_widen_the_interval() -> None:
    rng = np.random.default_rng(2)
    moments = np.repeat(rng.normal(1, 0.05, 20), 5)
    visits = np.repeat(np.arange(20), 5)
    low, high = statistics.interval(moments, visits, 0.5)
    alone_low, alone_high = statistics.interval(moments, np.arange(100), 0.5)
    assert high - low > 1.3 * (alone_high - alone_low)


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=60), st.sampled_from([0.25, 0.5, 0.95]))
@settings(max_examples=40, deadline=None)
def test_interval_contains_the_statistic(values: list[float], q: float) -> None:
    array = np.asarray(values)
    low, high = statistics.interval(array, np.arange(len(array)), q)
    ordered = np.sort(array)
    assert low <= ordered[min(int(np.ceil(q * len(array))), len(array) - 1)]
    assert low <= high


def test_too_few_runs_leave_the_upper_end_unbounded() -> None:
    assert statistics.interval(np.asarray([1.0, 2.0]), np.arange(2), 0.9)[1] == np.inf
    assert statistics.interval(np.zeros(0), np.zeros(0, np.int64), 0.5) == (0.0, np.inf)


def test_unknown_statistic_is_refused() -> None:
    with pytest.raises(ProfileError, match=r"Available statistics: .*quiet"):
        statistics.order_of("mean")
