"""A result is saved as a whole, and its plan has the hashes of all of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import budgets
from dsa_hw.channels.plan import Plan
from dsa_hw.errors import DsaError, ModelError
from dsa_hw.pipeline.allocate import allocate
from dsa_hw.pipeline.result import Allocation
from dsa_hw.pipeline.verification import verify
from dsa_hw.utils.weights import read_weights
from tests.fakes.formula import Net


def made(net: Net, example: torch.Tensor, amount: str = "50%") -> Allocation:
    return allocate(net, budgets.FlopsBudget(amount), example_inputs=example, method="uniform", progress=False)


@pytest.fixture
def result(net: Net, example: torch.Tensor) -> Allocation:
    return made(net, example)


def test_the_plan_has_the_hash_of_every_file(result: Allocation, tmp_path: Path) -> None:
    pytest.importorskip("onnx", reason="pip install 'dsa-hw[onnx]'")
    (tmp_path / "profile.sqlite").write_bytes(b"of another step")
    result.save(tmp_path, onnx=True)
    plan = Plan.load(tmp_path / "plan.json")
    names = {path.name for path in tmp_path.iterdir()}
    assert names - {"plan.json", "profile.sqlite", "README.md"} == set(plan.files)
    assert "model.onnx" in names
    for name, digest in plan.files.items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    result.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names - {"model.onnx"}, "that of the old result is removed"


def test_weights_that_were_trained_further_are_saved_with_their_hash(
    result: Allocation, net: Net, tmp_path: Path
) -> None:
    result.save(tmp_path)
    before = Plan.load(tmp_path / "plan.json")
    with torch.no_grad():
        for parameter in result.model.parameters():
            parameter.mul_(1.1)
    result.save(tmp_path)
    after = Plan.load(tmp_path / "plan.json")
    assert (before.network, before.files["model.safetensors"]) != (after.network, after.files["model.safetensors"])
    assert "as saved" in verify(tmp_path / "plan.json", net).weights
    found = read_weights(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in result.model.state_dict().items())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_not_saved(bad: float, result: Allocation, tmp_path: Path) -> None:
    next(result.model.parameters()).data.view(-1)[0] = bad
    with pytest.raises(ModelError, match="of the pruned network has"):
        result.save(tmp_path / "small")
    assert not (tmp_path / "small").exists()


def test_a_full_disk_leaves_the_old_result(
    result: Allocation, net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result.save(tmp_path)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = made(net, torch.zeros(1, 3, 16, 16), "70%")
    calls = 0
    real = os.write

    def full(descriptor: int, data: Any) -> int:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    for number in range(1, 7):
        calls = 0
        with monkeypatch.context() as patch:
            patch.setattr("os.write", full)
            with pytest.raises(DsaError, match="No space left"):
                other.save(tmp_path)
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old, number
