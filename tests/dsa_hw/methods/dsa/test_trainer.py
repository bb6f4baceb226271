"""The ready trainer, the guidances and their data: stages, resuming, Ctrl-C, and what a user can get wrong."""

from __future__ import annotations

import copy
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from dsa_hw.channels import masked
from dsa_hw.errors import DsaError, TrainingError
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.dsa.recipe import Recipe
from dsa_hw.methods.dsa.trainer import Trainer
from dsa_hw.methods.problem import Problem, realise
from dsa_hw.methods.registry import available_methods, solve
from dsa_hw.methods.synthetic import output_distance, synthetic_batches
from dsa_hw.training.batchnorm import recalibrate
from dsa_hw.training.finetune import finetune
from dsa_hw.training.loaders import RepeatingLoader
from dsa_hw.training.metrics import accuracy
from dsa_hw.zoo import data
from tests.fakes.networks import Small, batches, trained, with_flops

SHORT = Recipe(warm_up=0.5, allocation=4, finetune=1.5, lr=0.05, weight_steps=2)
# The paper's in all but its length.
SCALED = Recipe.paper(warm_up=0.5, allocation=4, finetune=1.5, milestones=(2.4, 3.6, 4.8), weight_steps=2)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained()


def trainer(model: nn.Module, recipe: Recipe = SHORT, share: float = 0.5, **options: Any) -> Trainer:
    groups, flops, dense = with_flops(model)
    options = {"train": batches(8), "val": batches(2, seed=5), **options}
    return Trainer(model, groups, CostSet([flops], groups.sizes, [share * dense]), recipe=recipe, **options)


def test_all_stages(tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = trainer(Small(), test=batches(2, seed=9), folder=tmp_path).run()
    assert accuracy(result.model, batches(2, seed=9)) > 0.5
    assert result.model.useful.out_channels == result.widths[0] < 16
    assert result.keep_ratios.index.tolist() == list(result.allocator.groups.names)
    assert result.log["epoch"].tolist() == [1, 2, 3, 4, 5, 6]
    assert {"loss", "lr", "used", "beta2", "accuracy"} <= set(result.log)
    assert (tmp_path / "log.csv").read_text().count("\n") == 7
    assert (tmp_path / "allocation.csv").exists()


class Interrupting(list):  # type: ignore[type-arg]
    """Batches; Ctrl-C comes while one of them is being fetched, counted over all passes."""

    def __init__(self, items: Any, at: int) -> None:
        super().__init__(items)
        self.at, self.fetched = at, 0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.fetched += 1
            if self.fetched == self.at:
                os.kill(os.getpid(), signal.SIGINT)
            yield item


@pytest.mark.parametrize(
    ("options", "loader", "at"),
    [
        ({}, "train", 21),  # in the middle of an epoch and of the allocation
        ({"finetune": batches(11, seed=3)}, "finetune", 7),  # in the last stage, with a loader of its own
        ({"recipe": SCALED}, "train", 13),  # while masks are sampled from probabilities that are neither 0 nor 1
    ],
    ids=["allocating", "last stage", "sampled masks"],
)
def test_interrupted_and_continued_gives_the_same(
    tmp_path: Path, options: dict[str, Any], loader: str, at: int
) -> None:
    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return Small()

    whole = trainer(fresh(), **options).run()

    interrupting = {loader: Interrupting(options.get(loader, batches(8)), at=at)}
    with pytest.raises(KeyboardInterrupt):
        trainer(fresh(), **{**options, **interrupting}, folder=tmp_path).run()
    again = trainer(fresh(), **options, folder=tmp_path)
    assert 0 < again.step < again.end
    assert again._epochs(again.step) % 1.0 != 0
    result = again.run()
    assert result.widths.tolist() == whole.widths.tolist()
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, result.model.state_dict()[key]), key
    # ... and when everything is done, the same lines give the result at once.
    done = trainer(fresh(), **options, folder=tmp_path)
    assert done.step == done.end
    assert torch.equal(done.run().model.linear.weight, whole.model.linear.weight)


