"""Proposals on disk: reuse for the same problem, and only for it."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import budgets
from dsa_hw import find_groups
from dsa_hw.methods import registry as methods
from dsa_hw.methods.checkpoint import solve_or_resume
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.problem import Problem, Proposal
from tests.fakes.formula import Net

IMAGES, LABELS = torch.arange(32 * 3.0).reshape(32, 3), torch.arange(32) % 10


def data(shift: float = 0.0, **options: Any) -> DataLoader[Any]:
    """Shuffled with the global random numbers, as usual."""
    return DataLoader(TensorDataset(IMAGES + shift, LABELS), batch_size=8, shuffle=True, **options)


def mean_square(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs - targets).square().mean()


@pytest.fixture
def solved() -> Iterator[list[Problem]]:
    """Problems that the method "trivial" was asked to solve."""
    asked: list[Problem] = []

    @methods.register_method("trivial")
    def solve(problem: Problem) -> Proposal:
        asked.append(problem)
        return Proposal(np.full(len(problem.groups), 0.5), problem.model)

    yield asked
    del methods.METHODS["trivial"]


@pytest.fixture
def problem(net: Net, example: torch.Tensor) -> dict[str, Any]:
    groups = find_groups(net, (example,))
    costs = CostSet.of(budgets.FlopsBudget("50%"), groups)
    return {"model": net, "groups": groups, "costs": costs, "train": data(), "val": data(1.0)}


class _Scaled:
    """A cost 1% above another one, as of another profile."""

    def __init__(self, cost: Any) -> None:
        self.cost = cost

    def value(self, alpha: torch.Tensor) -> torch.Tensor:
        return 1.01 * self.cost.value(alpha)

    def gradient(self, alpha: Any) -> Any:
        return 1.01 * self.cost.gradient(alpha)


def interrupt(problem: dict[str, Any], folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dsa_hw.methods.checkpoint.solve", _interrupted)
        ask(problem, folder)


def _interrupted(*_: Any) -> Any:
    raise KeyboardInterrupt


def ask(problem: dict[str, Any], folder: Path) -> Proposal:
    return solve_or_resume(Problem(**problem), "trivial", folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"train": data(0.5)},
        {"val": data(0.5)},
        {"train": None},
        {"val": None},
        {"seed": 1},
        {"train": DataLoader(TensorDataset(IMAGES, LABELS), batch_size=4, shuffle=True)},
        {"train": DataLoader(TensorDataset(IMAGES[:24], LABELS[:24]), batch_size=8, shuffle=True)},
        {"train": DataLoader(TensorDataset(IMAGES.double(), LABELS), batch_size=8, shuffle=True)},
        {"loss": mean_square},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"importance": "l1"},
        {"options": {"precision": "bf16"}},
        {"epochs": 2.0},
        {"minimum": 0.1},
        {"grid": np.array([2])},
        {"model": "other weights"},
        {"costs": "55%"},
        {"costs": "other cost"},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_kept_proposal_is_used_for_the_same_problem_only(
    changes: dict[str, Any],
    problem: dict[str, Any],
    solved: list[Problem],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if "model" in changes:
        changes = {"model": copy.deepcopy(problem["model"])}
        next(changes["model"].parameters()).data[0] += 1e-3
    if "costs" in changes:
        costs = CostSet.of(budgets.FlopsBudget("55%"), problem["groups"])
        other = _Scaled(costs.costs[0])
        same_limit = CostSet([other], costs.sizes, problem["costs"].limits, problem["costs"].budgets)
        changes = {"costs": costs if changes["costs"] == "55%" else same_limit}
    changes = {k: np.full(len(problem["groups"]), 2) if k == "grid" else v for k, v in changes.items()}
    ask(problem, tmp_path)
    torch.rand(3)  # an unseeded program: the order of the images is another one in every process
    with caplog.at_level(logging.WARNING):
        ask({**problem, "train": data(), "val": data(1.0)}, tmp_path)
    assert len(solved) == 1
    assert [r.levelname for r in caplog.records if "Continuing an earlier allocation" in r.message] == ["WARNING"]
    caplog.clear()
    ask({**problem, **changes}, tmp_path)
    assert len(solved) == 2, "solved again"
    assert "Continuing" not in caplog.text
    name = {"options": "options.precision", "costs": "cost model", "model": "weights"}.get(*changes, *changes)
    assert re.search(rf"different settings \(.*{name}=.+, requested {name}=.+\)", caplog.text)
    ask({**problem, **changes}, tmp_path)
    assert len(solved) == 2, "and kept"


def test_allocation_with_an_unstable_loss_is_never_continued(
    problem: dict[str, Any], solved: list[Problem], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loss = lambda outputs, targets: outputs.sum()
    for times in (1, 2):
        caplog.clear()
        ask({**problem, "loss": loss}, tmp_path)
        assert len(solved) == times
        assert "cannot be continued" in caplog.text
        assert solved[-1].folder is None, "nor is what is unfinished"


def test_interrupted_method_is_continued_with_a_warning(
    problem: dict[str, Any], solved: list[Problem], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ask(problem, tmp_path)
    unfinished = solved[0].folder
    assert unfinished is not None
    (tmp_path / "proposal.pt").unlink()
    with pytest.raises(KeyboardInterrupt):
        interrupt(problem, tmp_path)
    (unfinished / "work").touch()
    ask(problem, tmp_path)
    assert solved[-1].folder == unfinished
    assert "Continuing an earlier allocation that was interrupted" in caplog.text
    (tmp_path / "proposal.pt").unlink()
    with pytest.raises(KeyboardInterrupt):
        interrupt(problem, tmp_path)
    (unfinished / "work").touch()
    caplog.clear()
    with pytest.raises(KeyboardInterrupt):
        interrupt({**problem, "train": data(0.5)}, tmp_path)
    assert "Continuing" not in caplog.text, "of other data"
    assert "train=" in caplog.text
    assert not (unfinished / "work").exists(), "and its unfinished work is gone"


def test_damaged_proposal_is_not_used(
    problem: dict[str, Any], solved: list[Problem], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ask(problem, tmp_path)
    path = tmp_path / "proposal.pt"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    ask(problem, tmp_path)
    assert len(solved) == 2
    assert "Cannot read" in caplog.text
    weights = next(iter(problem["model"].state_dict().values())).numpy().tobytes()
    damaged = bytearray(content)
    damaged[content.index(weights[:16])] ^= 1
    path.write_bytes(damaged)
    ask(problem, tmp_path)
    assert len(solved) == 3
    assert "checksum" in caplog.text


def test_generator_reaches_the_method_unread(problem: dict[str, Any], solved: list[Problem], tmp_path: Path) -> None:
    ask({**problem, "train": ((IMAGES, LABELS) for _ in range(3))}, tmp_path)
    train = solved[0].train
    assert train is not None
    assert len(list(train)) == 3
