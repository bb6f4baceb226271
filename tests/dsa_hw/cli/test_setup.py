"""``dsa-hw setup``, without an installation."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dsa_hw.cli import setup
from dsa_hw.errors import MissingDependencyError
from profilers import litert
from profilers.litert.client import PACKAGES
from tests.fakes.litert_env import make_fake

ROOT = Path(setup.__file__).parents[2]


def _options(*words: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    setup.add(parser.add_subparsers())
    return parser.parse_args(["setup", *words])


def test_setup_installs_the_lock_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "home"))
    calls: list[list[str]] = []

    def call(command: list[str], wrong: str) -> None:
        calls.append(command)
        if "--require-hashes" in command:
            make_fake(tmp_path / "home", monkeypatch)

    monkeypatch.setattr(setup, "_call", call)
    assert setup.run(_options("ethos-u")) == 0
    venv, locked, torch_call = calls
    assert venv[1:3] == ["-m", "venv"]
    assert {"--require-hashes", "--no-deps"} <= set(locked)
    assert Path(locked[locked.index("-r") + 1]).read_text() == LOCK.read_text()
    for command in (locked, torch_call):
        assert command[command.index("--only-binary") + 1] == ":all:", "nothing is built, so nothing unlocked is run"
    assert torch_call[-1] == f"torch=={torch.__version__.partition('+')[0]}"
    constraints = Path(torch_call[torch_call.index("-c") + 1]).read_text().splitlines()
    assert {canonicalize_name(Requirement(line).name) for line in constraints} == set(requirements())
    assert "ready: " in capsys.readouterr().out
    assert setup.run(_options("litert")) == 0  # the same environment: nothing to do
    assert len(calls) == 3
    assert setup.run(_options("litert", "--again")) == 0
    assert len(calls) == 6


def test_failed_command_of_setup_is_an_error() -> None:
    with pytest.raises(MissingDependencyError, match=r"Cannot create an environment .* ended with 3"):
        setup._call(["sh", "-c", "exit 3"], "Cannot create an environment")


LOCK = Path(litert.__file__).with_name("requirements.txt")


def requirements() -> dict[str, list[tuple[Requirement, list[str]]]]:
    """Return what the lock file requires, with hashes, by name; a name may have several entries with markers."""
    found: dict[str, list[tuple[Requirement, list[str]]]] = {}
    for entry in re.sub(r"\\\n", " ", LOCK.read_text()).splitlines():
        if not entry.startswith("#"):
            text, *hashes = re.split(r"\s+--hash=", entry.strip())
            required = Requirement(text)
            found.setdefault(canonicalize_name(required.name), []).append((required, hashes))
    return found


def test_every_locked_package_has_one_version_and_hashes() -> None:
    found = requirements()
    assert len(found) > len(PACKAGES)
    for entries in found.values():
        for required, hashes in entries:
            assert re.fullmatch(r"==[0-9][0-9A-Za-z.]*", str(required.specifier)), required
            assert required.url is None
            assert hashes, required
            assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), required
    text = LOCK.read_text()
    assert "://" not in text, "a lock file names no server"
    for package in PACKAGES:
        name, _, version = package.partition("==")
        assert [str(required.specifier) for required, _ in found[name]] == [f"=={version}"]
    assert "torch" not in found, "its builds differ, and it must match the torch of this environment"


def test_lock_file_is_for_the_requirements_beside_it() -> None:
    locked = requirements()
    lines = [line for line in LOCK.with_suffix(".in").read_text().splitlines() if not line.startswith("#")]
    for wanted in map(Requirement, lines):
        versions = [
            str(required.specifier).removeprefix("==") for required, _ in locked[canonicalize_name(wanted.name)]
        ]
        assert all(wanted.specifier.contains(version) for version in versions), wanted


def test_lock_file_is_part_of_the_wheel() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["profilers"]
    assert any(Path("litert/requirements.txt").match(pattern) for pattern in data)


def test_extra_lists_the_packages_that_setup_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["ethos-u"] == list(PACKAGES)
