"""Weights in files: safetensors as this project writes them, and state dicts that users saved with torch.

Tensors only, never pickled code. ``torch.load`` does not compare the checksums of the zip file that ``torch.save``
writes, so that a flipped bit is another weight. They are compared here.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import io
import json
import logging
import os
import pathlib
import re
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dsa_hw.errors import ModelError
from dsa_hw.utils.inputs import as_path
from dsa_hw.utils.text import one_line

__all__ = ["checked_archive", "read_weights", "tensors_digest", "weights_bytes"]

_log = logging.getLogger(__name__)

# Where training scripts keep the state dict in a checkpoint. Averaged weights come first, as in timm.
_WRAPPERS: Final = (
    "state_dict_ema", "model_ema", "ema_state_dict", "ema", "state_dict", "model_state_dict", "model", "network", "net",
    "weights", "params", "module", "shadow",
)  # fmt: skip
_DEPTH: Final = 3  # of wrappers in wrappers
# What checkpoints contain beside tensors: settings, paths and NumPy's numbers. None of them runs code.
_HARMLESS: Final[list[Any]] = [
    argparse.Namespace, collections.defaultdict, dict, float, int, list, pathlib.PosixPath,
    np.dtype, np.float64(0).__reduce__()[0], *{type(np.dtype(t)) for t in "fdilqILQ?"},
]  # fmt: skip
_SAVE: Final = "Save model.state_dict() with torch.save or safetensors.torch.save_file."


def weights_bytes(state: Mapping[str, Any]) -> bytes:
    """Return a state dict as the bytes of a safetensors file.

    Tied weights are written once for each of their names, and memory formats are not kept; loading them into the same
    network ties them again.

    Raises:
        ModelError: Something in the state dict is not a tensor, or a tensor of a kind that the format does not have.
    """
    parts = {name: _plain(name, value).clone() for name, value in state.items()}
    try:
        return safetensors.torch.save(parts)
    except (KeyError, ValueError, TypeError, RuntimeError, safetensors.SafetensorError) as error:
        raise ModelError(f"The weights cannot be written as safetensors: {one_line(error)}.") from error


def tensors_digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of all tensors of a state dict with their names, types and shapes, whatever file holds them.

    >>> import torch
    >>> tensors_digest({"a": torch.zeros(2)}) == tensors_digest({"a": torch.zeros(2, 1)[:, 0]})
    True

    Raises:
        ModelError: Something in the state dict is not a tensor.
    """
    found = hashlib.sha256()
    for name in sorted(state):
        tensor = _plain(name, state[name])
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        if tensor.numel():
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def read_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a state dict from a safetensors file, or from a file of ``torch.save``.

    Of a checkpoint of a training, the state dict in it is returned: the averaged weights, where it has them.

    Raises:
        ModelError: The file cannot be read, is damaged, or has something other than the state dict of a network.
    """
    path = as_path(path, "weights")
    if not path.is_file():
        reason = "it is not a regular file" if path.exists() else "there is no such file"
        raise ModelError(f"Cannot read the weights {path}: {reason}.")
    try:
        with path.open("rb") as file:
            start = file.read(9)
        if start == b"version h":
            raise ModelError(f"{path} is a pointer of Git LFS, not the file itself. Run git lfs pull in its folder.")
        if path.suffix == ".safetensors" or start[8:] == b"{":
            return dict(safetensors.torch.load(path.read_bytes()))
        source = checked_archive(path) if start[:2] == b"PK" else path
        with torch.serialization.safe_globals(_HARMLESS):
            found = torch.load(source, weights_only=True, map_location="cpu")
    except ModelError:
        raise
    except (OSError, MemoryError, safetensors.SafetensorError) as error:
        raise ModelError(f"Cannot read the weights {path} ({one_line(error, 200)}). {_SAVE}") from error
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ModelError(
            f"The weights {path} are damaged: a checksum does not match, or a part is missing ({one_line(error)}). "
            "Restore the file."
        ) from error
    except Exception as error:  # torch and pickle raise a dozen unrelated classes for a file that is not theirs
        if found := re.search(r"GLOBAL ([\w.]+)", str(error)):
            reason = f"it contains {found[1]}. Only tensors are loaded, because other objects can run code"
        else:
            reason = "it is damaged, has something other than tensors, or is not a file of torch.save"
        raise ModelError(f"Cannot read the weights {path}: {reason}. {_SAVE}") from error
    return _state_dict(found, path)


def checked_archive(path: Path) -> io.BytesIO:
    """Return the parts of a zip file, whose checksums Python compares, as a new zip file for ``torch.load``.

    torch looks for the parts in its own way. Where the directory of the file is damaged, it can read other bytes than
    those that were compared.

    Raises:
        zipfile.BadZipFile: A checksum does not match, a part is missing, or parts are compressed, which ``torch.save``
            does not do: a small file could fill the memory.
    """
    copied = io.BytesIO()
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(copied, "w") as new:
        if sum(part.file_size for part in archive.infolist()) > path.stat().st_size:
            raise zipfile.BadZipFile("its parts are larger than the file")
        for part in archive.infolist():
            new.writestr(part.filename, archive.read(part))
    copied.seek(0)
    return copied


def _state_dict(found: Any, path: Path) -> dict[str, Tensor]:
    if not isinstance(found, Mapping):
        raise ModelError(f"{path} must contain a state dict; it contains a {type(found).__name__}. {_SAVE}")
    for _ in range(_DEPTH):
        wrapper = next((k for k in _WRAPPERS if isinstance(found.get(k), Mapping) and found[k]), None)
        if wrapper is None:
            break
        _log.info("%s is a checkpoint; its part %r is used.", path, wrapper)
        found = found[wrapper]
    if not found:
        raise ModelError(f"{path} must contain a state dict; it is empty. {_SAVE}")
    for key, value in found.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise ModelError(
                f"{path} must contain a state dict; it contains a {type(value).__name__} under "
                f"{one_line(repr(key), 60)}. {_SAVE}"
            )
    return dict(found)


def _plain(name: str, value: Any) -> Tensor:
    """Return a dense, contiguous tensor on the CPU."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized or value.is_meta:
        kind = type(value).__name__ if not isinstance(value, Tensor) else "tensor without plain data"
        raise ModelError(f"The state dict must contain plain tensors; {name!r} is a {kind}.")
    return value.detach().cpu().contiguous()
