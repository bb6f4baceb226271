"""Run Vela on an int8 LiteRT file and read its estimate.

Standard library only.
"""

from __future__ import annotations

import csv
import io
import math
import select
import subprocess
import sys
import tempfile
import time
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
_LIMIT = 540.0  # seconds; less than the request may take, so that Vela is ended before the worker is
_MOST = 2**24  # bytes of its output and of each file


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
        status, printed = _run(command)
        summary = next(iter(Path(folder).glob("*_summary_*.csv")), None)
        layers = next(iter(Path(folder).glob("*_per-layer.csv")), None)
        if status or summary is None or layers is None:
            said = [line for line in printed.splitlines() if line.strip()]
            wrong = [line for line in said if "error" in line.lower()] or said[-3:]
            raise VelaError(" ".join(" ".join(wrong).split())[:400] or f"exit code {status}")
        if max(summary.stat().st_size, layers.stat().st_size) > _MOST:
            raise VelaError(f"Its CSV files have more than {_MOST} bytes.")
        reasons = [line.partition(":")[2].strip()[:300] for line in printed.splitlines() if line.startswith("Reason:")]
        return {**parse(summary.read_text(), layers.read_text()), "reasons": reasons[:20]}


def _run(command: list[str], limit: float = _LIMIT, most: int = _MOST) -> tuple[int, str]:
    """Run a command; return its exit status and what it printed.

    It is ended if it takes longer than ``limit`` seconds or prints more than ``most`` bytes.
    """
    end, printed = time.monotonic() + limit, b""
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    ) as process:
        assert process.stdout is not None
        try:
            while True:
                left = end - time.monotonic()
                if left <= 0 or not select.select([process.stdout], [], [], left)[0]:
                    raise VelaError(f"It did not end within {limit:g} s.")
                block = process.stdout.read(2**16)
                if not block:
                    break
                printed += block
                if len(printed) > most:
                    raise VelaError(f"It printed more than {most} bytes.")
            status = process.wait(max(end - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired as error:
            raise VelaError(f"It did not end within {limit:g} s.") from error
        finally:
            process.kill()
    return status, printed.decode(errors="replace")


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
            cycles = _number(row["Op Cycles"])
            if not cycles and not _number(row["MAC Count"]):
                continue  # an activation fused into the previous operation
            operations.append(
                {
                    "name": f"{i}:{row['Original Operator']}",
                    "kind": row["Original Operator"],
                    "cycles": cycles,
                    "macs": _number(row["MAC Count"]),
                    "busy": {short: _number(row[name]) for name, short in _PARTS.items() if _number(row[name])},
                }
            )
        return {
            "seconds": _number(total["inference_time"]),
            "cycles": _number(total["cycles_total"]),
            "clock": _number(total["core_clock"]),
            "macs": _number(total["nn_macs"]),
            "memory": {m: 1024 * _number(total[f"{m}_memory_used"]) for m in _MEMORIES},
            "operations": operations,
            "on_cpu": on_cpu,
        }
    except (KeyError, ValueError, TypeError, StopIteration, csv.Error) as error:
        raise VelaError(f"Its CSV files do not have the expected format ({error!r}).") from error


def _number(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{text[:40]} is not a number of at least 0")
    return value
