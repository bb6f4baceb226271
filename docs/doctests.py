"""MkDocs hook: show the examples of docstrings (``>>>``) as code; Markdown would read them as quotations."""

from __future__ import annotations

from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor


class DoctestBlocks(Preprocessor):
    """Puts a fence around each example, which ends at an empty line."""

    def run(self, lines: list[str]) -> list[str]:
        """Return the lines with fences."""
        found: list[str] = []
        inside = False
        for line in [*lines, ""]:
            if not inside and line.lstrip().startswith(">>> "):
                found += ["", "```pycon"]
                inside = True
            elif inside and not line.strip():
                found.append("```")
                inside = False
            found.append(line)
        return found


class DoctestExtension(Extension):
    """The Markdown extension."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  (the name that Markdown calls)
        """Register the preprocessor before the one that reads fences."""
        md.preprocessors.register(DoctestBlocks(md), "doctests", 100)


def on_config(config: Any) -> Any:
    """Add the extension to those of the configuration."""
    config.markdown_extensions.append(DoctestExtension())
    return config
