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
    """The module through ``torch.compile``; compilation happens in the warm-up, outside the timed runs."""

    slow_to_load = True

    def check(self) -> None:
        """On the CPU the compiler's output is C++, so one is needed."""
        if self.device == "cpu" and not any(shutil.which(c) for c in ("c++", "g++", "clang++")):
            raise MissingDependencyError(
                "runtime 'compile' on the CPU needs a C++ compiler and none is on the PATH; "
                "install g++ or clang++, or use --runtime torch"
            )

    def compiled(self, module: nn.Module, inputs: tuple[Any, ...]) -> Callable[..., object]:
        """Compile now, not in the first timed run.

        Compiled code is kept per ``forward`` function, and after a few configurations of one class the compiler would
        give up and run the next ones eagerly, without a word. An exported copy has a ``forward`` of its own.
        """
        own = torch.export.export(module, inputs).module()
        compiled: Callable[..., object] = torch.compile(own, dynamic=False, fullgraph=True)
        with self.active(), torch.inference_mode():
            compiled(*inputs)
        return compiled

    def describe(self) -> dict[str, str]:
        """As for torch, and the mode."""
        return {**super().describe(), "torch.compile": "inductor, default mode, static shapes"}
