"""MkDocs hook: render TeX formulas as MathML while building, so that pages need no script and no network."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

# What pymdownx.arithmatex writes with `generic: true`.
_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<tex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)


def on_page_content(content: str, **_: Any) -> str:
    """Replace every formula of a page by MathML."""
    return _FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match["open"] == "[" else "inline"
    return convert(html.unescape(match["tex"]), display=display)
