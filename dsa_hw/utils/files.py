"""Files that are written completely or not at all, locks, and the cache folder of the user.

Every writer of this project uses this module (the agent that runs on boards is one file and has its own):

* `whole_file`, `write_bytes`, `write_text`, `write_figure`: one file;
* `whole_folder`: several files of a folder that belong together;
* `append_line`: one line of a log that is never rewritten;
* `locked`: a file that is read, changed and written again;
* `only_process`: a folder in which a long piece of work is continued.

After a crash, a full disk or a killed process, a file has its old or its new content. What the operating system refuses
is an error of the class that the caller chooses.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dsa_hw.errors import DsaError, FileError
from dsa_hw.utils.text import one_line

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "append_line",
    "cache_folder",
    "locked",
    "only_process",
    "refuse_overwriting",
    "settle_folder",
    "whole_file",
    "whole_folder",
    "write_bytes",
    "write_figure",
    "write_text",
]

_PATIENCE: Final = 60.0  # seconds to wait for another process; none of ours holds a lock for as long
_SWITCH: Final = ".switch"  # complete new files of a folder that are not yet in their places
_STAGING: Final = ".writing-"  # incomplete ones
_REMOVED: Final = ".removed.json"  # in both: names of files that the new ones replace
# What torch and safetensors raise where the operating system refuses to write.
_FAILED_WRITE: Final = re.compile(
    r"PytorchStreamWriter|inline_container|iostream error|unexpected pos|I/?O ?Error", re.I
)


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], error: type[DsaError] = FileError) -> Iterator[Path]:
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
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with _explained(path, error):
        try:
            if path.exists() and not path.is_file():
                raise OSError(errno.EINVAL, "it is not a regular file")
            # Exclusive: a link that somebody put there is not followed. The umask applies.
            os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            yield temporary
            _flush(temporary)
            os.replace(temporary, path)
            _flush(path.parent)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def write_bytes(path: str | os.PathLike[str], content: bytes, error: type[DsaError] = FileError) -> None:
    """Write ``content``, completely or not at all (see `whole_file`)."""
    with whole_file(path, error) as temporary:
        descriptor = os.open(temporary, os.O_WRONLY | getattr(os, "O_BINARY", 0))
        try:
            _write_all(descriptor, content)
        finally:
            os.close(descriptor)


def write_text(path: str | os.PathLike[str], text: str, error: type[DsaError] = FileError) -> None:
    """Write ``text`` as UTF-8, completely or not at all (see `whole_file`)."""
    write_bytes(path, text.encode("utf-8"), error)


def write_figure(
    path: str | os.PathLike[str], figure: Figure, error: type[DsaError] = FileError, **options: Any
) -> None:
    """Draw a Matplotlib figure to a file, completely or not at all (see `whole_file`).

    Args:
        path: The file; its suffix chooses the format, e.g. .png, .svg or .pdf.
        figure: The figure.
        error: The class to raise.
        **options: For ``Figure.savefig``.

    Raises:
        DsaError: The format is unknown, or the file cannot be written; of class ``error``.
    """
    kind = Path(path).suffix.lstrip(".").lower()
    if kind not in figure.canvas.get_supported_filetypes():
        raise error(f"A figure must have the suffix .png, .svg or .pdf; got {str(path)!r}.")
    with whole_file(path, error) as temporary:
        figure.savefig(temporary, format=kind, **options)


@contextlib.contextmanager
def whole_folder(
    path: str | os.PathLike[str], names: Collection[str], error: type[DsaError] = FileError
) -> Iterator[Path]:
    """Write files of a folder that belong together: all of them, or none.

    The body writes the files to the temporary folder that is yielded. If it succeeds, they are flushed to disk, and one
    rename makes them the new content. They then move to their places in ``path``. A process that is killed before the
    rename leaves the old files. One that is killed after it leaves the rest of the moves to `settle_folder`, which
    readers and the next writer call. Other files of the folder stay as they are. The folder is locked meanwhile.

    Args:
        path: The folder; it is made where it does not exist.
        names: Names of all files that may belong together. Those that the body does not write are removed, because an
            earlier result left them.
        error: The class to raise where the operating system refuses.

    Yields:
        The temporary folder.

    Raises:
        DsaError: The folder cannot be written, or another process writes to it; of class ``error``.
    """
    path = Path(path)
    with _explained(path, error):
        path.mkdir(parents=True, exist_ok=True)
        with locked(path / "folder", error):
            _settle(path, names)
            for leftover in path.glob(f"{_STAGING}*"):  # of a process that was killed: we have the lock
                shutil.rmtree(leftover, ignore_errors=True)
            staging = Path(tempfile.mkdtemp(dir=path, prefix=_STAGING))
            try:
                yield staging
                written = _checked_names(staging, names)
                for name in written:
                    if (path / name).is_dir():  # before the switch, which could not be completed
                        raise OSError(errno.EISDIR, f"{name} in it is a folder")
                write_text(staging / _REMOVED, json.dumps(sorted(set(names) - set(written))), error)
                for entry in (*staging.iterdir(), staging):
                    _flush(entry)
                os.rename(staging, path / _SWITCH)
                _settle(path, names)
            finally:
                shutil.rmtree(staging, ignore_errors=True)


def settle_folder(path: str | os.PathLike[str], names: Collection[str], error: type[DsaError] = FileError) -> None:
    """Complete a `whole_folder` that was interrupted; does nothing where there is none.

    The folder may come from a stranger: no file is moved, replaced or removed but those of ``names``.

    Args:
        path: The folder.
        names: As for `whole_folder`.
        error: The class to raise.

    Raises:
        DsaError: The folder must be completed and cannot be written, or the interrupted write is not one of ours; of
            class ``error``.
    """
    path = Path(path)
    if os.path.lexists(path / _SWITCH):
        with _explained(path, error), locked(path / "folder", error):
            _settle(path, names)


def append_line(path: str | os.PathLike[str], line: str, error: type[DsaError] = FileError) -> None:
    """Append a line to a file, completely or not at all, and flush it to disk.

    Where an earlier process was killed within a line, a new line is begun.

    Args:
        path: The file; it is made where it does not exist.
        line: Text without line breaks.
        error: The class to raise where the operating system refuses.

    Raises:
        DsaError: The line cannot be written; of class ``error``.
    """
    with _explained(Path(path), error):
        # Appending: where the file system has no locks, a line is still written behind all others.
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
        try:
            with _file_lock(descriptor):
                end = os.lseek(descriptor, 0, os.SEEK_END)
                try:
                    if end:
                        os.lseek(descriptor, end - 1, os.SEEK_SET)
                        line = line if os.read(descriptor, 1) == b"\n" else f"\n{line}"
                    _write_all(descriptor, f"{line}\n".encode())
                    os.fsync(descriptor)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.ftruncate(descriptor, end)
                    raise
                if not end:  # perhaps new: its name too
                    _flush(Path(path).parent)
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def locked(
    path: str | os.PathLike[str],
    error: type[DsaError] = FileError,
    patience: float = _PATIENCE,
    busy: str | None = None,
) -> Iterator[None]:
    """Keep other processes from changing a file while it is read, changed and written again.

    The lock is the file ``.NAME.lock`` beside ``path``, because ``path`` itself is replaced. The operating system
    releases it where a process dies. On file systems without locks the existence of the file is the lock.

    Args:
        path: The file that is changed; it may not exist.
        error: The class to raise.
        patience: Seconds to wait for another process.
        busy: What to say where another process has the lock; None says it in general words.

    Raises:
        DsaError: Another process has had the lock for ``patience`` seconds, or the folder cannot be written; of class
            ``error``.
    """
    path = Path(path)
    lock = path.with_name(f".{path.name}.lock")
    deadline = time.monotonic() + patience
    with _explained(path, error):
        while (release := _acquire(lock)) is None:
            if time.monotonic() > deadline:
                said = busy or f"Another process has locked {path} for {patience:g} s. Wait for it."
                raise error(f"{said} If there is none, delete {lock}.")
            time.sleep(0.005)
    try:
        yield
    finally:
        release()


@contextlib.contextmanager
def only_process(folder: Path | None, error: type[DsaError] = FileError) -> Iterator[None]:
    """Keep other processes from continuing the work in a folder, which would mix with ours.

    Args:
        folder: The folder; it is made where it does not exist, and removed again if it stays empty. None for work that
            is kept nowhere.
        error: The class to raise.

    Raises:
        DsaError: Another process works in the folder, or it cannot be written; of class ``error``.
    """
    if folder is None:
        yield
        return
    made = not folder.exists()
    with _explained(folder, error):
        folder.mkdir(parents=True, exist_ok=True)
    busy = f"Another process works in {one_line(folder)}. Wait for it, or choose another out."
    try:
        with locked(folder / "work", error, 1.0, busy):
            yield
    finally:
        if made:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()


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


@contextlib.contextmanager
def _explained(path: Path, error: type[DsaError]) -> Iterator[None]:
    """Turn refusals of the operating system, also those that torch and safetensors report, into ``error``."""
    try:
        yield
    except DsaError:
        raise
    except OSError as reason:
        raise error(f"Cannot write {one_line(path)}: {one_line(reason.strerror or reason)}.") from reason
    except Exception as reason:
        library = type(reason).__name__ == "SafetensorError" or isinstance(reason, RuntimeError)
        if not (library and _FAILED_WRITE.search(str(reason))):
            raise
        said = str(reason).strip().partition("\n")[0]
        raise error(f"Cannot write {one_line(path)}: is the disk full? ({one_line(said, 120)}).") from reason


def _write_all(descriptor: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _flush(path: Path) -> None:
    """Flush a file, or the names of a folder, to disk."""
    if os.name != "posix" and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _settle(path: Path, names: Collection[str]) -> None:
    """Move the files of a complete switch to their places; the caller has the lock."""
    switch = path / _SWITCH
    try:
        kind = os.lstat(switch).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(kind):  # never a link, which would move files of another folder
        raise OSError(errno.ENOTDIR, f"{_SWITCH} in it is not a folder; delete it")
    moved, removed = _checked_names(switch, names), _removed(switch, names)
    for name in moved:
        os.replace(switch / name, path / name)
    for name in removed:
        (path / name).unlink(missing_ok=True)
    _flush(path)
    shutil.rmtree(switch)


def _checked_names(folder: Path, names: Collection[str]) -> list[str]:
    """Return the names of the files of a folder, which must be regular files with known names."""
    found = [entry for entry in folder.iterdir() if entry.name != _REMOVED]
    for entry in found:
        if entry.name not in names or not stat.S_ISREG(os.lstat(entry).st_mode):
            raise OSError(errno.EINVAL, f"{folder.name} in it has a foreign file, {entry.name!r}; delete {folder.name}")
    return [entry.name for entry in found]


def _removed(switch: Path, names: Collection[str]) -> list[str]:
    try:
        found = json.loads((switch / _REMOVED).read_bytes())
    except (OSError, ValueError, RecursionError):  # the last thing of a settled folder that was removed
        return []
    # Only of known names, whoever wrote the list.
    return [name for name in names if name in found] if isinstance(found, list) else []


def _acquire(lock: Path) -> Callable[[], None] | None:
    """Return what releases the lock; None where another process has it."""
    if fcntl is None:
        return _acquire_by_existence(lock)
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(descriptor), os.stat(lock)):
            raise FileNotFoundError
    except (BlockingIOError, FileNotFoundError):
        # Another process has the lock, or had it and has removed its file: then this is a lock of nothing.
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
            raise
        return _acquire_by_existence(lock.with_suffix(".locked"))

    def release() -> None:
        with contextlib.suppress(OSError):
            os.unlink(lock)
        with contextlib.suppress(OSError):  # nothing was written to it
            os.close(descriptor)

    return release


def _acquire_by_existence(lock: Path) -> Callable[[], None] | None:
    try:
        os.close(os.open(lock, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return None

    def release() -> None:
        with contextlib.suppress(OSError):
            os.unlink(lock)

    return release


@contextlib.contextmanager
def _file_lock(descriptor: int) -> Iterator[None]:
    """Lock an open file that is never replaced; file systems without locks do without."""
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # closing the file releases it
    yield
