"""The worker process, which answers requests about LiteRT files.

It converts, narrows, quantises, estimates and times them. Runs in the environment that ``dsa-hw setup ethos-u``
creates, started by `profilers.litert.client.Worker`. Requests and answers are JSON objects, one per line. Arrays and
networks are files (.npy, .pt2, .tflite) in the folder given on the command line. Output of the libraries goes to
standard error.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import time
import traceback
import warnings
import zipfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # import siblings as a package, not from the path: their names are common words
    _folder = Path(__file__).resolve().parent
    sys.path = [p for p in sys.path if Path(p or ".").resolve() != _folder]
    _spec = importlib.util.spec_from_file_location(
        "dsa_hw_workers", _folder / "__init__.py", submodule_search_locations=[str(_folder)]
    )
    assert _spec is not None
    assert _spec.loader is not None
    sys.modules["dsa_hw_workers"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["dsa_hw_workers"])
    __package__ = "dsa_hw_workers"

import numpy as np

from .masks import CannotNarrowError
from .narrow import TfliteTemplate
from .vela import VelaError, estimate

__all__ = ["Service", "main"]

_SIGNATURE = "serving_default"


class UnsupportedError(Exception):
    """The request is not possible for this network; the message says why."""


class Service:
    """The requests, one method each; the caller names the files, which are in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._templates: dict[str, TfliteTemplate] = {}
        self._interpreters: dict[str, Any] = {}

    def convert(self, program: str, model: str, shapes: list[list[int]]) -> dict[str, Any]:
        """Convert ``program`` (.pt2) to ``model`` (.tflite, float32, images channel-last) and keep it as a template."""
        import litert_torch
        import torch

        with zipfile.ZipFile(self._path(program)) as archive:
            for name in archive.namelist():
                if name.endswith("_config.json") and b'"use_pickle": true' in archive.read(name):
                    raise UnsupportedError("The exported network has tensors that only pickle can store.")
        exported = torch.export.load(self._path(program))
        module = exported.module()
        inputs = tuple(torch.randn(shape) for shape in shapes)
        with torch.no_grad():
            outputs = torch.utils._pytree.tree_leaves(module(*inputs))
        images = [i for i, x in enumerate(inputs) if x.ndim == 4]
        made = [i for i, y in enumerate(outputs) if y.ndim == 4]
        arguments = tuple(x.permute(0, 2, 3, 1).contiguous() if i in images else x for i, x in enumerate(inputs))
        wrapped = litert_torch.to_channel_last_io(module, args=images, outputs=made)
        try:
            edge = litert_torch.convert(wrapped, arguments)
        except Exception as error:  # the converter raises whatever its passes raise
            raise UnsupportedError(f"litert-torch cannot convert this network: {_one_line(error)}") from error
        edge.export(str(self._path(model)))
        state = {k: v.detach().numpy() for k, v in exported.state_dict.items()}
        try:
            self._templates[model] = TfliteTemplate(_read(self._path(model)), _codes(), state)
        except CannotNarrowError as error:
            return {"narrows": str(error)}
        return {"narrows": ""}

    def narrow(
        self, template: str, model: str, slices: dict[str, dict[str, list[int]]], pads: list[Any]
    ) -> dict[str, Any]:
        """Write one configuration of ``template`` to the file ``model``."""
        kept = {name: {int(axis): indices for axis, indices in cuts.items()} for name, cuts in slices.items()}
        try:
            made = self._templates[template].make(kept, pads)
        except CannotNarrowError as error:
            raise UnsupportedError(str(error)) from error
        _write(made, self._path(model))
        return {}

    def quantise(
        self, model: str, to: str, inputs: list[str], ranges: dict[str, list[float]] | None = None
    ) -> dict[str, Any]:
        """Quantise ``model`` to int8 (weights per channel, activations with static ranges) and write it to ``to``.

        Ranges are observed on ``inputs``, in batches of the size that the file has, or given. Returns them, by the
        number of the tensor in the file: its name is a whole stack trace.
        """
        from ai_edge_quantizer import quantizer, recipe

        graph = _read(self._path(model)).subgraphs[0]
        names = [t.name.decode() if isinstance(t.name, bytes) else str(t.name) for t in graph.tensors]
        try:
            job = quantizer.Quantizer(self._path(model).read_bytes(), recipe.static_wi8_ai8())
            if ranges is None:
                size = int(graph.tensors[graph.inputs[0]].shape[0])
                arrays = [_channels_last(np.load(self._path(name), allow_pickle=False)) for name in inputs]
                starts = range(0, len(arrays[0]), size)
                samples = [{f"args_{i}": a[s : s + size] for i, a in enumerate(arrays)} for s in starts]
                found = job.calibrate({_SIGNATURE: samples})
            else:
                found = {
                    names[int(i)]: {"min": _as_range(low, graph, i), "max": _as_range(high, graph, i)}
                    for i, (low, high) in ranges.items()
                }
            result = job.quantize(found)
        except Exception as error:  # the quantiser raises whatever its passes raise
            raise UnsupportedError(f"ai-edge-quantizer cannot quantise this network: {_one_line(error)}") from error
        self._path(to).write_bytes(bytes(result.quantized_model))
        seen = {
            str(i): found[name] for i, name in enumerate(names) if name in found and np.size(found[name]["min"]) == 1
        }
        return {"ranges": {i: [float(np.ravel(r[side])[0]) for side in ("min", "max")] for i, r in seen.items()}}

    def vela(self, model: str, accelerator: str, system: str, memory: str, config: str) -> dict[str, Any]:
        """Return Vela's estimate for the int8 file ``model``."""
        try:
            return estimate(self._path(model), accelerator, system, memory, config)
        except VelaError as error:
            raise UnsupportedError(f"Vela cannot compile this network: {error}") from error

    def load(self, model: str, inputs: list[str], threads: int) -> dict[str, Any]:
        """Make ``model`` ready to run on ``inputs``, with XNNPACK."""
        from ai_edge_litert.interpreter import Interpreter

        interpreter = Interpreter(model_path=str(self._path(model)), num_threads=threads)
        interpreter.allocate_tensors()
        self._interpreters[model] = interpreter
        self._feed(interpreter, inputs)
        return {}

    def _feed(self, interpreter: Any, inputs: list[str]) -> None:
        details = sorted(interpreter.get_input_details(), key=lambda d: d["name"])
        for detail, name in zip(details, inputs, strict=True):
            array = _channels_last(np.load(self._path(name), allow_pickle=False))
            scale, zero = detail["quantization"]
            if detail["dtype"] == np.int8:
                array = np.clip(np.round(array / scale) + zero, -128, 127)
            interpreter.set_tensor(detail["index"], array.astype(detail["dtype"]))

    def sequence(self, steps: list[tuple[str, int]]) -> dict[str, Any]:
        """Run (model, runs) back to back; return for each the seconds of its runs."""
        gc.disable()  # a garbage collection during a run would disturb the measurement
        try:
            return {"steps": [_timed(self._interpreters[model].invoke, n) for model, n in steps]}
        finally:
            gc.enable()

    def outputs(self, model: str, to: str, inputs: list[str] | None = None) -> dict[str, Any]:
        """Write the outputs to ``to``.0.npy, ``to``.1.npy ... as float32, images channel-first; return how many.

        They are those on the inputs that ``model`` was loaded with, or on others, which it then keeps.
        """
        interpreter = self._interpreters[model]
        if inputs is not None:
            self._feed(interpreter, inputs)
        interpreter.invoke()
        details = sorted(interpreter.get_output_details(), key=lambda d: (len(d["name"]), d["name"]))
        for i, detail in enumerate(details):
            array = interpreter.get_tensor(detail["index"])
            if detail["dtype"] == np.int8:
                scale, zero = detail["quantization"]
                array = (array.astype(np.float32) - zero) * scale
            array = np.moveaxis(array, -1, 1) if array.ndim == 4 else array
            np.save(self._path(f"{to}.{i}.npy"), np.ascontiguousarray(array, np.float32), allow_pickle=False)
        return {"count": len(details)}

    def forget(self, model: str) -> dict[str, Any]:
        """Free what was loaded from ``model``, if anything."""
        self._interpreters.pop(model, None)
        self._templates.pop(model, None)
        return {}

    def _path(self, name: str) -> Path:
        if not name or Path(name).name != name:
            raise UnsupportedError(f"{name!r} is not a plain file name")
        return self._folder / name


