"""``python -m profilers.latency``: what sampled configurations of a network take on a device.

Examples::

    python -m profilers.latency --device cuda
    python -m profilers.latency --model mobilenet_v2 --runtime onnxruntime --threads 1 --out mobilenet.sqlite
    python -m profilers.latency --model my_package.networks:make --input 1x3x96x96 --self-check
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsa_hw.errors import DsaError, ProfileError

__all__ = ["add_options", "main", "run", "share"]

_ALLOW = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code: 0, 2 (bad input), 4 (a measurement that cannot be trusted), 130 (Ctrl-C)."""
    parser = argparse.ArgumentParser(
        prog="python -m profilers.latency",
        description="Measure what sampled channel configurations of a network take on a device.",
        epilog="example: python -m profilers.latency --model resnet18 --device cpu --runtime onnxruntime",
    )
    add_options(parser)
    return run(parser.parse_args(arguments))


def run(options: argparse.Namespace) -> int:
    """The command with its options parsed (``dsa-hw profile`` is the same command)."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        report = _self_check(options) if options.self_check else _profile(options)
    except DsaError as error:
        message = " ".join(str(error).split())
        sys.stderr.write(f"error: {message}\n")
        if options.json:
            sys.stdout.write(json.dumps({"error": message, "exit_code": error.exit_code}) + "\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write(f"\nstopped; what was measured is in {options.out}, and the same command continues it\n")
        return 130
    sys.stdout.write((json.dumps(report["json"]) if options.json else report["text"]) + "\n")
    return 0


def add_options(parser: argparse.ArgumentParser, quantity: str = "latency") -> None:
    """Every option of the command; ``python -m profilers.energy`` is the same one with a counter."""
    add = parser.add_argument
    parser.set_defaults(quantity=quantity, counter=None, fleet=None)
    if quantity == "energy":
        add("--counter", help="your own meter: package.module:function that returns joules (the device's own counter)")
    add("--model", default="resnet18", help="torchvision name, timm/NAME, or package.module:factory (%(default)s)")
    add("--input", help="input shape, for example 1x3x224x224 (the model's own)")
    add("--batch", type=_positive, help="batch size (that of the input shape)")
    add(
        "--device",
        default="cpu",
        help="cpu, cuda, cuda:1, mps, ethos-u55-128, ssh://USER@HOST, adb:SERIAL or table:PATH.csv (%(default)s)",
    )
    if quantity == "latency":
        add("--fleet", help="measure on the boards behind this Dask scheduler, for example tls://scheduler:8786")
    add(
        "--runtime",
        default="auto",
        help="auto, torch, compile, onnxruntime, openvino, tensorrt or litert (%(default)s)",
    )
    add("--precision", default="fp32", choices=("fp32", "fp16"))
    add("--threads", type=_positive, default=1, help="CPU threads of one run (%(default)s)")
    add("--samples", type=_positive, default=40, help="configurations to fit a model to (%(default)s)")
    add("--holdout", type=int, default=10, help="configurations to test it with, drawn first (%(default)s)")
    add(
        "--grid",
        default="auto",
        help="channel counts to sample: auto finds what the target likes, N: multiples (%(default)s)",
    )
    add("--statistic", default="quiet", choices=("quiet", "median", "p90", "p95", "p99"), help="(%(default)s)")
    add(
        "--allow",
        type=share,
        default=_ALLOW,
        help="largest disturbance of a measurement; more than the default gets an answer on a busy machine (2%%)",
    )
    add("--time-limit", type=_duration, default=600.0, help="for example 90, 90s or 10min (10min)")
    add("--out", default="profile.sqlite", type=Path, help="store; continued if it exists (%(default)s)")
    add("--plot", type=Path, help="write the saw-tooth of the grid sweep to this picture")
    add("--seed", type=int, default=0)
    add("--self-check", action="store_true", help="measure the same configurations twice and report the difference")
    add("--reset-reference", action="store_true", help="the machine has changed for good: forget how fast it was")
    add("--json", action="store_true", help="print one JSON object")


def _positive(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1")
    return int(text)


def share(text: str) -> float:
    """``"5%"`` -> 0.05, for options."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if not match or not 0 < float(match[1]) <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share; write for example 2% or 5%")
    return float(match[1]) / 100


def _duration(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)?", text)
    if not match or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; write for example 90, 90s or 10min")
    return float(match[1]) * {None: 1, "s": 1, "min": 60, "h": 3600}[match[2]]


