"""The command ``dsa-hw``. Each subcommand is a module with ``add`` (its options) and ``run``."""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
from collections.abc import Sequence

import dsa_hw
from dsa_hw.cli.run_file import RUN_FILE, as_yaml, chooses_code, effective_options, expand_run_file, save_run_file
from dsa_hw.errors import DsaError
from dsa_hw.utils.arguments import OneLineParser
from dsa_hw.utils.commands import run_command
from dsa_hw.utils.packages import OWN, why_hidden

__all__ = ["build_parser", "main"]

_COMMANDS = (
    "demo", "inspect", "allocate", "minimize", "verify", "export", "compare", "sweep", "profile", "fit", "doctor",
    "setup",
)  # fmt: skip
_EPILOG = """Examples:
  dsa-hw demo
  dsa-hw inspect --model resnet18
  dsa-hw allocate --model resnet18 --pretrained --budget latency=50% --out small/
  dsa-hw allocate --config small/run.yaml --out again/

`dsa-hw COMMAND --help` describes a command. Exit codes: 0 done, 1 unexpected
error (its traceback is written to a file), 2 invalid input, 3 a budget cannot
be met or is not met, 4 a measurement is not precise enough, 130 interrupted,
143 terminated.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    The codes are 0 (done), 1 (unexpected error; its traceback is in a file), 2 (invalid input), 3 (a budget cannot be
    met or is not met), 4 (a measurement is not precise enough), 130 (interrupted) and 143 (terminated).
    """
    if hidden := next(filter(None, map(why_hidden, OWN)), None):
        print(f"dsa-hw: {hidden}", file=sys.stderr)
        return DsaError.exit_code
    words = sys.argv[1:] if argv is None else list(argv)
    at = next((i for i, word in enumerate(words) if word in _COMMANDS), None)
    return run_command("dsa-hw" if at is None else f"dsa-hw {words[at]}", lambda: _run(words, at))


def _run(words: list[str], at: int | None) -> int:
    """Run the command at a position of the words; without one, the parser says what is missing."""
    parser = build_parser()
    typed, options = words, {}
    if at is not None:
        command, own = words[at], _parsers(parser)[words[at]]
        rest = expand_run_file(command, own, words[at + 1 :])
        options = effective_options(command, own, rest)
        if "--print-config" in rest:
            print(as_yaml(options), end="")
            return 0
        words = [*words[: at + 1], *rest]
    args, unknown = parser.parse_known_args(words)
    if unknown:  # reported as an error of the command; argparse would name dsa-hw alone
        OneLineParser(prog=f"dsa-hw {args.command}").error(f"unknown arguments: {shlex.join(unknown)}")
    args.typed = shlex.join(["dsa-hw", *typed])
    out = args.out if args.continues else None

    def save() -> None:
        if out is not None and out.is_dir():
            save_run_file(out, options)

    def run() -> int | None:
        try:
            code: int | None = args.run(args)
        except KeyboardInterrupt:
            save()
            raise
        save()
        return code

    again = "Repeat the command to continue."
    if out is not None and out.suffix != ".sqlite" and not chooses_code(options):
        again = f"Continue with: {shlex.join(['dsa-hw', args.command, '--config', str(out / RUN_FILE)])}"
    return run_command(
        f"dsa-hw {args.command}", run, verbose=args.verbose, quiet=args.quiet, as_json=args.json, out=out, again=again
    )


def _parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command."""
    found = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(found.choices)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of ``dsa-hw`` with every command."""
    parser = OneLineParser(
        prog="dsa-hw",
        description="Prune PyTorch networks to a latency, energy or FLOPs budget, measured and\n"
        "verified on the target device.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dsa-hw {dsa_hw.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="log each step, and tracebacks of errors")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name in _COMMANDS:  # imported here: they need the packages that `main` checks first
        importlib.import_module(f"dsa_hw.cli.{name}").add(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
