"""A comparison with made-up numbers: what the page must show is known exactly."""

# ruff: noqa: E501
from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pandas as pd

import budgets
from dsa_hw.channels import find_groups
from dsa_hw.experiments.report.findings import COLUMNS, Findings
from dsa_hw.profiles import Profile
from dsa_hw.zoo.models import load_model


def profile_of(groups: Any, seed: int = 0) -> Profile:
    """A made profile: a constant and FLOPs, 1 % of noise, with a saw-tooth of 20 % off the grid of 8."""
    rng = np.random.default_rng(seed)
    flops = budgets.flops(groups)
    rows = []
    for i in range(40):
        ratios = np.ones(len(groups)) if i == 0 else rng.uniform(0.2, 1, len(groups))
        widths = np.maximum(8 * np.round(ratios * groups.sizes / 8), 8).astype(int).clip(max=groups.sizes)
        alpha = widths / groups.sizes
        # Late groups cost more than their FLOPs say, so that the two budgets differ.
        took = 2e-4 + 1e-3 * float(flops(alpha)) / flops.dense + 4e-4 * float(np.mean(alpha[len(alpha) // 2 :]))
        took *= 1 + 0.01 * rng.standard_normal()
        split = "dense" if i == 0 else "holdout" if i % 5 == 0 else "train"
        rows.append(
            {
                **dict(zip(groups.names, widths.tolist(), strict=True)),
                "seconds": took,
                "low": 0.99 * took,
                "high": 1.01 * took,
                "split": split,
                "runs": 40,
            }
        )
    table = pd.DataFrame(rows)
    name = groups.names[0]
    evidence = []
    for channels in (64, 63, 62, 60, 56, 52, 48, 47, 46, 44, 40, 36, 32, 31, 30, 28, 24, 16):
        off = 0.0 if channels % 8 == 0 else 0.2
        t = 1e-4 * channels / 64 * (1 + off)
        evidence.append(
            {
                "group": name,
                "width": channels,
                "channels": channels,
                "seconds": t,
                "low": 0.99 * t,
                "high": 1.01 * t,
                "runs": 20,
                "excess": off,
                "divisor": 8,
            }
        )
    return Profile(
        table,
        groups.names,
        tuple(int(c) for c in groups.sizes),
        target="made/cpu",
        fingerprint=groups.fingerprint,
        network="made",
        inputs=([[1, 3, 32, 32], "torch.float32"],),
        environment={"target": "made/cpu"},
        grid=dict.fromkeys(groups.names, 8),
        grid_evidence=tuple(evidence),
        noise=0.01,
        interval=0.01,
    )


@functools.cache
def _fitted() -> tuple[Any, Profile, budgets.CostModel]:
    network, inputs = load_model("resnet8")
    groups = find_groups(network, inputs)
    profile = profile_of(groups)
    return groups, profile, budgets.fit(profile, groups)


def findings(model: str = "resnet20", accuracies: tuple[float, float] = (0.972, 0.958)) -> Findings:
    """Dense, three budgets by two methods, and the FLOPs-budget network at the latency budget's latency.

    ``accuracies``: of the latency-budget network, and of the FLOPs-budget network brought to its latency.
    """
    groups, profile, cost = _fitted()
    rng = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    widths: dict[str, Any] = {}

    def add(id: str, kind: str, asked: str, method: str, matches: str, share: float, accuracy: float) -> None:
        took = share * 1.6e-3
        rows.append(
            dict(zip(COLUMNS, (id, kind, asked, method, matches, 0.8e-3 if kind == "latency" else np.nan, share * 25e6, share * 78e3, took * 1.01, took, 0.99 * took, 1.02 * took, 120, True, np.nan if kind == "dense" else accuracy - 0.2, accuracy), strict=True))
        )  # fmt: skip
        if kind != "dense":
            ratios = np.clip(share + 0.25 * rng.standard_normal(len(groups)), 0.1, 1)
            widths[id] = np.maximum(8 * np.round(ratios * groups.sizes / 8), 8).astype(int).clip(max=groups.sizes)

    add("dense", "dense", "", "", "", 1.0, 0.983)
    add("latency-50%-dsa", "latency", "50%", "dsa", "", 0.496, accuracies[0])
    add("latency-30%-dsa", "latency", "30%", "dsa", "", 0.298, accuracies[0] - 0.02)
    add("latency-50%-uniform", "latency", "50%", "uniform", "", 0.49, accuracies[0] - 0.01)
    add("flops-50%-dsa", "flops", "50%", "dsa", "", 0.612, 0.969)
    add("flops-30%-dsa", "flops", "30%", "dsa", "", 0.42, 0.95)
    add("flops-50%-uniform", "flops", "50%", "uniform", "", 0.58, 0.955)
    add("params-50%-dsa", "params", "50%", "dsa", "", 0.71, 0.97)
    add("flops-50%-dsa@latency-50%-dsa", "flops", "50%", "dsa", "latency-50%-dsa", 0.499, accuracies[1])
    frame = pd.DataFrame(rows)
    correct = {}
    for _, row in frame.iterrows():
        right = np.zeros(360, bool)
        right[: round(360 * row["accuracy"])] = True
        correct[row["id"]] = right
    steps = np.arange(1, 61)
    histories = {
        id: pd.DataFrame(
            {
                "step": steps,
                "cost": np.maximum(1 - steps / 70, share) + 0.01 * rng.standard_normal(60).cumsum() / 5,
                "limit": np.maximum(1 - (1 - share) * steps / 40, share),
            }
        )
        for id, share in (("latency-50%-dsa", 0.5), ("flops-50%-dsa", 0.5))
    }
    return Findings(
        frame, pd.DataFrame(widths, index=list(groups.names)).T, groups.sizes, histories, correct, profile, cost,
        {"model": model, "data": "digits", "target": "onnxruntime/cpu, 1 thread", "date": "2026-11-16", "version": "0.1.0",
         "command": f"dsa-hw compare --model {model} --data digits --budgets flops=50% latency=50% params=50% --target onnxruntime/cpu --out report/",
         "statistic": "quiet: a low quantile of the undisturbed runs", "training": "20 epochs dense, 4 allocating, 4 fine-tuning; seed 0",
         "onnxruntime": "1.31.1", "limits": "One training seed.\nDigits are easy."},
    )  # fmt: skip
