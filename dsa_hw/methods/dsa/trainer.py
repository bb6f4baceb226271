"""Training with DSA: warm-up, allocation together with training, pruning, training of the pruned network.

One learning-rate schedule runs over all stages, and momentum goes through the cut with the channels that are kept. The
folder gets ``log.csv`` (a row per epoch), ``allocation.csv`` (a row per step of the keep ratios) and ``checkpoint.pt``
(tensors and numbers only, read with ``weights_only=True``). Under ``torchrun`` every rank builds the same trainer and
the first one writes.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from budgets.notation import BudgetLike
from dsa_hw.channels import ChannelGroups, shrink
from dsa_hw.channels.surgery import narrow
from dsa_hw.errors import TrainingError
from dsa_hw.methods.checkpoint import probed_costs
from dsa_hw.methods.costs import Cost, CostSet
from dsa_hw.methods.dsa.allocator import Allocator
from dsa_hw.methods.dsa.recipe import Recipe
from dsa_hw.methods.problem import Problem, Proposal, Realised, realise
from dsa_hw.training.finetune import defer_interrupt, interruption, one_cycle, trainable_parameters
from dsa_hw.training.fingerprints import UnstableError, fingerprint_loader
from dsa_hw.training.loaders import RepeatingLoader, length_of, on_device, unlabelled
from dsa_hw.training.losses import Loss, Step, autocast, checked_loss, chosen_loss
from dsa_hw.training.metrics import accuracy
from dsa_hw.training.origins import Origin, read_state, write_state
from dsa_hw.training.recovery import refit
from dsa_hw.training.teachers import Teacher, as_teacher, taught_loss
from dsa_hw.utils.arrays import Ints
from dsa_hw.utils.files import write_text
from dsa_hw.utils.modules import check_finite_weights, device_of, evaluating
from dsa_hw.utils.progress import counted_steps
from dsa_hw.utils.records import Log, recorder
from dsa_hw.utils.text import one_line

__all__ = ["Trained", "Trainer"]

_log = logging.getLogger(__name__)

_REFIT_IMAGES = 512  # validation images, without their labels


@dataclass(frozen=True, eq=False)
class Trained:
    """Result of a `Trainer`.

    Attributes:
        model: The pruned network if the recipe fine-tunes, else the network with its dense shapes.
        keep_ratios: Keep ratio of each channel group.
        widths: Kept channels of each group (K,).
        kept: Indices of the kept channels of each group.
        allocator: The allocator, with its history.
        log: A row per epoch.
    """

    model: nn.Module
    keep_ratios: pd.Series[float]
    widths: Ints
    kept: list[Ints]
    allocator: Allocator
    log: pd.DataFrame


class Trainer:
    """Training of a network together with its keep ratios.

    >>> import dsa_hw, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    >>> groups = dsa_hw.find_groups(model, torch.zeros(1, 3, 8, 8))
    >>> data = [(torch.randn(16, 3, 8, 8), torch.randint(4, (16,))) for _ in range(12)]
    >>> recipe = dsa_hw.Recipe(warm_up=0.5, allocation=1, finetune=0.5, lr=0.01)
    >>> result = dsa_hw.Trainer(model, groups, dsa_hw.FlopsBudget("50%"), data[:9], data[9:], recipe).run()
    >>> bool(result.model[0].out_channels == result.widths[0] < 8)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ChannelGroups,
        budgets: BudgetLike | Sequence[BudgetLike] | CostSet[Cost],
        train: Iterable[Any],
        val: Iterable[Any],
        recipe: Recipe,
        *,
        finetune: Iterable[Any] | None = None,
        test: Iterable[Any] | None = None,
        loss: Loss | None = None,
        step: Step | None = None,
        teacher: nn.Module | Teacher | None = None,
        grid: Ints | None = None,
        folder: str | os.PathLike[str] | None = None,
        log: Log | None = None,
        progress: bool = False,
        seed: int = 0,
        title: str = "training",
    ) -> None:
        """Prepare the training, or load the checkpoint in ``folder`` to continue it.

        Args:
            model: The network; trained in place until it is pruned.
            groups: Its channel groups.
            budgets: See `dsa_hw.Allocator`.
            train: Loader of (inputs, targets) for the weights.
            val: Loader of (inputs, targets) for the keep ratios.
            recipe: Lengths of the stages and settings of the training.
            finetune: Loader of the last stage; ``train`` if not given. The paper holds out a tenth of the training
                data for the keep ratios, and trains on all of it once these are decided (``Data.whole``).
            test: Loader to report the accuracy on after every epoch.
            loss: ``loss(outputs, targets)``, a scalar; None is the cross entropy.
            step: ``step(model, batch)`` instead of ``loss``, for networks that compute their own loss.
            teacher: A trained network, for example a copy of ``model``, whose outputs the weights learn in every stage
                beside the targets; or a `Teacher` with settings. None in a training from scratch.
            grid: Step of the widths (K,).
            folder: Where to write the log and checkpoints. Ctrl-C finishes the present step and saves; the same lines
                continue and give the same result. Other initial weights, data, budgets or settings are refused.
            log: Called with a dict for each epoch (stage "training") and each step of the keep ratios ("allocating"),
                on the first rank. `dsa_hw.integrations.loggers` has some for TensorBoard, MLflow and Weights & Biases.
            progress: Whether to show a progress bar.
            seed: Seed of sampled masks.
            title: Label of the progress bar.

        Raises:
            TrainingError: Nothing can be trained, a loader is empty, or the checkpoint does not fit.
            InfeasibleBudgetError: A budget cannot be met.
        """
        trainable_parameters(model)
        check_finite_weights(model, "the network", TrainingError)
        self.recipe, self.loss, self.grid, self.test = recipe, chosen_loss(loss, step), grid, test
        self.groups, self.teacher = groups, as_teacher(teacher)
        self.train, self.val = RepeatingLoader(train, "train"), RepeatingLoader(val, "val")
        self.last = self.train if finetune is None else RepeatingLoader(finetune, "finetune")
        self.epoch_steps, self.last_epoch_steps = length_of(train), length_of(self.last.loader)
        for source, steps in ((self.train, self.epoch_steps), (self.last, self.last_epoch_steps)):
            if steps == 0:
                raise TrainingError(f"The {source.name} loader is empty. Give one with at least one batch.")
        self.warm_up_end, self.allocation_end = (
            round(e * self.epoch_steps) for e in (recipe.warm_up, recipe.warm_up + recipe.allocation)
        )
        self.end = self.allocation_end + round(recipe.finetune * self.last_epoch_steps)
        self.progress, self.title = progress, title
        self.folder = Path(folder) if folder is not None else None
        self.every = max(1, min(recipe.weight_steps, (self.allocation_end - self.warm_up_end) // 12))
        updates = max(3, (self.allocation_end - self.warm_up_end) // self.every)
        self.dense, self._record = model, recorder(log)
        self.allocator = Allocator(
            model,
            groups,
            budgets,
            steps=updates,
            loss=self.loss,
            beta2=recipe.beta2,
            precision=recipe.precision,
            seed=seed,
            log=self._record if self._first else None,
            **recipe.allocator,
        )
        self.step = 0
        self.kept: list[Ints] | None = None
        self.rows: list[dict[str, float]] = []
        self._network, self._optimiser = self._prepared(model)
        self._seen = [0.0, 0.0]
        self._origin = None if self.folder is None else self._described(seed)
        self._resume()
        self._good = self._state()

    def run(self) -> Trained:
        """Run all stages that are still to do.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; with a folder the state is saved.
            TrainingError: The loss is not finite; the state of the last whole epoch is restored.
        """
        shown = counted_steps(self.end, self.title, shown=self.progress, first=self.step)
        note = ""
        with shown as count, defer_interrupt() as interrupts:
            while self.step < self.end:
                try:
                    self.advance()
                except TrainingError as error:
                    self._load(self._good)
                    raise TrainingError(
                        f"{error} Training stopped at step {self.step}, and the last whole epoch is restored."
                    ) from error
                if int(self._epochs(self.step)) > int(self._epochs(self.step - 1)) or self.step == self.end:
                    note = self._end_epoch()
                count(note)
                if self._any_rank(interrupts):
                    self._save()
                    where = f"Saved in {self.folder}." if self._origin else "Not saved."
                    _log.warning("Interrupted at step %d of %d. %s", self.step, self.end, where)
                    raise interruption(interrupts)
        if self.kept is None:
            self.kept = self._realise().kept
        widths = np.array([len(units) for units in self.kept], np.int64)
        network = self._plain
        check_finite_weights(network, "the trained network", TrainingError)
        return Trained(network, self.allocator.keep_ratios, widths, self.kept, self.allocator, pd.DataFrame(self.rows))

    def advance(self) -> None:
        """Make one weight step and, when due, one step of the keep ratios or the pruning."""
        recipe, device = self.recipe, device_of(self._network)
        if self.step >= self.allocation_end and self.kept is None and recipe.finetune > 0:
            self._prune()
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate()
        self._network.train()
        allocating = self.warm_up_end <= self.step < self.allocation_end
        with self.allocator.masks() if allocating else contextlib.nullcontext(), autocast(recipe.precision, device):
            source = self.train if self.step < self.allocation_end else self.last
            value = taught_loss(self._network, on_device(next(source), device), self.loss, self.teacher)
        self._optimiser.zero_grad(set_to_none=True)
        value.backward()
        self._optimiser.step()
        self.step += 1
        self._seen = [self._seen[0] + float(value.detach()), self._seen[1] + 1.0]
        if allocating and (self.step - self.warm_up_end) % self.every == 0 and not self.allocator.finished:
            self.allocator.step(*[next(self.val) for _ in range(recipe.val_batches)])

    def _epochs(self, step: int) -> float:
        """Convert steps to epochs; the last stage may have a loader of another length."""
        first = min(step, self.allocation_end)
        return first / self.epoch_steps + (step - first) / self.last_epoch_steps

    def _rate(self) -> float:
        recipe = self.recipe
        if not recipe.milestones:
            return recipe.lr * one_cycle(self.step / max(self.end, 1), recipe.rise)
        epoch = self._epochs(self.step)
        return float(recipe.lr * 0.1 ** sum(epoch >= milestone for milestone in recipe.milestones))

    def _realise(self) -> Realised:
        allocator = self.allocator
        problem = Problem(self.dense, self.groups, allocator.costs, grid=self.grid, minimum=0.0)
        proposal = Proposal(allocator.admm.keep_ratios, self.dense, allocator.importances())
        return realise(problem, proposal)

    def _prune(self) -> None:
        """Cut the network; where that raises the loss, refit its layers. Momentum stays with weights that are kept."""
        found = self._realise()
        dense, before = self._plain, self._optimiser
        refitted = self._refit(dense, found)
        self.kept = found.kept
        self._network, self._optimiser = self._prepared(found.model)
        if refitted:
            return
        slices = self.groups.slices(found.kept)
        cuts = {old: slices[name] for name, old in dense.named_parameters(remove_duplicate=False) if name in slices}
        for old, new in zip(dense.parameters(), found.model.parameters(), strict=True):
            if (momentum := before.state.get(old, {}).get("momentum_buffer")) is not None:
                self._optimiser.state[new]["momentum_buffer"] = narrow(momentum, cuts.get(old, {}))

    def _refit(self, dense: nn.Module, found: Realised) -> bool:
        """Refit the layers of the pruned network to the outputs of the whole one, where it lowers the loss.

        Weights that were trained under hard masks are those of the pruned network already: the whole one has a higher
        loss then, and there is nothing to recover. Under the sampled masks of the paper there is.
        """
        device = device_of(dense)
        batches = [on_device(next(self.val), device)]
        if not isinstance(batches[0][0], Tensor):
            return False

        def loss(network: nn.Module) -> float:
            with torch.no_grad(), evaluating(network):
                return float(checked_loss(network, batches[0], self.loss))

        as_cut = loss(found.model)
        if loss(dense) >= as_cut:
            return False
        while sum(len(x) for x, _ in batches) < _REFIT_IMAGES and len(batches) < length_of(self.val.loader):
            batches.append(on_device(next(self.val), device))
        inputs = unlabelled(batches[1:] or batches, _REFIT_IMAGES, device)
        new = copy.deepcopy(found.model)
        refit(new, dense, self.groups, found.kept, inputs)
        if loss(new) >= as_cut:
            return False
        found.model.load_state_dict(new.state_dict())
        return True

    @property
    def _first(self) -> bool:
        return not _distributed() or torch.distributed.get_rank() == 0

    def _any_rank(self, interrupts: list[int]) -> bool:
        """Tell whether any rank was interrupted; all must stop after the same step, or one would wait for ever."""
        if not _distributed():
            return bool(interrupts)
        flag = torch.tensor([float(bool(interrupts))], device=device_of(self._network))
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag.item())

    @property
    def _plain(self) -> nn.Module:
        network = self._network
        return network.module if isinstance(network, nn.parallel.DistributedDataParallel) else network

    def _prepared(self, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
        recipe = self.recipe
        optimiser = torch.optim.SGD(
            trainable_parameters(model),
            recipe.lr,
            recipe.momentum,
            weight_decay=recipe.weight_decay,
            nesterov=recipe.nesterov,
        )
        return (nn.parallel.DistributedDataParallel(model) if _distributed() else model), optimiser

    def _end_epoch(self) -> str:
        row: dict[str, float] = {
            "epoch": self._epochs(self.step),
            "loss": self._seen[0] / max(self._seen[1], 1.0),
            "lr": self._optimiser.param_groups[0]["lr"],
            "used": max(price.used for price in self.allocator.prices()),
            "beta2": self.allocator.beta2,
        }
        if self.test is not None:
            row["accuracy"] = accuracy(self._plain, self.test, self.recipe.precision)
        self._seen = [0.0, 0.0]
        self.rows.append(row)
        self._good = self._state()
        self._save()
        if self._first:
            self._record({"stage": "training", "step": self.step, **row})
        return ", ".join(f"{key} {row[key]:.3g}" for key in ("loss", "used", "accuracy") if key in row)

    def _state(self) -> dict[str, Any]:
        state = {
            "step": self.step,
            "kept": None if self.kept is None else [torch.from_numpy(units) for units in self.kept],
            "network": self._plain.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "allocator": self.allocator.state_dict(),
            "train": self.train.state_dict(),
            "val": self.val.state_dict(),
            "last": self.last.state_dict(),
            "rows": list(self.rows),
            "seen": list(self._seen),
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
        tables = {"log.csv": pd.DataFrame(self.rows), "allocation.csv": self.allocator.history}
        for name, table in tables.items():
            write_text(self.folder / name, table.to_csv(index=False), TrainingError)
        if self._origin is not None:
            write_state(self.folder / "checkpoint.pt", self._origin, self._state())

    def _described(self, seed: int) -> Origin | None:
        """Return what the training depends on; None, with a warning, where it cannot be compared."""
        try:
            loaders = {source.name: fingerprint_loader(source.loader) for source in (self.train, self.val, self.last)}
            settings = {f"recipe.{name}": value for name, value in asdict(self.recipe).items()}
            ingredients = {
                "network": self.groups.fingerprint,
                "budgets": [budget.to_dict() for budget in self.allocator.costs.budgets],
                "grid": None if self.grid is None else [int(step) for step in self.grid],
                "seed": seed,
                **settings,
                **loaders,
                "loss": self.loss,
                **({} if self.teacher is None else {"teacher": self.teacher.ingredients()}),
                "weights": dict(self.dense.state_dict()),
            }
            return Origin.of(ingredients, probed_costs(self.allocator.costs))
        except UnstableError as error:
            _log.warning("This training cannot be continued after an interruption: it depends on %s.", error)
            return None

    def _resume(self) -> None:
        file = self.folder / "checkpoint.pt" if self.folder is not None else None
        if file is None or self._origin is None or not file.exists():
            return
        known, state = read_state(file, device_of(self.dense))
        # Ranks read different parts of the data; the first one compares.
        if self._first and (different := known.differences(self._origin)):
            raise TrainingError(
                f"{file} is of a training with different settings ({different}). Give another folder, or delete it to "
                "start again. Seed initial weights, so that the same lines make the same network."
            )
        try:
            self._load(state)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TrainingError(f"{file} cannot be used: {one_line(error)}. Delete it to start again.") from error
        _log.warning("Continuing at step %d of %d, from %s.", self.step, self.end, file)


def _distributed() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
