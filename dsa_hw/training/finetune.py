"""Training of weights: SGD with one cycle of the learning rate, interruptible and resumable.

Training in bfloat16 (``precision="bf16"``) with channels-last tensors takes about half the time on CPUs with AVX-512
BF16 and on GPUs.
"""

from __future__ import annotations

import contextlib
import logging
import math
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from dsa_hw.errors import TrainingError
from dsa_hw.training.fingerprints import UnstableError, fingerprint_loader
from dsa_hw.training.loaders import RepeatingLoader, length_of, on_device
from dsa_hw.training.losses import Loss, Step, autocast, chosen_loss
from dsa_hw.training.origins import Origin, read_state, write_state
from dsa_hw.training.teachers import Teacher, as_teacher, taught_loss, useful_teacher
from dsa_hw.utils.commands import TerminatedError, terminate
from dsa_hw.utils.modules import check_finite_weights, device_of, modes_kept
from dsa_hw.utils.numbers import check_number
from dsa_hw.utils.progress import counted_steps
from dsa_hw.utils.text import one_line

__all__ = ["defer_interrupt", "finetune", "interruption", "one_cycle", "trainable_parameters"]

_log = logging.getLogger(__name__)

# Steps per row of the table that `finetune` returns.
_ROW = 50


def finetune(
    model: nn.Module,
    loader: Iterable[Any],
    epochs: float,
    *,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    warm_up: float = 0.1,
    loss: Loss | None = None,
    step: Step | None = None,
    teacher: nn.Module | Teacher | None = None,
    precision: str = "fp32",
    progress: bool = False,
    title: str = "fine-tuning",
    folder: Path | None = None,
) -> pd.DataFrame:
    """Train in place by SGD with Nesterov momentum and one cycle of the learning rate.

    Deterministic if the loader is.

    Args:
        model: The network. Its modes stay as they are.
        loader: Loader of (inputs, targets) with a length.
        epochs: How long to train; may be a fraction.
        lr: Peak learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay of SGD.
        warm_up: Share of the steps during which the learning rate rises.
        loss: ``loss(outputs, targets)``, a scalar; None is the cross entropy.
        step: ``step(model, batch)`` instead of ``loss``, for networks that compute their own loss.
        teacher: The dense network, whose outputs the pruned one learns beside the targets, or a `Teacher` with
            settings. It is used where it is better than ``model`` on the first batch, and not changed.
        precision: "fp32", "bf16" or "fp16".
        progress: Whether to show a progress bar.
        title: Label of the progress bar.
        folder: Where to keep a checkpoint, written after every epoch and on Ctrl-C, which finishes the present step
            first. The same call continues from it and gives the same weights; a call with other weights, data or
            settings is refused.

    Returns:
        A row per 50 steps: step, lr, loss.

    Raises:
        TrainingError: Nothing can be trained, ``epochs`` or ``lr`` is not a number from 0, the loss is not finite, or
            the checkpoint does not fit.
    """
    check_number(epochs, "epochs", TrainingError)
    check_number(lr, "lr", TrainingError)
    optimiser = torch.optim.SGD(
        trainable_parameters(model), lr, momentum=momentum, weight_decay=weight_decay, nesterov=True
    )
    chosen = chosen_loss(loss, step)
    epoch = length_of(loader)
    steps = max(1, round(epochs * epoch))
    device = device_of(model)
    taught = useful_teacher(as_teacher(teacher), model, loader, chosen)
    run = _TrainingRun(model, optimiser, RepeatingLoader(loader), steps)
    if folder is not None:
        settings: dict[str, Any] = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "warm_up": warm_up}
        settings |= {} if taught is None else {"teacher": taught.ingredients()}
        run.keep_in(folder, {"epochs": epochs, "steps": steps, **settings, "precision": precision, "loss": chosen})
    shown = counted_steps(steps, title, shown=progress, first=run.step)
    with modes_kept(model), shown as count, defer_interrupt() as interrupts:
        model.train()
        while run.step < steps:
            for group in optimiser.param_groups:
                group["lr"] = lr * one_cycle(run.step / steps, warm_up)
            with autocast(precision, device):
                value = taught_loss(model, on_device(next(run.source), device), chosen, taught)
            optimiser.zero_grad(set_to_none=True)
            value.backward()
            optimiser.step()
            run.record(float(value.detach()))
            count("")
            if interrupts or (run.step % epoch == 0 and run.step < steps):
                run.save()
            if interrupts:
                raise interruption(interrupts)
    check_finite_weights(model, "the trained network", TrainingError)
    return pd.DataFrame(run.rows)


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that require a gradient.

    Raises:
        TrainingError: There is none.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise TrainingError(
            "No parameter of the network requires a gradient, so it cannot be trained. Unfreeze some with "
            "requires_grad_(), or give no `train` loader to keep the weights."
        )
    return parameters


