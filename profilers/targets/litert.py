"""LiteRT (formerly TensorFlow Lite) on the CPU with XNNPACK, as on phones.

Its packages are in an environment of their own (``dsa-hw setup litert``). A worker process there makes whole rounds
of runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dsa_hw.errors import MissingDependencyError, ProfileError
from dsa_hw.utils.arrays import Floats
from dsa_hw.utils.text import one_line
from profilers import machine
from profilers.litert.client import Worker, invalid_answer, versions
from profilers.litert.convert import ConvertedNetwork, TfliteFile, arrays_of, convert, quantise, written
from profilers.networks.quantisation import Ranges
from profilers.networks.seconds import checked_seconds
from profilers.targets.base import Loaded, Target, register

__all__ = ["LiteRT"]

_SEQUENCE = 600.0  # seconds for a round, and for each of its steps:
_STEP = 30.0
_OUTPUTS = 1000  # outputs of a network at most


@register("litert")
class LiteRT(Target):
    """A LiteRT file in float32 or int8, images channel-last, run by the interpreter with XNNPACK."""

    slow_to_load = True
    schemes = ("s8edge",)

    def __init__(self, device: str = "cpu", *, precision: str = "fp32", threads: int = 1) -> None:
        super().__init__(device, precision=precision, threads=threads)
        self.worker = Worker()
        self.remote_device = self
        self._names: weakref.WeakKeyDictionary[Loaded, str] = weakref.WeakKeyDictionary()

    def check(self) -> None:
        """Check device, precision and the environment."""
        if self.device != "cpu":
            raise MissingDependencyError(f"Runtime 'litert' supports --device cpu only; got {self.device!r}.")
        if self.precision == "fp16":
            raise ProfileError(f"Runtime 'litert' supports --precision fp32 and int8; got {self.precision!r}.")
        if self.int8 is not None and self.int8.without:
            raise ProfileError(
                f"Runtime 'litert' quantises every layer. Omit --int8-without; got {', '.join(self.int8.without)}."
            )
        versions()

    def template(self, model: Any, groups: Any, inputs: tuple[Any, ...]) -> ConvertedNetwork:
        """Convert the network once; configurations are made by narrowing that file."""
        return ConvertedNetwork(self.worker, model, groups, inputs)

    def load(self, artefact: Any, inputs: tuple[Any, ...]) -> Loaded:
        """Load a LiteRT file in the worker.

        A module is converted first, which takes many seconds. In int8, a module or a float32 file is quantised with
        the ranges of ``inputs``; bytes are a file that is loaded as it is.
        """
        if isinstance(artefact, bytes):
            file = written(self.worker, artefact)
        else:
            file = artefact if isinstance(artefact, TfliteFile) else convert(self.worker, artefact, inputs)[0]
            if self.int8 is not None:
                file, _ = quantise(file, inputs)
        with arrays_of(self.worker, inputs) as arrays:
            self.worker.ask("load", model=file.name, inputs=arrays, threads=self.threads)

        def clock(n: int) -> Floats:
            return self._sequence([(file.name, n)])[0]

        def run_on(values: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
            with arrays_of(self.worker, tuple(torch.from_numpy(value) for value in values)) as arrays:
                return outputs(file, arrays)

        loaded = Loaded(lambda: clock(1), clock=clock, outputs=lambda: outputs(file), run_on=run_on)
        self._names[loaded] = file.name
        weakref.finalize(file, self.worker.forget, file.name)  # whoever can run it holds the file
        return loaded

    def quantise(
        self, model: Any, inputs: tuple[Any, ...], batches: Iterable[Sequence[Any]], ranges: Ranges | None
    ) -> tuple[bytes, Ranges]:
        """Return a module as an int8 LiteRT file, and the ranges of its activations."""
        file, _ = convert(self.worker, model, inputs)
        seen = tuple(torch.cat(column) for column in zip(*batches, strict=True)) if ranges is None else ()
        file, found = quantise(file, seen, ranges)
        return file.content(), found

    def sequence(self, steps: Sequence[tuple[Loaded, int]]) -> list[Floats]:
        """Run (network, runs) back to back in the worker."""
        return self._sequence([(self._names[loaded], runs) for loaded, runs in steps])

    def _sequence(self, steps: Sequence[tuple[str, int]]) -> list[Floats]:
        found = self.worker.ask("sequence", steps=list(steps), limit=_SEQUENCE + _STEP * len(steps)).get("steps")
        if not isinstance(found, list) or len(found) != len(steps) or not all(isinstance(s, list) for s in found):
            raise invalid_answer("sequence", f"times of {len(steps)} steps are expected")
        return [checked_seconds(s, n, "The LiteRT worker") for s, (_, n) in zip(found, steps, strict=True)]

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
            **({"int8": str(self.int8.scheme), "ai-edge-quantizer": found["ai-edge-quantizer"]} if self.int8 else {}),
        }


def outputs(file: TfliteFile, inputs: list[str] | None = None) -> list[NDArray[Any]]:
    """Return the outputs of a loaded file, float32, images channel-first, on other inputs if any are named."""
    stem = file.worker.path("").name
    count = file.worker.ask("outputs", model=file.name, to=stem, inputs=inputs).get("count")
    if type(count) is not int or not 0 <= count <= _OUTPUTS:
        raise invalid_answer("outputs", f"count must be a number from 0 to {_OUTPUTS}")
    paths = [file.worker.folder / f"{stem}.{i}.npy" for i in range(count)]
    try:
        return [np.load(path, allow_pickle=False) for path in paths]
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise invalid_answer("outputs", one_line(error, 200)) from error
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
