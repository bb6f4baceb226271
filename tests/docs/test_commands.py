"""The commands and options that the documents show are accepted by the real parsers."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from dsa_hw.cli.budget_args import expand_budgets
from dsa_hw.cli.main import _parsers, build_parser
from dsa_hw.cli.run_file import _lenient
from profilers.cli import add_options
from tests.docs.blocks import DOCUMENTS, ROOT, commands, inline_code

# Options of other programs that the documents name.
FOREIGN = {"--nthreads", "--strict", "--durations", "--arena-cache-size"}
FOREIGN |= {"--exportTimes", "--fp16", "--int8", "--loadEngine", "--saveEngine", "--stronglyTyped", "--timingCacheFile"}


def parser_of(words: list[str]) -> tuple[argparse.ArgumentParser, list[str]] | None:
    """Return the parser of one of our commands with its arguments; None for other programs."""
    if words[0] == "dsa-hw":
        return build_parser(), words[1:]
    if words[:2] == ["python", "-m"] and words[2] in ("profilers.latency", "profilers.energy"):
        parser = argparse.ArgumentParser(prog=" ".join(words[:3]))
        add_options(parser, words[2].removeprefix("profilers."))
        return parser, words[3:]
    if words[0].startswith("--"):  # options to add to `dsa-hw profile`
        return build_parser(), ["profile", *words]
    return None


def check(where: str, words: list[str]) -> bool:
    """Parse a command; return whether it is one of ours."""
    found = parser_of(words)
    if found is None:
        return False
    parser, arguments = found
    if {"--config", "--print-config"} & set(arguments):  # nothing is required beside a run file
        parser = _lenient(_parsers(parser)[arguments[0]], typed=False)
        arguments = arguments[1:]
    try:
        args = parser.parse_args(arguments)
    except SystemExit as error:
        pytest.fail(f"{where}: {' '.join(words)} ends with {error.code}")
    expand_budgets([*(getattr(args, "budget", None) or ()), *(getattr(args, "budgets", None) or ())])
    return True


def test_commands_in_blocks_are_accepted() -> None:
    ours = sum(check(where, words) for page in DOCUMENTS for where, words in commands(page))
    assert ours >= 20


def test_other_commands_in_blocks_name_files_and_targets_that_exist() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
    for page in DOCUMENTS:
        for where, words in commands(page):
            if words[0] == "make":
                assert words[1] in targets, where
            if words[0] == "python" and words[1].endswith(".py"):
                assert (ROOT / words[1]).is_file(), where


def all_options() -> set[str]:
    """Return the options of every command."""
    parsers: list[argparse.ArgumentParser] = [build_parser()]
    energy = argparse.ArgumentParser()
    add_options(energy, "energy")
    found: set[str] = set(energy._option_string_actions)
    while parsers:
        for action in parsers.pop()._actions:
            found.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    return found


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_in_the_text_exist(page: Path) -> None:
    known = all_options() | FOREIGN
    if page.parent.name == "benchmarks":  # their text also explains the options of the scripts
        known |= {
            o for file in (ROOT / "benchmarks").glob("*.py") for o in re.findall(r'"(--[\w-]+)"', file.read_text())
        }
    for code in inline_code(page):
        if code.startswith(("--", "dsa-hw ", "python -m profilers.")):
            named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", code))
            assert named <= known, f"{page.name}: {code}"
        if code.startswith("dsa-hw ") and not code.startswith("dsa-hw --"):
            for command in code.split()[1].split("|"):
                assert command in _commands(), f"{page.name}: {code}"


def _commands() -> list[str]:
    action = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return list(action.choices)
