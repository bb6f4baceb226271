"""The estimator for GPUs, on a simulated GPU with known algorithms and speeds, and on a recorded one."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import budgets
from budgets.features import FeatureMap
from budgets.kernels import SHAPE, kernel_shapes
from budgets.regression import FastestKernel, PhysicsNNLS
from budgets.selection import candidates
from budgets.serialization import decode, encode
from dsa_hw.channels.counts import Count, Term
from dsa_hw.errors import ProfileError
from dsa_hw.profiles import Profile

COLUMNS = (*SHAPE, "positions", "recorded")


def _count(name: str, scale: float = 1.0) -> Count:
    return Count(0.0, scale * np.eye(len(COLUMNS))[COLUMNS.index(name)])


SHAPES = FeatureMap.from_terms({n: [Term(1.0, (_count(n),))] for n in SHAPE}, 6, dict.fromkeys(SHAPE, "3x3"))
PHI = FeatureMap.from_terms(
    {
        "constant": [Term(1.0, ())],
        "recorded": [Term(1.0, (_count("recorded"),))],
        "input bytes": [Term(1.0, (_count("positions"), _count("reads", 1 / 9)))],
        "output bytes": [Term(1.0, (_count("positions"), _count("outputs")))],
        "weight bytes": [Term(1.0, (_count("reads", 1 / 9), _count("outputs")))],
    },
    6,
)


def simulated_ms(images: float, side: float, reads: float, outputs: float, processors: int, winograd: bool) -> float:
    """A GPU with whole tiles and waves that runs the fastest of its algorithms, operation by operation."""
    c_in, times = reads / 9, []
    if winograd:
        patches = images * math.ceil(side / 4 - 1e-9) ** 2
        tiles = 36 * math.ceil(patches / 128) * math.ceil(outputs / 128 - 1e-9)
        times.append(
            math.ceil(tiles / processors) * (2e-4 * c_in + 2e-3) + 2e-7 * (patches * (c_in + outputs) + c_in * outputs)
        )
        tiles = images * math.ceil(side / 8 - 1e-9) * math.ceil(side / 16 - 1e-9) * math.ceil(outputs / 32 - 1e-9)
        times.append(math.ceil(tiles / processors) * (2.5e-4 * c_in + 3e-3))
    tiles = math.ceil(images * side**2 / 128 - 1e-9) * math.ceil(outputs / 64 - 1e-9)
    times.append(math.ceil(tiles / processors) * 1.2e-4 * reads)
    return 0.02 + min(times) + 5e-9 * images * side**2 * (c_in + outputs)


@pytest.fixture(scope="module")
def table() -> tuple[np.ndarray, np.ndarray]:
    """Random convolutions on a simulated GPU with 40 processors, in milliseconds with 1% noise."""
    rng = np.random.default_rng(0)
    images, side, c_in, outputs = (
        np.rint(np.exp(rng.uniform(np.log(low), np.log(high), 500)))
        for low, high in ((1, 64), (5, 100), (4, 1000), (4, 1000))
    )
    x = np.c_[images, side, 9 * c_in, outputs, images * side**2, np.zeros(500)]
    y = np.array([simulated_ms(*row[:4], processors=40, winograd=True) for row in x])
    return x, y * np.exp(0.01 * rng.normal(size=500))


def test_algorithms_speeds_and_processors_of_a_simulated_gpu_are_found(table: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = table
    model = FastestKernel(PHI, shapes=SHAPES).fit(x[:200], y[:200])
    assert model.processors_ == 40
    error = np.abs(model.predict(x[200:]) / y[200:] - 1).mean()
    work = np.c_[x[:, 4] * x[:, 2] * x[:, 3], PHI(x)[:, 2:]]
    physics = np.abs(PhysicsNNLS().fit(work[:200], y[:200]).predict(work[200:]) / y[200:] - 1).mean()
    assert error < 0.02 < 0.1 < physics
    assert model.kernels_[1, 0] * 9 == pytest.approx(2.5e-4, rel=0.05)
    assert set(np.unique(model.algorithms(x))) == {0, 1, 2}


def test_an_algorithm_that_the_gpu_does_not_have_is_not_used(table: tuple[np.ndarray, np.ndarray]) -> None:
    x = table[0]
    y = np.array([simulated_ms(*row[:4], processors=16, winograd=False) for row in x])
    model = FastestKernel(PHI, shapes=SHAPES).fit(x[:200], y[:200])
    assert np.abs(model.predict(x[200:]) / y[200:] - 1).mean() < 0.05


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_cost_rises_with_channels_and_gradient_is_exact(table: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    x, y = table
    model = FastestKernel(PHI, shapes=SHAPES).fit(x[:60], y[:60])
    rng = np.random.default_rng(seed)
    low = x[rng.integers(len(x), size=50)].copy()
    high = low.copy()
    high[:, 2:4] *= rng.uniform(1, 3, (50, 2))
    assert (model.predict(high) >= model.predict(low) * (1 - 1e-14)).all()
    assert (model.smooth(high) >= model.smooth(low) * (1 - 1e-14)).all()
    low[:, 2:4] += rng.uniform(0.1, 0.4, (50, 2))  # off the corners
    step = 1e-5 * np.eye(6)
    for column in (2, 3):
        numeric = (model.smooth(low + step[column]) - model.smooth(low - step[column])) / 2e-5
        np.testing.assert_allclose(model.gradient(low)[:, column], numeric, rtol=1e-5, atol=1e-9)
    tensor = torch.tensor(low, requires_grad=True)
    model.value(tensor).sum().backward()
    assert tensor.grad is not None
    np.testing.assert_allclose(tensor.grad.numpy(), model.gradient(low), rtol=1e-9, atol=1e-15)


@pytest.fixture(scope="module")
def gpu_profile() -> Callable[..., Profile]:
    """Factory of profiles of whole networks on the simulated GPU."""

    def make(groups: Any, target: str) -> Profile:
        shapes, _ = kernel_shapes(groups)
        assert shapes is not None
        rng = np.random.default_rng(0)
        widths = np.maximum(1, np.rint(rng.uniform(0.2, 1, (80, len(groups))) * groups.sizes)).astype(int)
        sizes = (shapes(widths / groups.sizes) * shapes.dense).reshape(80, -1, 4)
        three = [kind == "3x3" for kind in shapes.classes[::4]]
        frame = pd.DataFrame(widths, columns=list(groups.names))
        frame["seconds"] = [
            1e-3 * sum(simulated_ms(*op, processors=2, winograd=w) for op, w in zip(row, three, strict=True))
            for row in sizes
        ]
        frame["split"] = ["train"] * 50 + ["holdout"] * 30
        return Profile(frame, groups.names, tuple(groups.sizes.tolist()), target, fingerprint=groups.fingerprint)

    return make


def test_fit_chooses_it_for_a_gpu_and_its_file_predicts_the_same(
    network: Callable[..., Any], gpu_profile: Callable[..., Profile], tmp_path: Path
) -> None:
    groups = network(size=6, operations=12, seed=3)
    some = {name: candidates(groups, gpu=True)[name] for name in ("physics", "physics, blocks of 32", "fastest kernel")}
    model = budgets.fit(gpu_profile(groups, "torch/cuda fp32"), groups, candidates=some, repeats=1)
    assert model.name == "fastest kernel"
    errors = model.report["holdout_mape"]
    assert errors["fastest kernel"] < 0.5 * errors[["physics", "physics, blocks of 32"]].min()
    again = budgets.load_cost_model(model.save(tmp_path / "gpu.json"), groups, target="torch/cuda fp32")
    alpha = np.random.default_rng(1).uniform(0.1, 1, (20, 6))
    np.testing.assert_array_equal(again(alpha), model(alpha))
    np.testing.assert_array_equal(again.gradient(alpha, 0.9), model.gradient(alpha, 0.9))
    assert again.estimator.coefficients() == model.estimator.coefficients()


@pytest.mark.parametrize(
    ("target", "gpu"),
    [("torch/cuda fp32", True), ("onnxruntime/cuda:1 fp16", True), ("ssh://a@b?runtime=tensorrt fp16", True),
     ("onnxruntime/cpu fp32 x1", False), ("synthetic/cpu", False)],
)  # fmt: skip
def test_only_gpus_are_offered_it(
    network: Callable[..., Any],
    gpu_profile: Callable[..., Profile],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    gpu: bool,
) -> None:
    groups = network(size=3, operations=4, seed=1)
    asked = []

    def few(groups: Any, outside: str, gpu: bool) -> dict[str, Any]:
        asked.append(gpu)
        return {"physics": candidates(groups)["physics"]}

    monkeypatch.setattr("budgets.fitting.all_candidates", few)
    budgets.fit(gpu_profile(groups, target), groups, repeats=1)
    assert asked == [gpu]
    assert "fastest kernel" not in candidates(groups)


def test_shapes_that_do_not_fit_are_refused(table: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = table
    with pytest.raises(ProfileError, match="X has 5 channel groups, but `shapes` has 6"):
        FastestKernel(shapes=SHAPES).fit(x[:, :5], y)
    with pytest.raises(ProfileError, match="4 affine features for each operation"):
        FastestKernel(PHI, shapes=PHI).fit(x, y)
    maps: list[FeatureMap] = []
    state = encode(FastestKernel(PHI, shapes=SHAPES).fit(x[:60], y[:60]), maps)
    for name, wrong in (("processors_", -3), ("kernels_", {"array": [1.0, 2.0, 3.0], "dtype": "float"})):
        with pytest.raises(ProfileError, match="`kernels_` must have shape"):
            decode({**state, "learnt": {**state["learnt"], name: wrong}}, maps)


@pytest.mark.parametrize(("gpu", "goal"), [("a100", 0.15), ("t4", 0.15)])
def test_recorded_convolutions_are_predicted_within_the_goal(gpu: str, goal: float) -> None:
    path = Path(os.environ.get("DSA_HW_DATA", "")) / "gpu_convolutions" / f"{gpu}.csv.gz"
    if not path.exists():
        pytest.skip("needs gpu_convolutions in the folder DSA_HW_DATA")
    frame = pd.read_csv(path)
    images, side, c_in, outputs = (frame[c].to_numpy(float) for c in ("batch", "size", "c_in", "c_out"))
    x = np.c_[images, side, 9 * c_in, outputs, images * side**2, np.arange(len(frame))]
    y, order = frame["ms"].to_numpy(), np.random.default_rng(0).permutation(len(frame))
    model = FastestKernel(PHI, shapes=SHAPES).fit(x[order[:200]], y[order[:200]])
    assert np.abs(model.predict(x[order[200:]]) / y[order[200:]] - 1).mean() < goal
