"""A newcomer's first minutes: clone, `make demo`, then every command of the README, in a new folder and environment.

    python benchmarks/first_ten_minutes.py --folder newcomer --out first_ten_minutes.json

The commands are read from the README, so what is documented is what is run. Those that need the reader's own pictures
or downloaded weights are listed and not run. No command is repeated. The folder must be new; caches are kept in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_REPOSITORY = Path(__file__).resolve().parents[1]
_NEEDS = {"photos/": "the reader's pictures", "imagefolder:": "the reader's pictures", "--pretrained": "a download"}
_GOAL = 15 * 60


def readme_commands(text: str) -> list[str]:
    """The commands of the README's shell blocks, without comments and without make."""
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.S)
    lines = [" ".join(shlex.split(line, comments=True)) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("make ")]


def timed(command: str, folder: Path, environment: dict[str, str]) -> dict[str, Any]:
    """Run one command and keep what it printed."""
    print(f"$ {command}", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )  # typed by us, from our own README
    seconds = time.perf_counter() - begin
    shown = [line for line in done.stdout.splitlines() if line.strip()]
    print(f"  exit {done.returncode} after {seconds:.0f} s", file=sys.stderr, flush=True)
    return {"command": command, "code": done.returncode, "seconds": round(seconds, 1), "printed": shown[-12:],
            "errors": done.stderr.strip().splitlines()[-3:] if done.returncode else []}  # fmt: skip


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--out", type=Path, default=Path("first_ten_minutes.json"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    folder = args.folder.resolve()
    clone = folder / "dsa_hw"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"DSA_HW_CACHE": str(folder / "cache"), "PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"}
    rows = [timed(f"git clone --quiet {_REPOSITORY} dsa_hw", folder, environment)]
    rows.append(timed("make demo", clone, environment))
    left = {}
    for command in readme_commands((clone / "README.md").read_text()):
        need = next((why for mark, why in _NEEDS.items() if mark in command), None)
        if need is not None:
            left[command] = f"needs {need}"
        elif command.startswith("dsa-hw verify small/") and not (clone / "small").exists():
            rows.append(timed("dsa-hw allocate --model resnet18 --budget latency=50% --out small/", clone, environment))
            rows.append(timed(command, clone, environment))
        else:
            rows.append(timed(command, clone, environment))
    rows[0]["command"] = "git clone"
    total = sum(row["seconds"] for row in rows)
    found = {"date": time.strftime("%Y-%m-%d"), "seconds": round(total), "commands": rows, "left out": left}
    text = json.dumps(found, indent=1).replace(str(folder), "FOLDER")
    args.out.write_text(text + "\n")
    for row in rows:
        print(f"{row['seconds']:7.1f} s  exit {row['code']}  {row['command']}")
    failed = sum(row["code"] != 0 for row in rows)
    print(f"{total / 60:.1f} minutes (goal: {_GOAL / 60:.0f}); {failed} of {len(rows)} commands failed")
    return int(failed > 0 or total > _GOAL)


if __name__ == "__main__":
    sys.exit(main())
