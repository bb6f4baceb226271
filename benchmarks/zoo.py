"""Networks of torchvision, timm, transformers, smp and ultralytics: found, shrunk, proved, counted.

    python benchmarks/zoo.py --out zoo.jsonl            # hours; resumes where it stopped
    python benchmarks/zoo.py --out zoo.jsonl --markdown # the tables for docs/benchmarks/zoo.md

For each model, in a process of its own: trace with torch.export alone (seconds), find_groups (seconds, with its
verification), random widths for all groups, shrink (seconds), masked == shrunk with random weights and statistics,
FLOPs and parameters predicted == counted. Torch-Pruning prunes half of every group by weight magnitude with the
classifier left alone; it passes when the pruned network runs, keeps its output shape and has fewer parameters.

Size rule: the model's own input, except convolutional networks above 100 M parameters, which get 96 x 96.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import multiprocessing
import pathlib
import resource
import signal
import sys
import time
import warnings
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode
from zoo_networks import Example, build, names

import budgets
from dsa_hw import find_groups, masked, shrink
from dsa_hw.channels.discovery import difference, randomise
from dsa_hw.utils.inputs import as_inputs
from dsa_hw.utils.modules import copy_module
from dsa_hw.utils.progress import counted_steps


def call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = as_inputs(inputs)
    return model(*args, **kwargs)


def counted_flops(model: nn.Module, inputs: Any) -> int:
    """What torch's counter sees, with attention as its two products: on CPUs it does not know the fused call."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.requires_grad_(False)  # the counter's module tracker trips over parameters used as inputs otherwise
    try:
        plain = sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False)  # no fused attention, LSTM
        with torch.no_grad(), plain[0], plain[1], FlopCounterMode(display=False) as counter:
            call(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
    return counter.get_total_flops()


def example(name: str) -> Example:
    model, inputs = build(name)
    convolutional = not any("Attention" in type(m).__name__ for m in model.modules())
    if convolutional and sum(p.numel() for p in model.parameters()) > 100e6 and "/" not in name.removeprefix("timm/"):
        inputs = (torch.randn(1, 3, 96, 96),)
    return model, inputs


def ours(name: str) -> dict[str, Any]:
    model, inputs = example(name)
    args, kwargs = as_inputs(inputs)
    shapes = [list(x.shape) for x in [*args, *kwargs.values()] if isinstance(x, torch.Tensor)]
    result: dict[str, Any] = {"params": sum(p.numel() for p in model.parameters()), "input": shapes}
    start = time.process_time()  # one thread; other programs may share the core
    torch.export.export(copy_module(model), args, kwargs, strict=False)
    result["export_s"] = time.process_time() - start
    start = time.process_time()
    groups = find_groups(model, inputs)
    result["find_s"] = time.process_time() - start
    rng = np.random.default_rng(0)
    kept = [np.sort(rng.permutation(size)[: rng.integers(1, size + 1)]) for size in groups.sizes]
    randomise(model, seed=1)
    start = time.process_time()
    small = shrink(model, groups, kept)
    result["shrink_s"] = time.process_time() - start
    result["resized"] = sum(type(m).__name__.startswith("Resized") for m in small.modules())
    with torch.no_grad():
        with masked(model, groups, kept):
            expected = call(model, inputs)
        result["difference"] = difference(expected, call(small, inputs))
    if not result["difference"] <= 1e-4:  # rounding in a deep random network, or a real fault? double precision tells
        double = tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs)
        model, small = model.double(), small.double()
        with torch.no_grad():
            with masked(model, groups, kept):
                expected = call(model, double)
            result["difference"] = difference(expected, call(small, double))
        small = small.float()
    widths = pd.DataFrame([[len(k) for k in kept]], columns=list(groups.names))
    result["flops_exact"] = bool(counted_flops(small, inputs) == budgets.flops(groups).predict(widths)[0])
    result["params_exact"] = bool(
        sum(p.numel() for p in small.parameters()) == budgets.params(groups).predict(widths)[0]
    )
    frame = groups.to_frame()
    prunable = frame[frame.why_frozen == ""]
    result |= {
        "groups": len(groups),
        "units": int(groups.sizes.sum()),
        "flops_share": float(prunable.flops_share.sum()),
    }
    reasons: collections.Counter[str] = collections.Counter()
    for frozen in groups.frozen:
        reasons[_kind_of(frozen.reason)] += frozen.channels
    result["frozen"] = dict(reasons)
    result["passes"] = (
        result["difference"] <= 1e-4 and result["flops_exact"] and result["params_exact"] and len(groups) > 0
    )
    return result


def _kind_of(reason: str) -> str:
    """A reason without the names of layers and numbers, so that equal ones add up."""
    if reason.startswith("the code at"):
        return "code holds the channel count: " + reason.split(" ")[3]
    if " in '" in reason:
        head, _, tail = reason.partition(" in '")
        return head + tail[tail.index("'") + 1 :]
    return reason


