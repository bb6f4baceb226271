"""No public call changes the user's model, even where ``forward`` writes to attributes, containers and buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsa_hw
from dsa_hw import FlopsBudget, MeasuringRules
from dsa_hw.training.metrics import accuracy
from tests.fakes.formula import Formula

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
DATA = [(torch.randn(8, 3, 8, 8), torch.arange(8) % 4) for _ in range(6)]
HALF = FlopsBudget("50%")
QUIET: dict[str, Any] = {"example_inputs": IMAGE, "progress": False}


class Caching(nn.Module):
    """Assigns an attribute that the class has, keeps results with their gradients, appends, counts and replaces."""

    anchors = torch.empty(0)
    count: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 4)
        self.seen: list[Tensor] = []
        self.grids: dict[int, Tensor] = {}
        self.total = torch.zeros(())
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("last", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.one(x)))
        self.anchors = self.grids[len(x)] = torch.arange(x.shape[-1], dtype=x.dtype)
        self.features = x
        self.seen.append(x)
        x = self.head(torch.relu(self.two(x + self.anchors)).mean((2, 3)))
        with torch.no_grad():
            self.count += 1
            self.total.add_(1)
            self.last = x.mean(0)
        return x


def made() -> Caching:
    """A network in training mode, half-way through the user's own training."""
    torch.manual_seed(0)
    model = Caching()
    model.one.register_forward_hook(lambda *_: None)
    model.norm.eval()
    model(IMAGE).sum().backward()
    return model


def _frozen(value: Any) -> Any:
    """A copy that compares equal only to the same content: identities of tensors and modules, values of tensors."""
    if isinstance(value, nn.Module):
        return "module", id(value)
    if isinstance(value, Tensor):
        gradient = value.grad.tolist() if value.is_leaf and value.grad is not None else None
        return "tensor", id(value), value.tolist(), value.requires_grad, gradient
    if isinstance(value, dict):
        return "dict", id(value), [(key, _frozen(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [_frozen(item) for item in value]
    return value


def _state(model: nn.Module) -> dict[str, Any]:
    return {name: _frozen(vars(module)) for name, module in model.named_modules()}


def _masked(model: Caching) -> None:
    groups = dsa_hw.find_groups(model, IMAGE)
    before = _state(model)
    with dsa_hw.masked(model, groups, [[0, 1]] * len(groups)):
        pass
    assert _state(model) == before


def _recover(model: Caching) -> None:
    groups = dsa_hw.find_groups(model, IMAGE)
    kept = [[0, 1, 2]] * len(groups)
    small = dsa_hw.shrink(model, groups, kept)
    assert dsa_hw.recover(small, model, [x for x, _ in DATA], dsa_hw.Plan.of(groups, kept))


def _step(model: Caching) -> None:
    allocator = dsa_hw.Allocator(model, dsa_hw.find_groups(model, IMAGE), HALF, steps=3)
    for batch in DATA[:3]:
        allocator.step(batch)


def _verify(model: Caching) -> None:
    result = dsa_hw.allocate(model, HALF, method="uniform", recovery="none", **QUIET)
    small = dsa_hw.apply_plan(model, result.plan, IMAGE)
    assert dsa_hw.verify(result.plan, model, weights=result.model.state_dict()).now.verdict == "MET"
    assert small.one.weight.shape == result.model.get_submodule("one").weight.shape


def _latency(model: Caching) -> None:
    rules = MeasuringRules(precision=0.5, least_blocks=2, most_blocks=2, rounds=2, least_seconds=0.0)
    dsa_hw.profile(model, IMAGE, Formula(), samples=3, holdout=1, grid=1, rules=rules)
    dsa_hw.measure(model, IMAGE, Formula(), rules=rules)


CALLS: dict[str, Callable[[Caching, Path], Any]] = {
    "find_groups": lambda m, _: dsa_hw.find_groups(m, IMAGE),
    "shrink": lambda m, _: dsa_hw.shrink(m, dsa_hw.find_groups(m, IMAGE), [4, 4]),
    "masked": lambda m, _: _masked(m),
    "recover": lambda m, _: _recover(m),
    "Allocator.step": lambda m, _: _step(m),
    "apply_plan and verify": lambda m, _: _verify(m),
    "accuracy": lambda m, _: accuracy(m, DATA),
    "profile and measure": lambda m, _: _latency(m),
    "allocate without data": lambda m, out: dsa_hw.allocate(m, HALF, options={"steps": 3}, out=out, **QUIET),
    "allocate on val": lambda m, _: dsa_hw.allocate(m, HALF, val=DATA, options={"steps": 3}, **QUIET),
    "allocate on train": lambda m, _: dsa_hw.allocate(m, HALF, train=DATA, val=DATA, options={"steps": 3}, **QUIET),
    "sweep": lambda m, _: dsa_hw.sweep(m, [HALF, FlopsBudget("70%")], method="uniform", example_inputs=IMAGE),
    "minimize": lambda m, _: dsa_hw.minimize(
        m, "flops", "99%", val=DATA, method="uniform", most=1, example_inputs=IMAGE, progress=False
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_no_public_call_changes_the_model(call: str, tmp_path: Path) -> None:
    model = made()
    before, random = _state(model), torch.get_rng_state()
    CALLS[call](model, tmp_path / "out")
    found = _state(model)
    for name, module in before.items():
        changed = [key for (key, old), (_, new) in zip(module[2], found[name][2], strict=True) if old != new]
        assert not changed, (name, changed)
    assert found == before
    assert torch.equal(torch.get_rng_state(), random)
