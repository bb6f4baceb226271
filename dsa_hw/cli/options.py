"""Options that several commands share, and what they mean."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from dsa_hw.errors import ModelError
from dsa_hw.utils.arguments import share

__all__ = [
    "DEFAULT_TARGET",
    "EXIT_CODES",
    "add_measuring",
    "measuring_rules",
    "model_and_inputs",
    "read_weights",
    "warn_of_random_weights",
]

DEFAULT_TARGET = "onnxruntime/cpu"
EXIT_CODES = {"MET": 0, "NOT MET": 3, "INCONCLUSIVE": 4}


def add_measuring(parser: argparse.ArgumentParser, target: str | None = DEFAULT_TARGET) -> None:
    """``--target``, ``--allow`` and ``--json``."""
    default = "that of the plan, where it is this computer" if target is None else target
    parser.add_argument("--target", default=target, metavar="RUNTIME/DEVICE", help=f"where to measure ({default})")
    parser.add_argument("--allow", type=share, default=0.02, help="disturbance allowed on a busy machine (2%%)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def measuring_rules(args: argparse.Namespace) -> Any:
    """The rules of measuring that ``--allow`` names."""
    from profilers import MeasuringRules

    return MeasuringRules.allowing(args.allow)


def model_and_inputs(args: argparse.Namespace, shape: tuple[int, ...] | None = None) -> tuple[Any, tuple[Any, ...]]:
    """The model of ``--model`` with ``--input``, or else with ``shape``."""
    from dsa_hw.zoo.models import load_model, parse_shape

    return load_model(args.model, parse_shape(args.input) if args.input else shape)


def warn_of_random_weights(args: argparse.Namespace, trained: bool = False) -> None:
    """Say that the weights are random where no ``--weights`` were given and the network is not ``trained`` first.

    The factory of a user (``package.module:factory``) may well load weights; nothing is said about those.
    """
    if args.weights or trained or ":" in args.model:
        return
    text = "The weights are random (no --weights): any accuracy or agreement with the dense network is meaningless."
    print(text, file=sys.stderr if args.json else sys.stdout, flush=True)


def read_weights(path: Path) -> dict[str, Any]:
    """A state dict; nothing is unpickled but tensors."""
    import pickle

    import torch

    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ModelError(f"the weights {path} cannot be read ({' '.join(str(error).split())[:200]})") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path} holds a {type(found).__name__}: save model.state_dict()")
    return found
