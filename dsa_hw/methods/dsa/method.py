"""DSA's three sources of guidance, one interface.

    train (+ val)   weights and keep ratios together, as in Alg. 1 of the paper; the adapted weights go on
    val only        weights stay as they are; every batch brings its own batch-norm statistics
    neither         made-up inputs; the target is what the dense network itself answers

What makes the last two work (docs/guide/allocation.md; measured in docs/benchmarks/cifar10.md): masks that are
soft for the same share of every group's units and sharp enough to be felt behind a batch norm, batch statistics under
the masks, a gradient averaged over steps and weighed against the cost of each group, and a budget that falls slowly.
Labelled data also say which units matter (`dsa_hw.methods.dsa.fisher`).
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from tqdm import tqdm

from dsa_hw.errors import DsaError, TrainingError
from dsa_hw.methods.dsa.allocator import Allocator
from dsa_hw.methods.dsa.fisher import fisher
from dsa_hw.methods.dsa.trainer import Recipe, Trainer
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import register_method
from dsa_hw.training.finetune import Endless, device_of, length_of, statistics_kept

__all__ = ["dsa", "made_up_batches", "made_up_inputs", "output_distance"]

_log = logging.getLogger(__name__)

# option -> default; None means that the guidance decides
_OPTIONS: dict[str, Any] = {
    "steps": None,
    "batches": 1,
    "beta2": (10.0, 100.0),
    "softness": "rank",
    "masks": "soft",
    "samples": 1,
    "weight_masks": "hard",
    "travel": 4.0,
    "metric": "cost",
    "smoothing": 0.9,
    "subproblem": "exact",
    "project_gradient": False,
    "precision": "fp32",
    "lr": 0.02,
    "weight_decay": 5e-4,
    "batch_size": None,
}
# Batches that decide which units matter most.
_FISHER_BATCHES = 16
_ADMM = ("travel", "metric", "smoothing", "subproblem", "project_gradient")


@register_method("dsa")
def dsa(problem: Problem) -> Proposal:
    """Differentiable sparsity allocation with whatever guidance there is."""
    unknown = set(problem.options) - set(_OPTIONS)
    if unknown:
        raise DsaError(f"dsa has no option {', '.join(sorted(unknown))}; it has {', '.join(sorted(_OPTIONS))}")
    options = {**_OPTIONS, **problem.options}
    if options["steps"] is None:
        options["steps"] = 120 if problem.train is None and problem.val is not None else 60
    if problem.train is not None:
        return _with_training(problem, options)
    return _with_frozen_weights(problem, options)


def _with_frozen_weights(problem: Problem, options: dict[str, Any]) -> Proposal:
    model = problem.model
    loss, importance = problem.loss, problem.importance
    batches: Any
    if problem.val is not None:
        batches = Endless(problem.val, "val")
        if importance == "auto":
            asked = itertools.islice(iter(batches.__next__, None), _FISHER_BATCHES)
            found = fisher(model, problem.groups, asked, loss, precision=options["precision"])
            importance = lambda *_: found  # noqa: E731
    else:
        loss = output_distance
        size = options["batch_size"] or _batch_size(problem.example_inputs)
        batches = made_up_batches(model, problem.example_inputs, size, problem.seed)
    allocator = Allocator(
        model,
        problem.groups,
        problem.costs.costs,
        problem.costs.limits.tolist(),
        steps=options["steps"],
        loss=loss,
        importance=importance,
        minimum=problem.least,
        seed=problem.seed,
        **{key: options[key] for key in ("beta2", "softness", "masks", "samples", "precision", *_ADMM)},
    )
    total = 0 if allocator.finished else options["steps"]
    for _ in tqdm(range(total), desc="allocating", unit="step", delay=2, disable=None if problem.progress else True):
        allocator.step(*[next(batches) for _ in range(options["batches"])])
    return Proposal(allocator.admm.keep_ratios, model, allocator.importances(), allocator.history)


def _with_training(problem: Problem, options: dict[str, Any]) -> Proposal:
    assert problem.train is not None
    val = problem.val
    if val is None:
        _log.warning("no val loader: keep ratios learn from the training data, as the weights do")
        val = problem.train
    epochs = 1.0 if problem.epochs is None else problem.epochs
    if epochs <= 0:
        raise TrainingError(f"epochs = {epochs}: give a positive number, or leave train out to keep the weights")
    weight_steps = max(1, round(epochs * length_of(problem.train) / options["steps"]))
    recipe = Recipe(
        warm_up=0.0,
        allocation=epochs,
        finetune=0.0,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        rise=0.1,
        weight_steps=weight_steps,
        val_batches=options["batches"],
        beta2=options["beta2"],
        precision=options["precision"],
        allocator={
            "importance": problem.importance,
            "minimum": problem.least,
            **{key: options[key] for key in ("softness", "masks", "samples", "weight_masks", *_ADMM)},
        },
    )
    model = copy.deepcopy(problem.model)
    trainer = Trainer(
        model,
        problem.groups,
        problem.costs.costs,
        problem.costs.limits.tolist(),
        problem.train,
        val,
        recipe,
        loss=problem.loss,
        progress=problem.progress,
        seed=problem.seed,
        title="allocating",
        folder=problem.folder,
    )
    if trainer.allocator.finished:  # the dense network keeps the budgets: nothing to learn
        return Proposal(trainer.allocator.admm.keep_ratios, problem.model)
    trained = trainer.run()
    trained.model.train(problem.model.training)
    allocator = trained.allocator
    return Proposal(allocator.admm.keep_ratios, trained.model, allocator.importances(), allocator.history)


def made_up_batches(model: nn.Module, example_inputs: Any, size: int, seed: int) -> Iterator[tuple[Any, Any]]:
    """Endless batches of `made_up_inputs`, with the dense network's own outputs as targets."""
    for made in made_up_inputs(example_inputs, size, seed, device_of(model)):
        with torch.no_grad(), statistics_kept(model):
            outputs = model(*made)
        yield (made[0] if len(made) == 1 else made), outputs


