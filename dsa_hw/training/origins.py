"""What a result on disk was computed from, so that it is continued only where all of it is the same.

An `Origin` names every ingredient (weights, data, loss, method, options, budgets, costs). `Origin.differences` says
which of them differ, with both values. State files hold an origin, tensors and plain values, and a checksum; they are
read with ``weights_only``.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from dsa_hw.errors import TrainingError
from dsa_hw.training.fingerprints import fingerprint
from dsa_hw.utils.files import whole_file
from dsa_hw.utils.text import one_line

__all__ = ["Origin", "plain_or_hash", "read_state", "write_state"]

_LONGEST: Final = 200  # characters of a value that is kept as text
_SAME: Final = 1e-3
"""Relative difference of costs that counts as none.

The weights of the sittings of a profile depend on how much sittings were seen to differ, so that fitting the same runs
on another day moves a cost a little. Intervals of costs are not narrower than a few times this.
"""


@dataclass(frozen=True)
class Origin:
    """The ingredients of a result.

    >>> one = Origin.of({"seed": 0, "weights": [0.1] * 1000})
    >>> one.differences(Origin.of({"seed": 1, "weights": [0.1] * 1000}))
    'seed=0, requested seed=1'

    Attributes:
        settings: Name -> text. Texts are equal only where the values are: a short plain value in words, else a SHA-256.
        costs: Costs at fixed configurations; equal to about 0.1%.
    """

    settings: Mapping[str, str]
    costs: tuple[float, ...] = ()

    @classmethod
    def of(cls, ingredients: Mapping[str, Any], costs: Sequence[float] = ()) -> Origin:
        """Describe ingredients.

        Raises:
            UnstableError: An ingredient cannot be compared between processes (see `fingerprint`).
        """
        return cls({name: _text(value) for name, value in ingredients.items()}, tuple(float(c) for c in costs))

    def differences(self, requested: Origin) -> str:
        """Return each ingredient that differs, with both values; "" where all are the same."""
        found = []
        for name in dict.fromkeys([*self.settings, *requested.settings]):
            here, there = self.settings.get(name, "none"), requested.settings.get(name, "none")
            if here != there:
                found.append(f"{name}={_shown(here, there)}, requested {name}={_shown(there, here)}")
        if len(self.costs) != len(requested.costs):
            found.append(f"costs={len(self.costs)}, requested costs={len(requested.costs)}")
        elif self.costs:
            pairs = list(zip(self.costs, requested.costs, strict=True))
            here_at, there_at = max(pairs, key=_apart)
            if not _apart((here_at, there_at)) <= _SAME:
                found.append(f"cost model={here_at:.4g}, requested cost model={there_at:.4g} at one configuration")
        return "; ".join(found)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for `from_dict`."""
        return {"settings": dict(self.settings), "costs": list(self.costs)}

    @classmethod
    def from_dict(cls, content: Any) -> Origin:
        """Return the origin that `to_dict` wrote.

        Raises:
            ValueError: ``content`` is something else.
        """
        try:
            settings = {str(name): str(value) for name, value in content["settings"].items()}
            return cls(settings, tuple(float(c) for c in content["costs"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError("it does not say what it was computed from") from error


def write_state(path: str | os.PathLike[str], origin: Origin, state: Mapping[str, Any]) -> None:
    """Write tensors and plain values with their origin and a checksum, whole or not at all.

    Raises:
        TrainingError: The file cannot be written.
    """
    content = {"origin": origin.to_dict(), "state": dict(state)}
    with whole_file(path, TrainingError) as temporary:
        torch.save({**content, "sha256": fingerprint(content)}, temporary)


def read_state(path: Path, device: torch.device | str = "cpu") -> tuple[Origin, dict[str, Any]]:
    """Return what `write_state` wrote.

    Raises:
        TrainingError: The file cannot be read, or was damaged or edited.
    """
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        found = {"origin": content["origin"], "state": content["state"]}
        if fingerprint(found) != content["sha256"]:
            raise ValueError("the checksum does not match")
        return Origin.from_dict(content["origin"]), dict(content["state"])
    except Exception as error:  # torch and pickle raise a dozen unrelated classes for a damaged file
        raise TrainingError(f"Cannot read {path}: {one_line(error, 200)}. Delete it to start again.") from error


def plain_or_hash(value: Any) -> Any:
    """Return a short plain value as it is, and the SHA-256 of any other.

    Raises:
        UnstableError: The value cannot be compared between processes.
    """
    return value if _is_plain(value) and len(repr(value)) <= _LONGEST else fingerprint(value)


def _text(value: Any) -> str:
    found = plain_or_hash(value)
    return found if found is not value else repr(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(part) for item in value.items() for part in item)
    return value is None or type(value) in (bool, int, float, str)


def _shown(text: str, other: str) -> str:
    """Return a text for a message: 8 digits of a hash, a long value from where it differs from the other one."""
    if digits := re.fullmatch("'?([0-9a-f]{32,64})'?", text):
        return digits[1][:8]
    if len(text) <= 60:
        return text
    same = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(other))
    return f"...{text[max(same - 20, 0) : same + 40]}..."


def _apart(pair: tuple[float, float]) -> float:
    """Return the relative difference of two costs; infinity where one is not a positive number."""
    one, other = pair
    if one == other:
        return 0.0
    return abs(one - other) / min(one, other) if 0 < one < math.inf and 0 < other < math.inf else math.inf
