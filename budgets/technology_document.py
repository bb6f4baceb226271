"""The schema of a technology's file."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from budgets.technologies import PATHS
from dsa_hw.utils.documents import Document

__all__ = ["TechnologyDocument"]

_Energy = Annotated[float, Field(ge=0, le=1e12)]  # pJ; nothing takes a joule


class _PathsDocument(Document):
    weights: tuple[str, ...] = PATHS["weights"]
    activations: tuple[str, ...] = PATHS["activations"]


class TechnologyDocument(Document):
    """A technology as a file, with the fields of `budgets.technologies.Technology`: picojoules and bytes."""

    model_config = ConfigDict(title="dsa_hw technology")
    remedy = (
        'Write {"mac": pJ, "byte": {"dram": pJ, "large": pJ, "small": pJ}}, with "width" (bytes of a number, 4) and '
        '"paths" where they differ from the default.'
    )

    mac: _Energy
    byte: dict[str, _Energy] = Field(min_length=1)
    width: float = Field(4.0, gt=0, le=1e3)
    paths: _PathsDocument = _PathsDocument()
    name: str = ""
    source: str = "user's own figures"
