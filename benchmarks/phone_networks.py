"""Published latencies of MobileNets on phones, and how well F explains them; a part of gpu_cost_models.py.

benchmarks/data/pixel_mobilenets.csv has the published milliseconds with their sources. The work of each network is
counted by ``budgets.physics_features``. Networks of other widths and resolutions are other rows of the same table.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import nn

import budgets
from budgets.regression import CostRegressor, PhysicsNNLS
from dsa_hw.channels import find_groups
from dsa_hw.zoo.torchvision_compat import torchvision

__all__ = ["phones"]

TABLE = Path(__file__).parent / "data" / "pixel_mobilenets.csv"
# Output channels and stride of the 13 separable convolutions (Howard et al. 2017, table 1).
SEPARABLE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *((512, 1),) * 5, (1024, 2), (1024, 1))


def mobilenet_v1(width: float) -> nn.Module:
    """MobileNetV1 with ``width`` times the channels."""

    def layer(c_in: int, c_out: int, kernel: int, stride: int, groups: int = 1) -> list[nn.Module]:
        convolution = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
        return [convolution, nn.BatchNorm2d(c_out), nn.ReLU6()]

    channels = max(8, int(32 * width))
    layers = layer(3, channels, 3, 2)
    for c, stride in SEPARABLE:
        out = max(8, int(c * width))
        layers += [*layer(channels, channels, 3, stride, channels), *layer(channels, out, 1, 1)]
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1001))


@cache
def work(network: str, width: float, resolution: int) -> pd.Series[float]:
    """Multiply-adds and bytes of a network by class."""
    model = mobilenet_v1(width) if network == "mobilenet_v1" else torchvision.models.mobilenet_v2(width_mult=width)
    groups = find_groups(model.eval(), (torch.zeros(1, 3, resolution, resolution),))
    found: dict[str, float] = {}
    for granularity in ("coarse", "classes"):
        phi = budgets.physics_features(groups, granularity)
        found |= {f"{granularity}: {name}": float(dense) for name, dense in zip(phi.names, phi.dense, strict=True)}
    return pd.Series(found, dtype=float)


def phones() -> dict[str, dict[str, float]]:
    """Mean leave-one-out errors by device, precision and unit."""
    frame = pd.read_csv(TABLE)
    result = {}
    for key, rows in frame.groupby(["network", "device", "precision", "unit"], sort=False):
        counted = pd.DataFrame([work(r.network, r.width, r.resolution) for r in rows.itertuples()])
        y = rows["ms"].to_numpy()
        coarse = [c for c in counted.columns if c.startswith("coarse") and "constant" not in c]
        classes = [c for c in counted.columns if c.startswith("classes") and "constant" not in c]
        result[", ".join(map(str, key))] = {
            "networks": float(len(y)),
            "FLOPs": _leave_one_out(PhysicsNNLS(), counted[["coarse: work"]].to_numpy(), y),
            "physics, coarse": _leave_one_out(PhysicsNNLS(), counted[coarse].to_numpy(), y),
            "physics": _leave_one_out(PhysicsNNLS(), counted[classes].to_numpy(), y),
        }
    return result


def _leave_one_out(model: CostRegressor, x: np.ndarray, y: np.ndarray) -> float:
    scaled = x / x.max(0)
    errors = []
    for i in range(len(y)):
        rest = np.arange(len(y)) != i
        predicted = model.fit(scaled[rest], y[rest]).predict(scaled[[i]])[0]
        errors.append(abs(predicted / y[i] - 1))
    return float(np.mean(errors))
