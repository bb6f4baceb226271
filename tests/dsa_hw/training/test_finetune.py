"""Fine-tuning: interruption, schedule, checks."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn

from dsa_hw.errors import TrainingError
from dsa_hw.training.finetune import defer_interrupt, finetune, one_cycle
from tests.fakes.loaders import Interrupting
from tests.fakes.networks import Small, batches
from tests.fakes.processes import send


def test_interrupted_training_continues_to_the_same_weights(tmp_path: Path) -> None:
    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return Small()

    whole = fresh()
    table = finetune(whole, batches(30), 4)
    again = fresh()
    with pytest.raises(KeyboardInterrupt):
        finetune(again, Interrupting(batches(30), at=77), 4, folder=tmp_path)
    again = fresh()
    pd.testing.assert_frame_equal(finetune(again, Interrupting(batches(30), at=0), 4, folder=tmp_path), table)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert [file.name for file in tmp_path.iterdir()] == ["finetune.pt"]


@pytest.mark.parametrize(
    "changes",
    [
        {"epochs": 5},
        {"lr": 0.01},
        {"momentum": 0.8},
        {"weight_decay": 0.0},
        {"warm_up": 0.2},
        {"precision": "bf16"},
        {"loss": nn.CrossEntropyLoss()},
        {"model": 1},
        {"loader": batches(30, seed=3)},
        {"loader": batches(31)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_checkpoint_of_other_weights_data_or_settings_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    def call(model: int = 0, loader: Any = None, **options: Any) -> None:
        torch.manual_seed(model)
        finetune(Small(), loader or batches(30), folder=tmp_path, **{"epochs": 2, **options})

    call()
    call()
    changed = next(iter(changes))
    name = {"model": "weights", "loader": "data"}.get(changed, changed)
    with pytest.raises(TrainingError, match=rf"different settings \(.*{name}=\S+, requested {name}=\S+.* Delete it"):
        call(**changes)


def test_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    def trained() -> nn.Module:
        torch.manual_seed(0)
        model = Small()
        finetune(model, batches(4), 2, folder=tmp_path)
        return model

    whole = trained().state_dict()
    content = bytearray((tmp_path / "finetune.pt").read_bytes())
    refused = 0
    for place in range(300, len(content), len(content) // 40):
        damaged = content.copy()
        damaged[place] ^= 64
        (tmp_path / "finetune.pt").write_bytes(damaged)
        try:
            found = trained().state_dict()
        except TrainingError as error:
            refused += "Delete it to start again" in str(error)
        else:  # a byte without meaning, such as a date in the zip file
            assert all(torch.equal(found[name], value) for name, value in whole.items())
    assert refused > 20


def test_learning_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    rates = [one_cycle(step / 100, 0.3) for step in range(101)]
    assert max(rates) == rates[30] == 1.0
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[-1] == 0.0


def test_second_interrupt_is_not_deferred() -> None:
    with defer_interrupt() as received:
        send(signal.SIGINT)
        assert received == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)


def _nan_gradient(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets) + (0.0 * outputs.sum()).abs().sqrt()


def test_weights_that_become_nan_in_the_last_step_are_noticed() -> None:
    """The loss is finite; the step after it is not."""
    with pytest.raises(TrainingError, match=r"weight of the trained network has NaN"):
        finetune(Small(), batches(1), 1, loss=_nan_gradient)
