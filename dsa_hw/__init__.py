"""dsa_hw: prune a PyTorch network to a budget in the unit that counts, on the device that counts, with proof.

Names are loaded when first used, so that the lower layers can be imported alone and ``import dsa_hw`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "ChannelGroups": "dsa_hw.channels",
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
    "ChannelGroups",
    "EnergyBudget",
    "FlopsBudget",
    "LatencyBudget",
    "MemoryBudget",
    "ParamsBudget",
    "Plan",
    "apply_plan",
    "choose",
    "find_groups",
    "masked",
    "shrink",
]

if TYPE_CHECKING:
    from budgets import EnergyBudget, FlopsBudget, LatencyBudget, MemoryBudget, ParamsBudget
    from dsa_hw.channels import ChannelGroups, choose, find_groups, masked, shrink
    from dsa_hw.channels.plan import Plan, apply_plan


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'dsa_hw' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_HOMES]
