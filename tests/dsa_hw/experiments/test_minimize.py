"""The lowest cost within a drop: the bisection against a known answer, and whole searches on a target of formulas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from budgets import FlopsBudget, LatencyBudget, ParamsBudget
from dsa_hw.channels.plan import apply_plan
from dsa_hw.errors import BudgetError, DsaError, InfeasibleBudgetError, TrainingError
from dsa_hw.experiments.front import Front
from dsa_hw.experiments.minimize import Minimum, minimize, next_share
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.pipeline.options import ProfileOptions
from dsa_hw.pipeline.reading import Verdict
from dsa_hw.utils.modules import load_weights
from dsa_hw.utils.weights import read_weights
from tests.fakes.digits import digits, formula, net

SETTINGS = ExperimentSettings(epochs=0, finetune_epochs=1, reading=1.0)
PROFILING = ProfileOptions(samples=16, holdout=4, time_limit=30.0)


@given(st.floats(0.0, 1.0), st.floats(0.01, 0.5), st.floats(0.005, 0.2))
def test_bisection_finds_the_threshold_within_the_tolerance(threshold: float, least: float, tolerance: float) -> None:
    tried: dict[float, bool] = {}
    while (share := next_share(tried, least, 1.0, tolerance, known=True)) is not None:
        assert least <= share <= 1.0
        assert share not in tried
        tried[share] = share >= threshold
    assert len(tried) <= math.ceil(math.log2((1 - least) / (tolerance - 0.002))) + 1
    lowest = min((share for share, passes in tried.items() if passes), default=1.0)
    assert lowest >= threshold
    assert lowest - max(threshold, least) <= tolerance + 1e-9


def test_without_a_network_that_is_known_to_pass_the_largest_limit_comes_first() -> None:
    assert next_share({}, 0.1, 0.7, 0.02, known=False) == 0.7
    assert next_share({0.7: False}, 0.1, 0.7, 0.02, known=False) is None
    assert next_share({0.7: True}, 0.1, 0.7, 0.02, known=False) == 0.4


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    """A network that was trained so long that a short fine-tuning hardly changes its answers."""
    from dsa_hw.training.finetune import finetune

    model = net()
    torch.manual_seed(0)
    finetune(model, digits().train, 30, lr=0.05)
    return model.eval()


@pytest.fixture(scope="module")
def labelled(dense: nn.Module) -> list[Any]:
    """360 images with the answers of the dense network: its accuracy is 1, and the drop is the disagreement."""
    from dsa_hw.zoo.data import load_data

    with torch.no_grad():
        return [(x, dense(x).argmax(1)) for x, _ in load_data("digits").test]


def search(dense: nn.Module, labelled: list[Any], **more: Any) -> Minimum:
    settings = {"val": labelled, "method": "uniform", "settings": SETTINGS, "profiling": PROFILING, "progress": False}
    settings |= {"target": "formula/cpu", "recovery": "none", "example_inputs": torch.zeros(1, 3, 32, 32)}
    return minimize(dense, more.pop("cost", "flops"), more.pop("max_drop", "20%"), **(settings | more))


@pytest.fixture(scope="module")
def found(dense: nn.Module, labelled: list[Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Minimum]:
    out = tmp_path_factory.mktemp("minimum")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsa_hw.methods.registry._HOMES", ("dsa_hw.methods.baselines",))
        return out, search(dense, labelled, cost="latency", train=digits().train, out=out)


def test_cost_and_drop_are_certified(found: tuple[Path, Minimum], dense: nn.Module, labelled: list[Any]) -> None:
    """Against the files: the network is rebuilt from its plan, timed by the formula and counted image by image."""
    out, result = found
    assert result.certificate.verdict == Verdict.MET
    small = apply_plan(dense, out / "plan.json")
    load_weights(small, read_weights(out / "model.safetensors"), "small")
    entry, quality = result.certificate.entries[0], result.quality
    assert formula(small.eval(), (torch.zeros(1, 3, 32, 32),)) == pytest.approx(entry.measured)
    right = torch.cat([small(x).argmax(1) == y for x, y in labelled])
    assert quality.drop is not None
    assert quality.drop.value == pytest.approx(1 - float(right.double().mean()))
    assert quality.drop.high <= quality.max_drop == 0.2


def test_the_next_lower_limit_fails(found: tuple[Path, Minimum]) -> None:
    front = found[1].front
    passes, shares = front["passes"].to_numpy(bool), front["share"].to_numpy(float)
    assert (front["drop_high"][passes] <= 0.2).all()
    assert (front["drop_high"][~passes] > 0.2).all()
    assert shares[passes].min() - shares[~passes].max() <= 0.02 or len(front) == 6
    assert found[1].certificate.entries[0].measured == front["measured"][passes].min()


def test_a_network_that_passes_is_not_fine_tuned(found: tuple[Path, Minimum]) -> None:
    front = found[1].front
    assert (front["epochs"][~front["passes"].astype(bool)] == 1).all()
    assert front["epochs"].iloc[0] == 0, "the largest network needs no training"
    assert f"{int((front['epochs'] > 0).sum())} network(s) fine-tuned" in repr(found[1])


def test_the_error_is_divided_by_the_judgements_without_test_data(found: tuple[Path, Minimum]) -> None:
    assert found[1].quality.confidence == pytest.approx(1 - 0.05 / 12)
    assert found[1].quality.source == "validation data"


def test_interrupted_search_continues_and_gives_the_same(
    found: tuple[Path, Minimum], dense: nn.Module, labelled: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    real = Front.allocate

    def stop(front: Front, id: str, *args: Any) -> Any:
        calls.append(id)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(front, id, *args)

    monkeypatch.setattr(Front, "allocate", stop)
    more: dict[str, Any] = {"cost": "latency", "train": digits().train, "out": tmp_path}
    with pytest.raises(KeyboardInterrupt):
        search(dense, labelled, **more)
    again = search(dense, labelled, **more)
    assert calls[2] == calls[3]
    assert len(calls) == len(again.front) + 1
    pd.testing.assert_frame_equal(again.front, found[1].front)
    assert again.widths.equals(found[1].widths)
    with pytest.raises(DsaError, match="different settings \\(max_drop="):
        search(dense, labelled, max_drop="10%", **more)


def test_further_limits_are_kept_together_with_the_drop(dense: nn.Module, labelled: list[Any]) -> None:
    limits = [ParamsBudget("70%"), LatencyBudget("90%")]
    result = search(dense, labelled, budgets=limits, cost=FlopsBudget("95%"), most=2)
    kinds = [entry.budget["kind"] for entry in result.certificate.entries]
    assert kinds == ["FlopsBudget", "ParamsBudget", "LatencyBudget"]
    assert result.certificate.verdict == Verdict.MET
    total = sum(p.numel() for p in dense.parameters())
    assert sum(p.numel() for p in result.model.parameters()) <= 0.7 * total
    assert result.front["asked"].iloc[0] == "95%", "the largest limit comes first: nothing is known to pass"


def test_test_data_decide_from_the_largest_network_down(dense: nn.Module, labelled: list[Any]) -> None:
    """On random labels every network passes; on the dense network's own only large ones do."""
    generator = torch.Generator().manual_seed(0)
    chance = [(x, torch.randint(10, y.shape, generator=generator)) for x, y in labelled]
    result = search(dense, chance, test=labelled, cost=FlopsBudget("90%"), most=3)
    assert result.front["passes"].all()
    assert result.quality.source == "test data"
    assert result.quality.confidence == 0.95
    costs = sorted(result.front["measured"], reverse=True)
    chosen = costs.index(result.certificate.entries[0].measured)
    assert result.certificate.verdict == Verdict.MET
    assert chosen < len(costs) - 1, "the smallest network must fail on the test data, or this test shows nothing"


