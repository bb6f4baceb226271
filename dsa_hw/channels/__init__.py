"""The lowest layer: what can be removed from a network at all, and removing it."""

from dsa_hw.channels.discovery import find_groups
from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.channels.importance import choose, importance
from dsa_hw.channels.masking import masked
from dsa_hw.channels.surgery import shrink

__all__ = ["ChannelGroups", "choose", "find_groups", "importance", "masked", "shrink"]
