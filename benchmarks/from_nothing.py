"""How long does a newcomer wait? Whole commands in new processes, with new caches: profile, allocate, demo.

    python benchmarks/from_nothing.py --out from_nothing.jsonl
    python benchmarks/from_nothing.py --out from_nothing.jsonl --neighbour    # beside a process with 30% duty
    python benchmarks/from_nothing.py --out from_nothing.jsonl --summary

One JSON line for each command; what is in the file is not run again. Run it on a machine that is otherwise quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_PROFILES = {
    ("resnet18", 64): 30, ("resnet20", 32): 30, ("mobilenet_v2", 224): 60, ("resnet18", 224): 90,
}  # fmt: skip
_ALLOCATIONS = {("resnet18", 64): 60, ("resnet18", 224): 120}
_DEMO = 120
_BURN = """
import time
while True:
    end = time.perf_counter() + 0.03
    while time.perf_counter() < end:
        pass
    time.sleep(0.07)
"""


def commands() -> dict[str, tuple[list[str], float]]:
    """The commands by name, each with its goal in seconds on an idle machine."""
    found: dict[str, tuple[list[str], float]] = {}
    for (name, side), goal in _PROFILES.items():
        shape = ["--model", name, "--input", f"1x3x{side}x{side}"]
        found[f"profile {name} at {side}"] = (["profilers.latency", "--device", "cpu", *shape], goal)
    for (name, side), goal in _ALLOCATIONS.items():
        shape = ["--model", name, "--input", f"1x3x{side}x{side}"]
        found[f"allocate {name} at {side}"] = (["dsa_hw.cli", "allocate", *shape, "--budget", "latency=60%"], goal)
    found["demo"] = (["dsa_hw.cli", "demo"], _DEMO)
    return found


def timed(words: list[str], neighbour: bool) -> dict[str, Any]:
    """Run one command in an empty folder with an empty cache."""
    beside = subprocess.Popen([sys.executable, "-c", _BURN]) if neighbour else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "DSA_HW_CACHE": str(Path(folder) / "cache")}
            begin = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            seconds = time.perf_counter() - begin
    finally:
        if beside is not None:
            beside.kill()
            beside.wait()
    return {"seconds": round(seconds, 1), "code": done.returncode, "out": done.stdout[-3000:]}


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("from_nothing.jsonl"))
    parser.add_argument("--neighbour", action="store_true", help="beside a process that uses a core 30%% of the time")
    parser.add_argument("--summary", action="store_true", help="only print what is in the file")
    args = parser.parse_args()
    condition = "neighbour" if args.neighbour else "idle"
    done = {(row["what"], row["condition"]) for row in rows(args.out)}
    for what, (words, _) in {} if args.summary else commands().items():
        if (what, condition) in done:
            continue
        print(f"{what}, {condition} ...", file=sys.stderr, flush=True)
        row = {"what": what, "condition": condition, **timed(words, args.neighbour), "date": time.strftime("%Y-%m-%d")}
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    goals = {what: goal for what, (_, goal) in commands().items()}
    for row in rows(args.out):
        goal = goals[row["what"]] * (2 if row["condition"] == "neighbour" and row["what"] != "demo" else 1)
        verdict = "reached" if row["code"] == 0 and row["seconds"] <= goal else "MISSED"
        print(f"{row['what']:24} {row['condition']:10} {row['seconds']:6.1f} s  goal {goal:4.0f} s: {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
