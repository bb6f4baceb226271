"""``dsa-hw doctor``: what is installed, and which runtimes and devices can be used here."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from typing import Any

import dsa_hw
from dsa_hw.cli.options import add_command
from dsa_hw.cli.output import print_json
from dsa_hw.errors import DsaError
from dsa_hw.utils.packages import OWN, why_hidden
from dsa_hw.utils.text import one_line

__all__ = ["add", "run"]

_PACKAGES = (
    "torch", "torchvision", "numpy", "scipy", "pandas", "scikit-learn", "onnx", "onnxscript", "onnxruntime", "openvino",
    "tensorrt", "timm", "zeus", "distributed",
)  # fmt: skip
_TARGETS = (
    "torch/cpu", "compile/cpu", "onnxruntime/cpu", "openvino/cpu", "litert/cpu", "ethos-u55-128", "torch/cuda",
    "onnxruntime/cuda", "tensorrt/cuda", "torch/mps",
)  # fmt: skip
_EXAMPLES = """Examples:
  dsa-hw doctor
  dsa-hw doctor --target tensorrt/cuda
  dsa-hw doctor --json > doctor.json

A target of --target is also tried: a small network is measured on it for
some seconds. The last line has everything that an issue about it needs.

Exit codes: 0 done, 2 a target of --target cannot be used, or other packages
hide budgets or profilers.

--json prints an object with dsa_hw, python, platform, cores, packages,
own_packages, targets, trials.
"""
_NETWORK = "resnet8"  # small enough for any board
_TRIAL_SECONDS = 10.0


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "doctor",
        run,
        summary="show what is installed, and which runtimes and devices can be used here",
        description="Show what is installed, and which runtimes and devices can be used here and why not. Paste the "
        "output into an issue.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "--target",
        action="append",
        metavar="RUNTIME/DEVICE",
        help="check this target only, and measure a small network on it; may be repeated (default: check all that are "
        "known)",
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings; exit code 2 where a requested target or one of our packages cannot be used."""
    packages = {name: _version(name) for name in _PACKAGES}
    ours = {name: why_hidden(name) for name in OWN}
    targets = {name: _refusal(name) for name in args.target or _TARGETS}
    trials: dict[str, str] = {}
    for name in args.target or ():
        if targets[name] is None:
            targets[name], trials[name] = _trial(name)
    if args.json:
        print_json(_as_json(packages, ours, targets) | {"trials": trials})
    else:
        print(_as_text(packages, ours, targets))
        for name in args.target or ():
            print(f"\nFor an issue: {_summary(name, targets[name], trials.get(name, ''))}")
    failed = any(ours.values()) or (bool(args.target) and any(targets.values()))
    return DsaError.exit_code if failed else 0


def _as_json(
    packages: dict[str, str | None], ours: dict[str, str | None], targets: dict[str, str | None]
) -> dict[str, Any]:
    return {
        "dsa_hw": dsa_hw.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "packages": packages,
        "own_packages": {name: {"ours": why is None, "reason": why} for name, why in ours.items()},
        "targets": {name: {"usable": why is None, "reason": why} for name, why in targets.items()},
    }


def _as_text(packages: dict[str, str | None], ours: dict[str, str | None], targets: dict[str, str | None]) -> str:
    lines = [
        f"dsa_hw {dsa_hw.__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"{os.cpu_count()} cores",
        "",
        "Packages",
        *(f"  {name:<14} {version or 'not installed'}" for name, version in packages.items()),
        "",
        "Packages of this distribution",
        *(f"  {name:<14} {why or 'ours'}" for name, why in ours.items()),
        "",
        "Targets",
        *(f"  {name:<18} {'usable' if why is None else f'not usable: {why}'}" for name, why in targets.items()),
    ]
    return "\n".join(lines)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _trial(target: str) -> tuple[str | None, str]:
    """Measure a small network on a target; return why that failed, or None, and what came out."""
    from dsa_hw.zoo.models import load_model

    model, inputs = load_model(_NETWORK)
    try:
        found = dsa_hw.measure(model, inputs, target, name=_NETWORK, time_limit=_TRIAL_SECONDS)
    except Exception as error:  # whatever a driver or a runtime raises: the user is told, and exit code 2
        return one_line(f"{type(error).__name__}: {error}"), ""
    about = ", ".join(f"{key} {value}" for key, value in sorted(found.environment.items()))
    return None, one_line(f"{repr(found).splitlines()[0]}; {about}", 2000)


def _summary(target: str, refusal: str | None, trial: str) -> str:
    """Return one line with everything that an issue about a target needs."""
    where = f"dsa_hw {dsa_hw.__version__}, Python {platform.python_version()}, {platform.platform()}"
    return f"{where}; {trial}" if refusal is None else f"{where}; {target} not usable: {refusal}"


def _refusal(target: str) -> str | None:
    """Return why ``target`` cannot be used here; None where it can."""
    from profilers.targets import resolve

    try:
        resolve(target)
    except DsaError as error:
        return one_line(error)
    except Exception as error:  # a broken installation of a runtime raises whatever its import raises
        return one_line(f"{type(error).__name__}: {error}")
    return None