def test_test_data_on_which_nothing_passes_leave_the_verdict_open(dense: nn.Module, labelled: list[Any]) -> None:
    chance = [(x, torch.zeros_like(y)) for x, y in labelled]
    result = search(dense, chance, test=labelled, max_drop="3%", most=2)
    assert result.certificate.verdict != Verdict.MET
    assert result.certificate.entries[0].measured == result.front["measured"].max()


def test_metric_of_the_user_has_its_own_unit(dense: nn.Module, labelled: list[Any]) -> None:
    def closeness(outputs: Any, targets: Any) -> Any:
        return -nn.functional.cross_entropy(outputs, targets, reduction="none")

    result = search(dense, labelled, metric=closeness, max_drop=0.5, most=3)
    assert result.quality.name == "closeness"
    assert result.quality.drop is not None
    assert result.quality.drop.high <= 0.5


def test_impossible_questions_are_refused_before_anything_is_trained_or_pruned(
    dense: nn.Module, labelled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dsa_hw.experiments.minimize.train_dense", _never)
    monkeypatch.setattr(Front, "allocate", _never)
    monkeypatch.setattr(Front, "with_cost", _never)
    settings = ExperimentSettings(train_epochs=1, finetune_epochs=0, epochs=0)
    with pytest.raises(BudgetError, match=r"360 inputs .* cannot show a drop of at most 0\.50%.* at least \d+ inputs"):
        search(dense, labelled, train=labelled, max_drop="0.5%", settings=settings)
    few = [(labelled[0][0][:4], labelled[0][1][:4])]
    with pytest.raises(BudgetError, match="4 inputs \\(test data\\) cannot show"):
        search(dense, labelled, test=few)
    with pytest.raises(TrainingError, match="not known on the validation data"):
        search(dense, [(x, torch.rand(len(x), 10)) for x, _ in labelled])
    for wrong in ("-1%", "one", math.nan, True, -0.1, None):
        with pytest.raises(BudgetError, match="`max_drop` must be"):
            search(dense, labelled, max_drop=wrong)
    with pytest.raises(BudgetError, match="Unknown cost 'latncy'"):
        search(dense, labelled, cost="latncy")
    with pytest.raises(BudgetError, match="limits the cost that is minimised"):
        search(dense, labelled, budgets=FlopsBudget("50%"))
    with pytest.raises(BudgetError, match="`most` must be a whole number"):
        search(dense, labelled, most=0)


def test_no_network_within_the_drop_is_an_error_with_the_best(dense: nn.Module, labelled: list[Any]) -> None:
    with pytest.raises(InfeasibleBudgetError, match=r"None of the 1 networks .* Train longer"):
        search(dense, labelled, max_drop="2%", most=1)


def _never(*args: Any, **more: Any) -> Any:
    raise AssertionError("not expected")
