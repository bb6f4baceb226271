"""The command behind ``python -m profilers.latency``, ``python -m profilers.energy`` and ``dsa-hw profile``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import profilers  # its names are imported on first use, so that --help stays fast
from dsa_hw.errors import ProfileError
from dsa_hw.utils.arguments import OneLineParser, duration, positive_integer, share, whole_number
from dsa_hw.utils.commands import run_command
from dsa_hw.utils.progress import Bar
from dsa_hw.utils.text import json_text
from profilers import summary

__all__ = ["add_options", "command", "run"]

_EXAMPLES = """examples:
  {prog} --model resnet18 --device cpu --runtime onnxruntime
  {prog} --model mobilenet_v2 --device cuda --time-limit 30min --out mobilenet.sqlite
  {prog} --model my_package.networks:make --input 1x3x96x96 --self-check
"""


def command(quantity: str, arguments: Sequence[str] | None = None) -> int:
    """Parse arguments (``sys.argv`` if None), measure, print, and return the exit code."""
    prog = f"python -m profilers.{quantity}"
    parser = OneLineParser(
        prog=prog,
        description=f"Measure the {quantity} of sampled channel configurations of a network on a device.",
        epilog=_EXAMPLES.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser, quantity)

    def parse_and_run() -> int:
        options = parser.parse_args(arguments)
        return run_command(prog, lambda: run(options), quiet=options.quiet, as_json=options.json, out=options.out)

    return run_command(prog, parse_and_run)


def add_options(parser: argparse.ArgumentParser, quantity: str = "latency") -> None:
    """Add the options of the command; ``quantity`` is "latency" or "energy"."""
    add = parser.add_argument
    parser.set_defaults(quantity=quantity, counter=None, fleet=None, insecure=False)
    if quantity == "energy":
        add("--counter", help="your own meter: package.module:function that returns joules (default: the device's own)")
    add(
        "--model",
        default="resnet18",
        help="torchvision name, timm/NAME, or package.module:factory (default: %(default)s)",
    )
    add("--input", help="input shape, for example 1x3x224x224 (default: the model's own)")
    add("--batch", type=positive_integer, help="batch size (default: that of the input shape)")
    add(
        "--device",
        default="cpu",
        help="cpu, cuda, mps, ethos-u55-128, ssh://USER@HOST, adb:SERIAL, table:PATH.csv (default: %(default)s)",
    )
    if quantity == "latency":
        add("--fleet", help="measure on the boards behind this Dask scheduler, for example tls://scheduler:8786")
        add("--insecure", action="store_true", help="accept --fleet tcp:// to another computer, without encryption")
    add(
        "--runtime",
        default="auto",
        help="auto, torch, compile, onnxruntime, openvino, tensorrt or litert (default: %(default)s)",
    )
    add("--precision", default="fp32", help="fp32, fp16, int8, or int8-SCHEME as in a report (default: %(default)s)")
    add("--threads", type=positive_integer, default=1, help="CPU threads of one run (default: %(default)s)")
    add(
        "--samples",
        type=positive_integer,
        default=40,
        help="configurations to fit a cost model to (default: %(default)s)",
    )
    add(
        "--holdout",
        type=whole_number,
        default=10,
        help="configurations to test it with, drawn first (default: %(default)s)",
    )
    add(
        "--grid",
        default="auto",
        help="channel counts to sample: multiples of N, or auto for those that run efficiently (default: %(default)s)",
    )
    add(
        "--statistic",
        default="quiet",
        choices=("quiet", "median", "p90", "p95", "p99"),
        help="quiet: the lower quartile of the dense network times the median ratio to it; median: with its median; "
        "p90, p95, p99: of the runs themselves (default: %(default)s)",
    )
    add(
        "--require",
        type=share,
        help="fail where a 95%% interval is wider than this, for example 2%%; without it, every interval is accepted",
    )
    add("--time-limit", type=duration, default=600.0, help="for example 90, 90s or 10min (default: 10min)")
    add("--out", default="profile.sqlite", type=Path, help="store; continued if it exists (default: %(default)s)")
    add("--plot", type=Path, help="write a plot of the grid sweep to this file")
    add("--seed", type=whole_number, default=0, help="seed of the sampling (default: %(default)s)")
    add("--self-check", action="store_true", help="measure the same configurations twice and report the difference")
    add("--json", action="store_true", help="print one JSON object instead of text")
    add("--quiet", action="store_true", help="show no progress and no warnings")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    text, content = _self_check(options) if options.self_check else _profile(options)
    print(json_text(content) if options.json else text)
    return 0


def _profile(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the summary of a profile as text and as plain data."""
    if options.fleet:
        return _profile_fleet(options)
    if options.insecure:
        raise ProfileError("--insecure is an option of --fleet. Leave it out.")
    _check_target(options)
    model, inputs = _network(options)
    with Bar(shown=not (options.json or options.quiet)) as bar:
        found = profilers.profile(
            model,
            inputs,
            f"{options.runtime}/{options.device}",
            **_settings(options, bar),
            quantity=options.quantity,
            counter=options.counter,
        )
    if options.plot:
        from profilers.profiling.plots import save_grid_plot

        save_grid_plot(found, options.plot)
    return summary.profile_text(found, options.out), summary.profile_data(found, options.out)


