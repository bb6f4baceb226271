"""Keep ratios that are learnt inside a training loop of the user's own.

One `Allocator.step` is: keep ratios -> keep probabilities (`dsa_hw.methods.dsa.relaxation`) -> masks
(`dsa_hw.methods.dsa.estimators`) -> loss -> dL/dalpha -> one step of ADMM (`dsa_hw.methods.dsa.admm`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from budgets.notation import BudgetLike
from dsa_hw.channels import ChannelGroups, masked
from dsa_hw.channels.importance import Importance, scores
from dsa_hw.errors import TrainingError, WidthError
from dsa_hw.methods.costs import Cost, CostSet
from dsa_hw.methods.dsa.admm import Admm, ShadowPrice
from dsa_hw.methods.dsa.estimators import sample_masks
from dsa_hw.methods.dsa.relaxation import Layout, inexactness, keep_probabilities
from dsa_hw.methods.problem import Proposal
from dsa_hw.training.batchnorm import batch_statistics
from dsa_hw.training.loaders import on_device
from dsa_hw.training.losses import Loss, Step, autocast, checked_loss, chosen_loss
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.modules import copy_module, device_of, evaluating
from dsa_hw.utils.records import Log, recorder

__all__ = ["Allocator"]


class Allocator:
    """Keep ratios of a network, learnt under budgets while its weights are trained (or stay as they are).

    >>> import dsa_hw, torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 4))
    >>> groups = dsa_hw.find_groups(model, torch.zeros(1, 3, 8, 8))
    >>> allocator = dsa_hw.Allocator(model, groups, dsa_hw.FlopsBudget("50%"), steps=9)
    >>> batch = torch.randn(16, 3, 8, 8), torch.randint(4, (16,))
    >>> while not allocator.finished:
    ...     with allocator.masks():  # the weights adapt to the channels that are left
    ...         loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    ...     loss.backward()  # then a step of the optimiser, usually several per step of the allocator
    ...     value = allocator.step(batch)  # validation data
    >>> widths = dsa_hw.round_widths(allocator.keep_ratios, allocator.costs)
    >>> bool(allocator.costs.at_widths(widths)[0] <= allocator.costs.limits[0])
    True
    """

    def __init__(
        self,
        model: nn.Module,
        groups: ChannelGroups,
        budgets: BudgetLike | Sequence[BudgetLike] | CostSet[Cost],
        *,
        steps: int,
        loss: Loss | None = None,
        step: Step | None = None,
        importance: str | Importance = "gamma",
        beta2: tuple[float, float] = (10.0, 100.0),
        softness: str = "rank",
        masks: str = "soft",
        samples: int = 1,
        weight_masks: str = "hard",
        statistics: str = "batch",
        minimum: ArrayLike = 0.05,
        precision: str = "fp32",
        seed: int = 0,
        log: Log | None = None,
        **admm: Any,
    ) -> None:
        """Resolve the budgets and check the settings.

        Args:
            model: The network, or the ``DistributedDataParallel`` around it; then the gradients of the ranks are
                averaged.
            groups: Its channel groups.
            budgets: One budget or several; a measured one needs its fitted cost model, as in
                ``LatencyBudget("5ms", profile=model)``. For costs of your own, a `CostSet`.
            steps: Number of calls of `step` until `finished`; the budget falls during the first two thirds.
            loss: ``loss(outputs, targets)``, a scalar; None is the cross entropy.
            step: ``step(model, batch)`` instead of ``loss``, for networks that compute their own loss.
            importance: Importance b_i of the channels, a name or a function; computed again at every step, because
                weights change.
            beta2: Sharpness of the masks at the first and at the last step; it grows geometrically in between.
            softness: The unit of beta2. "rank" is the rank of a channel in its group: about 2 / beta2 of the channels
                of every group have masks between 1/4 and 3/4. "importance" is b_i itself, as in the paper: a group of
                nearly equal importances stays soft, so that no channel is removed but all are weakened.
            masks: Estimator of the gradient through the masks, see `dsa_hw.methods.dsa.estimators.sample_masks`.
            samples: Masks per batch.
            weight_masks: What `masks` applies in weight steps: "hard" masks of the most important channels, so that
                the weights adapt to the network that comes out; masks "sampled" at every step, as in the paper; or
                "soft" ones, which weights can learn to compensate.
            statistics: Batch-norm statistics in `step`: those of each "batch", or the "stored" ones.
            minimum: Smallest keep ratio, a number or (K,).
            precision: "fp32" (leaves a surrounding autocast in force), "bf16" or "fp16".
            seed: Seed of the sampled masks.
            log: Called with a dict for each step: the row of `history`, with the stage "allocating".
            **admm: Further settings of `dsa_hw.methods.dsa.admm.Admm`.

        Raises:
            InfeasibleBudgetError: A budget cannot be met.
            WidthError: The network has no channel groups, or a setting is out of range.
        """
        if len(groups) == 0:
            raise WidthError("The network has no channel groups, so there is nothing to allocate. See `groups.frozen`.")
        if steps < 3:
            raise WidthError(f"`steps` must be at least 3, and should be 50 or more; got {steps}.")
        if not (0.0 < beta2[0] <= beta2[1] and math.isfinite(beta2[1])):
            raise WidthError(f"`beta2` must be two positive numbers that do not fall; got {beta2}.")
        for name, value, known in (
            ("weight_masks", weight_masks, ("hard", "sampled", "soft")),
            ("softness", softness, ("rank", "importance")),
            ("statistics", statistics, ("batch", "stored")),
        ):
            if value not in known:
                raise WidthError(f"`{name}` must be one of {', '.join(known)}; got {value!r}.")
        self.model, self.groups = model, groups
        self.network: nn.Module = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.loss, self.importance, self.beta2_range = chosen_loss(loss, step), importance, beta2
        self.estimator, self.samples, self.precision = masks, samples, precision
        self.weight_masks, self.softness, self.statistics = weight_masks, softness, statistics
        self.costs: CostSet[Cost] = budgets if isinstance(budgets, CostSet) else CostSet.of(budgets, groups)
        pace = max(1, round(steps * 2 / 3))
        # No group can keep less than one channel.
        least = np.maximum(np.asarray(minimum, np.float64), 1.0 / np.asarray(groups.sizes, np.float64))
        self.admm = Admm(self.costs, **{"pace": pace, "settle": steps - pace, "minimum": least, **admm})
        self._layout = Layout(tuple(int(size) for size in groups.sizes))
        self._generator = torch.Generator().manual_seed(seed)
        self._first_loss: float | None = None
        self._rows: list[dict[str, float]] = []
        self._log = recorder(log)
        self._weight_mask: Tensor | None = None

    @property
    def finished(self) -> bool:
        """Whether all steps are done; True at once if the dense network meets the budgets."""
        return self.admm.finished

    @property
    def keep_ratios(self) -> pd.Series[float]:
        """Keep ratio of each channel group, within every budget; meant for the end, valid at any time."""
        return pd.Series(self.admm.keep_ratios, index=list(self.groups.names), name="keep_ratio")

    @property
    def beta2(self) -> float:
        """Sharpness of the masks at the present step."""
        first, last = self.beta2_range
        total = self.admm.pace + self.admm.settle
        return float(first * (last / first) ** (self.admm.state.step / total))

    @property
    def history(self) -> pd.DataFrame:
        """A row per step: loss, beta2, inexactness, residual, use and limit of each budget, keep ratio of each group.

        The ``residual`` is that of the KKT conditions, see `Admm.residual`.
        """
        return pd.DataFrame(self._rows)

    def prices(self) -> tuple[ShadowPrice, ...]:
        """Return the use and the shadow price (loss per unit of the cost) of every budget."""
        return self.admm.prices()

    def importances(self) -> list[Floats]:
        """Return the importance of every channel at present, K arrays (C_k,)."""
        return scores(self.network, self.groups, self.importance)

    def proposal(self) -> Proposal:
        """Return keep ratios, channels and a copy of the weights, for ``dsa_hw.allocate(..., method=proposal)``."""
        return Proposal(self.admm.keep_ratios, copy_module(self.network), self.importances(), self.history)

    @contextlib.contextmanager
    def masks(self) -> Iterator[nn.Module]:
        """Mask the network for a weight step; see ``weight_masks``."""
        if self.admm.finished and self.admm.state.step == 0:  # the dense network meets the budgets
            yield self.model
            return
        if self._weight_mask is None:
            self._weight_mask = self._present()
        masks = self._weight_mask
        if self.weight_masks == "sampled":
            draw = torch.rand(masks.shape, generator=self._generator)
            masks = (draw < masks).to(torch.float32)
        with masked(self.network, self.groups, self._layout.split(masks)):
            yield self.model

    def _present(self) -> Tensor:
        """Return the masks (K, C_max) of the present keep ratios, or the probabilities they are sampled from."""
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
            # p = sigmoid(beta2 (log b - log beta1)); log b falls evenly by 1 from the first channel to the last.
            b = torch.exp(-(self._ranks() + 0.5) / self._layout.counts()[:, None])
        return keep_probabilities(alpha, b, self.beta2, self._layout)

    def _ranks(self) -> Tensor:
        """Return the rank of each channel in its group (K, C_max), 0 for the most important; padding comes last."""
        importance = self._layout.pad(self.importances(), fill=-1.0)
        return importance.argsort(dim=1, descending=True, stable=True).argsort(dim=1)

    def step(self, batch: Any, *more: Any, scaler: Any = None) -> float:
        """Make one step of the keep ratios.

        Weights, their gradients, modes and batch-norm statistics are the same afterwards as before.

        Args:
            batch: A validation batch as its loader yields it, for example (inputs, targets).
            *more: Further batches, to average the gradient over.
            scaler: The ``torch.amp.GradScaler`` in use, so that float16 gradients do not vanish.

        Returns:
            The loss.

        Raises:
            TrainingError: The loss is not finite or has exploded; the allocation is unchanged.
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
                    "dL/dalpha is not finite, because the loss overflows under the masks. Lower the learning rate"
                    + (", or the scale of the scaler." if factor != 1.0 else ".")
                )
        except TrainingError:
            self._generator.set_state(saved)
            raise
        sharp = self.beta2
        self.admm.step(gradient)
        self._weight_mask = None
        self._record(total, sharp, p)
        return total

    def _masked_loss(self, p: Tensor, batch: tuple[Any, Any]) -> Tensor:
        draw = sample_masks(p, self.estimator, self.samples, generator=self._generator)
        losses = []
        with (batch_statistics if self.statistics == "batch" else evaluating)(self.network):
            for mask in draw.masks:
                with (
                    masked(self.network, self.groups, self._layout.split(mask)),
                    autocast(self.precision, device_of(self.network)),
                ):
                    losses.append(checked_loss(self.network, batch, self.loss))
        return draw.surrogate(torch.stack(losses).cpu())

    def _averaged(self, gradient: Floats, loss: float) -> tuple[Floats, float]:
        """Average over all ranks, so that every rank makes the same step."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return gradient, loss
        # nccl takes tensors on the device only; gloo takes either.
        both = torch.tensor([*gradient, loss], dtype=torch.float64, device=device_of(self.network))
        distributed.all_reduce(both)
        mean = (both / distributed.get_world_size()).cpu().numpy()
        return mean[:-1], float(mean[-1])

    def _refuse_explosion(self, loss: float) -> None:
        if self._first_loss is None:
            self._first_loss = loss
        elif loss > 100.0 * max(self._first_loss, 1.0):
            raise TrainingError(
                f"The loss has exploded from {self._first_loss:.3g} to {loss:.3g}. Lower the learning rate. The keep "
                "ratios are unchanged."
            )

    def _record(self, loss: float, beta2: float, p: Tensor) -> None:
        used = {f"used_{j}": price.used for j, price in enumerate(self.admm.prices())}
        limits = {f"limit_{j}": float(limit) for j, limit in enumerate(self.admm.limits)}
        row = {"step": float(self.admm.state.step), "loss": loss, "beta2": beta2}
        row["inexactness"] = float(inexactness(p.detach()).sum())
        row["residual"] = self.admm.residual
        alpha = dict(zip(self.groups.names, self.admm.alpha.tolist(), strict=True))
        self._rows.append({**row, **used, **limits, **alpha})
        self._log({"stage": "allocating", **self._rows[-1], "step": self.admm.state.step})

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs besides the states of the model and the optimiser."""
        return {
            "admm": self.admm.state_dict(),
            "generator": self._generator.get_state(),
            "fingerprint": self.groups.fingerprint,
            "first_loss": self._first_loss,
            "rows": list(self._rows),
            "masks": self._weight_mask,  # computed from weights that have changed since
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where ``state`` was taken.

        Raises:
            WidthError: The state is of another network or other budgets.
        """
        if state["fingerprint"] != self.groups.fingerprint:
            raise WidthError("The allocation state is of another network: its channel groups differ.")
        self.admm.load_state_dict(state["admm"])
        self._generator.set_state(state["generator"])
        self._first_loss, self._rows, self._weight_mask = state["first_loss"], list(state["rows"]), state["masks"]
