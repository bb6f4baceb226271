"""Random networks and their profiles: sizes as ``dsa_hw.channels`` describes them, costs with known noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
from numpy.typing import NDArray

from dsa_hw.channels.counts import Count, Operation, Term
from dsa_hw.profiles import Profile


@dataclass(frozen=True, eq=False)
class FakeGroups:
    """As much of ``ChannelGroups`` as costs use."""

    names: tuple[str, ...]
    sizes: NDArray[np.int64]
    operations: tuple[Operation, ...]
    fingerprint: str

    def __len__(self) -> int:
        return len(self.names)


def make_groups(size: int = 8, operations: int = 20, seed: int = 0) -> FakeGroups:
    """A random network of convolutions (dense, pointwise, depthwise), additions, concatenations and activations."""
    rng = np.random.default_rng(seed)
    sizes = 8 * rng.integers(2, 17, size)
    eye = np.eye(size)

    def channels(k: int | None, times: float = 1.0, fixed: float = 3.0) -> Count:
        return Count(times * fixed, np.zeros(size)) if k is None else Count(0.0, times * sizes[k] * eye[k])

    found = []
    for n in range(operations):
        pixels = float(rng.choice([49, 196, 784, 3136]))
        kind = (
            rng.choice(["spatial", "pointwise", "depthwise", "add", "silu", "cat", "linear"])
            if n >= size
            else "spatial"
        )
        a, b = (None if n == 0 else int(rng.integers(size))), (n if n < size else int(rng.integers(size)))
        name = f"op{n}"
        if kind in ("spatial", "pointwise"):
            area = 9.0 if kind == "spatial" else 1.0
            work = (channels(a), channels(b))
            found.append(
                Operation(
                    name,
                    "conv2d",
                    "",
                    (Term(2 * area * pixels, work),),
                    (Term(area, work),),
                    (channels(a, pixels),),
                    channels(b, pixels),
                    False,
                    False,
                    4,
                )
            )
        elif kind == "depthwise":
            one = (channels(b),)
            found.append(
                Operation(
                    name,
                    "conv2d",
                    "",
                    (Term(18 * pixels, one),),
                    (Term(9.0, one),),
                    (channels(b, pixels),),
                    channels(b, pixels),
                    False,
                    True,
                    4,
                )
            )
        elif kind == "linear":
            work = (channels(a), channels(None, 1.0, 10.0))
            found.append(
                Operation(
                    name,
                    "linear",
                    "",
                    (Term(2.0, work),),
                    (Term(1.0, work),),
                    (channels(a),),
                    channels(None, 1.0, 10.0),
                    False,
                    False,
                    4,
                )
            )
        else:
            count = channels(b, pixels)
            inputs = (count, count) if kind == "add" else (count,)
            found.append(Operation(name, str(kind), "", (), (), inputs, count, False, False, 4))
    return FakeGroups(
        tuple(f"group{k}" for k in range(size)), sizes, tuple(found), f"fingerprint-{seed}-{size}-{operations}"
    )


def true_cost(groups: FakeGroups, alpha: NDArray[np.float64], spread: float = 0.0) -> NDArray[np.float64]:
    """Seconds: rates of a plausible CPU, each operation off its class by a fixed factor of relative sd ``spread``."""
    rng = np.random.default_rng(12345)
    total = np.full(alpha.shape[:-1], 2e-4)
    for operation in groups.operations:
        flops = sum((term(alpha) for term in operation.flops), np.zeros(alpha.shape[:-1]))
        moved = sum((count(alpha) for count in (*operation.inputs, operation.output)), np.zeros(alpha.shape[:-1]))
        rate = 4e-11 if operation.depthwise else 1e-11
        slow = 2e-9 if operation.kind == "silu" else 1e-10
        total = total + np.exp(spread * rng.normal()) * (rate * flops + slow * moved)
    return total


def make_profile(
    groups: FakeGroups,
    train: int = 40,
    holdout: int = 20,
    noise: float = 0.02,
    seed: int = 0,
    spread: float = 0.0,
    low: float = 0.2,
    step: int = 1,
    block: int = 1,
) -> Profile:
    """A profile with log-normal noise of relative sd ``noise``.

    Widths are multiples of ``step``, and the device computes blocks of ``block`` channels.
    """
    rng = np.random.default_rng(seed)
    n = train + holdout
    widths = np.maximum(1, np.round(rng.uniform(low, 1, (n, len(groups))) * groups.sizes / step)).astype(int) * step
    widths = np.vstack([widths, groups.sizes])
    computed = np.ceil(widths / block) * block
    cost = true_cost(groups, computed / groups.sizes, spread) * np.exp(noise * rng.normal(size=n + 1))
    frame = pd.DataFrame(widths, columns=list(groups.names))
    frame["seconds"] = cost
    frame["low"], frame["high"], frame["runs"] = 0.99 * cost, 1.01 * cost, 100
    frame["split"] = ["train"] * train + ["holdout"] * holdout + ["dense"]
    return Profile(
        frame,
        names=groups.names,
        sizes=tuple(groups.sizes.tolist()),
        target="synthetic/cpu",
        fingerprint=groups.fingerprint,
        environment={"runtime": "synthetic 1.0"},
        grid={} if step == 1 else dict.fromkeys(groups.names, step),
    )


@pytest.fixture
def network() -> Callable[..., FakeGroups]:
    """Factory of random networks."""
    return make_groups


@pytest.fixture
def profile() -> Callable[..., Profile]:
    """Factory of profiles."""
    return make_profile


@pytest.fixture
def cost() -> Callable[..., NDArray[np.float64]]:
    """The noiseless cost behind a profile."""
    return true_cost
