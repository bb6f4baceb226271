"""dsa_hw: prune a PyTorch network to a budget in the unit that counts, on the device that counts, with proof.

Names are loaded when first used, so that the lower layers can be imported alone and ``import dsa_hw`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "Allocation": "dsa_hw.allocation",
    "Allocator": "dsa_hw.allocator",
    "Certificate": "dsa_hw.certificate",
    "ChannelGroups": "dsa_hw.channels",
    "Recipe": "dsa_hw.trainer",
    "Trainer": "dsa_hw.trainer",
    "allocate": "dsa_hw.front",
    "compare": "dsa_hw.comparison",
    "recheck": "dsa_hw.recheck",
    "round_widths": "dsa_hw.rounding",
    "sweep": "dsa_hw.sweeping",
    "find_groups": "dsa_hw.channels",
    "choose": "dsa_hw.channels",
    "shrink": "dsa_hw.channels",
    "masked": "dsa_hw.channels",
    "Plan": "dsa_hw.channels.plan",
    "apply_plan": "dsa_hw.channels.plan",
    "EnergyBudget": "budgets",
    "FlopsBudget": "budgets",
    "LatencyBudget": "budgets",
    "MemoryBudget": "budgets",
    "ParamsBudget": "budgets",
}
__all__ = [
    "Allocation",
    "Allocator",
    "Certificate",
    "ChannelGroups",
    "EnergyBudget",
    "FlopsBudget",
    "LatencyBudget",
    "MemoryBudget",
    "ParamsBudget",
    "Plan",
    "Recipe",
    "Trainer",
    "allocate",
    "apply_plan",
    "choose",
    "compare",
    "find_groups",
    "masked",
    "recheck",
    "round_widths",
    "shrink",
    "sweep",
]

if TYPE_CHECKING:
    from budgets import EnergyBudget, FlopsBudget, LatencyBudget, MemoryBudget, ParamsBudget
    from dsa_hw.allocation import Allocation
    from dsa_hw.allocator import Allocator
    from dsa_hw.certificate import Certificate
    from dsa_hw.channels import ChannelGroups, choose, find_groups, masked, shrink
    from dsa_hw.channels.plan import Plan, apply_plan
    from dsa_hw.comparison import compare
    from dsa_hw.front import allocate
    from dsa_hw.recheck import recheck
    from dsa_hw.rounding import round_widths
    from dsa_hw.sweeping import sweep
    from dsa_hw.trainer import Recipe, Trainer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dsa_hw' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