def _timed(invoke: Any, n: int) -> list[float]:
    clock = time.perf_counter
    stamps = [clock()]
    for _ in range(n):
        invoke()
        stamps.append(clock())
    return [float(x) for x in np.diff(stamps)]


def _as_range(value: float, graph: Any, index: str) -> Any:
    """Return one end of a range in the shape that the quantiser gives it: a 1 for each axis of the tensor."""
    return np.full((1,) * len(graph.tensors[int(index)].shape), value, np.float32)


def _channels_last(array: Any) -> Any:
    return np.ascontiguousarray(np.moveaxis(array, 1, -1)) if array.ndim == 4 else array


def _read(path: Path) -> Any:
    from ai_edge_litert import schema_py_generated as schema

    return schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)


def _write(model: Any, path: Path) -> None:
    import flatbuffers

    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(model.Pack(builder), b"TFL3")
    path.write_bytes(bytes(builder.Output()))


def _codes() -> dict[int, str]:
    from ai_edge_litert import schema_py_generated as schema

    return {v: k for k, v in vars(schema.BuiltinOperator).items() if isinstance(v, int) and not k.startswith("_")}


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def main() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # also what C++ libraries print
    sys.stdout = sys.stderr
    warnings.simplefilter("ignore")
    service = Service(Path(sys.argv[1]))
    for line in sys.stdin:
        try:
            request = json.loads(line)
            for name in request.pop("forgotten"):
                service.forget(name)
            answer = {"done": getattr(service, request.pop("do"))(**request)}
        except UnsupportedError as error:
            answer = {"refused": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": _one_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
