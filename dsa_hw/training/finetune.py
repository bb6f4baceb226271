"""What training needs here and nothing more: checked losses, weight steps, accuracy, batch-norm statistics.

Any loop can be used with `dsa_hw.Allocator`; these functions are for the ready trainer, the comparisons and the
benchmarks. Training in bfloat16 (``precision="bf16"``) with channels-last tensors takes about half the time on CPUs
with AVX-512 BF16 and on GPUs.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm import tqdm

from dsa_hw.errors import TrainingError

__all__ = [
    "Endless",
    "checked_loss",
    "device_of",
    "evaluate",
    "finetune",
    "length_of",
    "on_device",
    "one_cycle",
    "precise",
    "recalibrate",
    "statistics_kept",
    "stopping",
]

_BATCH_NORMS = (nn.modules.batchnorm._BatchNorm,)
Loss = Callable[[Any, Any], Tensor]


def device_of(model: nn.Module) -> torch.device:
    """Where the model's first parameter lives."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def on_device(batch: Any, device: torch.device) -> tuple[Any, Any]:
    """(inputs, targets) of a batch, moved."""
    if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
        raise TrainingError(f"a batch is a {type(batch).__name__}: loaders must yield (inputs, targets)")
    inputs, targets = batch
    return _moved(inputs, device), _moved(targets, device)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(v, device) for v in value)
    return value


