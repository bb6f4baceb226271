"""The method "dsa": differentiable sparsity allocation with the data that the problem has.

=============== =====================================================================================================
loaders         what is learnt
=============== =====================================================================================================
train (and val) Weights and keep ratios together, as in Alg. 1 of the paper; the proposal has the adapted weights.
val only        Keep ratios; weights stay, and batch norms use the statistics of each batch.
neither         Keep ratios, from random inputs with the outputs of the dense network as targets.
=============== =====================================================================================================

With frozen weights the result depends on masks that are soft for the same share of every group's channels and sharp
enough to have an effect behind a batch norm, on batch statistics under the masks, on a gradient that is averaged over
steps and weighed against the cost of each group, and on a budget that falls slowly (docs/guide/allocation.md;
ablation in docs/benchmarks/cifar10.md). With a ``val`` loader, masks remove channels in the order of
`dsa_hw.methods.dsa.fisher`, which is right for weights as they are. The channels of the result are those of
`dsa_hw.methods.dsa.elimination`, because its weights are refitted. Where there are images without labels, or inputs
synthesised from batch-norm statistics, `dsa_hw.allocate` makes them a ``val`` loader whose targets are the dense
network's own answers.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

from dsa_hw.errors import DsaError, TrainingError
from dsa_hw.methods.dsa.allocator import Allocator
from dsa_hw.methods.dsa.elimination import elimination
from dsa_hw.methods.dsa.fisher import fisher
from dsa_hw.methods.dsa.recipe import Recipe
from dsa_hw.methods.dsa.trainer import Trainer
from dsa_hw.methods.problem import Problem, Proposal
from dsa_hw.methods.registry import register_method
from dsa_hw.methods.synthetic import output_distance, perturbed, synthetic_batch_size, synthetic_batches
from dsa_hw.training.loaders import RepeatingLoader, length_of
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.modules import copy_module
from dsa_hw.utils.progress import tracked
from dsa_hw.utils.text import unknown_name

__all__ = ["dsa"]

_log = logging.getLogger(__name__)

_ALLOCATOR = {
    "beta2": (10.0, 100.0),
    "softness": "rank",
    "masks": "soft",
    "samples": 1,
    "weight_masks": "hard",
    "statistics": "batch",
    "travel": 4.0,
    "metric": "cost",
    "smoothing": 0.9,
    "subproblem": "exact",
    "project_gradient": False,
    "precision": "fp32",
}
# Option -> default. ``steps`` and ``batch_size`` depend on the data if they are None.
_OPTIONS: dict[str, Any] = {
    "steps": None,
    "batches": 1,
    **_ALLOCATOR,
    "lr": 0.02,
    "weight_decay": 5e-4,
    "batch_size": None,
}
# Validation batches that rank the channels.
_RANKING_BATCHES = 16


@register_method("dsa")
def dsa(problem: Problem) -> Proposal:
    """Propose keep ratios by DSA; see the module for what each loader is used for.

    Options: ``steps`` of the keep ratios with ``batches`` validation batches each; ``lr`` and ``weight_decay`` of the
    weights; ``batch_size`` of synthetic inputs; and the settings of `dsa_hw.Allocator`.

    Raises:
        DsaError: An option is unknown.
        TrainingError: The data or the number of epochs cannot be used.
    """
    for name in problem.options:
        if name not in _OPTIONS:
            raise DsaError(unknown_name("option", name, _OPTIONS))
    options = {**_OPTIONS, **problem.options}
    if options["steps"] is None:
        options["steps"] = 120 if problem.train is None and problem.val is not None else 60
    return (_with_frozen_weights if problem.train is None else _with_training)(problem, options)


def _with_frozen_weights(problem: Problem, options: dict[str, Any]) -> Proposal:
    model = problem.model
    loss, importance = problem.loss, problem.importance
    selection: list[Floats] | None = None
    batches: Any
    if problem.val is not None:
        batches = RepeatingLoader(problem.val, "val")
        if importance == "auto":
            first = list(itertools.islice(batches, _RANKING_BATCHES))
            if loss is output_distance:  # the dense network's own outputs as targets
                first = list(perturbed(first, problem.seed))
            found = fisher(model, problem.groups, first, loss, precision=options["precision"])
            selection = elimination(model, problem.groups, first, loss, precision=options["precision"])
            importance = lambda *_: found  # noqa: E731
    else:
        loss = output_distance
        size = options["batch_size"] or synthetic_batch_size(problem.example_inputs)
        batches = synthetic_batches(model, problem.example_inputs, size, problem.seed)
    allocator = Allocator(
        model,
        problem.groups,
        problem.costs,
        steps=options["steps"],
        loss=loss,
        importance=importance,
        minimum=problem.least,
        seed=problem.seed,
        log=problem.log,
        **{key: options[key] for key in _ALLOCATOR},
    )
    total = 0 if allocator.finished else options["steps"]
    for _ in tracked(range(total), "allocating", shown=problem.progress):
        allocator.step(*[next(batches) for _ in range(options["batches"])])
    ranking = allocator.importances() if selection is None else selection
    return Proposal(allocator.admm.keep_ratios, model, ranking, allocator.history)


def _with_training(problem: Problem, options: dict[str, Any]) -> Proposal:
    assert problem.train is not None
    val = problem.val
    if val is None:
        _log.warning("There is no val loader. The keep ratios are learnt from the training data, like the weights.")
        val = problem.train
    epochs = 1.0 if problem.epochs is None else problem.epochs
    if epochs <= 0:
        raise TrainingError(f"`epochs` must be positive; got {epochs}. Give no `train` loader to keep the weights.")
    recipe = Recipe(
        warm_up=0.0,
        allocation=epochs,
        finetune=0.0,
        lr=options["lr"],
        weight_decay=options["weight_decay"],
        rise=0.1,
        weight_steps=max(1, round(epochs * length_of(problem.train) / options["steps"])),
        val_batches=options["batches"],
        beta2=options["beta2"],
        precision=options["precision"],
        allocator={
            "importance": problem.importance,
            "minimum": problem.least,
            **{key: options[key] for key in _ALLOCATOR if key not in ("beta2", "precision")},
        },
    )
    trainer = Trainer(
        copy_module(problem.model),
        problem.groups,
        problem.costs,
        problem.train,
        val,
        recipe,
        loss=problem.loss,
        progress=problem.progress,
        seed=problem.seed,
        title="allocating",
        folder=problem.folder,
        log=problem.log,
    )
    if trainer.allocator.finished:  # the dense network meets the budgets
        return Proposal(trainer.allocator.admm.keep_ratios, problem.model)
    trained = trainer.run()
    trained.model.train(problem.model.training)
    allocator = trained.allocator
    return Proposal(allocator.admm.keep_ratios, trained.model, allocator.importances(), allocator.history)
