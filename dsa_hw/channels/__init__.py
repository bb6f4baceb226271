"""The lowest layer: what can be removed from a network at all, and removing it."""

from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.channels.importance import choose, importance
from dsa_hw.channels.masking import masked
from dsa_hw.channels.shrink import shrink
from dsa_hw.channels.verify import find_groups

__all__ = ["ChannelGroups", "choose", "find_groups", "importance", "masked", "shrink"]
