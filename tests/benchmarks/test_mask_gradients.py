"""The network of the mask-gradient benchmark runs as the allocator does: batch statistics under every mask."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dsa_hw.methods.dsa.relaxation import keep_probabilities


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "mask_gradients.py"
    spec = importlib.util.spec_from_file_location("mask_gradients_script", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_batch_statistics_remove_the_scale_of_the_first_group_and_stored_ones_do_not(script: ModuleType) -> None:
    masks = torch.ones(3, 2, 5, dtype=torch.float64)
    masks[1, 0] = 0.5
    masks[2] = torch.tensor([0.2, 1.0, 0.7, 0.4, 0.9])
    found = {statistics: script.trained_loss(0, statistics)[0](masks) for statistics in ("batch", "stored")}
    assert float(found["batch"][1]) == pytest.approx(float(found["batch"][0]), rel=1e-3)
    assert abs(float(found["stored"][1] - found["stored"][0])) > 1e-2
    alone = script.trained_loss(0, "batch")[0](masks[2:])
    assert torch.allclose(alone, found["batch"][2:]), "masks do not share their statistics"


def test_soft_masks_have_no_gradient_in_the_first_group_at_the_first_beta2_of_the_paper(script: ModuleType) -> None:
    loss, importance = script.trained_loss(0, "batch")
    slopes = []
    for beta2 in (0.05, 10.0):
        alpha = torch.tensor([0.6, 0.6], dtype=torch.float64, requires_grad=True)
        loss(keep_probabilities(alpha, importance, beta2, script.LAYOUT)[None]).sum().backward()
        assert alpha.grad is not None
        slopes.append(float(alpha.grad[0].abs()))
    assert slopes[0] < 0.05 * slopes[1]
