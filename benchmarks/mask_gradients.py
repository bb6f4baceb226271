"""Bias and variance of the mask-gradient estimators against the truth, found by enumerating every mask.

    python benchmarks/mask_gradients.py [--repeats 300] [--statistics batch] [--output table.md]

A two-layer network is trained on the digits of scikit-learn; its 5 + 5 hidden channels are two channel groups with a
keep ratio each. With 1024 masks the expected loss and its gradient in the keep ratios are exact, in float64. Every
estimator gets the same number of forward-backward passes (DisARM needs forward passes only; they are counted alike).
``bias`` and ``deviation`` are relative to the length of the true gradient; ``error`` is the root mean squared distance
to it, ``length`` that of the mean estimate, ``cosine`` the mean cosine of the angle to the truth; ``sign`` is how often
the difference of the two groups, which is what allocates, has the right sign.

The batch norms use the statistics of the batch under each mask, as the allocator does, or with ``--statistics stored``
those of the dense network.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from dsa_hw.methods.dsa.estimators import sample_masks
from dsa_hw.methods.dsa.relaxation import Layout, keep_probabilities

LAYOUT = Layout((5, 5))
ESTIMATORS: dict[str, tuple[str, float]] = {
    "soft": ("soft", 0.5),
    "straight_through": ("straight_through", 0.5),
    "antithetic": ("antithetic", 0.5),
    "relaxed 0.2": ("relaxed", 0.2),
    "relaxed 0.5": ("relaxed", 0.5),
    "relaxed 1.0": ("relaxed", 1.0),
    "disarm": ("disarm", 0.5),
}
log = logging.getLogger(__name__)


def normalise(norm: nn.BatchNorm1d, x: Tensor, statistics: str) -> Tensor:
    """Batch norm of x (..., batch, C): with the statistics of the "batch" under each mask, or as the module does it."""
    if statistics != "batch":
        found: Tensor = norm(x.flatten(0, -2)).view_as(x)
        return found
    variance, mean = torch.var_mean(x, dim=-2, keepdim=True, unbiased=False)
    return (x - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias


def trained_loss(seed: int, statistics: str = "batch") -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Loss (N,) as a function of masks (N, 2, 5), and the importances |gamma| of the channels (2, 5)."""
    torch.manual_seed(seed)
    data = load_digits()
    x = torch.from_numpy(data.data / 16.0)
    y = torch.from_numpy(data.target)
    first, second, last = nn.Linear(64, 5).double(), nn.Linear(5, 5).double(), nn.Linear(5, 10).double()
    norms = [nn.BatchNorm1d(5).double() for _ in range(2)]

    def forward(masks: Tensor, batch: Tensor, how: str) -> Tensor:
        hidden = torch.relu(normalise(norms[0], first(batch), how)) * masks[:, None, 0]  # (N, batch, 5)
        hidden = torch.relu(normalise(norms[1], second(hidden), how)) * masks[:, None, 1]
        scores: Tensor = last(hidden)
        return scores

    parameters = [p for module in (first, second, last, *norms) for p in module.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    for _ in range(400):
        index = torch.randint(0, len(x), (128,))
        optimizer.zero_grad()
        outputs = forward(torch.ones(1, 2, 5).double(), x[index], "stored")[0]
        nn.functional.cross_entropy(outputs, y[index]).backward()
        optimizer.step()
    for norm in norms:
        norm.eval()
    for parameter in parameters:
        parameter.requires_grad_(False)
    batch, labels = x[:256], y[:256]

    def loss(masks: Tensor) -> Tensor:
        scores = forward(masks, batch, statistics)
        return nn.functional.cross_entropy(
            scores.transpose(1, 2), labels.expand(len(masks), -1), reduction="none"
        ).mean(1)

    return loss, torch.stack([norm.weight.abs() for norm in norms])


def truth(loss: Callable[[Tensor], Tensor], b: Tensor, alpha: Tensor, beta2: float) -> Tensor:
    """dE[L]/dalpha (2,) by enumeration."""
    masks = torch.tensor(list(itertools.product((0.0, 1.0), repeat=10)), dtype=torch.float64).view(-1, 2, 5)
    leaf = alpha.clone().requires_grad_()
    p = keep_probabilities(leaf, b, beta2, LAYOUT)
    chance = torch.where(masks > 0, p, 1.0 - p).flatten(1).prod(1)
    (chance * loss(masks)).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def measure(passes: int, repeats: int, seeds: int, statistics: str = "batch") -> pd.DataFrame:
    """One row per estimator and beta2, averaged over networks and keep ratios."""
    rows = []
    for seed, beta2 in itertools.product(range(seeds), (0.05, 1.0, 5.0)):
        loss, b = trained_loss(seed, statistics)
        for ratios in ((0.9, 0.9), (0.6, 0.6), (0.4, 0.8)):
            alpha = torch.tensor(ratios, dtype=torch.float64)
            exact = truth(loss, b, alpha, beta2)
            for name, (method, temperature) in ESTIMATORS.items():
                generator = torch.Generator().manual_seed(seed)
                count = 1 if method == "soft" else passes
                draws = []
                for _ in range(2 if method == "soft" else repeats):
                    leaf = alpha.clone().requires_grad_()
                    p = keep_probabilities(leaf, b, beta2, LAYOUT)
                    sample = sample_masks(
                        p, method, count, temperature=temperature, generator=generator, dtype=torch.float64
                    )
                    sample.surrogate(loss(sample.masks)).backward()
                    assert leaf.grad is not None
                    draws.append(leaf.grad)
                found = torch.stack(draws)
                size = exact.norm()
                contrast = (found[:, 0] - found[:, 1]) * (exact[0] - exact[1])
                rows.append(
                    {
                        "estimator": name,
                        "beta2": beta2,
                        "passes": count,
                        "bias": float((found.mean(0) - exact).norm() / size),
                        "deviation": float(found.var(0).sum().sqrt() / size),
                        "error": float((found - exact).square().sum(1).mean().sqrt() / size),
                        "length": float(found.mean(0).norm() / size),
                        "cosine": float(nn.functional.cosine_similarity(found, exact[None]).mean()),
                        "sign": float((contrast > 0).double().mean()),
                    }
                )
    table = pd.DataFrame(rows).groupby(["beta2", "estimator"], sort=False).mean().reset_index()
    return table.sort_values(["beta2", "error"]).reset_index(drop=True)


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=4, help="forward-backward passes per estimate (even)")
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--statistics", choices=("batch", "stored"), default="batch", help="of the batch norms")
    parser.add_argument("--output", type=Path, help="write the table here as Markdown")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    table = measure(arguments.passes, arguments.repeats, arguments.seeds, arguments.statistics)
    lines = ["| " + " | ".join(table.columns) + " |", "|" + "---|" * len(table.columns)]
    for row in table.itertuples(index=False):
        lines.append("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row) + " |")
    text = "\n".join(lines)
    log.info("%s", text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
