"""LiteRT (formerly TensorFlow Lite) on the CPU with XNNPACK, as on phones.

Its packages are in an environment of their own (``dsa-hw setup litert``). A worker process there makes whole rounds
of runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsa_hw.errors import MissingDependencyError, ProfileError
from dsa_hw.utils.arrays import Floats
from profilers import machine
from profilers.litert.client import Worker, versions
from profilers.litert.convert import ConvertedNetwork, TfliteFile, arrays_of, convert
from profilers.targets.base import Loaded, Target, register

__all__ = ["LiteRT"]


@register("litert")
class LiteRT(Target):
    """A float32 LiteRT file, images channel-last, run by the interpreter with XNNPACK."""

    slow_to_load = True

    def __init__(self, device: str = "cpu", *, precision: str = "fp32", threads: int = 1) -> None:
        super().__init__(device, precision=precision, threads=threads)
        self.worker = Worker()
        self.remote_device = self
        self._names: weakref.WeakKeyDictionary[Loaded, str] = weakref.WeakKeyDictionary()

    def check(self) -> None:
        """Check device, precision and the environment."""
        if self.device != "cpu":
            raise MissingDependencyError(f"Runtime 'litert' supports --device cpu only; got {self.device!r}.")
        if self.precision != "fp32":
            raise ProfileError(f"Runtime 'litert' supports --precision fp32 only; got {self.precision!r}.")
        versions()

    def template(self, model: Any, groups: Any, inputs: tuple[Any, ...]) -> ConvertedNetwork:
        """Convert the network once; configurations are made by narrowing that file."""
        return ConvertedNetwork(self.worker, model, groups, inputs)

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        """Load a LiteRT file in the worker.

        A module is converted first, which takes many seconds.
        """
        file = artefact if isinstance(artefact, TfliteFile) else convert(self.worker, artefact, inputs)[0]
        with arrays_of(self.worker, inputs) as arrays:
            self.worker.ask("load", model=file.name, inputs=arrays, threads=self.threads)

        def clock(n: int) -> Floats:
            return self._sequence([(file.name, n)])[0]

        loaded = Loaded(lambda: clock(1), clock=clock, outputs=lambda: outputs(file))
        self._names[loaded] = file.name
        weakref.finalize(loaded, _forget, self.worker, file.name)
        return loaded

    def sequence(self, steps: Sequence[tuple[Loaded, int]]) -> list[Floats]:
        """Run (network, runs) back to back in the worker."""
        return self._sequence([(self._names[loaded], runs) for loaded, runs in steps])

    def _sequence(self, steps: Sequence[tuple[str, int]]) -> list[Floats]:
        found = self.worker.ask("sequence", steps=list(steps))["steps"]
        return [np.asarray(seconds, np.float64) for seconds in found]

    def busiest_process(self) -> str | None:
        """Describe the busiest process of this computer, where the worker runs."""
        return machine.busiest_process()

    def state(self) -> dict[str, float]:
        """Return the load of this computer, where the worker runs."""
        return machine.load_average()

    def describe(self) -> dict[str, str]:
        """Return the versions in the worker's environment and the interpreter's options."""
        found = versions()
        return {
            "ai-edge-litert": found["ai-edge-litert"],
            "litert-torch": found["litert-torch"],
            "interpreter": f"num_threads={self.threads} delegate=XNNPACK layout=NHWC",
        }


def outputs(file: TfliteFile) -> list[NDArray[Any]]:
    """Return the outputs of a loaded file, float32, images channel-first."""
    stem = file.worker.path("").name
    paths = [
        file.worker.folder / f"{stem}.{i}.npy"
        for i in range(file.worker.ask("outputs", model=file.name, to=stem)["count"])
    ]
    found = [np.load(path, allow_pickle=False) for path in paths]
    for path in paths:
        path.unlink()
    return found


def _forget(worker: Worker, name: str) -> None:
    if worker.pid is not None:
        worker.ask("forget", model=name)
