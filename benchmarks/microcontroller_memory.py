"""How close the counted arena and flash come to Vela's own report.

    dsa-hw setup ethos-u
    python benchmarks/microcontroller_memory.py

Each network is converted once. Configurations with random widths are narrowed, quantised and compiled by Vela for the
device, with its default system and memory mode; the table compares the SRAM and flash that Vela reports with
``MemoryBudget(part="sram")`` and ``MemoryBudget(part="flash")``. The first configuration is the dense network. Weights
are random, so there is no accuracy here.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch

import budgets
from dsa_hw.channels import find_groups
from dsa_hw.errors import DsaError
from dsa_hw.zoo.models import load_model
from profilers.networks.builder import ConfigurationBuilder
from profilers.targets import resolve
from profilers.targets.ethos_u import EthosU

RESULTS = Path(__file__).parent / "results" / "microcontroller_memory.json"
NETWORKS = ("mobilenet_v2:96", "resnet18:64", "squeezenet1_1:96")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--device", default="ethos-u55-128")
    option("--networks", nargs="+", default=NETWORKS, metavar="NAME:SIDE")
    option("--configurations", type=int, default=6, help="of each network, the dense one included (%(default)s)")
    option("--seed", type=int, default=0)
    option("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for text in args.networks:
        name, _, side = text.partition(":")
        try:
            rows += compare(name, int(side), args.device, args.configurations, args.seed)
        except DsaError as error:
            print(f"{name}: {error}", flush=True)
    table = pd.DataFrame(rows)
    args.out.write_text(json.dumps({"device": args.device, "rows": rows}, indent=1) + "\n")
    table["sram"], table["flash"] = table.arena / table.vela_sram, table.counted_flash / table.vela_flash
    print("counted over reported by Vela")
    print(table.groupby(["network", "side"])[["sram", "flash"]].agg(["min", "median", "max"]).round(3).to_string())


def compare(name: str, side: int, device: str, count: int, seed: int) -> list[dict[str, object]]:
    """Return counted and reported bytes of configurations of one network."""
    model, inputs = load_model(name, (1, 3, side, side))
    groups = find_groups(model, inputs)
    target = resolve(device)
    assert isinstance(target, EthosU)
    builder = ConfigurationBuilder(model, groups, inputs, target)
    arena, flash = budgets.arena(groups), budgets.flash(groups)
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        widths = groups.sizes if i == 0 else rng.integers(np.maximum(groups.sizes // 4, 1), groups.sizes + 1)
        table = pd.DataFrame([widths], columns=list(groups.names))
        memory = target.estimate(builder.artefact(builder.kept(widths.tolist())), inputs)["memory"]
        rows.append(
            {
                "network": name,
                "side": side,
                "widths": widths.tolist(),
                "arena": int(arena.predict(table)[0]),
                "vela_sram": int(memory["sram"]),
                "counted_flash": int(flash.predict(table)[0]),
                "vela_flash": int(memory["off_chip_flash"] + memory["on_chip_flash"]),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    main()
