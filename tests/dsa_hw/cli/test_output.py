"""What commands print: plain where it is piped, with colours on a terminal, null for what JSON does not have."""

from __future__ import annotations

import io
import json
import re
import sys

import pytest

from dsa_hw.cli.output import Table, print_json, print_table, print_text

TABLE = Table(("asked", "used", "verdict"), [("80%", "96.1%", "MET"), ("5 ms", "101%", "NOT MET")], left=(2,))
COLOUR = re.compile(r"\x1b\[\d*[1-9]\d*m")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Terminal:
    found = Terminal()
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "60", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", found)
    return found


def test_piped_table_is_plain_and_aligned(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(TABLE)
    assert capsys.readouterr().out == "asked   used  verdict\n  80%  96.1%  MET\n 5 ms   101%  NOT MET\n"


def test_table_on_a_terminal_has_coloured_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    print_table(TABLE)
    print_text("latency: MET")
    text = screen.getvalue()
    assert re.search(r"\x1b\[32mMET *\x1b", text)
    assert re.search(r"\x1b\[31mNOT MET *\x1b", text)
    assert "\x1b[32mMET\x1b[0m" in text.splitlines()[-1]
    assert "───" in text


def test_no_color_switches_colours_off(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch, NO_COLOR="1")
    print_table(TABLE)
    print_text("latency: MET")
    assert "NOT MET" in screen.getvalue()
    assert not COLOUR.search(screen.getvalue())


def test_names_are_not_taken_for_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    print_table(Table(("group",), [("[red]layer[/red]",)]))
    print_text("[bold]x[/bold]")
    assert "[red]layer[/red]" in screen.getvalue()
    assert "[bold]x[/bold]" in screen.getvalue()


def test_a_long_line_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal(monkeypatch)
    print_text("x" * 200)
    assert "x" * 200 in screen.getvalue()


def test_json_has_null_for_what_is_not_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"low": float("nan"), "rows": [{"high": float("inf"), "n": 1}]})
    assert json.loads(capsys.readouterr().out) == {"low": None, "rows": [{"high": None, "n": 1}]}
