"""Run Vela on an int8 LiteRT file and read its estimate.

Standard library only.
"""

from __future__ import annotations

import csv
import io
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["VelaError", "estimate", "parse"]

_MEMORIES = ("sram", "dram", "on_chip_flash", "off_chip_flash")
_PARTS = {
    "NPU": "npu",
    "SRAM AC": "sram",
    "DRAM AC": "dram",
    "OnFlash AC": "on_chip_flash",
    "OffFlash AC": "off_chip_flash",
}


class VelaError(Exception):
    """Vela failed, or its output cannot be read."""


def estimate(model: Path, accelerator: str, system: str, memory: str, config: str) -> dict[str, Any]:
    """Return Vela's estimate for the file ``model``.

    It has the entries of `parse`; ``reasons`` says why operations run on the CPU.

    Args:
        model: An int8 LiteRT file.
        accelerator: Vela's name of the accelerator, e.g. "ethos-u55-128".
        system: Name of the system in the configuration file.
        memory: Name of the memory mode in it.
        config: Path of the configuration file; relative paths are those of Vela.

    Raises:
        VelaError: Vela fails, or its output cannot be read.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "ethosu.vela",
            str(model),
            "--output-dir",
            folder,
            "--verbose-performance",
        ]
        command += ["--accelerator-config", accelerator, "--config", config]
        command += ["--system-config", system, "--memory-mode", memory]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        summary = next(iter(Path(folder).glob("*_summary_*.csv")), None)
        layers = next(iter(Path(folder).glob("*_per-layer.csv")), None)
        if done.returncode or summary is None or layers is None:
            said = [line for line in (done.stderr + "\n" + done.stdout).splitlines() if line.strip()]
            wrong = [line for line in said if "error" in line.lower()] or said[-3:]
            raise VelaError(" ".join(" ".join(wrong).split())[:400] or f"exit code {done.returncode}")
        reasons = [line.partition(":")[2].strip() for line in done.stdout.splitlines() if line.startswith("Reason:")]
        return {**parse(summary.read_text(), layers.read_text()), "reasons": reasons}


def parse(summary: str, layers: str) -> dict[str, Any]:
    """Read Vela's two CSV files.

    Returns seconds, cycles, clock (Hz), macs, memory (bytes by kind), operations and on_cpu. Every entry of
    ``operations`` has name, kind, cycles, macs and, in ``busy``, the cycles during which the multipliers and each
    memory are busy; ``cycles`` is about the largest of these. Cycles of all operations add up to the total. ``on_cpu``
    names the operators that the accelerator cannot run; Vela gives no cycles for them.
    """
    try:
        total = next(csv.DictReader(io.StringIO(summary)))
        operations, on_cpu = [], []
        for i, row in enumerate(csv.DictReader(io.StringIO(layers))):
            if row["Target"] != "NPU":
                on_cpu.append(row["Original Operator"])
                continue
            cycles = float(row["Op Cycles"])
            if not cycles and not float(row["MAC Count"]):
                continue  # an activation fused into the previous operation
            operations.append(
                {
                    "name": f"{i}:{row['Original Operator']}",
                    "kind": row["Original Operator"],
                    "cycles": cycles,
                    "macs": float(row["MAC Count"]),
                    "busy": {short: float(row[name]) for name, short in _PARTS.items() if float(row[name])},
                }
            )
        return {
            "seconds": float(total["inference_time"]),
            "cycles": float(total["cycles_total"]),
            "clock": float(total["core_clock"]),
            "macs": float(total["nn_macs"]),
            "memory": {m: 1024 * float(total[f"{m}_memory_used"]) for m in _MEMORIES},
            "operations": operations,
            "on_cpu": on_cpu,
        }
    except (KeyError, ValueError, TypeError, StopIteration) as error:
        raise VelaError(f"Its CSV files do not have the expected format ({error!r}).") from error
