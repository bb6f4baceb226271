"""torchvision, importable beside any build of torch. Import it (and timm) through here.

torchvision's wheel carries operators compiled against CUDA. Beside a CPU-only torch that library does not load,
and ``import torchvision`` dies while registering shape functions for ``torchvision::nms`` and ``torchvision::qnms``,
which then do not exist. Declaring just these two schemas first lets models, datasets and transforms work; calling the
two operators still fails, as it should. Where the compiled library does load, nothing is declared.
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
_library: torch.library.Library | None = None  # kept alive: the schemas vanish with it


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
