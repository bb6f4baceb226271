"""Fine-tuning: interruption, schedule, checks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

from dsa_hw.errors import TrainingError
from dsa_hw.training.finetune import defer_interrupt, finetune, one_cycle
from tests.fakes.loaders import Interrupting
from tests.fakes.networks import Small, batches


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
    pd.testing.assert_frame_equal(finetune(again, batches(30), 4, folder=tmp_path), table)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert [file.name for file in tmp_path.iterdir()] == ["finetune.pt"]
    with pytest.raises(TrainingError, match="Delete it"):  # of another length
        finetune(fresh(), batches(30), 5, folder=tmp_path)


def test_learning_rate_rises_to_its_peak_and_falls_to_zero() -> None:
    rates = [one_cycle(step / 100, 0.3) for step in range(101)]
    assert max(rates) == rates[30] == 1.0
    assert rates[:31] == sorted(rates[:31])
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[-1] == 0.0


def test_second_interrupt_is_not_deferred() -> None:
    with defer_interrupt() as received:
        os.kill(os.getpid(), signal.SIGINT)
        assert received == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
