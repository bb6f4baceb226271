"""The dense network of a comparison or a sweep, and training that gives the same network every time."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsa_hw.errors import DsaError, ModelError
from dsa_hw.experiments.run_folder import RunFolder
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.methods.checkpoint import probed_costs
from dsa_hw.methods.costs import Cost, CostSet
from dsa_hw.methods.problem import Batches, Loss
from dsa_hw.pipeline.meters import DENSE
from dsa_hw.training.finetune import finetune
from dsa_hw.training.fingerprints import UnstableError, fingerprint_loader
from dsa_hw.training.metrics import correct_predictions
from dsa_hw.training.origins import Origin, plain_or_hash
from dsa_hw.utils.arrays import Ints
from dsa_hw.utils.inputs import check_model
from dsa_hw.utils.modules import copy_module, load_weights
from dsa_hw.utils.text import one_line
from dsa_hw.zoo.data import Data, load_data
from dsa_hw.zoo.models import load_model

__all__ = ["Loaders", "named_data", "named_model", "pin_cost", "question_of", "rewind", "train", "train_dense"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Loaders:
    """Loaders of (inputs, targets) that a user gave, where `Data` has those of a data set."""

    name: str
    train: Batches | None
    val: Batches
    test: Batches | None


def named_data(data: str | Data | None, seed: int) -> Data | None:
    """Return data by name, or as they are.

    Raises:
        ModelError: ``data`` is something else.
    """
    if data is not None and not isinstance(data, (Data, str)):
        raise ModelError(f"`data` must be the name of a data set or a dsa_hw.zoo.data.Data; got {data!r}.")
    found = load_data(data, seed=seed) if isinstance(data, str) else data
    if found is not None and found.test is None:
        raise ModelError(f"Accuracies are reported on test data, which {found.name} does not have. Add a test loader.")
    return found


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
    check_model(model)
    if example_inputs is None and shape is not None:
        example_inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return copy_module(model), name or type(model).__name__, example_inputs


def question_of(loaders: Mapping[str, Any], **ingredients: Any) -> dict[str, Any]:
    """Return what a run depends on as plain data for `RunFolder`: short plain values, and hashes of the others.

    Where something cannot be compared between processes, a warning says so, and the run is never continued.

    Args:
        loaders: Loaders by name.
        **ingredients: Everything else.
    """
    found: dict[str, Any] = {}
    for name, value in {**ingredients, **loaders}.items():
        try:
            found[name] = fingerprint_loader(value) if name in loaders else plain_or_hash(value)
        except UnstableError as error:
            _log.warning("This run cannot be continued after an interruption: it depends on %s.", error)
            found[name] = uuid.uuid4().hex
    return found


def pin_cost(folder: RunFolder, cost: Cost, sizes: Ints, name: str = "cost.json") -> None:
    """Note the cost model by which networks are allocated, and refuse another one once there are networks.

    Args:
        folder: Where it is noted.
        cost: The cost model.
        sizes: Widths of the dense network.
        name: Of the file; each cost of the folder has its own.

    Raises:
        DsaError: Finished networks were allocated by another cost model.
    """
    wanted = Origin({}, tuple(probed_costs(CostSet([cost], sizes))))
    known = folder.read(name)
    if known is None or not folder.rows():
        folder.write(name, wanted.to_dict())
        return
    try:
        different = Origin.from_dict(known).differences(wanted)
    except ValueError as error:
        raise DsaError(f"Cannot read {folder.path / name}: {one_line(error)}. Delete the folder.") from error
    if different:
        raise DsaError(
            f"{str(folder.path)!r} contains networks that were allocated by another cost model ({different}). Use the "
            "profile of that run, choose another --out or delete the folder."
        )


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
    teacher: nn.Module | None = None,
    loss: Loss | None = None,
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
        teacher: The dense network, for a pruned one.
        loss: ``loss(outputs, targets)``; None is the cross entropy.
    """
    rewind(loader)
    torch.manual_seed(settings.seed)
    finetune(
        model, loader, epochs, lr=lr, teacher=teacher, precision=settings.precision, progress=progress, title=title,
        folder=folder, loss=loss or nn.functional.cross_entropy,
    )  # fmt: skip
    model.eval()


def train_dense(
    folder: RunFolder,
    model: nn.Module,
    data: Data | Loaders,
    settings: ExperimentSettings,
    *,
    progress: bool,
    say: Callable[[str], None],
    loss: Loss | None = None,
) -> None:
    """Train and test the dense network in place, or load what an earlier run trained.

    Args:
        folder: Where the weights are kept.
        model: The dense network.
        data: Training data, and test data if there are any.
        settings: Epochs, learning rate, precision and seed.
        progress: Whether to show a progress bar.
        say: Called with what is done.
        loss: ``loss(outputs, targets)``; None is the cross entropy.
    """
    kept = folder.weights(DENSE)
    if kept is not None:
        load_weights(model, kept["state_dict"], "the dense network")
        model.eval()
        return
    if settings.train_epochs:
        say(f"training the dense network on {data.name}, {settings.train_epochs:g} epochs")
        unfinished = folder.unfinished(DENSE, "training")
        train(
            model, data.train, settings.train_epochs, settings.lr, settings, progress=progress,
            title="training the dense network", folder=unfinished, loss=loss,
        )  # fmt: skip
        shutil.rmtree(unfinished, ignore_errors=True)
    model.eval()
    tested = {} if data.test is None else {"correct": torch.from_numpy(correct_predictions(model, data.test))}
    folder.keep(DENSE, model, **tested)
