"""The lowest layer: what can be removed from a network at all, and removing it."""

from dsa_hw.channels.discovery import find_groups
from dsa_hw.channels.groups import ChannelGroups
from dsa_hw.channels.importance import register_importance, select_channels
from dsa_hw.channels.masking import masked
from dsa_hw.channels.surgery import shrink

__all__ = ["ChannelGroups", "find_groups", "masked", "register_importance", "select_channels", "shrink"]
