"""What the options of a command describe: the network, its data, the target, and how to measure and train."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import dsa_hw
from dsa_hw.cli.output import shows_progress, step_listener
from dsa_hw.errors import ModelError, ProfileError
from dsa_hw.experiments.settings import ExperimentSettings
from dsa_hw.pipeline.options import ProfileOptions, RefinementOptions

if TYPE_CHECKING:
    from torch import nn

    from dsa_hw.zoo.data import Data
    from dsa_hw.zoo.preprocessing import Preprocessing
    from profilers import MeasuringRules

__all__ = [
    "experiment_arguments",
    "image_preprocessing",
    "load_dense",
    "load_named_data",
    "measuring_rules",
    "model_and_inputs",
    "profile_options",
    "refinement_options",
    "search_arguments",
    "settings_of",
    "target_of",
]


def search_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments that all functions that search for networks have in common."""
    return {
        "target": target_of(args),
        "profiling": profile_options(args),
        "refinement": refinement_options(args),
        "out": args.out,
        "progress": shows_progress(args),
    }


def experiment_arguments(args: argparse.Namespace, settings: ExperimentSettings) -> dict[str, Any]:
    """Return those that experiments, which train networks, have in common."""
    return {**search_arguments(args), "settings": settings, "listener": step_listener(args)}


def target_of(args: argparse.Namespace) -> str:
    """Return ``--target`` with the precision of ``--precision`` and ``--int8-without``.

    Raises:
        ProfileError: Layers are named without ``--precision int8``.
    """
    precision = args.precision
    if args.int8_without:
        if not (precision or "").startswith("int8"):
            raise ProfileError("--int8-without needs --precision int8.")
        precision = f"{precision}-without:{args.int8_without}"
    return f"{args.target} {precision}" if precision else str(args.target)


def measuring_rules(args: argparse.Namespace) -> MeasuringRules:
    """Return the measuring rules with the precision of ``--require``."""
    return dsa_hw.MeasuringRules(require=args.require)


def profile_options(args: argparse.Namespace) -> ProfileOptions:
    """Return how to profile."""
    return ProfileOptions(
        source=args.profile, samples=args.samples, holdout=args.holdout, grid=args.grid, time_limit=args.time_limit,
        rules=measuring_rules(args), force=getattr(args, "force", False), name=args.model,
    )  # fmt: skip


def refinement_options(args: argparse.Namespace) -> RefinementOptions:
    """Return how keep ratios become a network."""
    return RefinementOptions(minimum=args.minimum, confidence=args.confidence)


def settings_of(args: argparse.Namespace) -> ExperimentSettings:
    """Return how the networks of a comparison or a sweep are trained."""
    trained = bool(args.data) and not args.weights and not args.pretrained
    epochs = args.train_epochs if args.train_epochs is not None else 20.0 if trained else 0.0
    return ExperimentSettings(
        train_epochs=epochs, epochs=args.epochs, finetune_epochs=args.finetune_epochs, lr=args.lr,
        finetune_lr=args.finetune_lr, precision=args.train_precision, seed=args.seed,
    )  # fmt: skip


def model_and_inputs(
    args: argparse.Namespace, shape: tuple[int, ...] | None = None, weights: str | None = None
) -> tuple[nn.Module, tuple[Any, ...]]:
    """Return the model of ``--model`` with ``weights``; its inputs have the shape of ``--input``, or else ``shape``."""
    from dsa_hw.zoo.models import load_model, parse_shape

    return load_model(
        args.model,
        parse_shape(args.input) if args.input else shape,
        pretrained=args.pretrained,
        weights=weights,
        classes=args.classes,
    )


def load_named_data(args: argparse.Namespace) -> Data | None:
    """Return the data of ``--data``, prepared for the network of ``--model``; None without it."""
    from dsa_hw.zoo.data import load_data

    if not args.data:
        return None
    images = args.data.startswith("imagefolder:")
    return load_data(
        args.data, batch=args.batch_size, seed=args.seed, workers=args.workers,
        preprocessing=image_preprocessing(args) if images else None,
    )  # fmt: skip


def image_preprocessing(args: argparse.Namespace) -> Preprocessing:
    """Return how pictures become inputs of the network of ``--model``."""
    from dsa_hw.zoo.models import parse_shape, preprocessing_of

    return preprocessing_of(args.model, parse_shape(args.input) if args.input else None)


def load_dense(args: argparse.Namespace) -> tuple[nn.Module, tuple[Any, ...], Data | None]:
    """Return the dense network with its weights, its inputs, and the data of ``--data``.

    Random weights depend on ``--seed`` alone, so that a repeated command continues with the same network.
    """
    import torch

    data = load_named_data(args)
    torch.manual_seed(args.seed)
    model, inputs = model_and_inputs(args, data.shape if data else None, args.weights)
    if data is not None and data.classes is not None:
        _check_outputs(model, inputs, data, args)
    return model, inputs, data


def _check_outputs(model: nn.Module, inputs: tuple[Any, ...], data: Data, args: argparse.Namespace) -> None:
    """Refuse class folders that are not the classes of the network."""
    import torch

    from dsa_hw.training.losses import logits_of
    from dsa_hw.utils.modules import evaluating

    if not args.data.startswith("imagefolder:"):
        return  # numbered classes, which may be fewer than the outputs
    with torch.no_grad(), evaluating(model):
        outputs = logits_of(model(*inputs))
    if isinstance(outputs, torch.Tensor) and outputs.ndim == 2 and outputs.shape[1] != data.classes:
        raise ModelError(
            f"{args.data} has {data.classes} classes, but {args.model} has {outputs.shape[1]} outputs. Use --classes "
            f"{data.classes}, with weights that were trained for these classes."
        )
