"""``python -m profilers.energy``: what sampled configurations of a network take in joules on a device.

Examples::

    python -m profilers.energy --device cuda --time-limit 30min
    python -m profilers.energy --model mobilenet_v2 --device cpu --runtime onnxruntime --out energy.sqlite
    python -m profilers.energy --counter my_lab.meter:read_joules
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from profilers.latency import add_options, run

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; exit codes as ``python -m profilers.latency``."""
    parser = argparse.ArgumentParser(
        prog="python -m profilers.energy",
        description="Measure what sampled channel configurations of a network take in joules on a device.",
        epilog="example: python -m profilers.energy --model resnet18 --device cuda --time-limit 30min",
    )
    add_options(parser, quantity="energy")
    return run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
