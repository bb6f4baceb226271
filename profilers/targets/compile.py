"""``torch.compile`` with its default back end."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dsa_hw.errors import MissingDependencyError
from profilers.targets.base import register
from profilers.targets.torch import Torch

__all__ = ["Compile"]


@register("compile")
class Compile(Torch):
    """A module compiled by ``torch.compile`` when it is loaded."""

    slow_to_load = True

    def check(self) -> None:
        """Check that a C++ compiler is installed, which compilation for the CPU needs."""
        if self.device == "cpu" and not any(shutil.which(c) for c in ("c++", "g++", "clang++")):
            raise MissingDependencyError(
                "Runtime 'compile' on the CPU needs a C++ compiler on the PATH. Install g++ or clang++, or use "
                "--runtime torch."
            )

    def compiled(self, module: nn.Module, inputs: tuple[Any, ...]) -> Callable[..., object]:
        """Compile now, not in the first timed run.

        Compiled code is cached per ``forward`` function. After a few configurations of one class the compiler would
        silently run the next ones eagerly. An exported copy has its own ``forward``.
        """
        own = torch.export.export(module, inputs).module()
        compiled: Callable[..., object] = torch.compile(own, dynamic=False, fullgraph=True)
        with self.active(), torch.inference_mode():
            compiled(*inputs)
        return compiled

    def describe(self) -> dict[str, str]:
        """Add the compiler's mode to what `Torch` returns."""
        return {**super().describe(), "torch.compile": "inductor, default mode, static shapes"}
