"""A file is written whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dsa_hw.errors import PlanError
from dsa_hw.utils.files import cache_folder, whole_file, write_text


def _write_half(path: Path) -> None:
    with whole_file(path) as temporary:
        temporary.write_text("new")
        raise RuntimeError("half way")


def test_failed_write_keeps_the_old_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_text(path, "old")
    with pytest.raises(RuntimeError, match="half way"):
        _write_half(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["result.json"]


def test_missing_folder_is_an_error_of_the_given_class(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="Cannot write"):
        write_text(tmp_path / "missing" / "plan.json", "text", PlanError)


def test_a_link_with_the_temporary_prefix_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("precious")
    for name in ("model.json.partial", ".model.json", ".model.json."):
        (tmp_path / name).symlink_to(precious)
    write_text(tmp_path / "model.json", "new")
    assert precious.read_text() == "precious"
    assert not (tmp_path / "model.json").is_symlink()


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_follow_the_umask(tmp_path: Path, mask: int, mode: int) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSA_HW_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("DSA_HW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if os.name == "posix" and os.uname().sysname == "Linux":
        assert cache_folder() == tmp_path / "dsa_hw"
