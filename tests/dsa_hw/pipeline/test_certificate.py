from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import budgets
from dsa_hw.channels.plan import Plan, PrunedNetwork
from dsa_hw.errors import PlanError
from dsa_hw.pipeline.certificate import Certificate, entry_of
from dsa_hw.pipeline.quality import ACCURACY, AGREEMENT, METRIC, OUTPUT_ERROR, UNKNOWN, Quality
from dsa_hw.pipeline.reading import Judgement, Reading, judge
from dsa_hw.training.intervals import Interval, difference_interval, mean_interval, share_interval
from profilers.measuring.statistics import Estimate

METER = SimpleNamespace(
    title="onnxruntime/cpu fp32 x1", specification="onnxruntime/cpu", environment={"onnxruntime": "1.31"}, exact=False
)
DENSE = Reading(0.01, 0.0099, 0.0101, 300, "median")


FIVE, HALF = budgets.LatencyBudget("5ms"), budgets.LatencyBudget("50%")


def absolute(found: Reading) -> Judgement:
    """Judge a latency against 5 ms."""
    return judge(FIVE, found, DENSE, exact=False)


def reading(value: float, side: float = 0.005, doubt: str | None = None) -> Reading:
    return Reading(value, value * (1 - side), value * (1 + side), 400, "median", doubt)


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.98, "MET"), (0.999, "INCONCLUSIVE"), (1.002, "INCONCLUSIVE"), (1.02, "NOT MET")]
)
def test_a_verdict_is_about_the_whole_interval(share: float, verdict: str) -> None:
    assert absolute(reading(0.005 * share)).verdict == verdict


def test_the_uncertainty_of_a_relative_limit_counts_too() -> None:
    assert absolute(reading(0.005 * 0.993)).verdict == "MET"
    assert judge(HALF, reading(0.005 * 0.993), DENSE, exact=False).verdict == "INCONCLUSIVE"
    assert judge(HALF, reading(0.005 * 0.993), DENSE, exact=True).verdict == "MET"


def test_what_cannot_be_trusted_is_inconclusive() -> None:
    assert absolute(reading(0.001, doubt="busy")).verdict == "INCONCLUSIVE"
    assert absolute(Reading(math.nan, 0.0, math.inf)).verdict == "INCONCLUSIVE"


def beside(value: float, ratio: float, error: float, scale_error: float = 0.1) -> Reading:
    """A reading whose ratio to the dense network is known better than its time."""
    cost = Estimate(math.log(value), error**2 + scale_error**2)
    return Reading(value, *cost.interval(), 400, "median", None, None, cost, Estimate(math.log(ratio), error**2))


def test_a_share_needs_only_the_ratio() -> None:
    """In milliseconds the machine may be 10 % faster or slower; the share is known to 0.5 %."""
    network = beside(0.0049, 0.49, 0.005)
    assert judge(HALF, network, beside(0.01, 1.0, 0.0), exact=False).verdict == "MET"
    assert absolute(network).verdict == "INCONCLUSIVE"
    assert judge(HALF, beside(0.0052, 0.52, 0.005), beside(0.01, 1.0, 0.0), exact=False).verdict == "NOT MET"
    assert judge(HALF, beside(0.004995, 0.4995, 0.005), beside(0.01, 1.0, 0.0), exact=False).verdict == "INCONCLUSIVE"


def test_more_confidence_and_more_looks_need_more_distance() -> None:
    network, dense = beside(0.004955, 0.4955, 0.005), beside(0.01, 1.0, 0.0)
    assert judge(HALF, network, dense, exact=False, confidence=0.9).verdict == "MET"
    assert judge(HALF, network, dense, exact=False, confidence=0.99).verdict == "INCONCLUSIVE"
    assert judge(HALF, replace(network, look=3), dense, exact=False, confidence=0.9).verdict == "INCONCLUSIVE"


@given(
    value=st.floats(1e-6, 1.0), limit=st.floats(1e-6, 1.0), below=st.floats(0, 0.5), above=st.floats(0, 0.5)
)  # fmt: skip
def test_met_and_not_met_exclude_each_other(value: float, limit: float, below: float, above: float) -> None:
    budget = budgets.LatencyBudget(f"{limit!r}s")
    found = judge(budget, Reading(value, value * (1 - below), value * (1 + above), 9), DENSE, exact=False)
    assert found.low <= found.used <= found.high
    assert (found.verdict == "MET") == (found.high <= 1)
    assert (found.verdict == "NOT MET") == (found.low > 1)