def precise(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast for "bf16" or "fp16"; nothing for "fp32", which leaves a surrounding autocast in force."""
    if precision == "fp32":
        return contextlib.nullcontext()
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if precision not in kinds:
        raise TrainingError(f"precision {precision!r} is not known: use fp32, bf16 or fp16")
    return torch.autocast(device.type, kinds[precision])


def checked_loss(model: nn.Module, batch: tuple[Any, Any], loss: Loss) -> Tensor:
    """Loss of one batch (scalar); what does not fit, or is not finite, is a `TrainingError` with the reason."""
    inputs, targets = batch
    outputs = model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)
    if loss is nn.functional.cross_entropy:
        outputs = _classes(outputs, targets)
    try:
        value = loss(outputs, targets)
    except (IndexError, RuntimeError, ValueError, TypeError) as error:
        raise TrainingError(
            f"the loss cannot be computed from the network's outputs and the targets: {error}"
        ) from error
    if not (isinstance(value, Tensor) and value.numel() == 1):
        raise TrainingError("the loss must return one number (a scalar tensor)")
    if not math.isfinite(float(value.detach())):
        raise TrainingError(
            f"the loss is {float(value.detach())}: training diverged, or the data has NaN. Lower the learning rate, or "
            "check the inputs"
        )
    return value


def _classes(outputs: Any, targets: Any) -> Any:
    """Refuse labels that are no class of the network before they reach a kernel that only asserts."""
    if not isinstance(outputs, Tensor):
        raise TrainingError(
            f"the network returns a {type(outputs).__name__}: give loss= for it, cross-entropy needs logits"
        )
    if isinstance(targets, Tensor) and not targets.is_floating_point() and targets.numel() and outputs.ndim >= 2:
        low, high = int(targets.min()), int(targets.max())
        if low < 0 or high >= outputs.shape[1]:
            raise TrainingError(
                f"labels run from {low} to {high}, but the network has {outputs.shape[1]} classes (0 to "
                f"{outputs.shape[1] - 1}): map the labels, or change the last layer"
            )
    return outputs.float()


class Endless:
    """The batches of a loader again and again, with a position that can be saved and found again.

    A loader that gives nothing, or that cannot be begun twice (a generator), is refused when that shows. To come back
    to the same batches the loader must say the same thing again: `dsa_hw.zoo.data.Batches` does (it has an
    ``epoch``), a ``DataLoader`` does with a ``sampler`` that has ``set_epoch``.
    """

    def __init__(self, loader: Iterable[Any], name: str = "train") -> None:
        self.loader, self.name = loader, name
        self.passes, self.position = 0, 0
        self._iterator: Iterator[Any] | None = None

    def _begin(self) -> None:
        sampler = getattr(self.loader, "sampler", None)
        if sampler is not None and hasattr(sampler, "set_epoch"):
            sampler.set_epoch(self.passes)
        elif hasattr(self.loader, "epoch"):
            self.loader.epoch = self.passes
        self._iterator = iter(self.loader)
        self.passes, self.position = self.passes + 1, 0

    def __next__(self) -> Any:
        """The next batch."""
        for _ in range(2):
            if self._iterator is None:
                self._begin()
            try:
                batch = next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:
                self._iterator = None
                continue
            self.position += 1
            return batch
        raise TrainingError(
            f"the {self.name} loader ended early: it gave no batch in pass {self.passes}. Give something that can be "
            "iterated again (a DataLoader or a list, not a generator) and is not empty"
        )

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"passes": self.passes, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to where ``state`` was taken."""
        self.passes, self.position, self._iterator = int(state["passes"]), 0, None
        if self.passes and int(state["position"]) == _known_length(self.loader):  # at an end: nothing is read again
            self.position = int(state["position"])
        elif self.passes:
            self.passes -= 1
            for _ in range(int(state["position"])):
                next(self)


@torch.no_grad()
def evaluate(model: nn.Module, loader: Iterable[Any], precision: str = "fp32") -> float:
    """Share of right answers over the loader, in [0, 1]; the model's mode is given back."""
    device, before = device_of(model), model.training
    model.eval()
    right = total = 0
    try:
        for batch in loader:
            inputs, targets = on_device(batch, device)
            with precise(precision, device):
                right += int((model(inputs).argmax(1) == targets).sum())
            total += len(targets)
    finally:
        model.train(before)
    if total == 0:
        raise TrainingError("the loader gave nothing to evaluate on")
    return right / total


@contextlib.contextmanager
def statistics_kept(model: nn.Module) -> Iterator[None]:
    """Batch norms use each batch's own statistics and remember none of it; everything else is in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    norms = [m for m in model.modules() if isinstance(m, _BATCH_NORMS) and m.track_running_stats]
    saved = [(m, m.momentum, m.num_batches_tracked) for m in norms]
    model.eval()
    for norm in norms:
        norm.train()
        norm.momentum = 0.0  # running = 1 * running + 0 * batch
        norm.num_batches_tracked = None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, momentum, count in saved:
            norm.momentum, norm.num_batches_tracked = momentum, count
        for module, mode in modes:
            module.training = mode


@torch.no_grad()
def recalibrate(model: nn.Module, loader: Iterable[Any], batches: int = 20, precision: str = "fp32") -> None:
    """Measure the batch norms' statistics anew on up to ``batches`` batches (after weights or widths have changed)."""
    norms = [m for m in model.modules() if isinstance(m, _BATCH_NORMS) and m.track_running_stats]
    if not norms:
        return
    device, modes = device_of(model), [(module, module.training) for module in model.modules()]
    momenta = [norm.momentum for norm in norms]
    model.eval()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average over all batches
        norm.train()
    try:
        for batch, _ in zip(loader, range(batches), strict=False):
            inputs, _ = on_device(batch, device)
            with precise(precision, device):
                model(inputs)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, mode in modes:
            module.training = mode


def one_cycle(progress: float, warm_up: float = 0.2) -> float:
    """Learning rate over its peak at ``progress`` in [0, 1]: up linearly during ``warm_up``, down to 0 as a cosine."""
    if progress < warm_up:
        return (progress + 1e-3) / (warm_up + 1e-3)
    return 0.5 * (1.0 + math.cos(math.pi * (progress - warm_up) / (1.0 - warm_up)))


def finetune(
    model: nn.Module,
    loader: Iterable[Any],
    epochs: float,
    *,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    warm_up: float = 0.1,
    loss: Loss = nn.functional.cross_entropy,
    precision: str = "fp32",
    progress: bool = False,
    title: str = "fine-tuning",
    folder: Path | None = None,
) -> pd.DataFrame:
    """Train in place by SGD with Nesterov momentum and a one-cycle schedule; a row per 50 steps: step, lr, loss.

    ``epochs`` may be a fraction. The model is left in training mode as it was found. Deterministic where the loader is.
    With a ``folder`` Ctrl-C finishes the step and leaves a checkpoint there (as every epoch does), from which the same
    call goes on to the same weights.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise TrainingError("no parameter of the network requires a gradient: unfreeze the ones to train")
    epoch = length_of(loader)
    steps = max(1, round(epochs * epoch))
    optimiser = torch.optim.SGD(parameters, lr, momentum=momentum, weight_decay=weight_decay, nesterov=True)
    device, before = device_of(model), model.training
    run = _Run(model, optimiser, Endless(loader), None if folder is None else folder / "finetune.pt", steps)
    run.resume()
    bar = tqdm(total=steps, initial=run.step, desc=title, unit="step", delay=2, disable=None if progress else True)
    model.train()
    try:
        with bar, stopping() as asked:
            while run.step < steps:
                for group in optimiser.param_groups:
                    group["lr"] = lr * one_cycle(run.step / steps, warm_up)
                with precise(precision, device):
                    value = checked_loss(model, on_device(next(run.source), device), loss)
                optimiser.zero_grad(set_to_none=True)
                value.backward()
                optimiser.step()
                run.done(float(value.detach()))
                bar.update()
                if asked or (run.step % epoch == 0 and run.step < steps):
                    run.save()
                if asked:
                    raise KeyboardInterrupt
    finally:
        model.train(before)
    return pd.DataFrame(run.rows)


class _Run:
    """Where a fine-tuning stands: weights, optimiser, place in the data, losses so far; in ``file`` if there is one."""

    def __init__(
        self, model: nn.Module, optimiser: torch.optim.Optimizer, source: Endless, file: Path | None, steps: int
    ) -> None:
        self.model, self.optimiser, self.source, self.file, self.steps = model, optimiser, source, file, steps
        self.step, self.seen = 0, 0.0
        self.rows: list[dict[str, float]] = []

    def done(self, loss: float) -> None:
        """One step more; every 50 make a row."""
        self.step, self.seen = self.step + 1, self.seen + loss
        if self.step % 50 == 0 or self.step == self.steps:
            mean = self.seen / ((self.step - 1) % 50 + 1)
            self.rows.append({"step": self.step, "lr": self.optimiser.param_groups[0]["lr"], "loss": mean})
            self.seen = 0.0

    def save(self) -> None:
        """Whole or not at all."""
        if self.file is None:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        parts: dict[str, Any] = {"model": self.model, "optimiser": self.optimiser, "source": self.source}
        state = {name: part.state_dict() for name, part in parts.items()}
        state |= {"step": self.step, "seen": self.seen, "rows": self.rows, "steps": self.steps}
        partial = self.file.with_suffix(".partial")
        torch.save({**state, "random": torch.get_rng_state()}, partial)
        partial.replace(self.file)

    def resume(self) -> None:
        """Go to where the file was written, if there is one."""
        if self.file is None or not self.file.exists():
            return
        try:
            state = torch.load(self.file, map_location=device_of(self.model), weights_only=True)
            if state["steps"] != self.steps:
                raise ValueError(f"it is of a training of {state['steps']} steps, and {self.steps} are asked for")
            self.model.load_state_dict(state["model"])
            self.optimiser.load_state_dict(state["optimiser"])
        except (RuntimeError, ValueError, KeyError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise TrainingError(f"{self.file} cannot be used ({error}): delete it to start again") from error
        self.source.load_state_dict(state["source"])
        self.step, self.seen, self.rows = state["step"], state["seen"], state["rows"]
        torch.set_rng_state(state["random"].cpu())


def _known_length(loader: Iterable[Any]) -> int | None:
    try:
        return length_of(loader)
    except TrainingError:
        return None


def length_of(loader: Iterable[Any]) -> int:
    """Batches in one epoch."""
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError as error:
        raise TrainingError(
            "the loader has no length, so epochs mean nothing: give a DataLoader, a list, or anything with len()"
        ) from error


@contextlib.contextmanager
def stopping() -> Iterator[list[int]]:
    """A list that Ctrl-C fills, so that a step is finished first. The second Ctrl-C interrupts at once."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: Any) -> None:
        asked.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)
