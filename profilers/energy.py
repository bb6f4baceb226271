"""``python -m profilers.energy``: measure the energy of sampled configurations of a network on a device.

Examples::

    python -m profilers.energy --device cuda --time-limit 30min
    python -m profilers.energy --model mobilenet_v2 --device cpu --runtime onnxruntime --out energy.sqlite
    python -m profilers.energy --counter my_lab.meter:read_joules
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from profilers.cli import command

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, as ``python -m profilers.latency`` does."""
    return command("energy", arguments)


if __name__ == "__main__":
    sys.exit(main())
