"""``python -m profilers.latency``: measure the latency of sampled configurations of a network on a device.

Examples::

    python -m profilers.latency --device cuda
    python -m profilers.latency --model mobilenet_v2 --runtime onnxruntime --threads 1 --out mobilenet.sqlite
    python -m profilers.latency --model my_package.networks:make --input 1x3x96x96 --self-check
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from profilers.cli import command

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    The codes are 0 (done), 2 (invalid input), 4 (measurements cannot be trusted) and 130 (interrupted).
    """
    return command("latency", arguments)


if __name__ == "__main__":
    sys.exit(main())
