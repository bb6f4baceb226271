"""Checked losses and precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from dsa_hw.errors import TrainingError
from dsa_hw.training.loaders import on_device
from dsa_hw.training.losses import autocast, checked_loss, chosen_loss

X, Y = torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2])


def test_loss_is_that_of_the_function_and_has_a_gradient() -> None:
    model = nn.Linear(5, 3)
    value = checked_loss(model, (X, Y), nn.functional.cross_entropy)
    assert torch.equal(value, nn.functional.cross_entropy(model(X), Y))
    value.backward()
    assert model.weight.grad is not None


@pytest.mark.parametrize(
    ("batch", "loss", "words"),
    [
        ((X, Y + 1), nn.functional.cross_entropy, "Labels run from 1 to 3, but the network has 3 classes"),
        ((X, Y[:4]), nn.functional.cross_entropy, "cannot be computed"),
        ((X, nn.functional.one_hot(Y)), nn.functional.cross_entropy, "needs class numbers"),
        ((X * float("nan"), Y), nn.functional.cross_entropy, "loss is nan"),
        ((X, Y), lambda outputs, targets: outputs, "scalar"),
    ],
    ids=["labels", "shapes", "one-hot", "nan", "not a scalar"],
)
def test_unusable_losses_are_refused_with_the_reason(batch: Any, loss: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        checked_loss(nn.Linear(5, 3), batch, loss)


def test_precision_sets_autocast_and_fp32_leaves_it_alone() -> None:
    cpu, model = torch.device("cpu"), nn.Linear(5, 3)
    with autocast("bf16", cpu):
        assert model(X).dtype == torch.bfloat16
        with autocast("fp32", cpu):
            assert model(X).dtype == torch.bfloat16
    with autocast("fp32", cpu):
        assert model(X).dtype == torch.float32
    with pytest.raises(TrainingError, match="'fp8'"):
        autocast("fp8", cpu)


@dataclass
class Answer:
    logits: torch.Tensor


class Structured(nn.Linear):
    """Returns a dict, a dataclass or, like networks of transformers, a loss where labels are given."""

    kind: Any = dict

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = super().forward(x)
        if labels is not None:
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        return self.kind(logits=logits)


def test_logits_are_found_in_dicts_and_dataclasses() -> None:
    model = Structured(5, 3)
    wanted = nn.functional.cross_entropy(nn.functional.linear(X, model.weight, model.bias), Y)
    for model.kind in (dict, Answer):
        torch.testing.assert_close(checked_loss(model, (X, Y), nn.functional.cross_entropy), wanted)


def test_batch_that_is_a_dict_is_the_arguments_of_the_network_and_has_its_loss() -> None:
    model = Structured(5, 3)
    batch = on_device({"x": X, "labels": Y}, torch.device("cpu"))
    wanted = checked_loss(model, (X, Y), nn.functional.cross_entropy)
    torch.testing.assert_close(checked_loss(model, batch, nn.functional.cross_entropy), wanted)
    with pytest.raises(TrainingError, match="returns no loss"):
        checked_loss(model, on_device({"x": X}, torch.device("cpu")), nn.functional.cross_entropy)
    own = checked_loss(model, batch, lambda outputs, batch: outputs["logits"].mean() * len(batch["labels"]))
    torch.testing.assert_close(own, 6 * model(X)["logits"].mean())


@pytest.mark.parametrize("batch", [(X, Y), {"a": X}, X, (X, Y, Y)], ids=["pair", "dict", "tensor", "triple"])
def test_step_gets_the_batch_as_the_loader_yields_it(batch: Any) -> None:
    seen: list[Any] = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch)
        return model.weight.sum()

    model = nn.Linear(5, 3)
    value = checked_loss(model, on_device(batch, torch.device("cpu")), chosen_loss(None, step))
    assert torch.equal(value, model.weight.sum())
    assert type(seen[0]) is type(batch)
    assert len(seen[0]) == len(batch)


def test_batch_of_another_form_needs_a_step() -> None:
    with pytest.raises(TrainingError, match="For batches of another form give step="):
        checked_loss(nn.Linear(5, 3), on_device((X, Y, Y), torch.device("cpu")), nn.functional.cross_entropy)
