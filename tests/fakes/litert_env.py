"""The environment of the LiteRT worker: a fake one, and whether the real one is installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dsa_hw.errors import MissingDependencyError
from profilers.litert.client import PACKAGES, environment_folder, python_of, versions


def make_fake(home: Path, monkeypatch: pytest.MonkeyPatch, mood: str = "") -> None:
    """Make an environment in the cache folder ``home`` whose Python runs `fake_worker`."""
    monkeypatch.setenv("DSA_HW_CACHE", str(home))
    monkeypatch.setenv("FAKE_WORKER", mood)
    folder = environment_folder()
    for package in (*PACKAGES, "torch==1.0"):
        name, _, version = package.partition("==")
        about = folder / "lib/python3.11/site-packages" / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = python_of(folder)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).with_name("fake_worker.py")}" "$@"\n')
    python.chmod(0o755)


def _reason() -> str | None:
    try:
        versions()
    except MissingDependencyError as error:
        return str(error)
    return None


REASON = _reason()
CACHE = os.environ.get("DSA_HW_CACHE")


def real(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that converts for real: skipped, with the command to run, where the environment is not installed."""
    with_environment = pytest.mark.usefixtures("users_cache")(test)
    return pytest.mark.skipif(REASON is not None, reason=f"needs the real environment: {REASON}")(with_environment)