def made_up_inputs(
    example_inputs: Any, size: int, seed: int, device: torch.device | None = None
) -> Iterator[tuple[Tensor, ...]]:
    """Endless arguments like ``example_inputs`` but random, ``size`` examples each.

    Images (4 axes) are noise with a 1/f spectrum, as natural images have, of random contrast; other floating-point
    inputs are normal with the example's own mean and deviation. Anything else cannot be made up.
    """
    inputs = example_inputs if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
    if not inputs or not all(isinstance(x, Tensor) and x.is_floating_point() for x in inputs):
        raise TrainingError(
            "inputs of this network cannot be made up (only floating-point tensors can): give val= or train= loaders"
        )
    rng = torch.Generator().manual_seed(seed)
    while True:
        yield tuple(_like(x, size, rng).to(device) for x in inputs)


def _batch_size(inputs: tuple[Any, ...]) -> int:
    """32, fewer for large images: a batch norm takes its statistics over examples and pixels alike."""
    pixels = max((x.shape[2:].numel() for x in inputs if isinstance(x, Tensor) and x.ndim == 4), default=1)
    return max(8, min(32, 400_000 // pixels))


def _like(example: Tensor, size: int, rng: torch.Generator) -> Tensor:
    shape = (size, *example.shape[1:])
    white = torch.randn(shape, generator=rng)
    if example.ndim != 4:
        deviation, mean = torch.std_mean(example.float()) if example.numel() > 1 else (torch.ones(()), torch.zeros(()))
        return (white * deviation.clamp(min=1e-3).cpu() + mean.cpu()).to(example.dtype)
    rows, columns = torch.fft.fftfreq(shape[2]), torch.fft.rfftfreq(shape[3])
    distance = (rows[:, None] ** 2 + columns**2).sqrt().clamp(min=1.0 / max(shape[2:]))
    image = torch.fft.irfft2(torch.fft.rfft2(white) / distance, s=shape[2:])
    image = image / image.std((1, 2, 3), keepdim=True)
    contrast = torch.empty(size, 1, 1, 1).uniform_(0.5, 1.5, generator=rng)
    return (image * contrast).to(example.dtype)


def output_distance(outputs: Any, targets: Any) -> Tensor:
    """Squared distance from the dense network's outputs, over the variance of those: 0 same, about 1 unrelated."""
    total, count = torch.zeros(()), 0
    for found, wanted in zip(tree_leaves(outputs), tree_leaves(targets), strict=True):
        if isinstance(found, Tensor) and found.is_floating_point():
            wanted = wanted.detach().float()
            spread = (wanted - wanted.mean(0)).square().mean().clamp(min=1e-12)
            total = total.to(found.device) + (found.float() - wanted).square().mean() / spread
            count += 1
    if count == 0:
        raise TrainingError("the network has no floating-point output to compare: give val= and loss=")
    return total / count
