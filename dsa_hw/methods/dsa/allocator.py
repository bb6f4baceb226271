"""Allocator: the piece of DSA that plugs into anybody's training loop.

    allocator = dsa_hw.Allocator(model, groups, costs, limits, steps=100)
    for batch in train:
        with allocator.masks():                       # weights learn to live with what is left
            loss = criterion(model(inputs), targets)
        loss.backward(); optimiser.step(); optimiser.zero_grad()
        if due and not allocator.finished:
            allocator.step(next(val))                 # keep ratios learn from other data
    allocator.keep_ratios                             # within every budget

One `step` is: keep ratios -> keep probabilities -> masks -> loss -> dL/dalpha (`dsa_hw.methods.dsa.relaxation`) ->
one step of ADMM
(`dsa_hw.methods.dsa.admm`). The model's weights, gradients and batch-norm statistics are the same after it as before.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from dsa_hw.channels import ChannelGroups, masked
from dsa_hw.channels.importance import Importance, scores
from dsa_hw.errors import TrainingError, WidthError
from dsa_hw.methods.costs import Cost
from dsa_hw.methods.dsa.admm import Admm, ShadowPrice
from dsa_hw.methods.dsa.relaxation import Layout, inexactness, keep_probabilities, sample_masks
from dsa_hw.training.finetune import Loss, checked_loss, device_of, on_device, precise, statistics_kept

__all__ = ["Allocator"]


class Allocator:
    """Keep ratios of a network's channel groups, learnt under budgets while its weights are trained (or are not).

    model        the network, or the ``DistributedDataParallel`` around it; then the ranks' gradients are averaged
    groups       its channel groups
    costs        J costs with their ``limits``, in the same units
    steps        number of calls of `step` until `finished`; the budget falls during the first two thirds
    loss         ``loss(outputs, targets)``, a scalar
    importance   b_i of every unit: a name or a function, asked again at every step since weights change
    beta2        sharpness of the masks at the first and at the last step; it grows geometrically in between
    softness     what beta2 is measured in: the "rank" of a unit in its group, so that about 2 / beta2 of every group's
                 units have masks between 1/4 and 3/4; or its "importance" b_i itself, as in the paper, where a group of
                 nearly equal importances stays soft (all units are weakened, none is removed) and seems too expensive
                 to prune
    masks        estimator of the gradient through the masks (see ``dsa_hw.methods.dsa.relaxation``), and ``samples`` of
                 them; "soft" masks behind a batch norm have no gradient at a small beta2 such as the paper's 0.05
    weight_masks what `masks` puts on for weight steps: "hard" ones (the most important units: the weights then learn
                 for the network that comes out), masks "sampled" at every step (the paper), or "soft" ones, which
                 weights can learn to undo
    minimum      smallest keep ratio, a number or (K,): of the narrowest widths that the target allows
    precision    "fp32" (leaves a surrounding autocast in force), "bf16" or "fp16"
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ChannelGroups,
        costs: Sequence[Cost],
        limits: Sequence[float],
        *,
        steps: int,
        loss: Loss = nn.functional.cross_entropy,
        importance: str | Importance = "gamma",
        beta2: tuple[float, float] = (10.0, 100.0),
        softness: str = "rank",
        masks: str = "soft",
        samples: int = 1,
        weight_masks: str = "hard",
        minimum: ArrayLike = 0.05,
        precision: str = "fp32",
        seed: int = 0,
        **admm: Any,
    ) -> None:
        if len(groups) == 0:
            raise WidthError("the network has no channel group, so there is nothing to allocate; see groups.frozen")
        if steps < 3:
            raise WidthError(f"{steps} steps asked for; an allocation needs at least 3, and 50 or more to be good")
        if not (0.0 < beta2[0] <= beta2[1] and math.isfinite(beta2[1])):
            raise WidthError(f"beta2 = {beta2}: give the first and the last value, positive and not falling")
        self.model, self.groups = model, groups
        self.network: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.loss, self.importance, self.beta2_range = loss, importance, beta2
        self.estimator, self.samples, self.precision = masks, samples, precision
        if weight_masks not in ("hard", "sampled", "soft"):
            raise WidthError(f"weight_masks = {weight_masks!r}: choose from hard, sampled, soft")
        if softness not in ("rank", "importance"):
            raise WidthError(f"softness = {softness!r}: choose from rank, importance")
        self.weight_masks, self.softness = weight_masks, softness
        pace = max(1, round(steps * 2 / 3))
        settle = steps - pace
        # A group of one unit has nothing to give; below one unit nobody can keep anything.
        least = np.maximum(np.asarray(minimum, np.float64), 1.0 / np.asarray(groups.sizes, np.float64))
        self.admm = Admm(costs, limits, len(groups), **{"pace": pace, "settle": settle, "minimum": least, **admm})
        self._layout = Layout(tuple(int(size) for size in groups.sizes))
        self._generator = torch.Generator().manual_seed(seed)
        self._first_loss: float | None = None
        self._rows: list[dict[str, float]] = []
        self._shadow: Tensor | None = None

    @property
    def finished(self) -> bool:
        """Whether all steps are done (at once where the dense network keeps the budgets)."""
        return self.admm.finished

    @property
    def keep_ratios(self) -> pd.Series[float]:
        """Keep ratio of each channel group, within every budget; meant for the end, allowed at any time."""
        return pd.Series(self.admm.keep_ratios, index=list(self.groups.names), name="keep_ratio")

    @property
    def beta2(self) -> float:
        """Sharpness at the present step."""
        first, last = self.beta2_range
        total = self.admm.pace + self.admm.settle
        return float(first * (last / first) ** (self.admm.state.step / total))

    @property
    def history(self) -> pd.DataFrame:
        """A row per step: loss, beta2, inexactness, each budget's use, and the keep ratio of each group."""
        return pd.DataFrame(self._rows)

    def prices(self) -> tuple[ShadowPrice, ...]:
        """Use and shadow price (loss per unit of the cost) of every budget."""
        return self.admm.prices()

    def importances(self) -> list[NDArray[np.float64]]:
        """b_i of every unit at present: K arrays (C_k,)."""
        return scores(self.network, self.groups, self.importance)

    @contextlib.contextmanager
    def masks(self) -> Iterator[nn.Module]:
        """The network with the present masks on, for weight steps; see ``weight_masks``."""
        if self.admm.finished and self.admm.state.step == 0:  # dense keeps the budgets: there is nothing to mask
            yield self.model
            return
        if self._shadow is None:
            self._shadow = self._present()
        masks = self._shadow
        if self.weight_masks == "sampled":
            draw = torch.rand(masks.shape, generator=self._generator)
            masks = (draw < masks).to(torch.float32)
        with masked(self.network, self.groups, self._layout.split(masks)):
            yield self.model

    def _present(self) -> Tensor:
        """Masks (K, C_max) of the present keep ratios, or what they are sampled from."""
        alpha = torch.from_numpy(self.admm.alpha)
        if self.weight_masks != "hard":
            with torch.no_grad():
                return self._probabilities(alpha).to(torch.float32)
        kept = (alpha * self._layout.counts()).round().clamp(min=1.0)
        return (self._ranks() < kept[:, None]).to(torch.float32)

    def _probabilities(self, alpha: Tensor) -> Tensor:
        if self.softness == "importance":
            b = self._layout.pad(self.importances())
        else:
            # p = sigmoid(beta2 (log b - log beta1)), and log b falls evenly by 1 from the first unit to the last.
            b = torch.exp(-(self._ranks() + 0.5) / self._layout.counts()[:, None])
        return keep_probabilities(alpha, b, self.beta2, self._layout)

    def _ranks(self) -> Tensor:
        """Place of each unit in its group, 0 the most important: (K, C_max), what is padded comes last."""
        importance = self._layout.pad(self.importances(), fill=-1.0)
        return importance.argsort(dim=1, descending=True, stable=True).argsort(dim=1)

    def step(self, batch: Any, *more: Any, scaler: Any = None) -> float:
        """One step with one or several validation batches (inputs, targets); returns the loss.

        ``scaler``: the ``torch.amp.GradScaler`` in use, so that float16 gradients do not vanish. A loss that is not
        finite or has exploded raises `TrainingError` and leaves everything as it was.
        """
        factor = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
        gradient = np.zeros(len(self.groups))
        total = 0.0
        device = device_of(self.network)
        batches = (batch, *more)
        saved = self._generator.get_state()
        try:
            for one in batches:
                alpha = torch.from_numpy(self.admm.alpha).requires_grad_()
                p = self._probabilities(alpha)
                value = self._masked_loss(p, on_device(one, device))
                (found,) = torch.autograd.grad(value * factor, alpha)
                gradient += found.double().numpy() / (factor * len(batches))
                total += float(value.detach()) / len(batches)
            gradient, total = self._averaged(gradient, total)
            self._refuse_explosion(total)
            if not np.isfinite(gradient).all():
                raise TrainingError(
                    "dL/dalpha is not finite: the loss overflows under the masks. Lower the learning rate"
                    + (", or the scaler's scale" if factor != 1.0 else "")
                )
        except TrainingError:
            self._generator.set_state(saved)
            raise
        sharp = self.beta2
        self.admm.step(gradient)
        self._shadow = None
        self._record(total, sharp, p)
        return total

    def _masked_loss(self, p: Tensor, batch: tuple[Any, Any]) -> Tensor:
        draw = sample_masks(p, self.estimator, self.samples, generator=self._generator)
        losses = []
        with statistics_kept(self.network):
            for mask in draw.masks:
                with (
                    masked(self.network, self.groups, self._layout.split(mask)),
                    precise(self.precision, device_of(self.network)),
                ):
                    losses.append(checked_loss(self.network, batch, self.loss))
        return draw.surrogate(torch.stack(losses).cpu())

    def _averaged(self, gradient: NDArray[np.float64], loss: float) -> tuple[NDArray[np.float64], float]:
        """The mean over all ranks, where there are several: the same numbers everywhere, so the same step."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return gradient, loss
        # nccl takes tensors of the device only; gloo takes either.
        both = torch.tensor([*gradient, loss], dtype=torch.float64, device=device_of(self.network))
        distributed.all_reduce(both)
        mean = (both / distributed.get_world_size()).cpu().numpy()
        return mean[:-1], float(mean[-1])

    def _refuse_explosion(self, loss: float) -> None:
        if self._first_loss is None:
            self._first_loss = loss
        elif loss > 100.0 * max(self._first_loss, 1.0):
            raise TrainingError(
                f"the loss has exploded from {self._first_loss:.3g} to {loss:.3g}: lower the learning rate; the keep "
                "ratios are unchanged"
            )

    def _record(self, loss: float, beta2: float, p: Tensor) -> None:
        used = {f"used_{j}": price.used for j, price in enumerate(self.admm.prices())}
        limits = {f"limit_{j}": float(limit) for j, limit in enumerate(self.admm.limits)}
        row = {"step": float(self.admm.state.step), "loss": loss, "beta2": beta2}
        row["inexactness"] = float(inexactness(p.detach()).sum())
        alpha = dict(zip(self.groups.names, self.admm.alpha.tolist(), strict=True))
        self._rows.append({**row, **used, **limits, **alpha})

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to give the same allocation, beside the model's and optimiser's own."""
        return {
            "admm": self.admm.state_dict(),
            "generator": self._generator.get_state(),
            "fingerprint": self.groups.fingerprint,
            "first_loss": self._first_loss,
            "rows": list(self._rows),
            "masks": self._shadow,  # made from the weights of the last step, which are gone
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken; refused for another network or other budgets."""
        if state["fingerprint"] != self.groups.fingerprint:
            raise WidthError("this allocation state belongs to another network (its channel groups differ)")
        self.admm.load_state_dict(state["admm"])
        self._generator.set_state(state["generator"])
        self._first_loss, self._rows, self._shadow = state["first_loss"], list(state["rows"]), state["masks"]
