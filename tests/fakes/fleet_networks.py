"""Networks by name, for the command line."""

from __future__ import annotations

from typing import Any

import torch

from tests.fakes.machine import Tiny


def tiny() -> tuple[Any, Any]:
    torch.manual_seed(0)
    return Tiny().eval(), torch.randn(1, 3, 16, 16)