def one_cycle(progress: float, warm_up: float = 0.2) -> float:
    """Return the learning rate over its peak: a linear rise during ``warm_up``, then a cosine down to 0.

    >>> one_cycle(0.2), one_cycle(1.0)
    (1.0, 0.0)

    Args:
        progress: Share of the training that is done, in [0, 1].
        warm_up: Share of the training during which the learning rate rises.
    """
    if progress < warm_up:
        return (progress + 1e-3) / (warm_up + 1e-3)
    return 0.5 * (1.0 + math.cos(math.pi * (progress - warm_up) / (1.0 - warm_up)))


@contextlib.contextmanager
def defer_interrupt() -> Iterator[list[int]]:
    """Collect the first Ctrl-C in a list instead of raising KeyboardInterrupt; a second one interrupts at once.

    SIGTERM is collected too where it would raise, as in the commands of this project. Outside the main thread, where
    Python delivers no signals, the list stays empty.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {signal.SIGINT: signal.getsignal(signal.SIGINT)}
    if signal.getsignal(signal.SIGTERM) is terminate:
        before[signal.SIGTERM] = terminate

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, frame: Any) -> None:
        received.append(number)
        restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield received
    finally:
        restore()


def interruption(received: list[int]) -> KeyboardInterrupt:
    """Return what to raise for the signals that `defer_interrupt` collected."""
    return TerminatedError() if signal.SIGTERM in received else KeyboardInterrupt()


class _TrainingRun:
    """Position of a fine-tuning: weights, optimiser, place in the data, losses; saved to ``file`` if there is one."""

    def __init__(
        self,
        model: nn.Module,
        optimiser: torch.optim.Optimizer,
        source: RepeatingLoader,
        steps: int,
    ) -> None:
        self.model, self.optimiser, self.source, self.steps = model, optimiser, source, steps
        self.file: Path | None = None
        self.origin = Origin({})
        self.step, self.seen = 0, 0.0
        self.rows: list[dict[str, float]] = []

    def record(self, loss: float) -> None:
        """Count one step."""
        self.step, self.seen = self.step + 1, self.seen + loss
        if self.step % _ROW == 0 or self.step == self.steps:
            mean = self.seen / ((self.step - 1) % _ROW + 1)
            self.rows.append({"step": self.step, "lr": self.optimiser.param_groups[0]["lr"], "loss": mean})
            self.seen = 0.0

    def keep_in(self, folder: Path, settings: dict[str, Any]) -> None:
        """Save checkpoints in a folder, and continue from the one that is there.

        Raises:
            TrainingError: The checkpoint is damaged, or of a training with other weights, data or settings.
        """
        try:
            data = fingerprint_loader(self.source.loader)
            self.origin = Origin.of({**settings, "data": data, "weights": dict(self.model.state_dict())})
        except UnstableError as error:
            _log.warning("This training cannot be continued after an interruption: it depends on %s.", error)
            return
        self.file = folder / "finetune.pt"
        if not self.file.exists():
            return
        known, state = read_state(self.file, device_of(self.model))
        if different := known.differences(self.origin):
            raise TrainingError(
                f"{self.file} is of a training with different settings ({different}). Delete it to start again, or "
                "choose another folder."
            )
        try:
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.source.load_state_dict(state["source"])
            self.step, self.seen, self.rows = state["step"], state["seen"], state["rows"]
            torch.set_rng_state(state["random"].cpu())
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise TrainingError(
                f"The checkpoint {self.file} cannot be used: {one_line(error)}. Delete it to start again."
            ) from error
        _log.warning("Continuing a training at step %d of %d, from %s.", self.step, self.steps, self.file)

    def save(self) -> None:
        """Write the checkpoint, if there is a place for it."""
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        parts: dict[str, Any] = {"model": self.model, "optimiser": self.optimiser, "source": self.source}
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"step": self.step, "seen": self.seen, "rows": self.rows}
        write_state(self.file, self.origin, {**state, "random": torch.get_rng_state()})
