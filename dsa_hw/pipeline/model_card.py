"""The model card of a result: README.md with the certificate as a table, and front matter for the Hugging Face hub.

A card ends with the SHA-256 of its text. A card that somebody has edited is recognised by it and never overwritten.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from dsa_hw.channels.plan import Plan
from dsa_hw.pipeline.certificate import Certificate, Entry
from dsa_hw.units import format_magnitude
from dsa_hw.utils.text import one_line, percent

__all__ = ["is_replaceable", "model_card"]

_TAGS: Final = ("dsa_hw", "pruning", "structured-pruning", "model-compression", "pytorch")
_SEAL: Final = re.compile(r"\n<!-- made by dsa_hw, sha256:([0-9a-f]{64}) -->\n\Z")
_LARGEST: Final = 2**20  # bytes of a card that is ours


def model_card(network: str, plan: Plan, certificate: Certificate, recovery: str, files: Sequence[str]) -> str:
    """Return the text of a model card.

    Args:
        network: Name of the dense network.
        plan: The plan.
        certificate: Its certificate.
        recovery: What was done to the weights that remain; "" where nothing was.
        files: Names of the files beside the card.
    """
    kept, total = sum(plan.widths.values()), sum(plan.sizes)
    shapes = ", ".join("x".join(map(str, shape)) for shape in plan.inputs)
    tags = [*_TAGS, *(["onnx"] if any(name.endswith(".onnx") for name in files) else [])]
    made = plan.constructor
    given = "" if made is not None else ", model=MyNet()"
    needs = (
        f"The dense network is {_cell(str(made))}: no other code is needed."
        if made is not None
        else "`MyNet` is the class of the dense network, which is not part of this folder. Its weights do not matter."
    )
    lines = [
        "---", "library_name: dsa_hw", "tags:", *(f"- {tag}" for tag in tags), "---", "",
        f"# {_cell(network)}, pruned: {certificate.verdict}", "",
        f"{kept} of {total} channels in {len(plan.names)} groups are kept, for inputs of {shapes}. "
        f"Made on {certificate.date} with dsa_hw {certificate.versions.get('dsa_hw', '')}.", "",
        "## Certificate", "",
        "| Asked | Dense | Pruned | 95% interval | Of the budget | Target | Verdict |",
        "|---|---|---|---|---|---|---|",
        *map(_row, certificate.entries), "",
        _cell(str(certificate.quality)), *([f"\n{_cell(recovery)}"] if recovery else []), "",
        "A certificate holds for its target: measure again on your device with `dsa-hw verify`.", "",
        "## Use", "",
        "```python", "import dsa_hw", "", f'model = dsa_hw.load("."{given})  # the folder of this card', "```", "",
        needs, "",
        "## Files", "",
        "`plan.json` has the kept channels, the certificate, and the SHA-256 of the others: "
        + ", ".join(f"`{name}`" for name in files) + ".", "",
    ]  # fmt: skip
    text = "\n".join(lines)
    return f"{text}\n<!-- made by dsa_hw, sha256:{_digest(text)} -->\n"


def is_replaceable(path: Path) -> bool:
    """Tell whether a file may be overwritten by a new card: it does not exist, or is a card that nobody has edited."""
    try:
        if not path.is_symlink() and path.is_file() and path.stat().st_size <= _LARGEST:
            text = path.read_text(encoding="utf-8")
            found = _SEAL.search(text)
            return found is not None and found[1] == _digest(text[: found.start()])
        return not path.exists() and not path.is_symlink()
    except (OSError, ValueError):
        return False


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _row(entry: Entry) -> str:
    def say(value: float) -> str:
        return format_magnitude(value, entry.dimension) if math.isfinite(value) else "unknown"

    interval = f"{say(entry.low)} to {say(entry.high)}" if entry.runs and math.isfinite(entry.high) else "counted"
    if entry.estimated:
        interval = "estimated"
    elif not math.isfinite(entry.measured):
        interval = "not measured"
    used = percent(entry.utilisation) if math.isfinite(entry.utilisation) else "unknown"
    cells = (entry.asked, say(entry.dense), say(entry.measured), interval, used, entry.target, str(entry.verdict))
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Return text on one line that is not read as Markdown or HTML."""
    return re.sub(r"([\\`*_|<>\[\]#])", r"\\\1", one_line(text, 1000))
