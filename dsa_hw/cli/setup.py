"""``dsa-hw setup``: make an environment for packages that conflict with those of this project."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from dsa_hw.cli.options import add_command
from dsa_hw.errors import DsaError, MissingDependencyError

__all__ = ["add", "run"]

_EXAMPLES = """Examples:
  dsa-hw setup ethos-u
  dsa-hw setup ethos-u --constraints constraints.txt

The settings of pip apply (PIP_INDEX_URL, PIP_CONSTRAINT, pip.conf). The
environment gets the version of torch that is installed here; for its CPU-only
build set PIP_EXTRA_INDEX_URL as pytorch.org describes. The environment is in
the cache folder, which DSA_HW_CACHE changes.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "setup",
        run,
        summary="create the environment of the LiteRT and Arm Ethos-U targets",
        description="Create the environment of the LiteRT and Arm Ethos-U targets. Their packages conflict with "
        "others, so they are installed separately (about 2 GB).",
        examples=_EXAMPLES,
    )
    parser.add_argument("what", choices=("ethos-u", "litert"), help="both names stand for the same environment")
    parser.add_argument("--constraints", type=Path, metavar="FILE", help="versions for pip (its option -c)")
    parser.add_argument("--again", action="store_true", help="remove an existing environment first")


def run(options: argparse.Namespace) -> int:
    """Create the environment and start it once."""
    import torch

    from profilers.litert.client import PACKAGES, Worker, environment_folder, python_of, versions

    folder = environment_folder()
    if options.constraints and not options.constraints.is_file():
        raise DsaError(f"--constraints names no such file: {str(options.constraints)!r}.")
    if options.again:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        found = versions()
        print(f"Environment already exists at {folder}. Use --again to recreate it.")
    except MissingDependencyError:
        # Networks are passed as archives of torch.export, so both environments need the same torch.
        packages = [f"torch=={torch.__version__.partition('+')[0]}", *PACKAGES]
        print(f"Creating {folder} with {', '.join(packages)}. This takes some minutes and about 2 GB.", flush=True)
        _call([sys.executable, "-m", "venv", str(folder)], "Cannot create an environment")
        install = [
            str(python_of(folder)),
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--progress-bar",
            "on",
        ]
        if options.constraints:
            install += ["-c", str(options.constraints)]
        _call([*install, *packages], "Cannot install the packages")
        found = versions()
    worker = Worker()
    try:
        worker.ask("forget", model="nothing")  # starts the process, so that a broken environment fails now
    finally:
        worker.close()
    print("ready: " + ", ".join(f"{name} {version}" for name, version in found.items()))
    print("next: dsa-hw profile --model mobilenet_v2 --input 1x3x96x96 --device ethos-u55-128")
    return 0


def _call(command: list[str], wrong: str) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise MissingDependencyError(
            f"{wrong} ({' '.join(command[1:4])} ended with {done.returncode}). The reason is printed above."
        )
