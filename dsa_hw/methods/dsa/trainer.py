"""The ready trainer: warm-up, allocation together with training, hard pruning, training of what is left.

    trainer = Trainer(model, groups, costs, limits, train, val, Recipe.short(epochs=15), folder="run")
    result = trainer.run()          # Ctrl-C stops in good order; the same lines continue

One learning-rate schedule runs over all stages. The folder gets ``log.csv`` (a row per epoch) and ``checkpoint.pt``
(tensors and numbers only, read with ``weights_only=True``). Under ``torchrun`` every rank builds the same trainer and
the first one writes.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn
from tqdm import tqdm

from dsa_hw.channels import ChannelGroups, select_channels, shrink
from dsa_hw.errors import TrainingError
from dsa_hw.methods.costs import Cost, CostSet
from dsa_hw.methods.dsa.allocator import Allocator
from dsa_hw.methods.rounding import round_widths
from dsa_hw.training.finetune import (
    Endless,
    Loss,
    checked_loss,
    device_of,
    evaluate,
    length_of,
    on_device,
    one_cycle,
    precise,
    stopping,
)

__all__ = ["Recipe", "Trained", "Trainer"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """How long each stage takes, in epochs, and how weights and keep ratios are trained.

    ``milestones`` (epochs at which the learning rate falls by 10) are the paper's way; without them the learning rate
    goes through one cycle. ``weight_steps`` weight steps go to each step of the keep ratios.
    """

    warm_up: float
    allocation: float
    finetune: float
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 4e-5
    nesterov: bool = True
    milestones: tuple[float, ...] = ()
    rise: float = 0.2
    weight_steps: int = 20
    val_batches: int = 1
    beta2: tuple[float, float] = (10.0, 100.0)
    precision: str = "fp32"
    allocator: dict[str, Any] = field(default_factory=dict)

    @property
    def epochs(self) -> float:
        """All stages together."""
        return self.warm_up + self.allocation + self.finetune

    @classmethod
    def paper(cls, data: str = "cifar10", **changes: Any) -> Recipe:
        """The paper's set-up: 300 epochs on CIFAR-10, 120 on ImageNet, beta2 from 0.05 times 1.1 per epoch.

        Masks are sampled for weights and keep ratios, one per batch (Eqs. 3 and 4). Soft masks cannot replace them: at
        a beta2 of 0.05 they are nearly equal within a group, the next batch norm removes the common factor, and
        dL/dalpha vanishes (docs/development/mathematics.md, section 2).

        The paper allocates until the end. Once beta2 is in the tens of thousands (150 epochs) nothing moves any more;
        the network is shrunk there, and the rest of the training is cheaper.

        The paper also projects the gradients of theta to be nonnegative "to reach the budget faster", and stops at the
        budget (Alg. 1). This recipe does not (``project_gradient`` of `Admm`): it reaches the budget on a schedule and
        makes further steps there, in which a theta that cannot grow falls below the budget with the gradients' noise.
        """
        plans: dict[str, dict[str, Any]] = {
            "cifar10": {"warm_up": 20, "allocation": 150, "finetune": 130, "lr": 0.05, "milestones": (120, 180, 240)},
            "imagenet": {"warm_up": 15, "allocation": 75, "finetune": 30, "lr": 0.1, "milestones": (50, 80, 110)},
        }
        if data not in plans:
            raise TrainingError(f"the paper has no recipe for {data!r}: choose from {', '.join(plans)}")
        plan = plans[data]
        growth = (0.05, 0.05 * 1.1 ** plan["allocation"])
        allocator = {
            "softness": "importance",
            "masks": "straight_through",
            "samples": 1,
            "weight_masks": "sampled",
        }
        return cls(**{"beta2": growth, "allocator": allocator, "nesterov": False, **plan, **changes})

    @classmethod
    def short(cls, epochs: float = 15.0, **changes: Any) -> Recipe:
        """For small machines: a tenth of warm-up, a fifth of allocation, one cycle of the learning rate.

        Weights that are cut late have little time left: most of the cycle belongs to the network that comes out.
        """
        plan = {"warm_up": 0.1 * epochs, "allocation": 0.2 * epochs, "finetune": 0.7 * epochs, "lr": 0.2}
        return cls(**{"weight_decay": 5e-4, "weight_steps": 10, **plan, **changes})


@dataclass(frozen=True, eq=False)
class Trained:
    """What came out. ``model`` is shrunk if the recipe fine-tunes, else dense in shape; ``kept`` units per group."""

    model: nn.Module
    keep_ratios: pd.Series[float]
    widths: NDArray[np.int64]
    kept: list[NDArray[np.int64]]
    allocator: Allocator
    log: pd.DataFrame


class Trainer:
    """See the module. ``model`` is trained in place until it is shrunk; ``grid`` (K,) is the step of widths.

    ``finetune`` is the loader of the last stage, ``train`` where it is not given. The paper keeps a tenth of the
    training data for the keep ratios, and gives all of it to the weights once those are decided (``Data.whole``).
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ChannelGroups,
        costs: Sequence[Cost],
        limits: Sequence[float],
        train: Iterable[Any],
        val: Iterable[Any],
        recipe: Recipe,
        *,
        finetune: Iterable[Any] | None = None,
        test: Iterable[Any] | None = None,
        loss: Loss = nn.functional.cross_entropy,
        grid: NDArray[np.int64] | None = None,
        folder: str | os.PathLike[str] | None = None,
        tensorboard: bool = False,
        progress: bool = False,
        seed: int = 0,
        title: str = "training",
    ) -> None:
        if not any(p.requires_grad for p in model.parameters()):
            raise TrainingError(
                "no parameter of the network requires a gradient: unfreeze what to train, or allocate with val= only"
            )
        self.recipe, self.loss, self.grid, self.test = recipe, loss, grid, test
        self.costs, self.limits, self.groups = costs, limits, groups
        self.train, self.val = Endless(train, "train"), Endless(val, "val")
        self.last = self.train if finetune is None else Endless(finetune, "finetune")
        self.epoch_steps, self.last_epoch_steps = length_of(train), length_of(self.last.loader)
        for source, steps in ((self.train, self.epoch_steps), (self.last, self.last_epoch_steps)):
            if steps == 0:
                raise TrainingError(f"the {source.name} loader is empty: give one with at least one batch")
        self.warm_up_end, self.allocation_end = (
            round(e * self.epoch_steps) for e in (recipe.warm_up, recipe.warm_up + recipe.allocation)
        )
        self.end = self.allocation_end + round(recipe.finetune * self.last_epoch_steps)
        self.progress, self.title = progress, title
        self.folder = Path(folder) if folder is not None else None
        self.every = max(1, min(recipe.weight_steps, (self.allocation_end - self.warm_up_end) // 12))
        updates = max(3, (self.allocation_end - self.warm_up_end) // self.every)
        self.dense = model
        self.allocator = Allocator(
            model,
            groups,
            costs,
            limits,
            steps=updates,
            loss=loss,
            beta2=recipe.beta2,
            precision=recipe.precision,
            seed=seed,
            **recipe.allocator,
        )
        self.step, self.kept, self.rows = 0, None, []  # type: tuple[int, list[NDArray[np.int64]] | None, list[dict[str, float]]]
        self._network, self._optimiser = self._prepared(model)
        self._seen = [0.0, 0.0]
        self._writer = _tensorboard(self.folder) if tensorboard and self._first else None
        self._resume()
        self._good = self._state()

    # -- stages ------------------------------------------------------------------------------------------------------

    def run(self) -> Trained:
        """All stages that are still to do."""
        bar = tqdm(
            total=self.end, initial=self.step, desc=self.title, unit="step", delay=2, disable=not self.progress or None
        )
        with bar, stopping() as asked:
            while self.step < self.end:
                try:
                    self._one()
                except TrainingError as error:
                    self._load(self._good)
                    raise TrainingError(
                        f"{error}. Stopped at step {self.step}; the state of the last whole epoch is restored"
                    ) from error
                bar.update()
                if int(self._epochs(self.step)) > int(self._epochs(self.step - 1)) or self.step == self.end:
                    self._epoch(bar)
                if self._agreed(asked):
                    self._save()
                    where = (
                        f" in {self.folder}; the same call continues"
                        if self.folder
                        else ": give folder= to continue later"
                    )
                    _log.warning("stopped at step %d of %d%s", self.step, self.end, where)
                    raise KeyboardInterrupt
        if self.kept is None:
            self._decide()
        assert self.kept is not None
        widths = np.array([len(units) for units in self.kept], np.int64)
        network = self._plain
        return Trained(network, self.allocator.keep_ratios, widths, self.kept, self.allocator, pd.DataFrame(self.rows))

    def _one(self) -> None:
        """One weight step and, when due, one step of the keep ratios or the pruning."""
        recipe, device = self.recipe, device_of(self._network)
        if self.step >= self.allocation_end and self.kept is None and recipe.finetune > 0:
            self._prune()
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate()
        self._network.train()
        allocating = self.warm_up_end <= self.step < self.allocation_end
        with self.allocator.masks() if allocating else contextlib.nullcontext(), precise(recipe.precision, device):
            source = self.train if self.step < self.allocation_end else self.last
            value = checked_loss(self._network, on_device(next(source), device), self.loss)
        self._optimiser.zero_grad(set_to_none=True)
        value.backward()
        self._optimiser.step()
        self.step += 1
        self._seen = [self._seen[0] + float(value.detach()), self._seen[1] + 1.0]
        if allocating and (self.step - self.warm_up_end) % self.every == 0 and not self.allocator.finished:
            self.allocator.step(*[next(self.val) for _ in range(recipe.val_batches)])

    def _epochs(self, step: int) -> float:
        """Epochs that ``step`` steps are: the last stage may have a loader of another length."""
        first = min(step, self.allocation_end)
        return first / self.epoch_steps + (step - first) / self.last_epoch_steps

    def _rate(self) -> float:
        recipe = self.recipe
        if not recipe.milestones:
            return recipe.lr * one_cycle(self.step / max(self.end, 1), recipe.rise)
        epoch = self._epochs(self.step)
        return float(recipe.lr * 0.1 ** sum(epoch >= milestone for milestone in recipe.milestones))

    def _decide(self) -> None:
        alpha = self.allocator.keep_ratios.to_numpy()
        widths = round_widths(alpha, CostSet(self.costs, self.groups.sizes, self.limits), self.grid)
        scores = self.allocator.importances()
        self.kept = select_channels(self.dense, self.groups, widths, lambda *_: scores)

    def _prune(self) -> None:
        self._decide()
        assert self.kept is not None
        self._network, self._optimiser = self._prepared(shrink(self.dense, self.groups, self.kept))

    # -- one model, or the same one on every rank -------------------------------------------------------------------

    @property
    def _first(self) -> bool:
        return not _distributed() or torch.distributed.get_rank() == 0

    def _agreed(self, asked: list[int]) -> bool:
        """Whether any rank was asked to stop: all stop after the same step, or one would wait for ever."""
        if not _distributed():
            return bool(asked)
        flag = torch.tensor([float(bool(asked))], device=device_of(self._network))
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag.item())

    @property
    def _plain(self) -> nn.Module:
        network = self._network
        return network.module if isinstance(network, nn.parallel.DistributedDataParallel) else network

    def _prepared(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        recipe = self.recipe
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimiser = torch.optim.SGD(
            parameters, recipe.lr, recipe.momentum, weight_decay=recipe.weight_decay, nesterov=recipe.nesterov
        )
        return (nn.parallel.DistributedDataParallel(model) if _distributed() else model), optimiser

    # -- log and checkpoint ------------------------------------------------------------------------------------------

    def _epoch(self, bar: Any) -> None:
        row: dict[str, float] = {
            "epoch": self._epochs(self.step),
            "loss": self._seen[0] / max(self._seen[1], 1.0),
            "lr": self._optimiser.param_groups[0]["lr"],
            "used": max(price.used for price in self.allocator.prices()),
            "beta2": self.allocator.beta2,
        }
        if self.test is not None:
            row["accuracy"] = evaluate(self._plain, self.test, self.recipe.precision)
        self._seen = [0.0, 0.0]
        self.rows.append(row)
        bar.set_postfix({key: f"{value:.3g}" for key, value in row.items() if key in ("loss", "used", "accuracy")})
        self._good = self._state()
        self._save()
        if self._writer is not None:
            for key, value in row.items():
                self._writer.add_scalar(key, value, self.step)

    def _state(self) -> dict[str, Any]:
        state = {
            "step": self.step,
            "kept": None if self.kept is None else [torch.from_numpy(units) for units in self.kept],
            "dense": self.dense.state_dict() if self.kept is None else None,
            "network": self._plain.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "allocator": self.allocator.state_dict(),
            "train": self.train.state_dict(),
            "val": self.val.state_dict(),
            "last": self.last.state_dict(),
            "rows": list(self.rows),
            "seen": list(self._seen),
            "fingerprint": self.groups.fingerprint,
        }
        return copy.deepcopy(state)

    def _load(self, state: dict[str, Any]) -> None:
        self.kept = None if state["kept"] is None else [units.numpy() for units in state["kept"]]
        if self.kept is None:
            self._network, self._optimiser = self._prepared(self.dense)
        else:
            self._network, self._optimiser = self._prepared(shrink(self.dense, self.groups, self.kept))
        self._plain.load_state_dict(state["network"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.allocator.load_state_dict(state["allocator"])
        self.train.load_state_dict(state["train"])
        self.val.load_state_dict(state["val"])
        if self.last is not self.train:
            self.last.load_state_dict(state["last"])
        self.step, self.rows, self._seen = state["step"], list(state["rows"]), list(state["seen"])

    def _save(self) -> None:
        if self.folder is None or not self._first:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(self.rows).to_csv(self.folder / "log.csv", index=False)
        self.allocator.history.to_csv(self.folder / "allocation.csv", index=False)
        part = self.folder / "checkpoint.part"
        torch.save(self._state(), part)
        os.replace(part, self.folder / "checkpoint.pt")

    def _resume(self) -> None:
        file = self.folder / "checkpoint.pt" if self.folder is not None else None
        if file is None or not file.exists():
            return
        try:
            state = torch.load(file, map_location=device_of(self.dense), weights_only=True)
        except Exception as error:
            raise TrainingError(f"{file} cannot be read ({error}): delete it to start again") from error
        if state["fingerprint"] != self.groups.fingerprint:
            raise TrainingError(f"{file} belongs to another network: give another folder, or delete it to start again")
        self._load(state)
        _log.info("continuing at step %d of %d", self.step, self.end)


def _distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _tensorboard(folder: Path | None) -> Any:
    if folder is None:
        raise TrainingError("tensorboard=True needs folder=, where its files go")
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        from dsa_hw.errors import MissingDependencyError

        raise MissingDependencyError("tensorboard=True needs TensorBoard: pip install tensorboard") from error
    return SummaryWriter(str(folder))
