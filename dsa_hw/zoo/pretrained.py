"""Files of pretrained weights: from the caches of torch and Hugging Face, else from the network.

The caches are where the libraries have them: ``TORCH_HOME`` and ``HF_HOME`` are honoured. Files are read as tensors
only (`dsa_hw.utils.weights.read_weights`), wherever they come from.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from dsa_hw.errors import MissingDependencyError, ModelError
from dsa_hw.utils.text import first_line

__all__ = ["hub_file", "hub_weights", "torch_file"]

_TIMEOUT = 20.0  # seconds without an answer
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # of a repository, in this order


def torch_file(url: str) -> Path:
    """Return the file of a URL in the cache of torch; download it where it is not there.

    Raises:
        ModelError: It cannot be downloaded.
    """
    path = Path(torch.hub.get_dir(), "checkpoints", url.rpartition("/")[2])
    if path.is_file():
        return path
    found = re.search(r"-([0-9a-f]{8,})\.", path.name)  # torch's names end with the beginning of the SHA-256
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _time_limit():
            torch.hub.download_url_to_file(url, str(path), found[1] if found else None, sys.stderr.isatty())
    except Exception as error:  # URLError, OSError, RuntimeError for a wrong hash
        raise ModelError(
            f"Cannot download pretrained weights ({first_line(error)}). Without network access put {url} at {path}."
        ) from error
    return path


def hub_file(repository: str, name: str) -> Path:
    """Return a file of a repository (``org/name`` or ``org/name@revision``) of the Hugging Face hub, or of its cache.

    Raises:
        MissingDependencyError: huggingface_hub is not installed.
        ModelError: The file is not in the cache and cannot be downloaded.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError as error:
        raise MissingDependencyError(
            "Weights of the Hugging Face hub need huggingface_hub. Run pip install 'dsa-hw[timm]'."
        ) from error
    identity, _, revision = repository.partition("@")
    where: dict[str, Any] = {"repo_id": identity, "filename": name, "revision": revision or None}
    with contextlib.suppress(Exception):  # it is not in the cache
        return Path(huggingface_hub.hf_hub_download(**where, local_files_only=True))
    try:
        _check_network(constants.ENDPOINT)
        with _time_limit():
            return Path(huggingface_hub.hf_hub_download(**where))
    except Exception as error:  # of huggingface_hub, httpx, or the operating system
        cache = Path(constants.HF_HUB_CACHE, f"models--{identity.replace('/', '--')}")
        url = huggingface_hub.hf_hub_url(**where)
        raise ModelError(
            f"Cannot get {name} of {identity} from the Hugging Face hub ({first_line(error)}). Without network access "
            f"copy the folder {cache} from a computer that has it, or download {url} there and give it with --weights."
        ) from error


def hub_weights(repository: str, name: str | None = None) -> Path:
    """Return the file of weights in a repository: ``name``, else the safetensors file, else torch's.

    Raises:
        ModelError: There is none.
    """
    names = (name,) if name else _WEIGHTS
    errors: list[ModelError] = []
    for each in names:
        try:
            return hub_file(repository, each)
        except ModelError as error:
            errors.append(error)
    raise errors[0]


def _check_network(url: str) -> None:
    """Look up the host once, where there is no proxy: huggingface_hub retries for a minute and logs every attempt.

    Raises:
        OSError: There is no such host, or no network.
    """
    if not any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        socket.getaddrinfo(urllib.parse.urlsplit(url).hostname, 443)


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_TIMEOUT)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
