"""The trainer: stages, resumption, interruption, and wrong input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dsa_hw.channels import masked, shrink
from dsa_hw.errors import TrainingError
from dsa_hw.methods.costs import CostSet
from dsa_hw.methods.dsa.recipe import Recipe
from dsa_hw.methods.dsa.trainer import Trainer
from dsa_hw.methods.problem import Realised
from dsa_hw.training.finetune import finetune
from dsa_hw.training.metrics import accuracy
from dsa_hw.training.teachers import Teacher
from tests.fakes.loaders import Counting, Interrupting
from tests.fakes.networks import Small, batches, trained, with_flops

SHORT = Recipe(warm_up=0.5, allocation=4, finetune=1.5, lr=0.05, weight_steps=2)
# The paper's in all but its length.
SCALED = Recipe.paper(warm_up=0.5, allocation=4, finetune=1.5, milestones=(2.4, 3.6, 4.8), weight_steps=2)


def trainer(model: nn.Module, recipe: Recipe = SHORT, share: float = 0.5, **options: Any) -> Trainer:
    groups, flops, dense = with_flops(model)
    options = {"train": batches(8), "val": batches(2, seed=5), **options}
    return Trainer(model, groups, CostSet([flops], groups.sizes, [share * dense]), recipe=recipe, **options)


def test_all_stages_run_and_write_their_logs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    result = trainer(Small(), test=batches(2, seed=9), folder=tmp_path).run()
    assert accuracy(result.model, batches(2, seed=9)) > 0.5
    assert result.model.useful.out_channels == result.widths[0] < 16
    assert result.keep_ratios.index.tolist() == list(result.allocator.groups.names)
    assert result.log["epoch"].tolist() == [1, 2, 3, 4, 5, 6]
    assert {"loss", "lr", "used", "beta2", "accuracy"} <= set(result.log)
    assert (tmp_path / "log.csv").read_text().count("\n") == 7
    assert (tmp_path / "allocation.csv").exists()


@pytest.mark.parametrize(
    ("options", "loader", "at"),
    [
        ({}, "train", 21),  # in the middle of an epoch and of the allocation
        ({"finetune": batches(11, seed=3)}, "finetune", 7),  # in the last stage, with a loader of its own
        ({"recipe": SCALED}, "train", 13),  # while masks are sampled from probabilities that are neither 0 nor 1
    ],
    ids=["allocating", "last stage", "sampled masks"],
)
def test_interrupted_training_continues_to_the_same_result(
    tmp_path: Path, options: dict[str, Any], loader: str, at: int
) -> None:
    def fresh() -> nn.Module:
        torch.manual_seed(0)
        return Small()

    whole = trainer(fresh(), **options).run()

    interrupting = {loader: Interrupting(options.get(loader, batches(8)), at=at)}
    with pytest.raises(KeyboardInterrupt):
        trainer(fresh(), **{**options, **interrupting}, folder=tmp_path).run()
    options[loader] = Interrupting(options.get(loader, batches(8)), at=0)
    again = trainer(fresh(), **options, folder=tmp_path)
    assert 0 < again.step < again.end
    assert again._epochs(again.step) % 1.0 != 0
    result = again.run()
    assert result.widths.tolist() == whole.widths.tolist()
    for key, value in whole.model.state_dict().items():
        assert torch.equal(value, result.model.state_dict()[key]), key
    # When everything is done, the same call returns the result at once.
    done = trainer(fresh(), **options, folder=tmp_path)
    assert done.step == done.end
    assert torch.equal(done.run().model.linear.weight, whole.model.linear.weight)


def test_last_stage_has_its_own_loader_and_epochs() -> None:
    """As in the paper: all of the training data for the weights, once none of it is needed for the keep ratios."""
    train, rest = Counting(batches(8)), Counting(batches(11, seed=3))
    result = trainer(Small(), train=train, finetune=rest, recipe=replace(SHORT, warm_up=1, finetune=2)).run()
    assert (train.fetched, rest.fetched) == (5 * 8, 2 * 11)
    assert result.log["epoch"].tolist() == pytest.approx([1, 2, 3, 4, 5, 6, 7])
    with pytest.raises(TrainingError, match="finetune loader is empty"):
        trainer(Small(), finetune=[])


def test_broken_or_foreign_checkpoint_is_refused(tmp_path: Path) -> None:
    trainer(Small(), folder=tmp_path).run()
    other = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(TrainingError, match=r"different settings \(network="):
        trainer(other, folder=tmp_path)
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04 broken")
    with pytest.raises(TrainingError, match="Delete it"):
        trainer(Small(), folder=tmp_path)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"train": batches(8, seed=4)}, "train"),
        ({"val": batches(2, seed=6)}, "val"),
        ({"finetune": batches(8, seed=4)}, "finetune"),
        ({"loss": nn.CrossEntropyLoss()}, "loss"),
        ({"share": 0.6}, "cost model"),
        ({"recipe": replace(SHORT, lr=0.01)}, "recipe.lr"),
        ({"recipe": replace(SHORT, allocator={"samples": 2})}, "recipe.allocator"),
        ({"seed": 1}, "seed"),
        ({"weights": 1}, "weights"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_checkpoint_of_another_training_is_refused(tmp_path: Path, changes: dict[str, Any], name: str) -> None:
    def prepared(weights: int = 0, **options: Any) -> Trainer:
        torch.manual_seed(weights)
        return trainer(Small(), folder=tmp_path, **options)

    first = prepared()
    first._save()
    assert prepared().step == 0
    with pytest.raises(TrainingError, match=rf"different settings \(.*{name}=.+, requested {name}=.* delete it"):
        prepared(**changes)


def test_training_that_cannot_be_compared_is_not_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(Small(), folder=tmp_path, loss=lambda outputs, targets: nn.functional.cross_entropy(outputs, targets)).run()
    assert "cannot be continued" in caplog.text
    assert not (tmp_path / "checkpoint.pt").exists()
    assert (tmp_path / "log.csv").exists()


def test_last_epoch_is_restored_if_the_loss_diverges() -> None:
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
def test_unusable_loaders_are_refused_with_the_reason(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        trainer(Small(), **changes).run()


def test_val_loader_of_one_batch_is_repeated() -> None:
    assert trainer(Small(), val=batches(1)).run().allocator.finished


def test_frozen_model_is_refused() -> None:
    with pytest.raises(TrainingError, match="Unfreeze"):
        trainer(Small().requires_grad_(False))
    with pytest.raises(TrainingError, match="Unfreeze"):
        finetune(Small().requires_grad_(False), batches(1), 1)


def test_recipe_of_the_paper_samples_masks_and_meets_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_network_with_bad_weights_is_not_trained(bad: float) -> None:
    model = Small()
    model.useful.weight.data.view(-1)[0] = bad
    with pytest.raises(TrainingError, match=r"useful\.weight of the network has"):
        trainer(model)


def test_momentum_goes_through_the_cut_with_the_kept_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "_refit", lambda *_: False)
    torch.manual_seed(0)
    one = trainer(Small())
    while one.step < one.allocation_end:
        one.advance()
    before = {name: one._optimiser.state[p]["momentum_buffer"] for name, p in one._plain.named_parameters()}
    one._prune()
    assert one.kept is not None
    slices = one.groups.slices(one.kept)
    assert any(len(units) < size for units, size in zip(one.kept, one.groups.sizes, strict=True))
    for name, parameter in one._plain.named_parameters():
        expected = before[name]
        for axis, units in slices.get(name, {}).items():
            expected = expected.index_select(axis, torch.from_numpy(units))
        found = one._optimiser.state[parameter]["momentum_buffer"]
        assert found.shape == parameter.shape
        assert torch.equal(found, expected), name
        assert found.abs().sum() > 0


def test_weights_learn_from_a_teacher(tmp_path: Path) -> None:
    """All targets are wrong; what is learnt comes from the teacher."""
    dense = trained()
    wrong = [(x, (y + 1) % 4) for x, y in batches(8)]

    def result(**options: Any) -> float:
        torch.manual_seed(0)
        return accuracy(trainer(Small(), train=wrong, **options).run().model, batches(2, seed=9))

    assert result() < 0.4 < 0.6 < result(teacher=Teacher(dense, weight=1.0))
    torch.manual_seed(0)
    trainer(Small(), teacher=dense, folder=tmp_path).run()
    torch.manual_seed(0)
    with pytest.raises(TrainingError, match="teacher="):
        trainer(Small(), folder=tmp_path)


def test_layers_are_refitted_at_the_cut_where_it_lowers_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are not trained under masks lose by the cut; nothing is refitted where the cut loses nothing."""
    one = trainer(trained(), share=0.3, val=batches(6, seed=5))
    sizes = one.groups.sizes.tolist()

    def loss(network: nn.Module) -> float:
        with torch.no_grad():
            return sum(float(nn.functional.cross_entropy(network.eval()(x), y)) for x, y in batches(4, seed=11))

    def cut(share: float) -> Realised:
        kept = [np.arange(max(round(share * size), 1)) for size in sizes]
        return Realised(np.array([len(k) for k in kept]), kept, shrink(one.dense, one.groups, kept))

    found = cut(0.3)
    as_cut = loss(found.model)
    assert as_cut > loss(one.dense)
    monkeypatch.setattr(one, "_realise", lambda: found)
    one._prune()
    assert loss(one._plain) < as_cut
    assert not one._optimiser.state, "the momentum of other weights"
    assert not one._refit(one.dense, cut(1.0))
