"""Detectors with losses of their own: allocated to a budget, saved and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsa_hw
import dsa_hw.zoo.torchvision_compat  # before what imports torchvision
from dsa_hw.pipeline.quality import METRIC, NEGATIVE_LOSS
from dsa_hw.training.finetune import finetune
from dsa_hw.utils.weights import read_weights
from tests.fakes.detector import SIDE, Detector, scenes


def step(model: nn.Module, batch: Any) -> Tensor:
    return model.loss(batch)


@pytest.fixture(scope="module")
def trained() -> Detector:
    torch.manual_seed(0)
    model = Detector()
    before = float(step(model.eval(), scenes(1)[0]).detach())
    finetune(model, scenes(6), 3, step=step, lr=0.01)
    assert float(step(model.eval(), scenes(1)[0]).detach()) < before
    return model


EXAMPLE = torch.zeros(1, 3, SIDE, SIDE)


@pytest.mark.parametrize("loaders", [("val",), ("train", "val")], ids=["frozen weights", "trained weights"])
def test_detector_is_allocated_with_its_own_loss(trained: Detector, loaders: tuple[str, ...], tmp_path: Path) -> None:
    data = {name: scenes(3, seed=seed) for seed, name in enumerate(loaders, 1)}
    weights = {name: value.clone() for name, value in trained.state_dict().items()}
    result = dsa_hw.allocate(
        trained, dsa_hw.FlopsBudget("50%"), example_inputs=EXAMPLE, step=step, options={"steps": 8}, progress=False,
        **data,
    )  # fmt: skip
    assert result.certificate.verdict == dsa_hw.Verdict.MET
    assert result.widths.nunique() > 1  # the loss tells the groups apart
    assert all(torch.equal(value, weights[name]) for name, value in trained.state_dict().items())
    quality = result.quality
    assert (quality.measure, quality.name, quality.inputs) == (METRIC, NEGATIVE_LOSS, 24)
    assert quality.value is not None
    wanted = -sum(float(step(result.model.eval(), batch).detach()) for batch in data["val"]) / 3
    assert quality.value.value == pytest.approx(wanted, rel=1e-4)

    finetune(result.model, scenes(2), 1, step=step, lr=0.01)
    result = result.assess(trained, data["val"], step=step)
    result.save(tmp_path / "small")
    plan = dsa_hw.Plan.load(tmp_path / "small" / "plan.json")
    again = dsa_hw.apply_plan(Detector(), plan, EXAMPLE)
    again.load_state_dict(read_weights(tmp_path / "small" / "model.safetensors"))
    scene = scenes(1, seed=9)[0]
    torch.testing.assert_close(step(again.eval(), scene), step(result.model.eval(), scene))


def test_method_that_evaluates_configurations_accepts_a_step(trained: Detector) -> None:
    result = dsa_hw.allocate(
        trained, dsa_hw.FlopsBudget("60%"), example_inputs=EXAMPLE, step=step, val=scenes(1), method="knapsack",
        recovery="none", progress=False,
    )  # fmt: skip
    assert result.certificate.verdict == dsa_hw.Verdict.MET


def test_step_that_fails_is_refused_before_anything_is_trained(trained: Detector) -> None:
    def allocate(**given: Any) -> None:
        dsa_hw.allocate(
            trained, dsa_hw.FlopsBudget("50%"), example_inputs=EXAMPLE, val=scenes(1), progress=False, **given
        )

    with pytest.raises(dsa_hw.TrainingError, match=r"`step` fails on a batch of the val loader \(KeyError"):
        allocate(step=lambda model, batch: batch["none"])
    with pytest.raises(dsa_hw.TrainingError, match=r"must return a scalar tensor; got one of shape \(8, 80, 3\)"):
        allocate(step=lambda model, batch: model(batch["image"]).scores)
    with pytest.raises(dsa_hw.TrainingError, match="for others give step="):
        allocate()
    with pytest.raises(dsa_hw.TrainingError, match="not both"):
        allocate(step=step, loss=lambda outputs, targets: outputs.sum())


def detr() -> nn.Module:
    """Return a small DETR of transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16, 24], depths=[1, 1, 1, 1], layer_type="basic", out_features=["stage4"]
    )
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone, d_model=32, encoder_layers=1,
        decoder_layers=1, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=2, decoder_attention_heads=2,
        num_queries=6, num_labels=4, num_channels=3,
    )  # fmt: skip
    return transformers.DetrForObjectDetection(config)


@pytest.mark.slow
def test_detr_is_allocated_with_its_own_loss() -> None:
    torch.manual_seed(0)
    model = detr().eval()
    pictures = torch.randn(2, 3, 64, 64)
    objects = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.3]])} for _ in range(2)]
    result = dsa_hw.allocate(
        model, dsa_hw.FlopsBudget("70%"), example_inputs=(torch.zeros(1, 3, 64, 64),), recovery="none", progress=False,
        val=[{"pixel_values": pictures, "labels": objects}] * 3, options={"steps": 10},
        step=lambda model, batch: model(**batch).loss,
    )  # fmt: skip
    assert result.certificate.verdict == dsa_hw.Verdict.MET
    assert result.quality.name == NEGATIVE_LOSS
