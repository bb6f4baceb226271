"""The folder of a comparison or a sweep: what is damaged is refused, or made again."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ConfigDict, Field

from dsa_hw.errors import DsaError, FileError
from dsa_hw.experiments.run_folder import RunFolder, RunRowDocument
from dsa_hw.utils.documents import sealed
from tests.fakes.archives import with_parts_called_folders

SETTINGS: dict[str, Any] = {"seed": 0, "model": "resnet20", "options": {"a": [1, 2.5]}}


def test_settings_and_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SETTINGS)
    rows = [{"id": "one", "accuracy": 0.5, "widths": {"a": 3}}, {"id": "two", "accuracy": None}]
    for row in rows:
        folder.add(row)
    folder.add({"id": "three", "accuracy": float("nan")})
    again = RunFolder(tmp_path, SETTINGS)
    assert list(again.rows().values()) == [*rows, {"id": "three", "accuracy": None}]
    assert again.read("settings.json") == SETTINGS
    assert again.read("session.json") is None


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff", b"{", b"[" * 100_000, b"[]", b"{}", b'{"format": "dsa_hw run file 1", "content": {}}'],
    ids=lambda content: repr(content)[:20],
)
def test_damaged_settings_are_one_line(tmp_path: Path, content: bytes) -> None:
    RunFolder(tmp_path, SETTINGS)
    (tmp_path / "settings.json").write_bytes(content)
    with pytest.raises(FileError, match=r"settings\.json") as caught:
        RunFolder(tmp_path, SETTINGS)
    assert "\n" not in str(caught.value)


def test_no_damage_changes_a_row(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path, SETTINGS)
    rows = {id: {"id": id, "accuracy": 0.25 + i, "widths": {"a": i}} for i, id in enumerate(("one", "two", "three"))}
    for row in rows.values():
        folder.add(row)
    content = (tmp_path / "rows.jsonl").read_bytes()
    generator = random.Random(0)
    found = {}
    with caplog.at_level(logging.WARNING):
        for _ in range(200):
            changed = bytearray(content)
            changed[generator.randrange(len(content))] = generator.randrange(256)
            (tmp_path / "rows.jsonl").write_bytes(changed)
            found = folder.rows()
            assert found.items() <= rows.items()
            assert len(found) >= 1
    assert "is made again" in caplog.text


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SETTINGS)
    model = torch.nn.Linear(64, 64)
    folder.keep("one", model)
    assert torch.equal(folder.weights("one")["state_dict"]["weight"], model.weight)  # type: ignore[index]
    (file,) = (tmp_path / "networks").iterdir()
    content = bytearray(file.read_bytes())
    place = content.index(model.weight.detach().numpy().tobytes()[:64])
    content[place + 100] ^= 1
    file.write_bytes(content)
    with pytest.raises(DsaError, match="Delete it to train again"):
        folder.weights("one")


def test_weights_are_the_bytes_whose_checksums_were_compared(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SETTINGS)
    model = torch.nn.Linear(4, 4)
    folder.keep("one", model)
    (file,) = (tmp_path / "networks").iterdir()
    file.write_bytes(with_parts_called_folders(file.read_bytes()))
    found = folder.weights("one")
    assert found is not None
    assert torch.equal(found["state_dict"]["weight"], model.weight)


class Row(RunRowDocument):
    """A row with one field."""

    model_config = ConfigDict(extra="forbid")
    accuracy: float = Field(ge=0, le=1)


def test_rows_follow_the_schema_of_the_experiment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path, SETTINGS, Row)
    folder.add({"id": "one", "accuracy": 0.5})
    for wrong in ({"id": "two"}, {"id": "two", "accuracy": 1.5}, {"id": "two", "accuracy": 0.5, "further": 1}):
        with pytest.raises(FileError, match="the row of two"):
            folder.add(wrong)
        with (tmp_path / "rows.jsonl").open("a") as file:
            file.write(json.dumps(sealed(wrong)) + "\n")
    with caplog.at_level(logging.WARNING):
        assert folder.rows() == {"one": {"id": "one", "accuracy": 0.5}}
    assert caplog.text.count("is made again") == 3


@pytest.mark.parametrize("content", [[1], {}, {"state_dict": 5}], ids=str)
def test_a_file_without_weights_is_refused(content: Any, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SETTINGS)
    torch.save(content, tmp_path / "networks" / "one.pt")
    with pytest.raises(DsaError, match="Delete it to train again"):
        folder.weights("one")


def test_rows_have_a_checksum(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, SETTINGS)
    folder.add({"id": "one", "accuracy": 0.5})
    line = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(line.replace("0.5", "0.9"))
    assert folder.rows() == {}
    assert json.loads(line)["accuracy"] == 0.5