class Counting(list):  # type: ignore[type-arg]
    """Batches that count how many of them were fetched."""

    fetched = 0

    def __iter__(self) -> Any:
        for item in super().__iter__():
            self.fetched += 1
            yield item


def test_the_last_stage_has_its_own_loader_and_epochs() -> None:
    """As in the paper: all of the training data for the weights, once none of it is needed for the keep ratios."""
    train, rest = Counting(batches(8)), Counting(batches(11, seed=3))
    result = trainer(Small(), train=train, finetune=rest, recipe=replace(SHORT, warm_up=1, finetune=2)).run()
    assert (train.fetched, rest.fetched) == (5 * 8, 2 * 11)
    assert result.log["epoch"].tolist() == pytest.approx([1, 2, 3, 4, 5, 6, 7])
    with pytest.raises(TrainingError, match="finetune loader is empty"):
        trainer(Small(), finetune=[])


def test_a_checkpoint_of_another_network_or_a_broken_one_is_refused(tmp_path: Path) -> None:
    trainer(Small(), folder=tmp_path).run()
    other = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(TrainingError, match="another network"):
        trainer(other, folder=tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(TrainingError, match="Delete it"):
        trainer(Small(), folder=tmp_path)


def test_a_loss_that_diverges_restores_the_last_epoch() -> None:
    torch.manual_seed(0)
    clean = batches(8)

    class Poisoned(list):  # type: ignore[type-arg]
        passes = 0

        def __iter__(self) -> Any:
            Poisoned.passes += 1
            for index, (x, y) in enumerate(super().__iter__()):
                yield (x * float("nan") if Poisoned.passes == 3 and index == 4 else x), y

    subject = trainer(Small(), train=Poisoned(clean))
    with pytest.raises(TrainingError, match=r"loss is nan.*last whole epoch is restored"):
        subject.run()
    assert subject.step == 2 * subject.epoch_steps
    assert all(torch.isfinite(value).all() for value in subject.dense.state_dict().values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train": []}, "loader is empty"),
        ({"train": (b for b in batches(2))}, "no length"),
        ({"train": [(torch.randn(4, 3, 8, 8),)]}, "must yield"),
        ({"train": [(x, y + 4) for x, y in batches(2)]}, "Labels run from 4"),
        ({"val": iter(batches(2))}, "val loader gave no batch"),
    ],
)
def test_bad_loaders(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        trainer(Small(), **changes).run()


def test_a_val_loader_of_one_batch_is_enough() -> None:
    assert trainer(Small(), val=batches(1)).run().allocator.finished


def test_a_frozen_model_cannot_be_trained() -> None:
    with pytest.raises(TrainingError, match="Unfreeze"):
        trainer(Small().requires_grad_(False))
    with pytest.raises(TrainingError, match="Unfreeze"):
        finetune(Small().requires_grad_(False), batches(1), 1)


def test_the_papers_recipe() -> None:
    recipe = Recipe.paper()
    assert recipe.epochs == 300
    assert (recipe.weight_steps, recipe.momentum, recipe.weight_decay, recipe.lr) == (20, 0.9, 4e-5, 0.05)
    assert np.isclose((recipe.beta2[1] / recipe.beta2[0]) ** (1 / recipe.allocation), 1.1)
    assert Recipe.paper("imagenet").epochs == 120
    for masks in (recipe.allocator, Recipe.paper("imagenet").allocator):
        assert (masks["softness"], masks["masks"], masks["weight_masks"]) == (
            "importance",
            "straight_through",
            "sampled",
        )
    with pytest.raises(TrainingError, match="cifar10, imagenet"):
        Recipe.paper("mnist")


def test_the_papers_recipe_from_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the budget, and with sampled masks: 0 or 1, for weights (drawn for every batch) and for keep ratios."""
    for_weights: list[torch.Tensor] = []
    for_ratios: list[torch.Tensor] = []

    def recording(network: nn.Module, groups: Any, masks: list[torch.Tensor]) -> Any:
        seen = for_ratios if masks[0].requires_grad else for_weights
        seen.append(torch.cat(masks).detach().clone())
        return masked(network, groups, masks)

    monkeypatch.setattr("dsa_hw.methods.dsa.allocator.masked", recording)
    torch.manual_seed(0)
    result = trainer(Small(), SCALED).run()
    history = result.allocator.history
    assert len(for_weights) == 2 * len(for_ratios) == 2 * len(history)
    for masks in (for_weights, for_ratios):
        assert set(torch.cat(masks).tolist()) == {0.0, 1.0}
    pairs = zip(for_weights[::2], for_weights[1::2], strict=True)  # two weight steps to each step of the keep ratios
    assert not all(torch.equal(first, second) for first, second in pairs)
    assert history["beta2"].iloc[0] == 0.05
    # In the end at most the channel at the threshold of each group is undecided.
    assert history["inexactness"].iloc[-1] <= 0.25 * len(result.widths) + 1e-3
    assert result.model.useful.out_channels == result.widths[0] < 16
    assert with_flops(result.model)[2] <= 0.5 * with_flops(Small())[2]
    assert accuracy(result.model, batches(2, seed=9)) > 0.5


def problem(model: nn.Module, share: float = 0.5, **changes: Any) -> Problem:
    groups, flops, dense = with_flops(model)
    return Problem(
        model, groups, CostSet([flops], groups.sizes, [share * dense]), (torch.randn(1, 3, 8, 8),), **changes
    )


@pytest.mark.parametrize("guide", ["train", "val"])
def test_no_keep_ratio_is_below_the_narrowest_width(model: nn.Module, guide: str) -> None:
    """A budget so tight that groups go to the bottom: that is a width of the grid, not what the cost model makes up."""
    steps = np.full(len(problem(model).groups), 6)
    given = problem(model, 0.45, grid=steps, options={"steps": 12}, **{guide: batches(12)})
    assert given.least.tolist() == pytest.approx([min(6, c) / c for c in given.groups.sizes])
    alpha = solve(given, "dsa").alpha
    assert (alpha >= given.least).all()
    assert alpha.min() < 0.5
    free = solve(problem(model, 0.1, options={"steps": 12}, **{guide: batches(12)}), "dsa").alpha
    assert (free < given.least).any(), "or the test above could not fail"


@pytest.mark.parametrize("guide", ["train and val", "train", "val", "none"])
def test_every_guidance_keeps_the_useful_and_the_budget(model: nn.Module, guide: str) -> None:
    """The useful group keeps more in the mean over four draws of the data: 256 noisy images alone can say anything."""
    useful, useless = [], []
    for seed in range(4):
        loaders: dict[str, Any] = {"train": batches(24)} if "train" in guide else {}
        if "val" in guide:
            loaders["val"] = batches(8, seed=5 + seed)
        before = copy.deepcopy(model.state_dict())
        given = problem(model, **loaders, options={"steps": 24, "batch_size": 16}, seed=seed)
        proposal = solve(given, "dsa")
        network = realise(given, proposal)
        assert given.costs.keeps(network.widths / given.groups.sizes)
        ratio = dict(zip(given.groups.names, proposal.alpha, strict=True))
        useful.append(ratio["useful"])
        useless.append(ratio["useless"])
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
        assert network.model(torch.randn(2, 3, 8, 8)).shape == (2, 4)
        assert len(proposal.history) == 24
    assert np.mean(useful) > np.mean(useless)


def test_a_budget_already_met_returns_the_dense_network_at_once(model: nn.Module) -> None:
    class Untouchable(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            raise AssertionError("nothing may be trained")

    proposal = solve(problem(model, 1.0, train=Untouchable(batches(1)), val=batches(1)), "dsa")
    assert (proposal.alpha == 1.0).all()
    assert proposal.model is model


def test_wrong_options_methods_and_epochs(model: nn.Module) -> None:
    with pytest.raises(DsaError, match=r"Unknown option 'stesp'\. Did you mean 'steps'"):
        solve(problem(model, options={"stesp": 3}), "dsa")
    with pytest.raises(DsaError, match="Did you mean 'uniform'"):
        solve(problem(model), "unifrom")
    with pytest.raises(TrainingError, match="must be positive"):
        solve(problem(model, train=batches(1), val=batches(1), epochs=0), "dsa")
    assert available_methods()[0] == "dsa"


def test_made_up_inputs_look_like_images_and_other_inputs_are_refused() -> None:
    example = torch.randn(1, 3, 16, 16)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(3))
    net(example)
    x, y = next(synthetic_batches(net, (example,), 8, seed=0))
    assert x.shape == (8, 3, 16, 16)
    assert y.shape == (8, 3)
    spectrum = torch.fft.rfft2(x).abs().mean((0, 1))
    assert spectrum[0, 1] > 4 * spectrum[0, 7]  # 1/f: low frequencies are large
    again, _ = next(synthetic_batches(net, (example,), 8, seed=0))
    assert torch.equal(x, again)
    with pytest.raises(TrainingError, match="cannot be generated"):
        next(synthetic_batches(net, (torch.zeros(1, 5, dtype=torch.long),), 8, seed=0))
    assert float(output_distance(y, y)) == 0.0
    assert 0.5 < float(output_distance(y.roll(1, 0), y)) < 8.0


def test_recalibration_is_the_mean_over_the_batches() -> None:
    norm = nn.Sequential(nn.BatchNorm2d(3)).eval()
    found = batches(3)
    recalibrate(norm, found, batches=3)
    wanted = torch.stack([x.mean((0, 2, 3)) for x, _ in found]).mean(0)
    assert torch.allclose(norm[0].running_mean, wanted, atol=1e-6)
    assert norm[0].momentum == 0.1
    assert not norm.training


def test_repeating_loader_resumes_inside_an_epoch() -> None:
    found = data.load_data("digits", batch=64, seed=1)
    where = RepeatingLoader(found.train)
    for _ in range(25):
        next(where)
    state = where.state_dict()
    following = next(where)[1]
    back = RepeatingLoader(data.load_data("digits", batch=64, seed=1).train)
    back.load_state_dict(state)
    assert torch.equal(next(back)[1], following)


def test_fine_tuning_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return Small()

    whole = fresh()
    table = finetune(whole, batches(30), 4)
    again = fresh()
    with pytest.raises(KeyboardInterrupt):
        finetune(again, Interrupting(batches(30), at=77), 4, folder=tmp_path)
    again = fresh()
    pd.testing.assert_frame_equal(finetune(again, batches(30), 4, folder=tmp_path), table)
    for key, value in whole.state_dict().items():
        assert torch.equal(value, again.state_dict()[key]), key
    assert not (tmp_path / "finetune.partial").exists()
    with pytest.raises(TrainingError, match="Delete it"):  # of another length
        finetune(fresh(), batches(30), 5, folder=tmp_path)


def test_an_allocation_with_training_goes_on_where_it_was_interrupted(model: nn.Module, tmp_path: Path) -> None:
    val = batches(2, seed=5)
    whole = solve(problem(model, train=batches(24), val=val, options={"steps": 24}))
    with pytest.raises(KeyboardInterrupt):
        solve(problem(model, train=Interrupting(batches(24), at=10), val=val, options={"steps": 24}, folder=tmp_path))
    fetched = Interrupting(batches(24), at=-1)
    again = solve(problem(model, train=fetched, val=val, options={"steps": 24}, folder=tmp_path))
    np.testing.assert_array_equal(again.alpha, whole.alpha)
    assert torch.equal(again.model.linear.weight, whole.model.linear.weight)
    assert len(again.history) == 24
