"""Comparisons of measurements, and their reports."""

from __future__ import annotations

import numpy as np

from profilers import compare_measurements
from profilers.measuring.measurement import Measurement, Samples

CONTROL = 5e-4


def made(seconds: np.ndarray, what: str = "net", target: str = "t") -> Measurement:
    n = len(seconds)
    one = np.full(n, CONTROL)
    return Measurement(what, target, Samples(seconds, np.arange(n), one, one, np.zeros(n)), CONTROL)


def test_verdict_is_faster_slower_same_or_inconclusive() -> None:
    rng = np.random.default_rng(0)
    base = 1e-2 * (1 + 0.004 * rng.random(60))
    a = made(base)
    assert compare_measurements(a, made(base * 1.05)).verdict == "slower"
    assert compare_measurements(a, made(base * 0.95)).verdict == "faster"
    assert compare_measurements(a, made(base[::-1] * 1.0005)).verdict == "same"
    vague = made(1e-2 * (1 + 0.4 * rng.random(14)))
    verdict = compare_measurements(a, vague)
    assert verdict.verdict == "inconclusive"
    assert verdict.reason
    assert compare_measurements(a, made(base[:3])).verdict == "inconclusive"
    assert compare_measurements(a, made(np.zeros(0))).verdict == "inconclusive"
    assert "targets differ" in compare_measurements(a, made(base, target="u")).reason
    assert str(compare_measurements(a, made(base * 2))).startswith("slower: ratio 2.0000, 95% CI [")


def test_report_has_value_interval_percentiles_and_warnings() -> None:
    rng = np.random.default_rng(0)
    text = repr(made(1e-2 * (1 + 0.004 * rng.random(60)), "resnet18", "onnxruntime/cpu"))
    for part in ("resnet18 on onnxruntime/cpu", "ms, 95% CI [", "median", "p90", "p95", "p99", "60 runs", "rejected"):
        assert part in text
    assert "WARNING" not in text
    assert "WARNING" in repr(made(np.asarray([0.01, 0.02])))
