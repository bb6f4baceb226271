"""Conversion to LiteRT files, with a fake worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dsa_hw.errors import MeasurementError, ModelError
from profilers.litert.client import Worker
from profilers.litert.convert import convert
from tests.fakes.litert_env import make_fake


def test_files_are_deleted_with_their_objects(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch)
    worker = Worker()
    file, reason = convert(worker, *tiny)
    assert reason == ""
    assert file.content() == b"1000000"
    path = worker.folder / file.name
    del file
    assert not path.exists()
    assert not list(worker.folder.glob("*.pt2"))
    worker.close()


@pytest.mark.parametrize("line", ['{"done": {}}', '{"done": {"narrows": 1}}', '{"done": {"narrows": ""}}'])
def test_invalid_answers_are_errors(line: str, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch, f"says {line}")
    with pytest.raises(MeasurementError, match="invalid answer to request 'convert'"):  # the last: there is no file
        convert(Worker(), *tiny)


def test_integer_inputs_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_fake(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match="integers of shape"):
        convert(Worker(), torch.nn.Embedding(4, 2), (torch.zeros(1, 3, dtype=torch.long),))
