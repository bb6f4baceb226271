"""The code blocks and commands of the documents."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_INLINE = re.compile(r"`([^`\n]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        where: File and line, for messages.
        language: What follows the opening fence.
        text: The content.
        not_run: Why the tests do not run it; None where they do.
    """

    where: str
    language: str
    text: str
    not_run: str | None


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    text = page.read_text()
    return [
        Block(
            f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, found.start('text')) + 1}",
            found["language"],
            found["text"],
            found["reason"],
        )
        for found in _BLOCK.finditer(text)
    ]


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the command lines in the blocks of a page: where, and the words without a comment."""
    for block in blocks(page):
        if block.language in ("", "bash"):
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    end = next((i for i, word in enumerate(words) if word in ("|", ">")), len(words))
                    yield block.where, words[:end]


def inline_code(page: Path) -> list[str]:
    """Return what stands between backquotes outside blocks."""
    return _INLINE.findall(_BLOCK.sub("", page.read_text()))