BUDGETS = [
    budgets.LatencyBudget("5ms"),
    budgets.LatencyBudget("33.3%", quantile=0.95, target="openvino/cpu"),
    budgets.FlopsBudget("1.2G", convention="paper"),
    budgets.MemoryBudget("64MiB"),
    budgets.ParamsBudget("17%"),
    budgets.EnergyBudget("40mJ", confidence=0.9),
    budgets.EstimatedEnergyBudget("60%", technology="7nm-int8"),
]


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_a_budget_survives_json_to_the_last_digit(budget: budgets.Budget) -> None:
    again = budgets.Budget.from_dict(json.loads(json.dumps(budget.to_dict())))
    assert type(again) is type(budget)
    assert again.quantity.dimension == budget.quantity.dimension
    assert again.quantity.magnitude == pytest.approx(budget.quantity.magnitude, rel=1e-15)
    assert str(again) == str(budget)
    assert again.to_dict() == budget.to_dict()


# 900 of 1000 right, of 930: 50 were lost, 20 won.
_DENSE = np.array([1.0] * 930 + [0.0] * 70)
_SMALL = np.array([1.0] * 880 + [0.0] * 50 + [1.0] * 20 + [0.0] * 50)
QUALITIES = [
    Quality(
        ACCURACY, 1000, "validation data", mean_interval(_SMALL, 0.95), mean_interval(_DENSE, 0.95),
        difference_interval(_DENSE, _SMALL, 0.95), dense_weights="0" * 64,
    ),
    Quality(
        METRIC, 1, "test data", *[Interval(x, -math.inf, math.inf) for x in (31.5, 32.0, 0.5)], name="psnr",
        confidence=0.9,
    ),
    Quality(AGREEMENT, 99, "noise", share_interval(33, 99, 0.95), constant=0.25),
    Quality(OUTPUT_ERROR, 256, "synthesised inputs", Interval(1.2, 1.1, 1.3)),
    Quality(UNKNOWN, 0, "noise", reason="no such inputs"),
]  # fmt: skip


def certificate(value: float, quality: Quality | None = None) -> Certificate:
    entries = (
        entry_of(BUDGETS[0], METER, 0.00491, reading(value), DENSE),
        entry_of(budgets.LatencyBudget("40%"), METER, 0.0039, reading(0.0039, doubt="busy"), DENSE),
    )
    return Certificate(entries, "2026-11-16", 3, quality or QUALITIES[0], {"dsa_hw": "0.1.0"})


def test_the_line_says_what_was_asked_predicted_measured_and_decided() -> None:
    line = str(certificate(0.00493).entries[0])
    for part in ("latency <= 5 ms", "predicted 4.91 ms", "measured 4.93 ms [4.905, 4.955]", "400 runs", "98.6%"):
        assert part in line
    assert line.endswith("MET")
    assert "busy" in str(certificate(0.00493).entries[1])


def test_a_relative_limit_comes_from_the_same_run() -> None:
    entry = certificate(0.00493).entries[1]
    assert entry.limit == pytest.approx(0.4 * DENSE.value)


@pytest.mark.parametrize("quality", QUALITIES, ids=str)
def test_the_quality_survives_json_and_is_shown(quality: Quality) -> None:
    made = certificate(0.00493, quality)
    again = Certificate.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again.quality == quality
    assert str(again) == str(made)
    assert str(made).endswith(str(quality))
    assert ("Fine-tune before use." in str(made)) == quality.needs_training


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("measure",), "metric of mine"),
        (("value", "value"), 0.95),
        (("value", "value"), "0.9"),
        (("value", "low"), 0.9),
        (("value", "high"), None),
        (("dense", "high"), 0.99),
        (("value",), None),
        (("drop",), None),
        (("drop", "value"), 0.0),
        (("drop", "low"), 0.5),
        (("drop", "high"), "nan"),
        (("constant",), 0.5),
        (("inputs",), 999),
        (("inputs",), True),
        (("confidence",), 0.9),
        (("source",), "my holiday"),
        (("dense_weights",), "abc"),
        (("max_drop",), -0.1),
        (("surplus",), 1),
    ],
)
def test_a_quality_that_contradicts_itself_is_refused(path: tuple[str, ...], value: object) -> None:
    content = certificate(0.00493, QUALITIES[0]).to_dict()
    place = content["quality"]
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    with pytest.raises(PlanError, match="Cannot use the certificate of the plan: "):
        Certificate.from_dict(content)


