from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import budgets
from dsa_hw.channels.plan import Plan
from dsa_hw.cli import allocate, export, verify
from dsa_hw.cli.budget_args import parse_budget, parse_budgets
from dsa_hw.errors import BudgetError, InfeasibleBudgetError, ModelError, PlanError
from tests.fakes.formula import Net

MODEL = "tests.dsa_hw.cli.test_allocate:make"


def make() -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net().eval(), torch.zeros(1, 3, 16, 16)


def dsa_hw(*argv: Any) -> int:
    parser = argparse.ArgumentParser()
    subparsers = parser.add_subparsers(required=True)
    for command in (allocate, verify, export):
        command.add(subparsers)
    args = parser.parse_args([str(word) for word in argv])
    return int(args.run(args))


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("latency=50%", budgets.LatencyBudget("50%")),
        ("latency=5ms", budgets.LatencyBudget("5ms")),
        ("latency.p95=8ms", budgets.LatencyBudget("8ms", quantile=0.95)),
        ("flops=1.2G", budgets.FlopsBudget("1.2G")),
        ("params = 2M", budgets.ParamsBudget("2M")),
        ("memory=64MiB", budgets.MemoryBudget("64MiB")),
        ("energy=40mJ", budgets.EnergyBudget("40mJ")),
        ("estimated_energy=40mJ", budgets.EstimatedEnergyBudget("40mJ")),
    ],
)
def test_budgets_as_typed(text: str, budget: budgets.Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["latency", "latency=", "latncy=5ms", "flops.p95=1G", "latency.p0=5ms", "latency=5"])
def test_budgets_that_are_refused(text: str) -> None:
    with pytest.raises(BudgetError):
        parse_budget(text)


def test_the_same_cost_twice_is_refused() -> None:
    with pytest.raises(BudgetError, match="two budgets"):
        parse_budgets(["flops=50%", "flops=40%"])
    assert len(parse_budgets(["latency=50%", "latency.p95=60%"])) == 2


@pytest.mark.parametrize("command", ["allocate", "verify", "export"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dsa_hw(command, "--help")
    text = capsys.readouterr().out
    assert f"dsa-hw {command}" in text.partition("example")[2]
    assert "--json" in text


def test_allocate_verify_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "small"
    common = ("--model", MODEL)
    code = dsa_hw("allocate", *common, "--budget", "flops=50%", "--method", "uniform", "--out", out, "--json")
    found = json.loads(capsys.readouterr().out)
    assert (code, found["certificate"]["verdict"]) == (0, "MET")
    assert Plan.load(out / "plan.json").widths == found["widths"]

    assert dsa_hw("allocate", *common, "--budget", "flops=50%", "--method", "uniform", "--out", out) == 0
    assert "MET" in capsys.readouterr().out

    assert dsa_hw("verify", out / "plan.json", *common, "--weights", out / "model.pt") == 0
    assert "still holds" in capsys.readouterr().out
    assert dsa_hw("verify", out / "plan.json", *common, "--json") == 0
    assert json.loads(capsys.readouterr().out)["same_device"] is True

    onnx = tmp_path / "model.onnx"
    assert dsa_hw("export", out / "plan.json", *common, "--weights", out / "model.pt", "--out", onnx, "--json") == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == onnx.stat().st_size > 1000


def test_what_is_wrong_is_said(tmp_path: Path, net: Net) -> None:
    common = ("--model", MODEL, "--method", "uniform", "--out", tmp_path / "out")
    with pytest.raises(InfeasibleBudgetError) as impossible:
        dsa_hw("allocate", *common, "--budget", "flops=0.001%")
    assert impossible.value.exit_code == 3
    with pytest.raises(ModelError, match="--data"):
        dsa_hw("allocate", *common, "--budget", "flops=50%", "--finetune", "1")
    with pytest.raises(ModelError, match="cannot be read"):
        dsa_hw("allocate", *common, "--budget", "flops=50%", "--weights", tmp_path / "none.pt")
    bare = tmp_path / "bare.json"
    from dsa_hw import find_groups

    groups = find_groups(net, (torch.zeros(1, 3, 16, 16),))
    Plan.of(groups, [range(int(n)) for n in groups.sizes]).save(bare)  # type: ignore[misc]
    with pytest.raises(PlanError, match="no certificate"):
        dsa_hw("verify", bare, "--model", MODEL)


def test_guided_by_data_and_fine_tuned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--budget", "flops=60%", "--data", "digits", "--epochs", "0.2", "--finetune", "0.2", "--json")
    assert dsa_hw("allocate", "--model", MODEL, *words, "--out", tmp_path) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["accuracy"]) == {"dense", "pruned", "fine-tuned"}
    assert found["certificate"]["entries"][0]["utilisation"] >= 0.97
