"""Run files: the options of a command in YAML, for ``--config``.

A key is the name of an option (``budget``, ``time-limit``) or of a positional argument (``plan``); ``command`` names
the command. Values are what would be typed, and pass the same checks. What is typed replaces what the file says.

A run file is data. It may name files, but not code to import, and no other computer: these must be typed, so that a
run file from elsewhere cannot run anything that its user did not ask for.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from dsa_hw.errors import FileError
from dsa_hw.utils.files import write_text
from dsa_hw.utils.text import first_line, one_line, unknown_name
from dsa_hw.zoo.user_code import is_code

__all__ = [
    "RUN_FILE",
    "add_run_file",
    "as_yaml",
    "chooses_code",
    "effective_options",
    "expand_run_file",
    "save_run_file",
]

RUN_FILE: Final = "run.yaml"
_LARGEST = 2**20  # bytes
_OWN = ("help", "config", "print_config")
_REMOTE = ("ssh://", "adb:", "tcp://", "tls://")

Options = dict[str, Any]
"""Name of an option, without dashes before it -> text, list of texts, or True."""


def add_run_file(parser: argparse.ArgumentParser) -> None:
    """Add ``--config`` and ``--print-config``."""
    parser.add_argument(
        "--config", type=Path, metavar="YAML", help="read options from a run file; typed ones replace it"
    )
    parser.add_argument("--print-config", action="store_true", help="print the options as a run file, and do nothing")


def expand_run_file(command: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> list[str]:
    """Return the arguments of a command, with those of its run file before them.

    Args:
        command: Its name.
        parser: Its parser.
        words: What was typed after the name.

    Raises:
        FileError: The file cannot be read, has unknown keys, or chooses code or another computer.
    """
    if "-h" in words or "--help" in words:
        return list(words)
    typed = vars(_lenient(parser, typed=True).parse_known_args(words)[0])
    if "config" not in typed:
        return list(words)
    path = Path(typed["config"])
    known = {_key(action): action for action in parser._actions if action.dest not in _OWN}
    first: list[str] = []
    then: list[str] = []
    for key, value in _read(path, command, known).items():
        action = known[key]
        if action.dest in typed:
            continue
        _refuse_code(path, key, value)
        (then if action.option_strings else first).extend(_words(path, key, value, action))
    return [*first, *then, *words]


def effective_options(command: str, parser: argparse.ArgumentParser, words: Sequence[str]) -> Options:
    """Return all options of a command with their values as text, also those that have their default."""
    found = vars(_lenient(parser, typed=False).parse_known_args(words)[0])
    options: Options = {"command": command}
    for action in parser._actions:
        value = found.get(action.dest)
        if action.dest not in _OWN and value is not None and value is not False and value is not argparse.SUPPRESS:
            many = isinstance(value, (list, tuple))
            options[_key(action)] = value if value is True else [str(v) for v in value] if many else str(value)
    return options


def chooses_code(options: Options) -> bool:
    """Return whether options import code or reach another computer, which must be typed."""
    return any(_must_be_typed(key, text) for key, value in options.items() for text in _texts(value))


def save_run_file(folder: Path, options: Options) -> None:
    """Write options to run.yaml in a folder."""
    write_text(folder / RUN_FILE, as_yaml(options), FileError)


def as_yaml(options: Options) -> str:
    """Return options as the text of a run file."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes numbers, which are texts here, without quotes: `_read` makes every value a text."""

        yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    plain = {key: "true" if value is True else value for key, value in options.items()}
    return str(yaml.dump(plain, Dumper=Dumper, sort_keys=False, allow_unicode=True))


def _key(action: argparse.Action) -> str:
    names = [name for name in action.option_strings if name.startswith("--")]
    return names[0].removeprefix("--") if names else action.dest


def _lenient(parser: argparse.ArgumentParser, *, typed: bool) -> argparse.ArgumentParser:
    """Return a copy that keeps values as text and requires nothing; if ``typed``, without defaults."""
    copied = copy.deepcopy(parser)
    for action in copied._actions:
        action.required, action.type, action.choices = False, None, None
        if not action.option_strings and action.nargs is None:
            action.nargs = "?"
        if typed:
            action.default = argparse.SUPPRESS
    if typed:
        copied._defaults.clear()
    return copied


def _read(path: Path, command: str, known: dict[str, argparse.Action]) -> Options:
    import yaml

    class Loader(yaml.BaseLoader):  # type: ignore[misc]
        """Strings, lists and mappings only, without repeated keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            keys = [key.value for key, _ in node.value]
            if repeated := {key for key in keys if keys.count(key) > 1}:
                raise ValueError(f"the key {min(repeated)!r} occurs twice")
            return super().construct_mapping(node, deep)

    try:
        if path.stat().st_size > _LARGEST:
            raise ValueError(f"it has more than {_LARGEST} bytes")
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)
        if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
            raise ValueError("it must have lines such as model: resnet18")
    except (OSError, ValueError, TypeError, yaml.YAMLError, RecursionError) as error:
        raise FileError(f"Cannot read the run file {path}: {first_line(error)}.") from error
    content = {key.replace("_", "-") if key.replace("_", "-") in known else key: v for key, v in content.items()}
    other = content.pop("command", command)
    if other != command:
        raise FileError(f"{path} is a run file of dsa-hw {one_line(other, 40)}, not of dsa-hw {command}.")
    for key in content:
        if key not in known:
            raise FileError(f"{path}: {unknown_name('option', one_line(key, 60), known)}")
    return content


def _words(path: Path, key: str, value: Any, action: argparse.Action) -> list[str]:
    """Return what would be typed for an option."""
    name = f"--{key}"
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(v, str) for v in values):
        raise FileError(f"{path}: {key} must be a text, a number or a list of them.")
    if action.nargs == 0:
        if str(value).lower() not in ("true", "false"):
            raise FileError(f"{path}: {key} must be true or false; got {one_line(value, 40)!r}.")
        return [name] if str(value).lower() == "true" else []
    if values in ([""], ["null"], ["~"]):
        return []
    several = action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)
    if isinstance(value, list) and not several:
        raise FileError(f"{path}: {key} must be a single value; got a list.")
    if not action.option_strings:
        return list(values)
    return [name, *values] if action.nargs in ("+", "*") else [f"{name}={v}" for v in values]


def _refuse_code(path: Path, key: str, value: Any) -> None:
    """Refuse values that import code or reach another computer.

    Raises:
        FileError: The value must be typed.
    """
    for text in _texts(value):
        if what := _must_be_typed(key, text):
            raise FileError(
                f"{path} names {what} ({key}: {one_line(text, 80)}), which a file must not choose. Type it: --{key} "
                f"{one_line(text, 80)}."
            )


def _texts(value: Any) -> list[str]:
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str)]


def _must_be_typed(key: str, text: str) -> str:
    """Return what a value chooses that a file must not choose; empty where there is nothing."""
    if key == "counter" or (key in ("model", "data") and is_code(text)):
        return "code to import"
    if key == "fleet" or (key in ("target", "device") and any(mark in text for mark in _REMOTE)):
        return "another computer"
    return ""