def _network(options: argparse.Namespace) -> tuple[Any, tuple[Any, ...]]:
    from dsa_hw.zoo import models

    shape = models.parse_shape(options.input) if options.input else None
    model, inputs = models.load_model(options.model, shape)
    if options.batch:
        shape = (options.batch, *inputs[0].shape[1:])
        model, inputs = models.load_model(options.model, shape)
    return model, inputs


class _Bar:
    """A progress bar on standard error: stage, share done, time left, what is measured, and how much is trusted."""

    def __init__(self, quiet: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(
            total=100.0,
            disable=True if quiet else None,  # None: only on a terminal
            bar_format="{desc} {percentage:3.0f} %|{bar}| {elapsed} < {remaining} {postfix}",
            file=sys.stderr,
        )
        self._stage = ""

    def __call__(self, event: Any) -> None:
        if event.stage != self._stage:
            self._stage = event.stage
            self._bar.set_description_str(event.stage, refresh=True)
        notes = [event.what] if event.what else []
        if event.accepted is not None:
            notes.append(f"{100 * event.accepted:.0f} % of runs trusted")
        self._bar.set_postfix_str(", ".join(notes), refresh=False)
        if event.done is not None:
            self._bar.update(max(100 * event.done - self._bar.n, 0))

    def close(self) -> None:
        self._bar.close()


def _profile(options: argparse.Namespace) -> dict[str, Any]:
    from tqdm.contrib.logging import logging_redirect_tqdm

    from profilers import profile

    if options.holdout < 0:
        raise ProfileError(f"--holdout {options.holdout}: give 0 or more")
    if options.fleet:
        return _profile_fleet(options)
    _check_target(options)
    model, inputs = _network(options)
    bar = _Bar(options.json)
    try:
        with logging_redirect_tqdm():
            table = profile(
                model,
                inputs,
                f"{options.runtime}/{options.device}",
                **_settings(options, bar),
                quantity=options.quantity,
                counter=options.counter,
            )
    finally:
        bar.close()
    if options.plot:
        _plot(dict(table.attrs), options)
    return {"json": _as_json(table, options), "text": _summary(table, options)}


def _profile_fleet(options: argparse.Namespace) -> dict[str, Any]:
    """One report for each kind of board."""
    from tqdm.contrib.logging import logging_redirect_tqdm

    from profilers.fleet import profile_fleet

    if options.plot:
        raise ProfileError("--plot shows one device; leave it out with --fleet")
    model, inputs = _network(options)
    bar = _Bar(options.json)
    try:
        with logging_redirect_tqdm():
            tables = profile_fleet(
                model,
                inputs,
                options.fleet,
                f"{options.runtime}/{options.device}",
                **_settings(options, bar),
            )
    finally:
        bar.close()
    kinds = [{"kind": kind, **_as_json(table, options)} for kind, table in tables.items()]
    texts = [f"kind: {kind}\n{_summary(table, options)}" for kind, table in tables.items()]
    return {"json": {"kinds": kinds, "out": str(options.out)}, "text": "\n\n".join(texts)}


def _settings(options: argparse.Namespace, bar: _Bar) -> dict[str, Any]:
    """What a profile of one device and of a fleet have in common."""
    names = ("samples", "holdout", "grid", "out", "time_limit", "precision", "threads", "reset_reference", "seed")
    chosen = {name: getattr(options, name) for name in names}
    return {**chosen, "rules": _rules(options), "name": options.model, "listener": bar}


def _rules(options: argparse.Namespace) -> Any:
    from profilers import MeasuringRules

    return MeasuringRules.allowing(options.allow, options.statistic)


def _check_target(options: argparse.Namespace) -> None:
    """Before the model is loaded: a missing runtime, device or counter should cost no waiting."""
    from profilers.targets import resolve

    resolve(f"{options.runtime}/{options.device}", precision=options.precision, threads=options.threads)
    if options.quantity == "energy":
        from profilers.measuring.counters import Counter, find

        Counter.of(options.counter) if options.counter else find(options.device)


def _plot(attrs: dict[Any, Any], options: argparse.Namespace) -> None:
    from profilers.profiling.grid import plot

    if not attrs["grid_evidence"]:
        raise ProfileError("--plot shows the sweep of --grid auto, and no sweep was made; leave --grid out")
    try:
        plot(attrs["grid_evidence"], attrs["grid"], f"{options.model} on {attrs['target']}").savefig(
            options.plot, dpi=150
        )
    except (OSError, ValueError) as error:
        raise ProfileError(f"the picture cannot be written to {options.plot}: {error}") from error


def _next(options: argparse.Namespace) -> str:
    allowed = "" if options.allow == _ALLOW else f" --allow {100 * options.allow:g}%"
    return f"dsa-hw fit {options.out}{allowed}"


def _as_json(table: Any, options: argparse.Namespace) -> dict[str, Any]:
    attrs = table.attrs
    return {
        **{key: attrs[key] for key in ("target", "network", "statistic", "quantity", "unit", "grid", "grid_evidence")},
        **{key: attrs[key] for key in ("noise", "estimated")},
        **{key: attrs[key] for key in ("rejected", "untrusted", "breakdown", "prepared", "agreement", "environment")},
        "configurations": table.to_dict("records"),
        "out": str(options.out),
        "next": _next(options),
    }


def _summary(table: Any, options: argparse.Namespace) -> str:
    attrs = table.attrs
    dense = table[table["split"] == "dense"]
    rows = [("network", f"{attrs['network']}, {len(attrs['names'])} channel groups")]
    rows.append(("target", attrs["target"]))
    column, unit = ("joules", "mJ") if attrs["quantity"] == "energy" else ("seconds", "ms")
    if attrs["estimated"]:
        rows.append(("estimated", f"not measured: {attrs['estimated']}"))
    if len(dense):
        d = dense.iloc[0]
        interval = (
            "" if attrs["estimated"] else f" [{1e3 * d['low']:.4g}, {1e3 * d['high']:.4g}] ({attrs['statistic']})"
        )
        net = f", net of idling {1e3 * d['net']:.4g} {unit} at {d['watts']:.4g} W" if column == "joules" else ""
        rows.append(("dense", f"{1e3 * d[column]:.4g} {unit}{interval}{net}"))
    rows.append(("range", f"{1e3 * table[column].min():.4g} to {1e3 * table[column].max():.4g} {unit}"))
    counts = table["split"].value_counts()
    rows.append(("configurations", ", ".join(f"{n} {split}" for split, n in counts.items())))
    rows.append(("grid", _grid_line(attrs)))
    if not attrs["estimated"]:
        noise = f"spread {100 * attrs['noise']:.1f} % (median), {100 * attrs['rejected']:.0f} % of the runs rejected"
        rows.append(("noise", noise))
    if attrs["untrusted"]:
        rows.append(("left out", f"{attrs['untrusted']} configurations that cannot be trusted yet"))
    rows.append(
        ("made by", attrs["prepared"] + (f", outputs agree to {attrs['agreement']:.0e}" if attrs["agreement"] else ""))
    )
    spent = attrs["breakdown"]
    parts = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in spent.items())
    rows.append(("time", f"{sum(spent.values()):.0f} s: {parts}"))
    rows.append(("store", str(options.out)))
    width = max(len(name) for name, _ in rows)
    return "\n".join([*(f"{name:<{width}}  {text}" for name, text in rows), f"next: {_next(options)}"])