def _profile_fleet(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the summaries of a profile for each kind of board."""
    from profilers.fleet import profile_fleet
    from profilers.fleet.profile import check_address

    if options.plot:
        raise ProfileError("--plot shows one device. Leave it out with --fleet.")
    check_address(options.fleet, options.insecure)  # before the model is loaded
    model, inputs = _network(options)
    with Bar(shown=not (options.json or options.quiet)) as bar:
        profiles = profile_fleet(
            model,
            inputs,
            options.fleet,
            f"{options.runtime}/{options.device}",
            **_settings(options, bar),
            insecure=options.insecure,
        )
    out = options.out
    texts = [f"kind: {kind}\n{summary.profile_text(found, out)}" for kind, found in profiles.items()]
    kinds = [{"kind": kind, **summary.profile_data(found, out)} for kind, found in profiles.items()]
    return "\n\n".join(texts), {"kinds": kinds, "out": str(out)}


def _self_check(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Return the result of measuring twice."""
    if options.fleet:
        raise ProfileError("--self-check is for one device. Run it on a board, without --fleet.")
    _check_target(options)
    model, inputs = _network(options)
    with Bar(shown=not (options.json or options.quiet)) as bar:
        found = profilers.self_check(
            model,
            inputs,
            f"{options.runtime}/{options.device}",
            precision=options.precision,
            threads=options.threads,
            time_limit=options.time_limit,
            rules=_rules(options),
            seed=options.seed,
            listener=bar,
            quantity=options.quantity,
            counter=options.counter,
        )
    return summary.self_check_text(found, options.quantity), summary.self_check_data(found)


def _network(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    from dsa_hw.zoo.models import load_model, parse_shape

    shape = parse_shape(options.input) if options.input else None
    model, inputs = load_model(options.model, shape)
    if options.batch:
        model, inputs = load_model(options.model, (options.batch, *inputs[0].shape[1:]))
    return model, inputs


def _settings(options: argparse.Namespace, bar: Bar) -> dict[str, Any]:
    """Return the arguments that a profile of one device and of a fleet have in common."""
    names = ("samples", "holdout", "grid", "out", "time_limit", "precision", "threads", "seed")
    chosen = {name: getattr(options, name) for name in names}
    return {**chosen, "rules": _rules(options), "name": options.model, "listener": bar}


def _rules(options: argparse.Namespace) -> Any:
    return profilers.MeasuringRules(options.statistic, require=options.require)


def _check_target(options: argparse.Namespace) -> None:
    """Refuse a missing runtime, device or counter before the model is loaded."""
    profilers.resolve(f"{options.runtime}/{options.device}", precision=options.precision, threads=options.threads)
    if options.quantity == "energy":
        from profilers.measuring.counters import Counter, find

        Counter.of(options.counter) if options.counter else find(options.device)
