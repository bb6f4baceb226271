"""What commands print: tables and text for people, JSON for programs.

The text is plain where standard output is no terminal, and with NO_COLOR (https://no-color.org).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from dsa_hw.cli.options import DEFAULT_TARGET
from dsa_hw.utils.text import json_text

__all__ = [
    "Table",
    "print_json",
    "print_table",
    "print_text",
    "random_weights_warning",
    "records",
    "shows_progress",
    "step_listener",
    "verify_command",
    "warn_of_random_weights",
]

_COLOURS = {"NOT MET": "red", "INCONCLUSIVE": "yellow", "MET": "green"}
_VERDICTS = re.compile(r"\b(NOT MET|INCONCLUSIVE|MET)\b")


@dataclass(frozen=True)
class Table:
    """A table of texts.

    Attributes:
        head: Titles of the columns.
        rows: A text for each column.
        left: Numbers of the columns whose texts stand on the left; the others stand on the right.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Collection[int] = (0,)

    def __str__(self) -> str:
        """Return the table as plain text, with two spaces between columns."""
        lines = [list(self.head), *map(list, self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(
                text.ljust(width) if i in self.left else text.rjust(width)
                for i, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


def print_table(table: Table) -> None:
    """Print a table; on a terminal with lines and colours, and folded to its width."""
    if _is_plain():
        print(table)
        return
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=SIMPLE_HEAD, pad_edge=False)
    for i, title in enumerate(table.head):
        drawn.add_column(Text(title), justify="left" if i in table.left else "right", overflow="fold")
    for row in table.rows:
        drawn.add_row(*(Text(text, style=_COLOURS.get(text, "")) for text in row))
    Console().print(drawn)


def print_text(text: object) -> None:
    """Print text; on a terminal, verdicts have colours."""
    if _is_plain():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    shown = Text(str(text))
    for match in _VERDICTS.finditer(shown.plain):
        shown.stylize(_COLOURS[match[0]], *match.span())
    Console(soft_wrap=True).print(shown)


def _is_plain() -> bool:
    """Return whether to print plain text: into a pipe or a file, or where NO_COLOR is set."""
    return not sys.stdout.isatty() or bool(os.environ.get("NO_COLOR"))


def print_json(content: Any) -> None:
    """Print one JSON object."""
    print(json_text(content))


def records(frame: Any) -> list[dict[str, Any]]:
    """Return the rows of a data frame as plain data for JSON, with null for what is not a number."""
    found: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    return found


def shows_progress(args: argparse.Namespace) -> bool:
    """Return whether to show progress: not with ``--json`` or ``--quiet``."""
    return not (args.json or args.quiet)


def step_listener(args: argparse.Namespace) -> Callable[[str], None] | None:
    """Return what prints each step to standard error; None where no progress is shown."""
    return (lambda text: print(text, file=sys.stderr, flush=True)) if shows_progress(args) else None


def random_weights_warning(args: argparse.Namespace, trained: bool = False) -> str:
    """Return that the weights are random; nothing where there are weights or the network is ``trained`` first.

    The factory of a user (``package.module:factory``) may load weights, so nothing is said of it.
    """
    from dsa_hw.zoo.onnx_networks import is_onnx
    from dsa_hw.zoo.user_code import is_code

    if (
        args.weights
        or trained
        or is_code(args.model)
        or is_onnx(args.model)
        or (args.pretrained and args.classes is None)
    ):
        return ""
    if args.pretrained:
        return f"The last layer may be new and random (--classes {args.classes}): its accuracy is meaningless."
    return (
        "The weights are random (no --pretrained or --weights): any accuracy or agreement with the dense network is "
        "meaningless."
    )


def warn_of_random_weights(args: argparse.Namespace, trained: bool = False) -> None:
    """Print what `random_weights_warning` returns, if anything."""
    if text := random_weights_warning(args, trained):
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)


def verify_command(args: argparse.Namespace) -> str:
    """Return the command that verifies the plan in the folder of ``--out``."""
    words = ["dsa-hw", "verify", str(args.out / "plan.json"), "--model", args.model]
    if args.classes is not None:
        words += ["--classes", str(args.classes)]
    if args.target != DEFAULT_TARGET:
        words += ["--target", args.target]
    return shlex.join(words)
