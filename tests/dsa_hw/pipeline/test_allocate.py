from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import budgets
from dsa_hw import find_groups
from dsa_hw.channels.plan import Plan, apply_plan
from dsa_hw.errors import (
    BudgetError,
    DsaError,
    InfeasibleBudgetError,
    ModelError,
    ProfileError,
    TrainingError,
)
from dsa_hw.pipeline import meters
from dsa_hw.pipeline.allocate import allocate
from dsa_hw.pipeline.constraints import resolve_budgets
from dsa_hw.pipeline.cost_models import Task
from dsa_hw.pipeline.options import ProfileOptions, RefinementOptions
from dsa_hw.pipeline.verification import verify
from dsa_hw.profiles import Profile
from profilers import MeasuringRules
from profilers.networks.builder import ConfigurationBuilder
from tests.fakes.formula import Formula, Net

PROFILING = ProfileOptions(samples=8, holdout=2, grid=8, time_limit=60.0)
SMALL: dict[str, Any] = {"profiling": PROFILING, "progress": False}


def test_counted_budgets_are_met_exactly_and_counted_on_the_smaller_network(net: Net, example: torch.Tensor) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    wanted = [budgets.FlopsBudget("50%"), budgets.ParamsBudget("70%")]
    result = allocate(net, wanted, example_inputs=example, method="uniform", progress=False)
    assert result.certificate.verdict == "MET"
    assert result.certificate.utilisation >= 0.97
    assert result.certificate.measurements == 1
    flops, params = result.certificate.entries
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        result.model(example)
    assert flops.measured == counter.get_total_flops() <= flops.limit
    assert params.measured == sum(p.numel() for p in result.model.parameters()) <= params.limit
    assert result.widths.to_dict() == result.plan.widths
    assert (result.keep_ratios <= 1).all()
    again = apply_plan(net, result.plan, example)
    again.load_state_dict(result.model.state_dict())
    assert torch.equal(again(example), result.model(example))


def test_latency_is_profiled_measured_corrected_and_certified(
    net: Net, example: torch.Tensor, formula: Formula, tmp_path: Path, counting: list[Any]
) -> None:
    result = allocate(
        net, budget=budgets.LatencyBudget("60%"), example_inputs=example, target=formula, method="counting",
        out=tmp_path / "run", **SMALL,
    )  # fmt: skip
    (entry,) = result.certificate.entries
    assert entry.verdict == "MET", str(entry)
    assert 0.94 <= entry.utilisation <= 1
    assert result.certificate.measurements <= 6
    assert entry.limit == pytest.approx(0.6 * entry.dense)
    assert entry.target == "formula/device fp32"
    assert entry.environment["formula"] == "1"
    assert len(result.rounds) == result.certificate.measurements
    assert "latency <= 60%" in repr(result)
    assert "MET" in repr(result)
    for file in (
        "plan.json",
        "model.safetensors",
        "cost_model.json",
        "widths.csv",
        "rounds.csv",
        "history.csv",
        "profile.sqlite",
    ):
        assert (tmp_path / "run" / file).exists(), file

    again = verify(tmp_path / "run" / "plan.json", net, target=formula)
    assert (again.now.verdict, again.same_device) == ("MET", True)
    assert f"The certificate of {again.then.date} still holds." in str(again)
    formula.factor = 1.2  # everything is slower than it ever was here; a share of the dense network's latency is not
    assert verify(result.plan, net, target=formula, time_limit=1).now.verdict == "MET"
    formula.factor = 1.0

    # The same call again: nothing is trained again, and the profile is not measured again.
    samples = len(_samples(tmp_path / "run" / "profile.sqlite"))
    allocate(
        net, budget=budgets.LatencyBudget("60%"), example_inputs=example, target=formula, method="counting",
        out=tmp_path / "run", **SMALL,
    )  # fmt: skip
    assert len(counting) == 1
    assert len(_samples(tmp_path / "run" / "profile.sqlite")) == samples


