"""``dsa-hw profile``: the same command as ``python -m profilers.latency``."""

from __future__ import annotations

import argparse
from typing import Any

_EXAMPLES = """examples:
  dsa-hw profile --model resnet18 --device cpu --runtime onnxruntime --out profile.sqlite
  dsa-hw profile --model mobilenet_v2 --plot sawtooth.png
  dsa-hw profile --self-check
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    from profilers import cli

    parser = subparsers.add_parser(
        "profile",
        help="measure sampled channel configurations of a network on a device",
        description="Measure the latency of sampled channel configurations of a network on a device.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_options(parser)
    parser.set_defaults(run=cli.run)
