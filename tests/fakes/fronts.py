"""A sweep and a minimisation with made-up numbers, for their pages."""

from __future__ import annotations

import pandas as pd

from dsa_hw import LatencyBudget
from dsa_hw.experiments.report import About

ABOUT = About(
    "resnet20", "onnxruntime/cpu fp32 x1", "2026-11-16", "0.1.0",
    "dsa-hw sweep --model resnet20 --data digits --budgets latency=30%..90%:7 --out front/",
    [("method", "dsa"), ("onnxruntime", "1.31.1")],
)  # fmt: skip
BUDGET = LatencyBudget("90%")
SIZES = {f"layer{i}.{j}.conv{k}": 16 * 2**i for i in range(3) for j in range(3) for k in (1, 2)}


def sweep_table(accuracies: bool = True) -> pd.DataFrame:
    """Six budgets that are met or inconclusive, and one that cannot be met."""
    rows = []
    shares = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
    for i, share in enumerate(shares):
        took = 1e-3 * share * (0.96 + 0.005 * i)
        rows.append(
            {
                "asked": f"{100 * share:.0f}%", "limit": 1e-3 * share, "predicted": took, "measured": took,
                "low": 0.98 * took, "high": 1.02 * took, "dense": 1e-3, "utilisation": took / (1e-3 * share),
                "verdict": "INCONCLUSIVE" if i == 4 else "MET", "measurements": 3,
                "accuracy": 0.985 - 0.004 * i if accuracies else float("nan"), "plan": f"plans/{i}.json",
                "flops": 4e7 * (share - 0.05 * i), "least_used": 0.98 * took / (1e-3 * share),
                "most_used": 1.02 * took / (1e-3 * share),
            }
        )  # fmt: skip
    table = pd.DataFrame(rows)
    table.attrs = {
        "widths": {
            f"{100 * share:.0f}%": {
                name: max(8 * round(size * (share + 0.03 * (k % 5) - 0.06) / 8), 8)
                for k, (name, size) in enumerate(SIZES.items())
            }
            for share in shares
        },
        "infeasible": {"30%": "latency <= 30% of the dense network cannot be met: the smallest is 33.1%."},
        "target": ABOUT.target,
        "dense": {"flops": 4e7, "accuracy": 0.987 if accuracies else None, "widths": SIZES},
    }
    return table


def sweep_with_long_names() -> pd.DataFrame:
    """The sweep of a network whose groups have names without a place to break."""
    table = sweep_table()

    def renamed(widths: dict[str, int]) -> dict[str, int]:
        return {f"features.block_with_a_very_long_path_of_modules.{name}": width for name, width in widths.items()}

    dense = {**table.attrs["dense"], "widths": renamed(table.attrs["dense"]["widths"])}
    table.attrs |= {"dense": dense, "widths": {k: renamed(v) for k, v in table.attrs["widths"].items()}}
    return table


def trials() -> pd.DataFrame:
    """Networks that a minimisation tried; some drop too far."""
    rows = []
    for share, drop, passes, epochs in ((0.9, 0.001, True, 0), (0.6, 0.004, True, 4), (0.45, 0.021, False, 4)):
        rows.append(
            {
                "asked": f"{100 * share:.1f}%", "limit": share * 1e-3, "measured": 0.97 * share * 1e-3, "dense": 1e-3,
                "low": 0.96 * share * 1e-3, "high": 0.98 * share * 1e-3, "drop": drop, "drop_low": drop - 0.004,
                "drop_high": drop + 0.005, "passes": passes, "epochs": float(epochs), "accuracy": 0.98 - drop,
            }
        )  # fmt: skip
    return pd.DataFrame(rows)