@pytest.mark.parametrize(("limit", "verdict"), [(0.06, "MET"), (0.03, "INCONCLUSIVE"), (0.001, "NOT MET")])
def test_a_limit_of_the_drop_decides_with_the_whole_interval(limit: float, verdict: str) -> None:
    quality = replace(QUALITIES[0], max_drop=limit)
    made = Certificate((entry_of(BUDGETS[0], METER, 0.0049, reading(0.0049), DENSE),), "2026-11-16", 1, quality)
    assert quality.verdict == made.verdict == verdict
    content = made.to_dict()
    assert Certificate.from_dict(content).verdict == verdict
    content["verdict"] = "MET" if verdict != "MET" else "NOT MET"
    with pytest.raises(PlanError, match="its quality say"):
        Certificate.from_dict(content)


@pytest.mark.parametrize("value", [0.00493, math.nan])
def test_json_round_trip_inside_a_plan(value: float, tmp_path: object) -> None:
    made = certificate(value)
    net = torch.nn.Linear(3, 2)
    network = PrunedNetwork.of(net, (torch.zeros(1, 3),))
    plan = Plan(("a",), (4,), ((0, 2),), {"a.weight": (4,)}, ((1, 3),), made.to_dict(), network)
    plan.save(f"{tmp_path}/plan.json")
    again = Certificate.from_dict(Plan.load(f"{tmp_path}/plan.json").certificate)
    assert json.dumps(again.to_dict()) == json.dumps(made.to_dict())
    assert again.verdict == "INCONCLUSIVE"


def test_the_worst_verdict_is_the_verdict() -> None:
    assert certificate(0.0049).verdict == "INCONCLUSIVE"
    assert certificate(0.0059).verdict == "NOT MET"


@pytest.mark.parametrize(
    "content", [None, {}, {"format": "other"}, {"format": "dsa_hw certificate 1", "entries": [{}]}]
)
def test_anything_else_is_refused(content: dict | None) -> None:
    with pytest.raises(PlanError):
        Certificate.from_dict(content)


def test_the_certificate_keeps_the_specification_of_the_target() -> None:
    """A title leaves options out; the same target can only be named again with them."""
    name = "ssh://pi@board:22?runtime=onnxruntime&python=%2Fopt%2Fpython"
    meter = SimpleNamespace(**{**vars(METER), "title": "onnxruntime/ssh://pi@board:22 fp32 x1", "specification": name})
    made = Certificate((entry_of(BUDGETS[0], meter, 0.0049, reading(0.0049), DENSE),), "2026-11-16", 1, QUALITIES[0])
    again = Certificate.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again.entries[0].specification == name
    content = made.to_dict()
    del content["entries"][0]["specification"]
    with pytest.raises(PlanError, match="specification: is missing"):
        Certificate.from_dict(content)


@given(change=st.sampled_from(["limit", "least_used", "most_used", "utilisation", "measured"]), factor=st.floats(0, 2))
def test_a_number_that_does_not_follow_is_refused(change: str, factor: float) -> None:
    """Whatever number of an entry is changed, it is refused, or limit and verdict are those that were written."""
    made = Certificate((entry_of(BUDGETS[0], METER, 0.0049, reading(0.0049), DENSE),), "2026-11-16", 1, QUALITIES[0])
    assert made.verdict == "MET"
    content = made.to_dict()
    content["entries"][0][change] *= factor
    try:
        found = Certificate.from_dict(content)
    except PlanError:
        return
    assert found.entries[0].limit == pytest.approx(0.005)
    assert found.entries[0].most_used <= 1


def test_every_verdict_follows_from_its_interval() -> None:
    for value, verdict in ((0.0049, "MET"), (0.004999, "INCONCLUSIVE"), (0.0059, "NOT MET")):
        made = Certificate((entry_of(BUDGETS[0], METER, 0.0049, reading(value), DENSE),), "2026-11-16", 1, QUALITIES[0])
        assert Certificate.from_dict(made.to_dict()).verdict == verdict
        for other in {"MET", "INCONCLUSIVE", "NOT MET"} - {verdict}:
            content = made.to_dict()
            content["verdict"] = content["entries"][0]["verdict"] = other
            with pytest.raises(PlanError, match="verdict is"):
                Certificate.from_dict(content)
