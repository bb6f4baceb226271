"""dsa-hw setup: environments for packages that cannot live beside ours."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from dsa_hw.errors import DsaError, MissingDependencyError

__all__ = ["add", "run"]

_EXAMPLES = """examples:
  dsa-hw setup ethos-u
  dsa-hw setup ethos-u --constraints constraints.txt

pip's own settings hold (PIP_INDEX_URL, PIP_CONSTRAINT, pip.conf). torch is installed in the version that is here; to
get its CPU-only build, set PIP_EXTRA_INDEX_URL as pytorch.org says. DSA_HW_CACHE moves the folder.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "setup",
        help="make the environment for LiteRT and Arm Ethos-U",
        description="Make the environment of the LiteRT and Arm Ethos-U targets; their packages conflict with others.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("ethos-u", "litert"), help="both are the same environment")
    parser.add_argument("--constraints", type=Path, help="file of versions for pip (its option -c)")
    parser.add_argument("--again", action="store_true", help="remove the environment first, if there is one")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make the environment, and try it."""
    import torch

    from profilers.litert.client import PACKAGES, Worker, environment_folder, python_of, versions

    folder = environment_folder()
    if options.constraints and not options.constraints.is_file():
        raise DsaError(f"--constraints {options.constraints}: there is no such file")
    if options.again:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        found = versions()
        print(f"{folder} is there already; --again makes it anew")
    except MissingDependencyError:
        # The network crosses as an archive of torch.export, so both sides should have the same torch.
        packages = [f"torch=={torch.__version__.partition('+')[0]}", *PACKAGES]
        print(f"making {folder}: {', '.join(packages)}; some minutes, about 2 GB", flush=True)
        _call([sys.executable, "-m", "venv", str(folder)], "an environment cannot be made")
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
        _call([*install, *packages], "pip cannot install the packages")
        found = versions()
    worker = Worker()
    try:
        worker.ask("forget", model="nothing")  # starts the process: what is broken shows now
    finally:
        worker.close()
    print("ready: " + ", ".join(f"{name} {version}" for name, version in found.items()))
    print("next: dsa-hw profile --model mobilenet_v2 --input 1x3x96x96 --device ethos-u55-128")
    return 0


def _call(command: list[str], wrong: str) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise MissingDependencyError(
            f"{wrong} ({' '.join(command[1:4])} ended with {done.returncode}); see above for why"
        )