def _grid_line(attrs: dict[str, Any]) -> str:
    grid = attrs["grid"]
    values = sorted(set(grid.values()))
    text = ", ".join(f"{v} ({sum(g == v for g in grid.values())} groups)" for v in values)
    bad = [e for e in attrs["grid_evidence"] if e["width"] % grid.get(e["group"], 1)]
    if bad:
        worst = max(bad, key=lambda e: e["excess"])
        where = f"{worst['channels']} channels of {worst['group']}"
        text += f"; off the grid up to {100 * worst['excess']:.0f} % slower ({where})"
    return text


def _self_check(options: argparse.Namespace) -> dict[str, Any]:
    from profilers import self_check

    if options.fleet:
        raise ProfileError("--self-check is for one device; run it on a board, without --fleet")
    _check_target(options)
    model, inputs = _network(options)
    bar = _Bar(options.json)
    try:
        table = self_check(
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
    finally:
        bar.close()
    attrs = table.attrs
    unit = "mJ" if options.quantity == "energy" else "ms"
    shown = table[["first", "second"]] * 1e3
    lines = [
        f"self-check on {attrs['target']}: {len(table)} configurations, each measured twice",
        f"  first {unit}  second {unit}  difference",
    ]
    for (_, row), difference in zip(shown.iterrows(), table["difference"], strict=True):
        lines.append(f"  {row['first']:8.4g}  {row['second']:9.4g}  {100 * difference:+9.2f} %")
    lines.append(f"difference: median {100 * attrs['median']:.2f} %, largest {100 * attrs['largest']:.2f} %")
    return {"json": {**attrs, "configurations": table.to_dict("records")}, "text": "\n".join(lines)}


if __name__ == "__main__":
    sys.exit(main())
