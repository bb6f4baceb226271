"""Atomic writes, and the cache folder of the user."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dsa_hw.errors import DsaError
from dsa_hw.utils.text import one_line

__all__ = ["cache_folder", "refuse_overwriting", "whole_file", "write_text"]


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], error: type[DsaError] = DsaError) -> Iterator[Path]:
    """Write a file completely or not at all.

    The body writes to the temporary file that is yielded; it is in the folder of ``path`` and has an unpredictable
    name. If the body succeeds, the file is flushed to disk and replaces ``path``. Otherwise it is removed, and ``path``
    stays as it was. Permissions follow the umask.

    Args:
        path: The file to write. Its folder must exist.
        error: The class to raise where the operating system refuses (no space, no permission, no such folder).

    Yields:
        The path of the temporary file.

    Raises:
        DsaError: The file cannot be written; of class ``error``.
    """
    path = Path(path)
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        temporary = Path(name)
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        _flush(temporary)
        os.replace(temporary, path)
        temporary = None
        if os.name == "posix":
            _flush(path.parent)
    except OSError as reason:
        raise error(f"Cannot write {path}: {one_line(reason.strerror or reason)}.") from reason
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str, error: type[DsaError] = DsaError) -> None:
    """Write ``text`` as UTF-8, completely or not at all (see `whole_file`)."""
    with whole_file(path, error) as temporary:
        temporary.write_text(text, encoding="utf-8")


def refuse_overwriting(out: Path | None, *inputs: Path | None, option: str = "--out") -> None:
    """Raise `DsaError` where ``out`` is one of the files that a command reads, also through links."""
    for source in inputs:
        if out is not None and source is not None and _is_same(out, source):
            raise DsaError(f"{option} would overwrite an input of the command. Choose another file than {str(out)!r}.")


def cache_folder() -> Path:
    """Return the cache folder of this project, which may not exist.

    The environment variable ``DSA_HW_CACHE`` overrides the default, a subfolder of the cache folder of the platform.

    Raises:
        DsaError: The user has no home folder and ``DSA_HW_CACHE`` is not set.
    """
    if folder := os.environ.get("DSA_HW_CACHE"):
        return Path(folder)
    try:
        if sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home())
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise DsaError("This user has no home folder. Set DSA_HW_CACHE to a writable folder.") from error
    return base / "dsa_hw"


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return one.resolve() == other.resolve()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
