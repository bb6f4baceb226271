"""Allocator: budgets, masks, resumption, several ranks, mixed precision, and wrong input."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from budgets import FlopsBudget
from dsa_hw.channels.importance import scores
from dsa_hw.errors import InfeasibleBudgetError, TrainingError, WidthError
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.dsa.allocator import Allocator
from dsa_hw.methods.dsa.recipe import Recipe
from dsa_hw.training.loaders import RepeatingLoader
from tests.fakes.networks import batches, trained, with_flops


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained()


def allocator(model: nn.Module, share: float = 0.6, steps: int = 24, **options: Any) -> Allocator:
    groups, flops, dense = with_flops(model)
    return Allocator(model, groups, CostSet([flops], groups.sizes, [share * dense]), steps=steps, **options)


def run(one: Allocator, data: RepeatingLoader, steps: int | None = None) -> Allocator:
    while not one.finished and (steps is None or one.admm.state.step < steps):
        one.step(next(data))
    return one


def used(one: Allocator) -> float:
    """Cost at the keep ratios over the limit."""
    return float((one.costs.at_ratios(one.admm.keep_ratios) / one.costs.limits)[0])


@pytest.mark.parametrize("masks", ["soft", "straight_through", "antithetic", "relaxed", "disarm"])
def test_budget_is_met_and_used_with_every_estimator(model: nn.Module, masks: str) -> None:
    samples = 1 if masks == "soft" else 2
    one = run(allocator(model, masks=masks, samples=samples), RepeatingLoader(batches()))
    assert 0.995 <= used(one) <= 1.0
    assert one.keep_ratios.between(0.05, 1.0).all()
    history = one.history
    assert len(history) == 24
    assert history["beta2"].is_monotonic_increasing


def test_useful_group_keeps_more(model: nn.Module) -> None:
    ratios = run(allocator(model, steps=40), RepeatingLoader(batches())).keep_ratios
    assert ratios["useful"] > 1.5 * ratios["useless"]


def test_step_leaves_the_model_unchanged(model: nn.Module) -> None:
    subject = copy.deepcopy(model).train()
    subject.linear.bias.grad = torch.ones_like(subject.linear.bias)
    before, modes = copy.deepcopy(subject.state_dict()), [m.training for m in subject.modules()]
    one = allocator(subject)
    one.step(batches()[0])
    after = subject.state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert [m.training for m in subject.modules()] == modes
    assert torch.equal(subject.linear.bias.grad, torch.ones_like(subject.linear.bias))
    assert subject.useful.weight.grad is None
    with one.masks():
        assert not isinstance(subject.useful_out.weight, nn.Parameter)
    assert isinstance(subject.useful_out.weight, nn.Parameter)


def test_weights_can_be_trained_under_the_masks(model: nn.Module) -> None:
    subject = copy.deepcopy(model).train()
    one = run(allocator(subject, share=0.4), RepeatingLoader(batches()), steps=16)
    optimiser = torch.optim.SGD(subject.parameters(), 0.05)
    losses = []
    for x, y in batches(1) * 12:
        with one.masks() as masked_model:
            loss = nn.functional.cross_entropy(masked_model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert np.mean(losses[-4:]) < np.mean(losses[:4])


@pytest.mark.parametrize("kind", ["hard", "sampled", "soft"])
def test_weight_masks_are_of_the_given_kind(model: nn.Module, kind: str) -> None:
    # masks that are still soft, or there is nothing to sample
    one = run(allocator(model, share=0.4, weight_masks=kind, beta2=(2.0, 20.0)), RepeatingLoader(batches()), steps=20)
    seen = []
    for _ in range(2):
        with one.masks():
            weight = model.useful_out._parameters["weight"]
            seen.append((model.useful_out.weight / weight).detach().mean((0, 2, 3)))
    first = seen[0].numpy()
    alpha = dict(zip(one.groups.names, one.admm.alpha, strict=True))["useful"]
    if kind == "hard":  # the most important units, as many as the keep ratio says
        wanted = np.zeros(16)
        wanted[np.argsort(-one.importances()[list(one.groups.names).index("useful")])[: max(1, round(16 * alpha))]] = 1
        assert np.allclose(first, wanted)
    elif kind == "sampled":
        assert set(first.round(5)) <= {0.0, 1.0}
        assert not torch.equal(seen[0], seen[1]) or first.mean() in (0.0, 1.0)
    else:
        assert np.isclose(first.mean(), alpha, atol=1e-5)
        assert ((first > 0.01) & (first < 0.99)).any()
    with pytest.raises(WidthError, match="hard, sampled, soft"):
        allocator(model, weight_masks="firm")


def test_resumed_allocation_gives_the_same_keep_ratios(model: nn.Module, tmp_path: Path) -> None:
    straight = run(allocator(model, masks="straight_through", seed=3), RepeatingLoader(batches()))
    data = RepeatingLoader(batches())
    first = run(allocator(model, masks="straight_through", seed=3), data, steps=10)
    torch.save({"allocator": first.state_dict(), "data": data.state_dict()}, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    second, rest = allocator(model, masks="straight_through", seed=99), RepeatingLoader(batches())
    second.load_state_dict(state["allocator"])
    rest.load_state_dict(state["data"])
    run(second, rest)
    assert second.keep_ratios.equals(straight.keep_ratios)
    assert second.history.equals(straight.history)


def test_a_state_of_another_network_is_refused(model: nn.Module) -> None:
    other = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3))
    with pytest.raises(WidthError, match="another network"):
        allocator(model).load_state_dict(allocator(other).state_dict())


def test_precision_equals_a_surrounding_autocast(model: nn.Module) -> None:
    exact = run(allocator(model), RepeatingLoader(batches())).keep_ratios
    inside = allocator(model)
    data = RepeatingLoader(batches())
    while not inside.finished:
        with torch.autocast("cpu", torch.bfloat16):
            inside.step(next(data))
    named = run(allocator(model, precision="bf16"), RepeatingLoader(batches())).keep_ratios
    assert inside.keep_ratios.equals(named)  # a surrounding autocast and precision= are the same thing
    assert not named.equals(exact)  # ... and it is in force
    assert np.abs(named - exact).max() < 0.15


def test_scaled_gradients_equal_unscaled_ones(model: nn.Module) -> None:
    class Scaler:
        def is_enabled(self) -> bool:
            return True

        def get_scale(self) -> float:
            return 65536.0

    plain, scaled = allocator(model), allocator(model)
    plain.step(batches()[0])
    scaled.step(batches()[0], scaler=Scaler())
    assert np.allclose(plain.admm.state.gradient, scaled.admm.state.gradient, rtol=1e-4)


def test_dense_network_within_the_budget_is_finished_at_once(model: nn.Module) -> None:
    one = allocator(model, share=1.0)
    assert one.finished
    assert (one.keep_ratios == 1.0).all()
    with one.masks() as same:
        assert same is model


def test_infeasible_budget_is_refused_before_any_step(model: nn.Module) -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        allocator(model, share=0.001)
    assert caught.value.smallest is not None
    assert caught.value.smallest > 0


def test_nan_and_exploding_losses_are_refused_and_change_nothing(model: nn.Module) -> None:
    one = run(allocator(model, masks="straight_through"), RepeatingLoader(batches()), steps=5)
    before = pickle.dumps([one.admm.state.theta.tolist(), one.admm.state.step, one._generator.get_state().tolist()])
    x, y = batches()[0]
    with pytest.raises(TrainingError, match="loss is nan"):
        one.step((x * float("nan"), y))
    one.loss = lambda outputs, targets: 1e6 * nn.functional.cross_entropy(outputs, targets)
    with pytest.raises(TrainingError, match="exploded"):
        one.step((x, y))
    assert before == pickle.dumps(
        [one.admm.state.theta.tolist(), one.admm.state.step, one._generator.get_state().tolist()]
    )


def test_labels_out_of_range_are_refused(model: nn.Module) -> None:
    x, y = batches()[0]
    with pytest.raises(TrainingError, match="Labels run from 0 to 7, but the network has 4 classes"):
        allocator(model).step((x, torch.where(y == 3, 7, y)))


def test_a_frozen_model_can_be_allocated(model: nn.Module) -> None:
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert used(run(allocator(frozen), RepeatingLoader(batches()))) > 0.99


def test_groups_of_one_channel_are_not_allocated() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 1, 3),
        nn.ReLU(),
        nn.Conv2d(1, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    one = run(allocator(net, share=0.7), RepeatingLoader(batches()))
    assert 1 not in one.groups.sizes
    assert len(one.keep_ratios) == 1
    assert used(one) <= 1.0


def _rank(rank: int, world: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        wrapped = nn.parallel.DistributedDataParallel(trained())
        groups, _, _ = with_flops(wrapped.module)
        one = Allocator(wrapped, groups, FlopsBudget("50%"), steps=9)
        optimiser = torch.optim.SGD(wrapped.parameters(), 0.05)
        for train, val in zip(batches(9, seed=10 + rank), batches(9, seed=20 + rank), strict=True):
            wrapped.train()
            with one.masks():
                loss = nn.functional.cross_entropy(wrapped(train[0]), train[1])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            one.step(val)
        torch.save((one.admm.keep_ratios.tolist(), wrapped.module.useful.weight.detach()), f"{folder}/{rank}.pt")
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_with_different_data_agree_bit_for_bit(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_rank, (2, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2))
    assert first[0] == second[0]
    assert torch.equal(first[1], second[1])


def test_masks_by_rank_depend_on_the_order_of_importances_only(model: nn.Module) -> None:
    """Any increasing function of the importances gives the same masks; by importance it does not."""

    def cubed(net: nn.Module, groups: Any) -> list[Any]:
        return [score**3 for score in scores(net, groups)]

    alpha = torch.full((len(allocator(model).groups),), 0.4, dtype=torch.float64)
    for softness, same in (("rank", True), ("importance", False)):
        one, other = (
            allocator(model, softness=softness, importance=way, beta2=(5.0, 5.0))._probabilities(alpha)
            for way in ("gamma", cubed)
        )
        assert torch.equal(one, other) is same


def test_masks_by_rank_are_equally_soft_in_every_group(model: nn.Module) -> None:
    """Groups whose units are nearly alike are as sharp as others: |p - 1/2| < 1/4 in the same share of units."""

    def nearly_equal(net: nn.Module, groups: Any) -> list[Any]:
        return [
            1.0 + 1e-6 * (k == 0) * np.arange(size) + (k > 0) * np.arange(size) for k, size in enumerate(groups.sizes)
        ]

    one = allocator(model, importance=nearly_equal, beta2=(20.0, 20.0))
    alpha = torch.full((len(one.groups),), 0.5, dtype=torch.float64)
    soft = [float(((p - 0.5).abs() < 0.25).double().mean()) for p in one._layout.split(one._probabilities(alpha))]
    # |logit| < log 3 on either side of the threshold: a share 2 log(3) / beta2 of the units, up to one unit
    assert soft == pytest.approx([2 * np.log(3) / 20] * len(soft), abs=1 / min(one.groups.sizes))


def plain_network(seed: int) -> nn.Module:
    """Three convolutions with batch norms, trained a little: two inner groups, and one that a linear layer reads."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 12), (12, 16), (16, 20)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, 4))
    optimiser = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for x, y in batches(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net


@pytest.mark.parametrize("seed", range(3))
def test_soft_masks_at_the_papers_beta2_have_no_gradient_behind_a_batch_norm(seed: int) -> None:
    """Hence the sampled masks of ``Recipe.paper``. All keep ratios are sigmoid(1) = 0.73."""
    net, batch = plain_network(seed), batches(1, size=64, seed=1)[0]
    groups, _, _ = with_flops(net)

    def sensitivity(beta2: float, draw: int = 0, **options: Any) -> Any:
        """|dL/dalpha| (K,)."""
        options = {"beta2": (beta2, beta2), "start": 1.0, "smoothing": 0.0, "seed": draw, **options}
        one = Allocator(net, groups, FlopsBudget("30%"), steps=3, **options)
        one.step(batch)
        return np.abs(one.admm.state.gradient)

    soft = sensitivity(0.05, softness="importance", masks="soft")
    sampled = np.mean([sensitivity(0.05, draw, **Recipe.paper().allocator) for draw in range(8)], axis=0)
    inner = slice(0, 2)
    assert (soft[inner] < 0.01 * sampled[inner]).all()
    assert (soft[inner] < 0.01 * sensitivity(10.0)[inner]).all()
    assert soft[2] > 0.05 * sampled[2]  # no batch norm behind it: the identity does not hold there


def test_unknown_settings_are_refused(model: nn.Module) -> None:
    for name, known in (("softness", "rank, importance"), ("statistics", "batch, stored")):
        with pytest.raises(WidthError, match=f"`{name}` must be one of {known}"):
            allocator(model, **{name: "none"})


def test_stored_statistics_give_another_loss_than_those_of_the_batch(model: nn.Module) -> None:
    x, y = batches()[0]
    batch = 3.0 * x + 1.0, y  # not what the stored statistics were measured on
    by_batch, stored = (allocator(model, statistics=kind).step(batch) for kind in ("batch", "stored"))
    with torch.no_grad():
        dense = float(nn.functional.cross_entropy(model(batch[0]), y))
    assert abs(stored - dense) < 0.1 * abs(by_batch - dense)
