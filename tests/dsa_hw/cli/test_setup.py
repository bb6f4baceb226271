"""``dsa-hw setup``, without an installation."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_hw.cli import setup
from dsa_hw.errors import DsaError, MissingDependencyError
from profilers.litert.client import PACKAGES
from tests.fakes.litert_env import make_fake


def _options(*words: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    setup.add(parser.add_subparsers())
    return parser.parse_args(["setup", *words])


def test_setup_creates_the_environment_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "home"))
    pins = tmp_path / "pins.txt"
    pins.write_text("torch==2.13.0\n")
    calls: list[list[str]] = []

    def call(command: list[str], wrong: str) -> None:
        calls.append(command)
        if "pip" in command:
            make_fake(tmp_path / "home", monkeypatch)

    monkeypatch.setattr(setup, "_call", call)
    assert setup.run(_options("ethos-u", "--constraints", str(pins))) == 0
    assert calls[0][1:3] == ["-m", "venv"]
    assert calls[1][calls[1].index("-c") + 1] == str(pins)
    assert calls[1][-len(PACKAGES) :] == list(PACKAGES)
    assert f"torch=={torch.__version__.partition('+')[0]}" in calls[1]
    assert "ready: " in capsys.readouterr().out
    assert setup.run(_options("litert")) == 0  # the same environment: nothing to do
    assert len(calls) == 2
    assert setup.run(_options("litert", "--again")) == 0
    assert len(calls) == 4


def test_failed_command_of_setup_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "home"))
    with pytest.raises(DsaError, match="no such file"):
        setup.run(_options("ethos-u", "--constraints", str(tmp_path / "nowhere.txt")))
    with pytest.raises(MissingDependencyError, match=r"Cannot create an environment .* ended with 3"):
        setup._call(["sh", "-c", "exit 3"], "Cannot create an environment")


def test_extra_lists_the_packages_that_setup_installs() -> None:
    project = tomllib.loads((Path(setup.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["ethos-u"] == list(PACKAGES)
