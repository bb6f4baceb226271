"""A fake LiteRT worker: the same requests, with computed numbers.

A network has 1000 cycles for every kept index that ``narrow`` got, or a million if it got none. On LiteRT it takes
half as long in int8. The environment variable ``FAKE_WORKER`` selects a failure.
"""

from __future__ import annotations

import json
import os
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

FOLDER, MOOD = Path(sys.argv[2]), os.environ.get("FAKE_WORKER", "")


def convert(program: str, model: str, shapes: list[list[int]]) -> Any:
    with zipfile.ZipFile(FOLDER / program) as archive:
        pickled = [name for name in archive.namelist() if archive.read(name)[:2] in (b"PK", b"\x80\x02", b"\x80\x04")]
    if pickled:
        return {"refused": f"pickles crossed: {pickled}"}
    (FOLDER / model).write_text("1000000")
    return {"done": {"narrows": "PACK 'x': this operator is not supported" if MOOD == "rigid" else ""}}


def narrow(template: str, model: str, slices: dict[str, dict[str, list[int]]], pads: list[Any]) -> Any:
    assert (FOLDER / template).exists()
    kept = sum(len(indices) for cuts in slices.values() for indices in cuts.values())
    (FOLDER / model).write_text(str(1000 * kept or 1000000))
    return {"done": {}}


def quantise(model: str, to: str, inputs: list[str], ranges: Any = None) -> Any:
    assert all((FOLDER / name).exists() for name in inputs)
    (FOLDER / to).write_text((FOLDER / model).read_text())
    return {"done": {"ranges": ranges or {"0": [-1.0, 1.0]}}}


def vela(model: str, **system: str) -> Any:
    cycles = float((FOLDER / model).read_text())
    parts = [{"name": f"{i}:Conv2D", "kind": "Conv2D", "cycles": cycles / 2, "macs": 1.0, "busy": {}} for i in (0, 1)]
    on_cpu = ["ArgMax"] if MOOD == "cpu" else []
    return {
        "done": {
            "seconds": cycles / 5e8,
            "cycles": cycles,
            "clock": 5e8,
            "operations": parts,
            "on_cpu": on_cpu,
            "reasons": ["too odd"],
        }
    }


def load(model: str, inputs: list[str], threads: int) -> Any:
    return {"done": {}}


def sequence(steps: list[tuple[str, int]]) -> Any:
    each = {m: float((FOLDER / m).read_text()) / (1e9 if ".int8." in m else 5e8) for m, _ in steps}
    return {"done": {"steps": [[each[model]] * n for model, n in steps]}}


def forget(model: str) -> Any:
    return {"done": {}}


for line in sys.stdin:
    request = json.loads(line)
    request.pop("forgotten")
    if MOOD == "dies":
        sys.stdout.write('{"done"')
        sys.stdout.flush()
        sys.stderr.write("out of memory\n")
        sys.exit(1)
    if MOOD == "deaf":
        sys.stdout.write(json.dumps({"done": {}}) + "\n")
        sys.stdout.flush()
        time.sleep(600)
    while MOOD in ("floods", "shouts"):
        os.write(1 if MOOD == "floods" else 2, b"x" * 2**16)
    if MOOD.startswith("says "):
        answer = MOOD.removeprefix("says ")
    elif MOOD == "deep":
        answer = '{"done": ' + "[" * 100_000 + "]" * 100_000 + "}"
    elif MOOD == "sleeps":
        time.sleep(600)
    else:
        do = request.pop("do")
        answer = json.dumps(globals()[do](**request) if do in globals() else {"failed": f"no {do} here"})
    sys.stdout.write(answer + "\n")
    sys.stdout.flush()
