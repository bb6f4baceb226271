"""Channel groups of a network: find them, choose what to keep, mask and remove the rest.

A channel group is a set of units, and a unit is the smallest set of channels that can be removed: one channel almost
everywhere, the i-th channel of every group of a grouped convolution, a whole head of attention. From example inputs to
a pruned network: `trace` (operations), `rules` and `identities` (what is removed together), `assemble` (groups),
`discovery` (verification), `importance` (what to keep), `masking`, `surgery` and `rewriting` (without it), `plan` (the
file).
"""

from dsa_hw.channels.discovery import find_groups
from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.channels.importance import register_importance, select_channels
from dsa_hw.channels.masking import masked
from dsa_hw.channels.surgery import shrink

__all__ = ["ChannelGroups", "find_groups", "masked", "register_importance", "select_channels", "shrink"]
