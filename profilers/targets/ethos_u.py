"""Arm Ethos-U NPUs, estimated by Arm's compiler Vela.

A network is converted to LiteRT, quantised to int8 and compiled. ``--device ethos-u55-128`` (or another accelerator of
Vela) stands for Vela's default system. To select another, append ``?system=Ethos_U55_Deep_Embedded&memory=Sram_Only``,
and ``&config=FILE.ini`` if it is described in your own file.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from dsa_hw.errors import MeasurementError, MissingDependencyError, ProfileError
from dsa_hw.utils.text import one_line
from profilers.litert.client import Worker, invalid_answer, versions
from profilers.litert.convert import ConvertedNetwork, TfliteFile, arrays_of, convert
from profilers.networks.seconds import checked_seconds
from profilers.targets.base import Loaded, Target, register
from profilers.targets.litert import outputs

__all__ = ["EthosU"]

_ACCELERATORS = {"u55": (32, 64, 128, 256), "u65": (256, 512), "u85": (128, 256, 512, 1024, 2048)}
# Vela's defaults: the system, and which memory holds what.
_DEFAULTS = {
    "u55": ("Ethos_U55_High_End_Embedded", "Shared_Sram"),
    "u65": ("Ethos_U65_Client_Server", "Dedicated_Sram_384KB"),
    "u85": ("Ethos_U85_SYS_DRAM_Mid", "Dedicated_Sram_384KB"),
}
_CONFIG = "Arm/vela.ini"  # part of Vela


@register("ethos_u")
class EthosU(Target):
    """Int8 inference on an Ethos-U, estimated by Vela; deterministic."""

    slow_to_load = True

    def __init__(self, device: str, *, precision: str = "fp32", threads: int = 1) -> None:
        super().__init__(device, precision=precision, threads=threads)
        self.accelerator, self.system, self.memory, self.config = _parse(device)
        self.worker = Worker()
        self._versions: dict[str, str] | None = None

    def check(self) -> None:
        """Check precision, configuration file and the environment of Vela."""
        if self.precision != "fp32":
            raise ProfileError(f"An Ethos-U runs int8. Omit --precision; got {self.precision!r}.")
        if self.config != _CONFIG and not Path(self.config).is_file():
            raise ProfileError(
                f"Device {self.device}: there is no file {self.config}. Give a file in Vela's .ini format."
            )
        self._known()

    def _known(self) -> dict[str, str]:
        if self._versions is None:
            self._versions = versions()
        return self._versions

    @property
    def estimated(self) -> str:  # type: ignore[override]
        """Vela and its version."""
        return f"estimated by Vela {self._known()['ethos-u-vela']}"

    @property
    def title(self) -> str:
        """Accelerator, precision, system and memory mode."""
        return f"{self.accelerator} int8 {self.system} {self.memory}"

    def describe(self) -> dict[str, str]:
        """Return the versions of all tools, and the system.

        A configuration file of the user is given by its hash.
        """
        known = self._known()
        config = self.config
        if config != _CONFIG:
            config = f"{Path(config).name} sha256 {hashlib.sha256(Path(config).read_bytes()).hexdigest()[:16]}"
        return {
            "vela": known["ethos-u-vela"],
            "litert-torch": known["litert-torch"],
            "ai-edge-quantizer": known["ai-edge-quantizer"],
            "system": self.system,
            "memory mode": self.memory,
            "config": config,
        }

    def template(self, model: Any, groups: Any, inputs: tuple[Any, ...]) -> ConvertedNetwork:
        """Convert the network once; configurations narrow that file.

        Each configuration is then quantised.
        """
        return ConvertedNetwork(self.worker, model, groups, inputs)

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        """Quantise a float LiteRT file and run Vela.

        A module is converted first, which takes many seconds.
        """
        file = artefact if isinstance(artefact, TfliteFile) else convert(self.worker, artefact, inputs)[0]
        found = self.estimate(file, inputs)

        def floats() -> list[Any]:
            # Outputs of the float file: they are compared to verify that the right channels were removed.
            with arrays_of(self.worker, inputs) as arrays:
                self.worker.ask("load", model=file.name, inputs=arrays, threads=1)
            found = outputs(file)
            self.worker.ask("forget", model=file.name)
            return found

        return Loaded.exact(found["seconds"], floats)

    def estimate(self, file: TfliteFile, inputs: tuple[Any, ...]) -> dict[str, Any]:
        """Return Vela's estimate; see `profilers.litert.worker.vela.parse`.

        Raises:
            ModelError: Vela cannot compile the network.
            MeasurementError: An operation would run on the CPU, or the answer of the worker is invalid.
        """
        path = self.worker.path(".int8.tflite")
        config = self.config if self.config == _CONFIG else str(Path(self.config).resolve())
        system: dict[str, Any] = {"system": self.system, "memory": self.memory, "config": config}
        try:
            with arrays_of(self.worker, inputs) as arrays:
                self.worker.ask("quantise", model=file.name, to=path.name, inputs=arrays)
            found = _checked(self.worker.ask("vela", model=path.name, accelerator=self.accelerator, **system))
        finally:
            path.unlink(missing_ok=True)
        if found["on_cpu"]:
            kinds = one_line(", ".join(sorted(set(found["on_cpu"]))), 200)
            why = one_line("; ".join(dict.fromkeys(found["reasons"])), 200) or "no reason given"
            raise MeasurementError(
                f"{self.accelerator} cannot run {len(found['on_cpu'])} operation(s) of this network ({kinds}: {why}). "
                "They would run on the CPU, for which Vela gives no time. Replace them (docs/guide/ethos-u.md)."
            )
        checked_seconds([found["seconds"]], 1, "Vela")
        return found

    def known_grid(self) -> int | None:
        """Return 16 for a U85 and 8 for the others.

        Cycles jump after these multiples (docs/guide/ethos-u.md).
        """
        return 16 if "-u85-" in self.accelerator else 8


def _checked(found: dict[str, Any]) -> dict[str, Any]:
    """Check what is used of an estimate."""
    names, operations = ("seconds", "cycles", "clock"), found.get("operations")
    if not all(type(found.get(name)) in (int, float) and found[name] >= 0 for name in names):
        raise invalid_answer("vela", "seconds, cycles and clock must be numbers of at least 0")
    if not isinstance(operations, list) or not all(isinstance(o, dict) for o in operations):
        raise invalid_answer("vela", "operations must be a list of objects")
    for name in ("on_cpu", "reasons"):
        if not isinstance(found.get(name), list) or not all(isinstance(text, str) for text in found[name]):
            raise invalid_answer("vela", f"{name} must be a list of text")
    return found


def _parse(device: str) -> tuple[str, str, str, str]:
    """Split ``ethos-u55-128?system=S&memory=M&config=FILE`` into accelerator, system, memory and file."""
    accelerator, _, query = device.partition("?")
    match = re.fullmatch(r"ethos-(u\d+)-(\d+)", accelerator)
    if not match or int(match[2]) not in _ACCELERATORS.get(match[1], ()):
        known = ", ".join(f"ethos-{kind}-{macs}" for kind, sizes in _ACCELERATORS.items() for macs in sizes)
        raise MissingDependencyError(f"Unknown device {accelerator!r}. Available devices: {known}.")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(options.keys() - {"system", "memory", "config"}):
        raise ProfileError(f"Device {accelerator} has the options system, memory and config; got {unknown[0]!r}.")
    if "config" in options and not {"system", "memory"} <= options.keys():
        raise ProfileError(f"Device {device}: with config=, also give which system= and memory= in it to use.")
    system, memory = _DEFAULTS[match[1]]
    return accelerator, options.get("system", system), options.get("memory", memory), options.get("config", _CONFIG)
