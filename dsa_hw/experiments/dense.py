"""The dense network of a comparison or a sweep, and training that gives the same network every time."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsa_hw.experiments.run_folder import RunFolder
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.pipeline.meters import DENSE
from dsa_hw.training.finetune import finetune
from dsa_hw.training.metrics import correct_predictions
from dsa_hw.zoo.data import Data, load_data
from dsa_hw.zoo.models import load_model

__all__ = ["named_data", "named_model", "rewind", "train", "train_dense"]


def named_data(data: str | Data | None, seed: int) -> Data | None:
    """Return data by name, or as they are."""
    return load_data(data, seed=seed) if isinstance(data, str) else data


def named_model(
    model: str | nn.Module, name: str | None, data: Data | None, example_inputs: Any = None
) -> tuple[nn.Module, str, Any]:
    """Return a network by name, or a copy of the given one.

    Args:
        model: A name (random weights) or a module.
        name: Its name in reports; None uses the name or the class.
        data: The data, whose images have the shape of the input.
        example_inputs: Inputs of a module; None makes some of the shape of the data, if there are data.

    Returns:
        The network, its name, and example inputs (None where they are unknown).
    """
    shape = None if data is None else data.shape
    if isinstance(model, str):
        dense, example = load_model(model, shape)
        return dense, name or model, example
    if example_inputs is None and shape is not None:
        example_inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return copy.deepcopy(model), name or type(model).__name__, example_inputs


def rewind(*loaders: Any) -> None:
    """Set loaders back to the first epoch, so that every network sees the same images in the same order."""
    for loader in loaders:
        if hasattr(loader, "epoch"):
            loader.epoch = 0


def train(
    model: nn.Module,
    loader: Any,
    epochs: float,
    lr: float,
    settings: ExperimentSettings,
    *,
    progress: bool,
    title: str,
    folder: Path | None = None,
) -> None:
    """Train in place; the same call gives the same network.

    Args:
        model: The network.
        loader: Training data.
        epochs: How long.
        lr: Peak learning rate.
        settings: Precision and seed.
        progress: Whether to show a progress bar.
        title: Its title.
        folder: Where an interrupted training continues; None starts again.
    """
    rewind(loader)
    torch.manual_seed(settings.seed)
    finetune(model, loader, epochs, lr=lr, precision=settings.precision, progress=progress, title=title, folder=folder)
    model.eval()


def train_dense(
    folder: RunFolder,
    model: nn.Module,
    data: Data,
    settings: ExperimentSettings,
    *,
    progress: bool,
    say: Callable[[str], None],
) -> None:
    """Train and test the dense network in place, or load what an earlier run trained.

    Args:
        folder: Where the weights are kept.
        model: The dense network.
        data: Training and test data.
        settings: Epochs, learning rate, precision and seed.
        progress: Whether to show a progress bar.
        say: Called with what is done.
    """
    kept = folder.weights(DENSE)
    if kept is not None:
        model.load_state_dict(kept["state_dict"])
        model.eval()
        return
    if settings.train_epochs:
        say(f"training the dense network on {data.name}, {settings.train_epochs:g} epochs")
        unfinished = folder.unfinished(DENSE, "training")
        train(
            model, data.train, settings.train_epochs, settings.lr, settings, progress=progress,
            title="training the dense network", folder=unfinished,
        )  # fmt: skip
        shutil.rmtree(unfinished, ignore_errors=True)
    model.eval()
    folder.keep(DENSE, model, correct=torch.from_numpy(correct_predictions(model, data.test)))
