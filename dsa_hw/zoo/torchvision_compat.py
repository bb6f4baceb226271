"""torchvision with any build of torch. Import this module before torchvision or timm.

The wheel of torchvision contains operators compiled against CUDA. With a CPU-only torch that library does not load, and
``import torchvision`` fails while it registers shape functions for ``torchvision::nms`` and ``torchvision::qnms``,
which then do not exist. This module declares the two schemas first. Models, data sets and transforms then work; the two
operators themselves still fail. Where the compiled library loads, nothing is declared.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pathlib

import torch

__all__ = ["torchvision"]

_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
_library: torch.library.Library | None = None  # holds a reference: the schemas are removed with it


def _compiled_operators_load() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    folder = pathlib.Path(spec.origin).parent
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        if (path := folder / f"_C{suffix}").exists():
            try:
                torch.ops.load_library(str(path))
            except (OSError, RuntimeError):
                return False
            return True
    return False


if not _compiled_operators_load():
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for _name, _schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, _name):
            _library.define(_schema)

import torchvision  # noqa: E402
