"""What is left of the accuracy before any fine-tuning, without labels: as cut, refitted, distilled.

    python benchmarks/recovery.py --data cifar10.npz --weights resnet20-12fca82f.th --out recovery.jsonl
    python benchmarks/recovery.py --out recovery.jsonl --summary

The CIFAR-10 ResNet-20 is pruned to shares of its FLOPs with nothing at all, or with 512 unlabelled training images.
They guide keep ratios, order of channels and recovery; without them inputs are synthesised, once for all cases, and the
seconds of the first case contain that. One JSON line for each case; what is in the file is not repeated. Accuracy is
that on the 10,000 test images; ``agreement`` is what the certificate says, on held-out inputs. ``seconds`` and
``cpu_seconds`` are those of the whole call; the former mean something only where nothing else runs.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import torch

import dsa_hw
from dsa_hw.training.metrics import accuracy
from dsa_hw.zoo import models
from dsa_hw.zoo.data import Batches, load_data

SHARES, LEVELS, INPUTS = ("75%", "50%", "33%"), ("none", "refit", "distil"), ("nothing", "512 images")


def read(path: Path) -> pd.DataFrame:
    """Return the lines of a file as a table."""
    lines = path.read_text().splitlines() if path.exists() else []
    return pd.DataFrame([json.loads(line) for line in lines], columns=None if lines else ["share", "level", "inputs"])


def run(args: argparse.Namespace) -> None:
    """Run every case that is not in the file."""
    model, example = models.load_model(args.model, (1, 3, 32, 32))
    content = torch.load(args.weights, weights_only=True, map_location="cpu")
    state = content.get("state_dict", content)
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    model.eval()
    data = load_data("cifar10", args.data, seed=args.seed)
    assert isinstance(data.train, Batches)
    plain = replace(data.train, augment=0, flip=False)
    images = [inputs for (inputs, _), _ in zip(plain, range(4), strict=False)]
    dense = accuracy(model, data.test)
    begin_all = time.monotonic()
    for share in args.shares:
        for inputs in args.inputs:
            for level in args.levels:
                done = read(args.out)
                if ((done["share"] == share) & (done["level"] == level) & (done["inputs"] == inputs)).any():
                    continue
                begin, cpu = time.monotonic(), time.process_time()
                if args.time_limit is not None and begin - begin_all > args.time_limit:
                    return
                result = dsa_hw.allocate(
                    model, dsa_hw.FlopsBudget(share), example_inputs=example, recovery=level, seed=args.seed,
                    images=None if inputs == "nothing" else images, progress=False,
                )  # fmt: skip
                seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
                value = result.quality.value
                row = {
                    "agreement": None if value is None else value.value, "source": result.quality.source,
                    "model": args.model, "share": share, "inputs": inputs, "level": level, "dense": dense,
                    "accuracy": accuracy(result.model, data.test), "seconds": seconds, "cpu_seconds": cpu,
                    "threads": torch.get_num_threads(), "recovery": result.recovery,
                    "date": time.strftime("%Y-%m-%d"),
                }  # fmt: skip
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{share} {inputs}, {level}: {100 * row['accuracy']:.1f}% in {seconds:.0f} s", flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet20_a", help="CIFAR network with option-A shortcuts (%(default)s)")
    parser.add_argument("--data", type=Path, default=Path("cifar10.npz"))
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--shares", nargs="+", default=list(SHARES))
    parser.add_argument("--inputs", nargs="+", default=list(INPUTS), choices=INPUTS)
    parser.add_argument("--levels", nargs="+", default=list(LEVELS), choices=LEVELS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("recovery.jsonl"))
    parser.add_argument("--time-limit", type=float, help="begin no further case after so many seconds")
    parser.add_argument("--summary", action="store_true", help="print the table of what is in the file")
    args = parser.parse_args()
    if not args.summary:
        run(args)
    table = read(args.out)
    print((100 * table.pivot_table("accuracy", ["share", "inputs"], "level")).round(1).to_string())
    print(table.pivot_table("cpu_seconds", ["share", "inputs"], "level").round(0).to_string())


if __name__ == "__main__":
    main()
