"""``dsa-hw setup``: make an environment for packages that conflict with those of this project.

All packages but torch are installed from a lock file with hashes, profilers/litert/requirements.txt, as wheels: nothing
is built. torch must have the version of this environment, and its builds (CPU, CUDA) are different files, so that it
cannot be in the lock file; pip installs it from the index that it is configured with.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

from dsa_hw.cli.options import add_command
from dsa_hw.cli.output import print_json
from dsa_hw.errors import MissingDependencyError

__all__ = ["add", "run"]

_EXAMPLES = """Examples:
  dsa-hw setup ethos-u
  dsa-hw setup ethos-u --again

Packages are installed from a lock file with SHA-256 hashes, wheels only. The
settings of pip apply (PIP_INDEX_URL, pip.conf). The environment gets the version
of torch that is installed here; for its CPU-only build set PIP_EXTRA_INDEX_URL
as pytorch.org describes. The environment is in the cache folder, which
DSA_HW_CACHE changes.

--json prints an object with folder, versions.
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
    parser.add_argument("--again", action="store_true", help="remove an existing environment first")


def run(options: argparse.Namespace) -> int:
    """Create the environment and start it once."""
    import torch

    from profilers.litert.client import Worker, environment_folder, python_of, versions

    def say(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr if options.json else sys.stdout, flush=True)

    folder = environment_folder()
    if options.again:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        found = versions()
        say(f"Environment already exists at {folder}. Use --again to recreate it.")
    except MissingDependencyError:
        # Networks are passed as archives of torch.export, so both environments need the same torch.
        version = torch.__version__.partition("+")[0]
        say(f"Creating {folder} with torch {version}. This takes some minutes and about 2 GB.")
        _call([sys.executable, "-m", "venv", str(folder)], "Cannot create an environment")
        _install(python_of(folder), version)
        found = versions()
    worker = Worker()
    try:
        worker.ask("forget", model="nothing")  # starts the process, so that a broken environment fails now
    finally:
        worker.close()
    if options.json:
        print_json({"folder": str(folder), "versions": found})
    else:
        print("ready: " + ", ".join(f"{name} {version}" for name, version in found.items()))
        print("next: dsa-hw profile --model mobilenet_v2 --input 1x3x96x96 --device ethos-u55-128")
    return 0


def _install(python: Path, torch_version: str) -> None:
    """Install the lock file, and torch without changing what is locked."""
    install = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--only-binary", ":all:"]
    with resources.as_file(resources.files("profilers.litert") / "requirements.txt") as lock:
        _call([*install, "--require-hashes", "--no-deps", "-r", str(lock)], "Cannot install the locked packages")
        # A constraint with a hash would demand one for torch.
        locked = re.findall(r"^([\w.-]+==[^\\\n]+?) *\\?$", lock.read_text(), re.M)
    constraints = python.parent.parent / "constraints.txt"
    constraints.write_text("".join(f"{requirement}\n" for requirement in locked))
    _call([*install, "-c", str(constraints), f"torch=={torch_version}"], "Cannot install torch")


def _call(command: list[str], wrong: str) -> None:
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise MissingDependencyError(
            f"{wrong} ({' '.join(command[1:4])} ended with {done.returncode}). The reason is printed above."
        )
