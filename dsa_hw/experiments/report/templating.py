"""Pages from templates: everything from outside is escaped, and nothing is loaded from elsewhere.

The one script, which sorts tables, is allowed by its hash in the page's Content-Security-Policy; any other is blocked.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

__all__ = ["About", "Card", "Cell", "Picture", "Table", "render_page", "render_result", "wrapped"]


_LINE = 88  # characters of a command that fit on a page
_UNIT = re.compile(r"(\d) (?=%|[mµn]?s\b|[mµn]?J\b|[kMGT]?FLOPs\b|[kMGT]?params\b|[KMG]?i?B\b)")


@dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
        text: What it says.
        small: A second line in small letters.
        kind: The kind of budget whose coloured dot stands before the text; "dense" for a black one.
        mark: "better", "worse" or "unsure", for its colour.
        sort: The number by which its column is sorted, where that is not the text.
    """

    text: str
    small: str = ""
    kind: str = ""
    mark: str = ""
    sort: float | None = None


@dataclass(frozen=True)
class Table:
    """A table with a label for screen readers; the first cell of a row is its heading."""

    label: str
    head: list[Cell]
    rows: list[list[Cell]]


@dataclass(frozen=True)
class Card:
    """A large number with its label, and a line below."""

    label: str
    value: str
    more: str
    kind: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure whose title is its conclusion; ``svg`` is trusted."""

    title: str
    svg: Markup
    caption: str


@dataclass(frozen=True)
class About:
    """What a page says besides its results.

    Attributes:
        model: Name of the network.
        target: Where it was measured.
        date: When, as ``2026-11-18``.
        version: Of this program.
        command: The command line; empty if there was none.
        facts: How the networks were made and measured: name, text.
    """

    model: str
    target: str
    date: str
    version: str
    command: str = ""
    facts: Sequence[tuple[str, str]] = ()


CONTINUES = "The same command with the same folder continues; with a new folder it starts again."


def render_result(about: About, *, title: str, note: str = CONTINUES, **values: Any) -> str:
    """Return the page of a result with a verdict.

    Args:
        about: Model, target and command.
        title: What was asked, after the name of the network.
        note: What the command does.
        values: The rest of what the template uses.
    """
    return render_page(
        "result.html",
        title=f"{about.model}: {title}",
        version=about.version,
        date=about.date,
        where=" · ".join((about.model, about.target, about.date)),
        measured=about.facts,
        command=wrapped(about.command),
        note=note,
        **values,
    )


def wrapped(command: str) -> str:
    """Return a long command with one option per line, as a shell accepts it."""
    return command if len(command) <= _LINE else command.replace(" --", " \\\n  --")


def render_page(template: str, **values: Any) -> str:
    """Return a page.

    Args:
        template: Name of a file in ``templates``.
        values: What the template uses; ``title``, ``version`` and ``date`` among them. Text is escaped.
    """
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return _environment().get_template(template).render(script=Markup(script), script_hash=digest, **values)


@cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("dsa_hw.experiments.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["text"] = _text
    return found


@cache
def _script() -> str:
    return (files("dsa_hw.experiments.report") / "templates" / "sort.js").read_text("utf-8")


def _text(value: object) -> Markup:
    """Escape a value; signs become typographic, a number stays on one line with its unit."""
    text = re.sub(r"(?<=\w)&#39;(?=\w)", "&rsquo;", str(escape(str(value))))
    text = re.sub(r"(?<=\d )us\b", "µs", text).replace(" &lt;= ", " ≤&nbsp;")
    return Markup(_UNIT.sub("\\1&nbsp;", text))
