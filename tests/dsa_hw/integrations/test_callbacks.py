"""Callbacks of the real Lightning and transformers learn keep ratios while these train, and leave no masks behind."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import dsa_hw
import dsa_hw.zoo.torchvision_compat
from dsa_hw.errors import TrainingError
from dsa_hw.utils.modules import copy_module

EXAMPLE = torch.zeros(1, 3, 8, 8)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 4),
    )


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    rng = torch.Generator().manual_seed(1)
    labels = [torch.randint(4, (16,), generator=rng) for _ in range(count)]
    return [(torch.randn(16, 3, 8, 8, generator=rng) + y.view(-1, 1, 1, 1), y) for y in labels]


def assert_unmasked(model: nn.Module) -> None:
    assert all(name not in vars(module) for module in model.modules() for name in module._parameters)


def lightning_parts() -> tuple[Any, Any, Any]:
    lightning = pytest.importorskip("lightning")
    from dsa_hw.integrations.lightning import AllocationCallback

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = network()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.05)

    return lightning, Module, AllocationCallback


def fit(lightning: Any, module: Any, callback: Any, folder: Path, **options: Any) -> Any:
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        callbacks=[callback], default_root_dir=folder, **{"max_epochs": 2, "enable_checkpointing": False, **options},
        **settings,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(batches(10), batch_size=None))
    return trainer


def test_lightning_learns_keep_ratios_within_the_budget(tmp_path: Path) -> None:
    lightning, module_of, callback_of = lightning_parts()
    module = module_of()
    dense = copy_module(module.model)
    callback = callback_of("flops=50%", EXAMPLE, batches(3), steps=8)
    fit(lightning, module, callback, tmp_path)
    assert callback.allocator.finished
    assert len(callback.allocator.history) == 8
    assert_unmasked(module.model)
    result = dsa_hw.allocate(
        dense, "flops=50%", example_inputs=EXAMPLE, method=callback.proposal, val=batches(3), progress=False
    )
    assert result.certificate.verdict == dsa_hw.Verdict.MET
    assert result.model(EXAMPLE).shape == (1, 4)


def test_lightning_continues_the_allocation_from_its_checkpoint(tmp_path: Path) -> None:
    lightning, module_of, callback_of = lightning_parts()
    first = callback_of("flops=50%", EXAMPLE, batches(3), steps=8)
    trainer = fit(lightning, module_of(), first, tmp_path)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=False)["callbacks"]
    again = callback_of("flops=50%", EXAMPLE, batches(3), steps=8)
    again.load_state_dict(state[first.state_key])
    again._session.begin(network(), 20)
    assert again.allocator.keep_ratios.equals(first.allocator.keep_ratios)
    assert again._session._batches == 20


def test_wrong_settings_are_refused_with_what_to_do(tmp_path: Path) -> None:
    lightning, module_of, callback_of = lightning_parts()
    with pytest.raises(TrainingError, match="Train with this callback first"):
        callback_of("flops=50%", EXAMPLE, batches(1)).proposal  # noqa: B018
    with pytest.raises(TrainingError, match="Module has no network 'net'"):
        fit(lightning, module_of(), callback_of("flops=50%", EXAMPLE, batches(1), network="net"), tmp_path)
    with pytest.raises(TrainingError, match="needs at least 3 training batches; got 2"):
        fit(lightning, module_of(), callback_of("flops=50%", EXAMPLE, batches(1)), tmp_path, max_steps=2)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_transformers_learns_keep_ratios_within_the_budget(tmp_path: Path, accumulated: int) -> None:
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from dsa_hw.integrations.transformers import AllocationCallback

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3,
        max_position_embeddings=8,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)
    dense = copy_module(model).eval()
    rows = [{"input_ids": torch.randint(50, (8,)), "labels": i % 3} for i in range(48)]
    batch = {
        "input_ids": torch.stack([r["input_ids"] for r in rows]),
        "labels": torch.tensor([r["labels"] for r in rows]),
    }
    example = (torch.zeros(1, 8, dtype=torch.long),)
    callback = AllocationCallback("flops=70%", example, [batch], steps=6)
    settings = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=12, per_device_train_batch_size=4, use_cpu=True, report_to="none",
        save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=accumulated, logging_strategy="no",
    )  # fmt: skip
    transformers.Trainer(model=model, args=settings, train_dataset=rows, callbacks=[callback]).train()
    assert callback.allocator is not None
    assert callback.allocator.finished
    assert_unmasked(model)
    result = dsa_hw.allocate(
        dense, "flops=70%", example_inputs=example, method=callback.proposal, val=[batch], progress=False
    )
    assert result.certificate.verdict == dsa_hw.Verdict.MET
    assert result.quality.measure == "accuracy"  # of the labels in the batches
