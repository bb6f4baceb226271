"""DMCP: widths as a Markov chain whose transition probabilities are learnt with the weights (Guo et al. 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dsa_hw.channels import masked
from dsa_hw.errors import DsaError
from dsa_hw.methods.baselines._evaluation import place, prepared, seeded, unit_scores
from dsa_hw.methods.baselines._limits import Limits
from dsa_hw.methods.baselines._options import Training, baseline
from dsa_hw.methods.baselines._training import fine_tune, needs_train, steps_of
from dsa_hw.methods.baselines._units import masks_of, ranks
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.training.loaders import RepeatingLoader
from dsa_hw.training.losses import autocast, checked_loss
from dsa_hw.utils.arrays import Floats, Ints
from dsa_hw.utils.modules import device_of
from dsa_hw.utils.progress import counted_steps

__all__ = ["MarkovWidths", "dmcp"]

_START = 3.0  # theta: a transition probability of 95%, so that the expected network is at first close to the dense one
_NEAREST = 1e-3  # distance from the budget at which its logarithm stops falling, as a share of the dense cost


@dataclass(frozen=True)
class DmcpOptions(Training):
    """Options of DMCP.

    Attributes:
        states: Widths of a group that the chain can stop at, at most; the smallest allowed one and the dense one are
            among them.
        warm_up: Share of the steps in which only weights are trained.
        drawn: Networks that are drawn from the chains in each step of the weights, beside the narrowest and the widest.
        rate: Learning rate of the transition probabilities (Adam).
        price: Weight of the logarithm of the distance from the budget.
        tolerance: Share of a budget below which the expected cost is pulled up again.
    """

    states: int = 10
    warm_up: float = 0.5
    drawn: int = 2
    rate: float = 0.05
    price: float = 0.1
    tolerance: float = 0.99

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.states < 2 or not 0.0 <= self.warm_up < 1.0 or not 0.0 < self.tolerance <= 1.0:
            raise DsaError(
                "Options of dmcp must have states >= 2, 0 <= warm_up < 1 and 0 < tolerance <= 1; got "
                f"{self.states}, {self.warm_up} and {self.tolerance}."
            )


class MarkovWidths:
    """A chain for each group: width number i is followed by number i + 1 with probability sigmoid(theta_i).

    So width i is reached with probability q_i, the product of the transition probabilities before it,
    and the expected width is l_0 + sum_i (l_i - l_{i-1}) q_i. A unit is kept if its rank in the group is below
    the width; units are nested.

    Args:
        sizes: Widths (K,) of the dense network.
        allowed: K ascending arrays of widths.
        states: How many of them the chain can stop at.
    """

    def __init__(self, sizes: Ints, allowed: list[Ints], states: int) -> None:
        """Begin with chains that nearly always go to the end."""
        self.sizes = sizes
        chosen = [np.unique(np.linspace(0, len(w) - 1, min(states, len(w))).round().astype(int)) for w in allowed]
        self.levels = [w[at] for w, at in zip(allowed, chosen, strict=True)]
        self.theta = [torch.full((len(level) - 1,), _START, requires_grad=True) for level in self.levels]

    def reached(self) -> list[Tensor]:
        """Return the probabilities with which each group reaches its widths, the first one always."""
        return [torch.cat([t.new_ones(1), torch.sigmoid(t).cumprod(0)]) for t in self.theta]

    def ratios(self) -> Tensor:
        """Return the expected keep ratios (K,), differentiable."""
        found = []
        for level, q, size in zip(self.levels, self.reached(), self.sizes, strict=True):
            found.append(torch.from_numpy(np.diff(level, prepend=0)).to(q) @ q / int(size))
        return torch.stack(found)

    def masks(self, order: list[Ints]) -> list[Tensor]:
        """Return for each unit the probability that it is kept, by its rank in ``order``, differentiable."""
        pairs = zip(self.levels, self.reached(), order, strict=True)
        return [q[torch.from_numpy(np.searchsorted(level, rank, "right"))] for level, q, rank in pairs]

    def draw(self, rng: np.random.Generator) -> Ints:
        """Draw widths (K,) from the chains."""
        widths = []
        for level, theta in zip(self.levels, self.theta, strict=True):
            stops = rng.random(len(theta)) >= torch.sigmoid(theta.detach()).numpy()
            widths.append(level[int(np.argmax(stops)) if stops.any() else len(theta)])
        return np.array(widths, np.int64)


@baseline("dmcp", DmcpOptions)
def dmcp(problem: Problem, limits: Limits, options: DmcpOptions) -> Proposal:
    """Propose the expected widths of learnt Markov chains, and the weights that were trained with them.

    A step of the weights trains the widest and the narrowest network and two that are drawn, one after the other. After
    the warm-up, a step of the transition probabilities follows each: the loss of the network in which every unit is
    multiplied by the probability that it is kept, plus ``price`` * log|E F / F(dense) - B| for each budget that the
    expected cost exceeds or falls below ``tolerance`` of.
    """
    steps = steps_of(problem, "dmcp")
    importance = unit_scores(problem)
    order = ranks(importance)
    model = prepared(problem.model, options)
    chains = MarkovWidths(limits.sizes, limits.allowed, options.states)
    optimiser = torch.optim.Adam([theta for theta in chains.theta if theta.numel()], options.rate)
    rng = np.random.default_rng(problem.seed)
    floor = np.array([level[0] for level in chains.levels])
    rows: list[dict[str, float]] = []
    with seeded(problem, model), counted_steps(steps, "dmcp", shown=problem.progress) as count:
        batches = RepeatingLoader(needs_train(problem, "dmcp"))
        judged = batches if problem.val is None else RepeatingLoader(problem.val, "val")
        for step in range(steps):
            for widths in [limits.sizes, floor, *(chains.draw(rng) for _ in range(options.drawn))]:
                fine_tune(problem, model, options, masks_of(order, widths), batches, 1)
            if step >= options.warm_up * steps:
                loss = _learn(problem, limits, options, model, chains, order, optimiser, next(judged))
                alpha = chains.ratios().detach().double().numpy()
                rows.append({"step": step, "loss": loss, "cost": float(limits.costs.shares(alpha).max())})
            count("")
    alpha = chains.ratios().detach().double().numpy()
    model.train(problem.model.training)
    return Proposal(limits.scaled(limits.clip(alpha)), model, importance, pd.DataFrame(rows))


def _learn(
    problem: Problem,
    limits: Limits,
    options: DmcpOptions,
    model: torch.nn.Module,
    chains: MarkovWidths,
    order: list[Ints],
    optimiser: torch.optim.Optimizer,
    batch: object,
) -> float:
    """Make one step of the transition probabilities, and return the loss of the task."""
    alpha = chains.ratios()
    optimiser.zero_grad()
    with masked(model, problem.groups, chains.masks(order)), autocast(options.precision, device_of(model)):
        loss = checked_loss(model, place(batch, model, options), problem.loss)
        slopes = torch.autograd.grad(loss, chains.theta, retain_graph=True, allow_unused=True)
    push = _budget_slope(limits, alpha.detach().double().numpy(), options.tolerance)
    pull = torch.autograd.grad(options.price * (torch.from_numpy(push).to(alpha) * alpha).sum(), chains.theta)
    for theta, slope, more in zip(chains.theta, slopes, pull, strict=True):
        theta.grad = more if slope is None else slope + more
    optimiser.step()
    return float(loss.detach())


def _budget_slope(limits: Limits, alpha: Floats, tolerance: float) -> Floats:
    """Return the gradient (K,) of the sum of log|F(alpha) - B|, in shares of the dense costs.

    The budget that is used most decides whether cost may rise.
    """
    costs = limits.costs
    shares, bounds = costs.shares(alpha), costs.share_limits
    over = shares > bounds
    below = ~over & (shares < tolerance * bounds) & (shares / bounds == (shares / bounds).max()) & ~over.any()
    distance = np.maximum(np.abs(shares - bounds), _NEAREST)
    return np.asarray((np.where(over, 1.0, np.where(below, -1.0, 0.0)) / distance) @ costs.share_gradients(alpha))