def torch_pruning(name: str) -> dict[str, Any]:
    import torch_pruning

    model, inputs = example(name)
    if not isinstance(inputs, tuple) or len(inputs) != 1:
        return {"passes": False, "error": "not tried: it takes one tensor"}
    before = sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        output = model(*inputs)
    if not isinstance(output, torch.Tensor):
        return {"passes": False, "error": "not tried: several outputs"}
    shape = output.shape
    last = shape[1] if len(shape) > 3 else shape[-1]
    layers = (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)  # those that may create the outputs stay whole
    ignored = [m for m in model.modules() if isinstance(m, layers) and last in m.weight.shape[:2]]
    start = time.process_time()
    pruner = torch_pruning.pruner.BasePruner(
        model,
        inputs[0],
        importance=torch_pruning.importance.GroupMagnitudeImportance(p=2),
        pruning_ratio=0.5,
        ignored_layers=ignored,
    )
    pruner.step()
    seconds = time.process_time() - start
    with torch.no_grad():
        same = model(*inputs).shape == shape
    after = sum(p.numel() for p in model.parameters())
    return {"seconds": seconds, "passes": bool(same and after < before), "params_left": after / before}


def _child(function: Any, name: str, seconds: float, pipe: Any) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds)))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        pipe.send(function(name))
    except Exception as error:
        pipe.send(
            {
                "passes": False,
                "error": f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}",
            }
        )


def limited(function: Any, name: str, seconds: float) -> dict[str, Any]:
    """Run in a forked process that may use so many seconds of processor time: a hang or a crash costs one row."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(function, name, seconds, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            return {"passes": False, "error": f"over {seconds:.0f} s"}
        return {"passes": False, "error": f"process died ({process.exitcode})"}
    finally:
        process.kill()
        process.join()


FAMILIES = {
    "segmentation": "torchvision, segmentation",
    "video": "torchvision, video",
    "optical_flow": "torchvision, optical flow",
    "smp": "segmentation-models-pytorch",
    "ultralytics": "ultralytics (YOLO)",
    "transformers": "transformers",
    "own": "our own",
    "timm": "timm",
}


def family(name: str) -> str:
    return FAMILIES[name.split("/")[0]] if "/" in name else "torchvision, classification"


def markdown(rows: list[dict[str, Any]]) -> str:
    known = set(names())
    rows = [row for row in rows if row["name"] in known]
    kinds = list(dict.fromkeys(map(family, names())))
    lines = [
        "| networks | measured | dsa_hw passes | Torch-Pruning passes | FLOPs prunable, mean | least "
        "| find_groups / export, median | largest |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        part = [row for row in rows if family(row["name"]) == kind]
        there = sum(family(name) == kind for name in names())
        if not part:
            lines.append(f"| {kind} | 0 of {there} | | | | | | |")
            continue
        found = [row["ours"] for row in part if "error" not in row["ours"]]
        share = [us["flops_share"] for us in found]
        ratio = [us["find_s"] / us["export_s"] for us in found]
        theirs = sum(row.get("torch_pruning", {}).get("passes", False) for row in part)
        lines.append(
            f"| {kind} | {len(part)} of {there} | {sum(row['ours']['passes'] for row in part)} | {theirs} "
            f"| {np.mean(share):.0%} | {min(share):.0%} | {np.median(ratio):.1f} | {max(ratio):.1f} |"
        )
    for kind in kinds:
        part = sorted((row for row in rows if family(row["name"]) == kind), key=lambda row: str(row["name"]))
        if part:
            summary = f'<details markdown="1"><summary>{kind}: {len(part)} networks</summary>'
            lines += ["", summary, "", table(part), "", "</details>"]
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | groups | FLOPs prunable | find_groups (export alone) s | shrink s | masked = shrunk | F = counted "
        "| Torch-Pruning | frozen besides the output |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        us, them = row["ours"], row.get("torch_pruning", {})
        other = f"{them['seconds']:.1f} s" if them.get("passes") else f"fails: {them.get('error', 'wrong output')}"
        if "error" in us:
            lines.append(f"| {row['name']} | | | | | {us['error']} | | {other} | |")
            continue
        frozen = "; ".join(f"{n} {reason}" for reason, n in us["frozen"].items() if reason != "network output")
        exact = us["flops_exact"] and us["params_exact"]
        lines.append(
            f"| {row['name']} | {us['groups']} | {us['flops_share']:.0%} | {us['find_s']:.1f} ({us['export_s']:.1f}) "
            f"| {us['shrink_s']:.2f} | {us['difference']:.0e} | {'exact' if exact else 'NO'} | {other} | {frozen} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", default="zoo.jsonl", help="results, one JSON object a line; what is there is not done again"
    )
    parser.add_argument("--only", nargs="*", help="just these models")
    parser.add_argument("--no-rival", action="store_true", help="leave Torch-Pruning out")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of processor time per model")
    parser.add_argument("--rival-limit", type=float, default=60.0, help="seconds per model for Torch-Pruning")
    parser.add_argument("--markdown", action="store_true", help="print the table of what is there")
    args = parser.parse_args()
    path = pathlib.Path(args.out)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if args.markdown:
        print(markdown(rows))
        return
    done = {row["name"] for row in rows}
    todo = [name for name in (args.only or names()) if name not in done]
    with path.open("a") as file, counted_steps(len(todo), "networks") as count:
        for name in todo:
            row: dict[str, Any] = {"name": name, "ours": limited(ours, name, args.limit)}
            if not args.no_rival:
                row["torch_pruning"] = limited(torch_pruning, name, args.rival_limit)
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
            if not row["ours"]["passes"]:
                print(f"{name}: {row['ours']}", file=sys.stderr)
            count(name)
    print(markdown(rows).partition("\n\n")[0])


if __name__ == "__main__":
    main()
