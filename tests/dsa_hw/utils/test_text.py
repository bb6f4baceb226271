"""Messages are one line."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dsa_hw.utils.text import first_line, one_line, unknown_name


@given(st.text(), st.integers(4, 60))
def test_any_text_becomes_one_printable_line(text: str, limit: int) -> None:
    line = one_line(text, limit)
    assert len(line) <= limit
    assert line.isprintable()


def test_exception_without_message_gives_its_class() -> None:
    assert one_line(KeyError()) == "KeyError"


def test_unknown_name_lists_what_there_is_and_guesses_only_close_names() -> None:
    assert "Did you mean" not in unknown_name("method", "zzz", ["dsa", "uniform"])
    assert unknown_name("method", "unifrom", ["dsa", "uniform"]).count("'uniform'?") == 1


def test_first_line_of_an_error_can_stand_inside_a_sentence() -> None:
    assert first_line(RuntimeError("\n Shapes differ. \nTraceback ...")) == "Shapes differ"
    assert first_line(KeyError()) == "KeyError"
