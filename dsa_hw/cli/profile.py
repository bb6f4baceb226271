"""``dsa-hw profile``: the same command as ``python -m profilers.latency``."""

from __future__ import annotations

from typing import Any

from dsa_hw.cli.options import add_command
from profilers import cli

__all__ = ["add"]

_EXAMPLES = """Examples:
  dsa-hw profile --model resnet18 --device cpu --runtime onnxruntime
  dsa-hw profile --model mobilenet_v2 --plot grid.png --out mobilenet.sqlite
  dsa-hw profile --self-check

After an interruption the same command continues. Exit codes: 0 done, 2
invalid input, 4 less precise than --require.

--json prints an object with target, network, statistic, quantity, unit, grid,
grid_evidence, noise, interval, estimated, untrusted, breakdown, prepared,
agreement, environment, configurations, out, next.
"""


def add(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = add_command(
        subparsers,
        "profile",
        cli.run,
        summary="measure sampled channel configurations of a network on a device",
        description="Measure the latency of sampled channel configurations of a network on a device.",
        examples=_EXAMPLES,
        continues=True,
        output=False,
    )
    cli.add_options(parser)
