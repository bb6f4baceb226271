"""Every rival: budgets kept and used, the useless found, the impossible refused, the same answer twice."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import budgets
from dsa_hw import find_groups, masked
from dsa_hw.channels import ChannelGroups
from dsa_hw.errors import BudgetError, DsaError, InfeasibleBudgetError
from dsa_hw.methods import baselines
from dsa_hw.methods.baselines._limits import Limits
from dsa_hw.methods.baselines._options import Evaluation
from dsa_hw.methods.baselines._units import Gammas, Norms, gamma_scores
from dsa_hw.methods.baselines.knapsack import _Options as KnapsackOptions
from dsa_hw.methods.baselines.knapsack import _Program, taylor_scores
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.problem import Problem, Proposal, realise
from dsa_hw.methods.registry import available_methods, solve

METHODS: dict[str, Callable[[Problem], Proposal]] = {
    "uniform": baselines.uniform,
    "global_gamma": baselines.global_gamma,
    "ssl": baselines.ssl,
    "morphnet": baselines.morphnet,
    "netadapt": baselines.netadapt,
    "annealing": baselines.annealing,
    "knapsack": baselines.knapsack,
}
QUICK: dict[str, dict[str, Any]] = {"annealing": {"steps": 20}, "netadapt": {"iterations": 6, "batches": 1}}
TRAINED = ("ssl", "morphnet")
every = pytest.mark.parametrize("name", METHODS)


def block(c_in: int, c_out: int, size: int = 3, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(c_in, c_out, size, padding=size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(c_out), nn.ReLU())


class Small(nn.Module):
    """A stem, a residual block, an inverted bottleneck with a depthwise convolution, and a layer without batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block(3, 24)
        self.first, self.second = block(24, 40), block(40, 24)
        self.expand, self.depthwise = block(24, 48, 1), block(48, 48, 3, groups=48)
        self.project = block(48, 32, 1)
        self.plain = nn.Conv2d(32, 20, 1)
        self.head = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.second(self.first(x))
        x = self.project(self.depthwise(self.expand(x)))
        return self.head(torch.relu(self.plain(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def network() -> tuple[Small, ChannelGroups, Tensor]:
    torch.manual_seed(0)
    model = Small().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.2, 1.5)
                module.bias.normal_(0.0, 0.2)
    x = torch.randn(1, 3, 8, 8)
    return model, find_groups(model, (x,)), x


def loader(count: int = 48, batch: int = 16, seed: int = 0, shuffle: bool = True) -> DataLoader[Any]:
    """Four kinds of images, told apart by where they are bright."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 4
    x = torch.randn(count, 3, 8, 8, generator=generator)
    for i in range(count):
        a, b = divmod(int(y[i]), 2)
        x[i, :, 4 * a : 4 * a + 4, 4 * b : 4 * b + 4] += 1.5
    return DataLoader(TensorDataset(x, y), batch, shuffle=shuffle)


def problem_of(
    network: tuple[nn.Module, ChannelGroups, Tensor], name: str = "", share: float = 0.5, **more: Any
) -> Any:
    model, groups, x = network
    cost = budgets.flops(groups)
    costs = CostSet(more.pop("costs", [cost]), groups.sizes, more.pop("limits", [share * cost.dense]))
    settings = {"costs": costs, "example_inputs": (x,), **more}
    settings.setdefault("options", QUICK.get(name, {}))
    if name in TRAINED:
        settings.setdefault("train", loader())
    return Problem(model, groups, **settings)


def used(problem: Problem, alpha: Any) -> np.ndarray[Any, Any]:
    return problem.costs.at_ratios(np.asarray(alpha, np.float64)) / problem.costs.limits


@every
@pytest.mark.parametrize("share", [0.7, 0.3])
def test_budget_is_kept_and_used(network: Any, name: str, share: float) -> None:
    problem = problem_of(network, name, share)
    before = copy.deepcopy(problem.model.state_dict())
    proposal = METHODS[name](problem)
    assert proposal.alpha.shape == (len(problem.groups),)
    assert (proposal.alpha >= problem.minimum).all()
    assert (proposal.alpha <= 1.0).all()
    assert used(problem, proposal.alpha).max() <= 1.0
    result = realise(problem, proposal)
    real = used(problem, result.widths / problem.groups.sizes)
    # One unit of the stem can be 12 % of the smaller budget. So: used up, or there is no unit that would still fit.
    fuller = (result.widths + np.eye(len(result.widths), dtype=int)) / problem.groups.sizes
    more = [used(problem, row).max() for row in fuller if (row <= 1.0).all()]
    assert real.max() <= 1.0
    assert real.max() >= 0.98 or (real.max() >= 0.88 and min(more) > 1.0)
    assert result.model(torch.randn(2, 3, 8, 8)).shape == (2, 4)
    assert all(torch.equal(before[k], v) for k, v in problem.model.state_dict().items())
    assert not problem.model.training


@every
def test_several_budgets_at_once(network: Any, name: str) -> None:
    groups = network[1]
    costs = [budgets.flops(groups), budgets.params(groups), budgets.activation_memory(groups)]
    limits = [0.5 * costs[0].dense, 0.4 * costs[1].dense, 0.9 * costs[2].dense]
    problem = problem_of(network, name, costs=costs, limits=limits)
    proposal = METHODS[name](problem)
    assert used(problem, proposal.alpha).max() <= 1.0
    real = used(problem, realise(problem, proposal).widths / groups.sizes)
    assert 0.95 <= real.max() <= 1.0


@pytest.fixture(scope="module")
def latency(network: Any) -> budgets.CostModel:
    """A cost fitted to a noisy profile: time by FLOPs and parameters, and some overhead."""
    groups, rng = network[1], np.random.default_rng(0)
    widths = np.vstack([np.rint(rng.uniform(0.2, 1.0, (60, len(groups))) * groups.sizes), groups.sizes]).astype(int)
    ratios = widths / groups.sizes
    seconds = 1e-4 + 1e-10 * budgets.flops(groups)(ratios) + 1e-8 * budgets.params(groups)(ratios)
    frame = pd.DataFrame(widths, columns=list(groups.names))
    frame["seconds"] = seconds * np.exp(0.01 * rng.normal(size=len(frame)))
    frame["low"], frame["high"], frame["runs"] = 0.99 * frame.seconds, 1.01 * frame.seconds, 100
    frame["split"] = ["train"] * 40 + ["holdout"] * 20 + ["dense"]
    names, sizes = list(groups.names), groups.sizes.tolist()
    frame.attrs = {"target": "made up/cpu", "fingerprint": groups.fingerprint, "names": names, "sizes": sizes}
    frame.attrs |= {"environment": {}, "grid": {}, "dense": float(seconds[-1])}
    return budgets.fit(frame, groups)


@every
def test_fitted_cost_beside_a_counted_one(network: Any, latency: budgets.CostModel, name: str) -> None:
    params = budgets.params(network[1])
    problem = problem_of(network, name, costs=[latency, params], limits=[0.7 * latency.dense, 0.6 * params.dense])
    proposal = METHODS[name](problem)
    assert used(problem, proposal.alpha).max() <= 1.0
    real = used(problem, realise(problem, proposal).widths / network[1].sizes)
    assert 0.95 <= real.max() <= 1.0


@every
def test_widths_on_a_grid(network: Any, name: str) -> None:
    groups = network[1]
    problem = problem_of(network, name, 0.5, grid=np.full(len(groups), 8))
    result = realise(problem, METHODS[name](problem))
    assert all(w % 8 == 0 or w == c for w, c in zip(result.widths, groups.sizes, strict=True))
    assert used(problem, result.widths / groups.sizes).max() <= 1.0


@every
def test_dense_network_within_budget_is_returned_at_once(network: Any, name: str) -> None:
    problem = problem_of(network, name, 1.0, train=None)  # not even a loader is needed
    proposal = METHODS[name](problem)
    assert (proposal.alpha == 1.0).all()
    assert proposal.model is problem.model


@every
def test_infeasible_budget_names_the_smallest_feasible(network: Any, name: str) -> None:
    with pytest.raises(InfeasibleBudgetError) as caught:
        METHODS[name](problem_of(network, name, 1e-4))
    smallest = caught.value.smallest
    assert smallest is not None
    fine = problem_of(network, name, limits=[smallest])
    assert realise(fine, METHODS[name](fine)).widths.tolist() == [
        max(1, int(np.ceil(0.05 * c))) for c in fine.groups.sizes
    ]
    with pytest.raises(InfeasibleBudgetError):
        METHODS[name](problem_of(network, name, limits=[smallest * (1 - 1e-9)]))


@every
def test_unknown_options_are_refused(network: Any, name: str) -> None:
    with pytest.raises(DsaError, match="no option 'sped'"):
        METHODS[name](problem_of(network, name, options={"sped": 1}))


@every
def test_a_limit_per_cost(network: Any, name: str) -> None:
    with pytest.raises(BudgetError, match="a cost and a limit"):
        METHODS[name](problem_of(network, name, limits=[1.0, 2.0]))


@every
def test_same_seed_same_answer(network: Any, name: str) -> None:
    torch.manual_seed(1)
    first = METHODS[name](problem_of(network, name, seed=3))
    torch.manual_seed(2)
    torch.rand(5)
    state = torch.get_rng_state()
    second = METHODS[name](problem_of(network, name, seed=3))
    assert torch.equal(torch.get_rng_state(), state)  # and the user's own random numbers are left alone
    np.testing.assert_array_equal(first.alpha, second.alpha)
    assert first.history.equals(second.history)


def test_annealing_depends_on_the_seed(network: Any) -> None:
    found = [baselines.annealing(problem_of(network, "annealing", seed=s)).alpha for s in (0, 1)]
    assert not np.array_equal(*found)


def test_uniform_is_uniform_and_tight(network: Any) -> None:
    problem = problem_of(network, share=0.5)
    alpha = baselines.uniform(problem).alpha
    assert np.ptp(alpha) == 0.0
    assert used(problem, alpha)[0] == pytest.approx(1.0, abs=1e-9)


def test_global_threshold_separates_kept_from_removed(network: Any) -> None:
    problem = problem_of(network, share=0.5)
    proposal = baselines.global_gamma(problem)
    widths = np.rint(proposal.alpha * problem.groups.sizes).astype(int)
    assert proposal.importance is not None
    ordered = [np.sort(score)[::-1] for score in proposal.importance]
    floor = [max(1, int(np.ceil(0.05 * c))) for c in problem.groups.sizes]
    kept = min(s[w - 1] for s, w, f in zip(ordered, widths, floor, strict=True) if w > f)
    gone = max(s[w] for s, w in zip(ordered, widths, strict=True) if w < s.size)
    assert gone <= kept
    # One unit more would be over: the threshold is the smallest that keeps the budget.
    more = widths.copy()
    more[int(np.argmax([s[w] if w < s.size else -1.0 for s, w in zip(ordered, widths, strict=True)]))] += 1
    assert used(problem, more / problem.groups.sizes)[0] > 1.0


def test_raw_gamma_is_not_normalised_per_group(network: Any) -> None:
    model, groups, _ = network
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.first[1].weight.mul_(0.1)
    k = groups.names.index(next(n for n, m in zip(groups.names, groups.members, strict=True) if "first.0" in m))
    scores = gamma_scores(model, groups)
    np.testing.assert_allclose(scores[k], model.first[1].weight.detach().abs(), rtol=1e-6)
    plain = next(k for k, m in enumerate(groups.members) if "plain" in m)
    covered = Gammas(model, groups).covered
    assert not covered[groups.offsets[plain] : groups.offsets[plain + 1]].any()
    raw = np.concatenate(scores)
    assert scores[plain].mean() == pytest.approx(raw[covered].mean(), rel=1e-6)
    # A residual group is heard through both of its norms, as their mean or their maximum.
    stem = next(k for k, m in enumerate(groups.members) if "stem.0" in m)
    both = torch.stack([model.stem[1].weight, model.second[1].weight]).abs().detach()
    np.testing.assert_allclose(scores[stem], both.mean(0), rtol=1e-6)
    np.testing.assert_allclose(gamma_scores(model, groups, "amax")[stem], both.amax(0), rtol=1e-6)
    assert (np.argmin([s.mean() for s in scores])) == k
    problem = problem_of((model, groups, network[2]), share=0.6)
    assert baselines.global_gamma(problem).alpha[k] < baselines.uniform(problem).alpha[k]


def test_weight_norms_of_units_are_over_all_members(network: Any) -> None:
    model, groups, _ = network
    rms = np.split(Norms(model, groups).rms().detach().numpy(), groups.offsets[1:-1])
    stem = next(k for k, m in enumerate(groups.members) if "stem.0" in m)
    filters = torch.stack([model.stem[0].weight.flatten(1).norm(dim=1), model.second[0].weight.flatten(1).norm(dim=1)])
    np.testing.assert_allclose(rms[stem], filters.square().mean(0).sqrt().detach(), rtol=1e-4)


@pytest.mark.parametrize("name", TRAINED)
def test_trained_rivals_say_that_they_need_train(network: Any, name: str) -> None:
    with pytest.raises(DsaError, match="needs train"):
        METHODS[name](problem_of(network, name, train=None))


@pytest.mark.parametrize("name", TRAINED)
def test_train_once_allocate_often(network: Any, name: str) -> None:
    train = {"ssl": baselines.train_ssl, "morphnet": baselines.train_morphnet}[name]
    allocate = {"ssl": baselines.allocate_ssl, "morphnet": baselines.allocate_morphnet}[name]
    problem = problem_of(network, name, 0.7)
    trained = train(problem)
    assert trained is not problem.model
    shares = (0.7, 0.4)
    alphas = [allocate(problem_of(network, name, share), trained).alpha for share in shares]
    assert (alphas[0] >= alphas[1] - 1e-12).all()
    assert (alphas[0] > alphas[1]).any()
    np.testing.assert_array_equal(METHODS[name](problem_of(network, name, 0.4)).alpha, alphas[1])


@pytest.mark.parametrize("name", TRAINED)
def test_penalty_shrinks_what_it_is_on(network: Any, name: str) -> None:
    model, groups, _ = network
    train = {"ssl": baselines.train_ssl, "morphnet": baselines.train_morphnet}[name]

    def size(module: nn.Module) -> float:
        values = Norms(module, groups).rms() if name == "ssl" else Gammas(module, groups).reduced("amax")
        return float(values.detach().mean())

    quiet, loud = (
        size(train(problem_of(network, name, epochs=2, options={"pull": pull}, train=loader(shuffle=False))))
        for pull in (0.0, 0.5)
    )
    # The penalty alone would take half; the loss pulls back, but not all of the way.
    assert loud < 0.85 * quiet
    assert loud > 0.3 * size(model)


def test_morphnet_pulls_harder_where_a_unit_costs_more(network: Any) -> None:
    class OneGroup:
        """Only group k costs anything."""

        def __init__(self, k: int) -> None:
            self.weights = np.eye(len(network[1]))[k]

        def value(self, alpha: Tensor) -> Tensor:
            return 1e-3 + alpha @ torch.from_numpy(self.weights)

        def gradient(self, alpha: Any) -> Any:
            return np.broadcast_to(self.weights, np.shape(alpha)).copy()

    groups = network[1]
    k = next(k for k, m in enumerate(groups.members) if "first.0" in m)
    means = []
    for chosen in (k, (k + 1) % len(groups)):
        problem = problem_of(network, "morphnet", costs=[OneGroup(chosen)], limits=[0.5], epochs=2)
        gamma = Gammas(baselines.train_morphnet(problem), groups).reduced("amax").detach().numpy()
        means.append(np.split(gamma, groups.offsets[1:-1])[k].mean())
    assert means[0] < 0.8 * means[1]


def test_morphnet_with_a_threshold_meets_the_budget_by_its_multiplier(network: Any) -> None:
    problem = problem_of(network, "morphnet", 0.5, options={"threshold": 0.5})
    proposal = baselines.allocate_morphnet(problem, problem.model)
    assert used(problem, proposal.alpha)[0] == pytest.approx(1.0, abs=1e-9)
    omega = float(proposal.history["omega"].iloc[0])
    living = np.array([(s > 0.5).mean() for s in gamma_scores(problem.model, problem.groups, "amax")])
    free = proposal.alpha < 1.0
    np.testing.assert_allclose(proposal.alpha[free], omega * living[free], rtol=1e-9)


@pytest.mark.parametrize("name", TRAINED)
def test_bf16_and_channels_last(network: Any, name: str) -> None:
    options = {"precision": "bf16", "channels_last": True, "lr": 0.005}
    problem = problem_of(network, name, epochs=0.5, options=options)
    proposal = METHODS[name](problem)
    assert used(problem, proposal.alpha).max() <= 1.0
    assert all(p.dtype == torch.float32 for p in proposal.model.parameters())
    with pytest.raises(DsaError, match="precision"):
        METHODS[name](problem_of(network, name, options={"precision": "fp8"}))


def test_exploding_loss_is_refused(network: Any) -> None:
    with pytest.raises(DsaError, match="learning rate"):
        baselines.ssl(problem_of(network, "ssl", options={"lr": 1e12}, epochs=3))


class Planted(nn.Module):
    """Two branches of the same shape; what follows multiplies the ``dead`` one by almost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.live, self.dead = block(3, 32), block(3, 32)
        self.join_live, self.join_dead = nn.Conv2d(32, 16, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.join_live(self.live(x)) + self.join_dead(self.dead(x))
        return self.head(torch.relu(y).mean((2, 3)))


@pytest.fixture(scope="module")
def planted() -> tuple[nn.Module, ChannelGroups, Tensor]:
    torch.manual_seed(0)
    model = Planted().eval()
    with torch.no_grad():
        model.join_dead.weight.mul_(1e-4)
    x = torch.randn(1, 3, 8, 8)
    return model, find_groups(model, (x,)), x


@pytest.mark.parametrize("name", ["netadapt", "annealing", "knapsack"])
@pytest.mark.parametrize("guidance", ["val", "none"])
def test_useless_group_is_found(planted: Any, name: str, guidance: str) -> None:
    model, groups, _ = planted
    more: dict[str, Any] = {}
    if guidance == "val":
        inputs = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            target = model(inputs)
        # At its own outputs a network has no gradient, so the knapsack gets labels.
        labels = name == "knapsack"
        more["val"] = [(inputs, target.argmax(1) if labels else target)]
        more["loss"] = nn.functional.cross_entropy if labels else nn.functional.mse_loss
    options: dict[str, Any] = {"annealing": {"steps": 150}}.get(name, {})
    problem = problem_of(planted, share=0.6, options={**options, "statistics": "stored"}, **more)
    dead = next(k for k, m in enumerate(groups.members) if "dead.0" in m)
    live = next(k for k, m in enumerate(groups.members) if "live.0" in m)
    proposal, plain = METHODS[name](problem), baselines.uniform(dataclasses.replace(problem, options={}))
    assert proposal.alpha[dead] < 0.75 * plain.alpha[dead]
    assert proposal.alpha[live] > plain.alpha[live]
    probe = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        errors = [(realise(problem, p).model(probe) - model(probe)).square().mean() for p in (proposal, plain)]
    assert errors[0] < 0.5 * errors[1]


def test_netadapt_tunes_between_iterations(network: Any) -> None:
    options = {"iterations": 3, "batches": 1, "tune_steps": 2, "score_steps": 1}
    problem = problem_of(network, share=0.7, options=options, train=loader())
    proposal = baselines.netadapt(problem)
    assert proposal.model is not problem.model
    assert any(
        not torch.equal(a, b) for a, b in zip(problem.model.parameters(), proposal.model.parameters(), strict=True)
    )
    assert used(problem, proposal.alpha)[0] <= 1.0
    np.testing.assert_array_equal(proposal.alpha, baselines.netadapt(problem).alpha)
    with pytest.raises(DsaError, match="needs train"):
        baselines.netadapt(dataclasses.replace(problem, train=None))


def test_netadapt_takes_the_least_loss_of_all_groups(network: Any) -> None:
    """Its first choice against the definition, group by group."""
    model, groups, _ = network
    val = list(loader(16))
    problem = problem_of(network, share=0.8, val=val, options={"iterations": 4, "statistics": "stored"})
    first = baselines.netadapt(problem).history.iloc[0]
    bound = problem.costs.costs[0].dense * (1 - 0.2 / 4)
    from dsa_hw.channels import select_channels

    losses = {}
    for k, size in enumerate(groups.sizes.tolist()):
        fits = [
            w
            for w in range(1, size)
            if problem.costs.costs[0](np.where(np.arange(len(groups)) == k, w / size, 1)) <= bound
        ]
        if fits and max(fits) >= np.ceil(0.05 * size):
            widths = np.where(np.arange(len(groups)) == k, max(fits), groups.sizes)
            with torch.no_grad(), masked(model, groups, select_channels(model, groups, widths)):
                losses[groups.names[k]] = float(nn.functional.cross_entropy(model(val[0][0]), val[0][1])), max(fits)
    best = min(losses, key=lambda name: losses[name][0])
    assert (first["group"], first["width"]) == (best, losses[best][1])
    assert first["loss"] == pytest.approx(losses[best][0], rel=1e-5)


class Bilinear:
    """alpha'A alpha + b'alpha with entries >= 0."""

    def __init__(self, k: int, rng: np.random.Generator, coupling: float) -> None:
        self.a, self.b = coupling * rng.exponential(size=(k, k)), rng.exponential(size=k) + 0.1

    def value(self, alpha: Tensor) -> Tensor:
        return ((alpha @ torch.from_numpy(self.a)) * alpha).sum(-1) + alpha @ torch.from_numpy(self.b)

    def gradient(self, alpha: Any) -> Any:
        return alpha @ (self.a + self.a.T) + self.b


class TinyGroups:
    """All that a knapsack asks of channel groups."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = np.array(sizes)

    def __len__(self) -> int:
        return self.sizes.size


def knapsack_against_enumeration(seed: int, coupling: float, count: int = 1) -> float:
    """Importance kept by the program over the best of all configurations."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(3, 9, 4).tolist()
    costs = [Bilinear(4, rng, coupling) for _ in range(count)]
    share = rng.uniform(0.25, 0.9)
    limits = [share * float(c.value(torch.ones(4, dtype=torch.float64))) for c in costs]
    grid = np.array([1, 1, 2, 1])
    problem: Any = Problem(nn.Identity(), TinyGroups(sizes), CostSet(costs, sizes, limits), grid=grid)  # type: ignore[arg-type]
    importance = [rng.exponential(size=c) for c in sizes]
    try:
        program = _Program(Limits(problem), importance, KnapsackOptions())
    except InfeasibleBudgetError:
        return 1.0
    position, _ = program.solve()
    tables = [sorted({*range(g, c + 1, g), c}) for c, g in zip(sizes, grid.tolist(), strict=True)]
    every = np.array(list(itertools.product(*tables)))
    values = np.stack([np.asarray(c.value(torch.from_numpy(every / sizes))) for c in costs], -1)
    sums = [np.cumsum(np.sort(b)[::-1]) for b in importance]
    worth = sum(s[every[:, k] - 1] for k, s in enumerate(sums))
    best = float(worth[(values <= limits).all(-1)].max())
    widths = program.widths(position)
    assert any((row == widths).all() for row in every[(values <= limits).all(-1)])
    return sum(float(s[w - 1]) for s, w in zip(sums, widths, strict=True)) / best


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 2))
def test_knapsack_is_optimal_for_separable_costs(seed: int, count: int) -> None:
    assert knapsack_against_enumeration(seed, 0.0, count) == pytest.approx(1.0, abs=1e-6)


def test_knapsack_is_near_optimal_for_coupled_costs() -> None:
    ratios = np.array([knapsack_against_enumeration(seed, 1.0, 1 + seed % 2) for seed in range(25)])
    assert (ratios <= 1.0 + 1e-9).all()
    assert ratios.min() > 0.93
    assert ratios.mean() > 0.99


def test_taylor_scores_are_squared_mask_gradients(network: Any) -> None:
    model, groups, _ = network
    val = list(loader(32))
    scores = taylor_scores(problem_of(network, val=val), Evaluation(statistics="stored"))
    k = int(np.argmax([s.max() for s in scores]))
    unit, step = int(scores[k].argmax()), 1e-3
    slopes = []
    for x, y in val:
        ends = []
        for sign in (1.0, -1.0):
            masks = [torch.ones(c, dtype=torch.float64) for c in groups.sizes.tolist()]
            masks[k][unit] += sign * step
            twin = copy.deepcopy(model).double()
            with torch.no_grad(), masked(twin, groups, masks):
                ends.append(float(nn.functional.cross_entropy(twin(x.double()), y)))
        slopes.append((ends[0] - ends[1]) / (2 * step))
    assert scores[k][unit] == pytest.approx(np.square(slopes).sum(), rel=1e-2)


def test_taylor_scores_need_a_gradient(planted: Any) -> None:
    model, _, x = planted
    with torch.no_grad():
        val = [(x, model(x))]
    with pytest.raises(DsaError, match="no gradient"):
        baselines.knapsack(problem_of(planted, val=val, loss=nn.functional.mse_loss))
    other = problem_of(planted, val=val, loss=nn.functional.mse_loss, options={"importance": "problem"})
    assert used(other, baselines.knapsack(other).alpha)[0] <= 1.0


@pytest.mark.parametrize("name", ["netadapt", "annealing", "knapsack"])
def test_guidance_that_cannot_be_used(network: Any, name: str) -> None:
    with pytest.raises(DsaError, match="no batch"):
        METHODS[name](problem_of(network, name, val=[]))
    with pytest.raises(DsaError, match="nothing to evaluate on"):
        METHODS[name](problem_of(network, name, example_inputs=()))
    one = [(torch.randn(1, 3, 1, 1), torch.tensor([0]))]
    with pytest.raises(DsaError, match="larger batches"):
        METHODS[name](problem_of(network, name, val=one, options={"statistics": "batch"}))
    bad = [(torch.randn(2, 3, 8, 8), torch.tensor([0, 9]))]
    with pytest.raises(DsaError, match="classes"):
        METHODS[name](problem_of(network, name, val=bad))


def test_batch_statistics_leave_the_model_alone(network: Any) -> None:
    problem = problem_of(network, options={"statistics": "batch", "steps": 3}, val=list(loader(32)))
    before = copy.deepcopy(problem.model.state_dict())
    stored = dataclasses.replace(problem, options={"statistics": "stored", "steps": 3})
    losses = [baselines.annealing(p).history["loss"].iloc[0] for p in (problem, stored)]
    assert losses[0] != losses[1]
    assert all(torch.equal(before[k], v) for k, v in problem.model.state_dict().items())


@every
def test_found_by_name(network: Any, name: str) -> None:
    assert available_methods()[0] == "dsa"
    assert (solve(problem_of(network, name, 1.0), name).alpha == 1.0).all()