def test_profile_and_candidates_are_built_from_one_export(
    net: Net, example: torch.Tensor, formula: Formula, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export takes seconds; channels are removed from the exported graph instead."""
    made: list[Any] = []
    original = ConfigurationBuilder.__init__

    def count(self: ConfigurationBuilder, *arguments: Any) -> None:
        made.append(arguments)
        original(self, *arguments)

    monkeypatch.setattr(ConfigurationBuilder, "__init__", count)
    monkeypatch.setattr(meters, "loadable_module", lambda *_: pytest.fail("exported separately"))
    wanted = budgets.LatencyBudget("60%")
    result = allocate(net, wanted, example_inputs=example, target=formula, method="uniform", **SMALL)
    assert result.certificate.verdict == "MET"
    assert len(made) == 1
    work = formula.load(result.model, ()).run(1)[0] / formula.load(net, ()).run(1)[0]
    assert result.certificate.utilisation == pytest.approx(work / 0.6, rel=0.01), "it is that network's time"


def _samples(store: Path) -> pd.DataFrame:
    import profilers

    return profilers.load_tables(store).samples


def test_an_absolute_budget_is_not_met_on_a_slower_device(net: Net, example: torch.Tensor, formula: Formula) -> None:
    profile = known_profile(net, example)
    dense = float(profile.table["seconds"].max())
    result = allocate(
        net, budgets.LatencyBudget(f"{0.7 * dense!r}s"), example_inputs=example, target=formula, method="uniform",
        progress=False, profiling=ProfileOptions(source=profile, time_limit=60.0),
    )  # fmt: skip
    assert result.certificate.verdict == "MET", str(result.certificate)
    formula.factor = 1.3
    formula.describe = lambda: {"formula": "2", "cpu": "another"}  # type: ignore[method-assign]
    found = verify(result.plan, net, target=formula)
    assert found.now.verdict == "NOT MET"
    assert not found.same_device
    assert "cpu" in found.device
    assert "formula 1 -> 2" in found.versions
    assert f"The certificate of {found.then.date} no longer holds (measured on a different device)." in str(found)


def known_profile(net: Net, example: torch.Tensor, wrong: float = 1.0, **more: Any) -> Profile:
    """What the formula takes, times ``wrong``."""
    from dsa_hw import shrink

    groups, device, rng = find_groups(net, (example,)), Formula(noise=0.0), np.random.default_rng(0)
    rows = [groups.sizes, *(8 * rng.integers(1, groups.sizes // 8 + 1) for _ in range(20))]
    seconds = []
    for row in rows:
        small = shrink(net, groups, [np.arange(w) for w in row])
        seconds.append(wrong * float(device.load(small, ()).run(1)[0]))
    table = pd.DataFrame(rows, columns=list(groups.names))
    table["seconds"], table["split"] = seconds, ["dense"] + ["train"] * 20
    about = {"target": device.title, "fingerprint": groups.fingerprint, "grid": dict.fromkeys(groups.names, 8), **more}
    return Profile(table, groups.names, tuple(groups.sizes.tolist()), **about)


@pytest.mark.parametrize("wrong", [0.85, 1.15])
def test_a_profile_of_another_day_is_corrected(net: Net, example: torch.Tensor, formula: Formula, wrong: float) -> None:
    right = float(known_profile(net, example).table["seconds"].max())
    result = allocate(
        net, budgets.LatencyBudget(f"{0.5 * right!r}s"), example_inputs=example, target=formula, method="uniform",
        progress=False, profiling=ProfileOptions(source=known_profile(net, example, wrong)),
    )  # fmt: skip
    assert result.certificate.verdict == "MET", result.rounds.to_string()
    # How much the dense network's time differs from day to day is not known yet: a part of the budget is left for it.
    assert result.certificate.utilisation >= 0.86, result.rounds.to_string()  # times differ more than ratios
    assert 2 <= result.certificate.measurements <= 6


def test_an_infeasible_budget_is_refused_before_measuring_or_training(
    net: Net, example: torch.Tensor, formula: Formula, counting: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import profilers

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("profiled")

    known = ProfileOptions(source=known_profile(net, example))
    monkeypatch.setattr(profilers, "profile", refuse)
    monkeypatch.setattr(Formula, "load", refuse)
    common: dict[str, Any] = {"example_inputs": example, "target": formula, "method": "counting", "progress": False}
    with pytest.raises(InfeasibleBudgetError) as impossible:
        allocate(net, [budgets.LatencyBudget("50%"), budgets.FlopsBudget("0.01%")], **common)
    assert impossible.value.smallest is not None
    with pytest.raises(InfeasibleBudgetError, match="cannot be met"):
        allocate(net, budgets.LatencyBudget("1us"), profiling=known, **common)
    with pytest.raises(BudgetError, match="above the dense network"):
        allocate(net, budgets.LatencyBudget("1s"), profiling=known, **common)
    with pytest.raises(BudgetError, match="quantile"):
        allocate(net, budgets.LatencyBudget("50%", quantile=0.42), **common)
    with pytest.raises(BudgetError, match="empty list"):
        allocate(net, [], **common)
    with pytest.raises(DsaError, match="Unknown method"):
        allocate(net, budgets.FlopsBudget("50%"), example_inputs=example, method="nonsense")
    assert counting == []


def test_a_foreign_profile_is_refused(net: Net, example: torch.Tensor, formula: Formula) -> None:
    source = known_profile(net, example, target="openvino/cpu fp32 x1")
    with pytest.raises(ProfileError, match="openvino"):
        allocate(
            net, budgets.LatencyBudget("50%"), example_inputs=example, target=formula, method="uniform",
            profiling=ProfileOptions(source=source),
        )  # fmt: skip


def test_the_tail_is_measured_where_the_budget_is_on_the_tail(
    net: Net, example: torch.Tensor, formula: Formula
) -> None:
    known = ProfileOptions(source=known_profile(net, example))
    task = Task(net, find_groups(net, (example,)), (example,), known)
    wanted = [budgets.LatencyBudget("50%", quantile=0.95), budgets.LatencyBudget("50%")]
    readings = [c.meter.read({"net": net}, 20.0)["net"] for c in resolve_budgets(wanted, task, formula)]
    assert [r.statistic for r in readings] == ["p95", "median"]
    assert readings[0].value > readings[1].value


def test_an_interrupted_run_does_not_train_again(
    net: Net, example: torch.Tensor, tmp_path: Path, counting: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dsa_hw.pipeline.meters import CountMeter

    common: dict[str, Any] = {"example_inputs": example, "method": "counting", "progress": False, "out": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr(CountMeter, "read", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            allocate(net, budgets.FlopsBudget("50%"), **common)
    result = allocate(net, budgets.FlopsBudget("50%"), **common)
    assert result.certificate.verdict == "MET"
    assert len(counting) == 1
    allocate(net, budgets.FlopsBudget("60%"), **common)
    assert len(counting) == 2, "another budget is another problem"
    with torch.no_grad():
        net.one.weight.mul_(2)
    allocate(net, budgets.FlopsBudget("60%"), **common)
    assert len(counting) == 3, "other weights are another problem"
    (tmp_path / "proposal.pt").write_bytes(b"cut off")
    allocate(net, budgets.FlopsBudget("60%"), **common)
    assert len(counting) == 4


def test_a_proposal_can_be_taken_to_another_budget(net: Net, example: torch.Tensor, counting: list[Any]) -> None:
    first = allocate(net, budgets.FlopsBudget("60%"), example_inputs=example, method="counting", progress=False)
    second = allocate(net, budgets.FlopsBudget("30%"), example_inputs=example, method=first.proposal, progress=False)
    assert second.certificate.verdict == "MET"
    assert second.certificate.utilisation >= 0.97
    assert len(counting) == 1


def test_the_example_input_comes_from_the_first_layer(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    from dsa_hw.pipeline.example_inputs import example_for
    from dsa_hw.zoo.torchvision_compat import torchvision

    with caplog.at_level(logging.WARNING):
        assert example_for(torchvision.models.resnet18())[0].shape == (1, 3, 224, 224)
    assert "assuming 1x3x224x224" in caplog.text
    assert example_for(net)[0].shape == (1, 3, 32, 32), "halves the picture once: not a network for photographs"
    assert example_for(nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2)))[0].shape == (1, 20)
    fixed = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(4 * 28 * 28, 10))
    assert example_for(fixed)[0].shape == (1, 1, 28, 28)
    for model in (nn.Embedding(10, 4), nn.Conv1d(2, 3, 3), nn.ReLU()):
        with pytest.raises(ModelError, match="example_inputs"):
            example_for(model)


def test_onnx_runtime_from_end_to_end(net: Net, lenient: MeasuringRules, tmp_path: Path) -> None:
    """Really measured; what the busy machine of a test says about the verdict is not asserted, only that it fits."""
    onnxruntime = pytest.importorskip("onnxruntime")
    example = torch.randn(1, 3, 16, 16)
    result = allocate(
        net, budgets.LatencyBudget("70%"), example_inputs=example, target="onnxruntime/cpu", method="uniform",
        out=tmp_path, refinement=RefinementOptions(most=2), progress=False,
        profiling=replace(PROFILING, rules=lenient, time_limit=36.0),
    )  # fmt: skip
    (entry,) = result.certificate.entries
    assert entry.utilisation == pytest.approx(entry.measured / (0.7 * entry.dense))
    assert entry.low <= entry.measured <= entry.high
    assert entry.runs >= lenient.least_blocks * lenient.rounds
    assert entry.environment["onnxruntime"] == onnxruntime.__version__
    assert result.certificate.measurements <= 2
    assert sum(p.numel() for p in result.model.parameters()) < sum(p.numel() for p in net.parameters())
    path = result.export(tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: example.numpy()})
    with torch.no_grad():
        assert output == pytest.approx(result.model(example).numpy(), abs=1e-4)
    assert Plan.load(tmp_path / "plan.json").certificate == result.plan.certificate
    assert replace(result.plan, certificate=None).widths == result.widths.to_dict()


def test_a_fitted_model_of_another_version_needs_force(
    net: Net, example: torch.Tensor, formula: Formula, tmp_path: Path
) -> None:
    profile = known_profile(net, example, environment={"formula": "0"})
    file = budgets.fit(profile, find_groups(net, (example,))).save(tmp_path / "latency.json")
    common: dict[str, Any] = {"example_inputs": example, "target": formula, "method": "uniform", "progress": False}
    with pytest.raises(ProfileError, match="formula"):
        allocate(net, budgets.LatencyBudget("60%"), profiling=ProfileOptions(source=file), **common)
    forced = ProfileOptions(source=file, force=True)
    result = allocate(net, budgets.LatencyBudget("60%"), profiling=forced, **common)
    assert result.certificate.verdict == "MET", result.rounds.to_string()


@pytest.mark.parametrize("budget", [5, "5ms", None, ["5ms"], [budgets.FlopsBudget("50%"), 0.5]])
def test_anything_but_budgets_is_refused_with_an_example(net: Net, budget: Any) -> None:
    with pytest.raises(BudgetError, match=r"LatencyBudget\('5ms'\)|for example latency=5ms"):
        allocate(net, budget)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["one.weight", "norm.running_mean", "head.bias"])
def test_a_network_with_nan_or_infinite_weights_is_not_certified(
    name: str, bad: float, net: Net, example: torch.Tensor, counting: list[Any]
) -> None:
    net.state_dict()[name].view(-1)[0] = bad
    with pytest.raises(ModelError, match=f"{name} of the network has"):
        allocate(net, budgets.FlopsBudget("50%"), example_inputs=example, method="counting", progress=False)
    assert counting == [], "nothing was allocated"


def test_outputs_and_inputs_that_are_not_finite_are_refused(net: Net, example: torch.Tensor) -> None:
    common: dict[str, Any] = {"method": "uniform", "progress": False}
    with pytest.raises(ModelError, match="input 0 has NaN"):
        allocate(net, budgets.FlopsBudget("50%"), example_inputs=example * float("nan"), **common)
    net.four.bias.data.fill_(10.0)
    net.head.weight.data.fill_(3e38)
    with pytest.raises(ModelError, match="outputs of the network on the example inputs have"):
        allocate(net, budgets.FlopsBudget("50%"), example_inputs=torch.ones_like(example), **common)


def test_a_method_that_returns_bad_weights_or_a_bad_loss_is_not_certified(net: Net, example: torch.Tensor) -> None:
    from dsa_hw.methods import registry

    wanted, common = budgets.FlopsBudget("50%"), {"example_inputs": example, "progress": False}
    honest = allocate(net, wanted, method="uniform", **common).proposal
    assert honest is not None
    broken = replace(honest, model=Net())
    broken.model.two.weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"two\.weight of the network that the method returned has NaN"):
        allocate(net, wanted, method=broken, **common)
    batches = [(torch.randn(4, 3, 16, 16), torch.randint(10, (4,))) for _ in range(4)]
    assert "dsa" in registry.available_methods()
    with pytest.raises(TrainingError, match="The loss is nan"):
        allocate(net, wanted, train=batches, val=batches, loss=_bad_loss, options={"epochs": 1}, **common)


def _bad_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets) * float("nan")


@pytest.mark.parametrize("confidence", [0.0, 0.3, 1.0, float("nan")])
def test_a_confidence_that_no_certificate_may_have_is_refused(confidence: float) -> None:
    with pytest.raises(BudgetError, match="`confidence`"):
        RefinementOptions(confidence=confidence)
