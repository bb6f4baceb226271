"""Files of pretrained weights and of results: from the caches of torch and Hugging Face, else from the network.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsa_hw.errors import MissingDependencyError, ModelError
from dsa_hw.utils.text import first_line, one_line

__all__ = ["hub_file", "hub_snapshot", "hub_upload", "hub_weights", "torch_file"]

_TIMEOUT = 20.0  # seconds without an answer
_CONFIG = "config.json"
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
    huggingface_hub, constants = _hub()
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
        instead = (
            f"download {huggingface_hub.hf_hub_url(**where)} there and give it with --weights instead of --pretrained"
        )
        if name == _CONFIG:
            instead = "give timm/NAME, a network of timm, and its weights with --weights"
        raise ModelError(
            f"Cannot get {name} of {identity} from the Hugging Face hub ({first_line(error)}). Without network access "
            f"copy the folder {cache} from a computer that has it, or {instead}."
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


def hub_snapshot(repository: str, limits: Mapping[str, int]) -> Path:
    """Return a folder with files of one commit of a repository of the Hugging Face hub.

    Args:
        repository: ``org/name`` or ``org/name@revision``.
        limits: For each file its largest size in bytes; a larger one is not downloaded.

    Raises:
        MissingDependencyError: huggingface_hub is not installed.
        ModelError: The repository or a file does not exist or is too large, or there is neither network nor cache.
    """
    huggingface_hub, constants = _hub()
    from huggingface_hub.errors import HfHubHTTPError

    identity, revision = _repository(repository)
    commit, reason = None, None
    try:
        _check_network(constants.ENDPOINT)
        info = huggingface_hub.HfApi().model_info(identity, revision=revision, files_metadata=True, timeout=_TIMEOUT)
    except Exception as error:  # of huggingface_hub, httpx, or the operating system
        if isinstance(error, HfHubHTTPError):  # the hub has answered
            raise ModelError(f"Cannot get {repository} from the Hugging Face hub ({first_line(error)}).") from error
        reason = error
    else:
        commit = info.sha
        sizes = {file.rfilename: file.size for file in info.siblings or ()}
        for name, limit in limits.items():
            if name not in sizes:
                raise ModelError(f"{repository} is no result of dsa_hw: it has no {name}.")
            if sizes[name] is None or sizes[name] > limit:
                raise ModelError(f"{name} of {repository} has {sizes[name]} bytes; at most {limit} are accepted.")
    paths = []
    for name in limits:
        try:
            with _time_limit():
                found = huggingface_hub.hf_hub_download(
                    identity, name, revision=revision, local_files_only=reason is not None
                )
        except Exception as error:
            raise ModelError(
                f"Cannot get {name} of {repository} from the Hugging Face hub ({first_line(reason or error)}), and it "
                f"is not in the cache {constants.HF_HUB_CACHE}. Copy the folder of the result and use dsa_hw.load."
            ) from error
        paths.append(Path(found))
    for path in paths:
        if path.parent.name != (commit or paths[0].parent.name) or path.stat().st_size > limits[path.name]:
            raise ModelError(f"{path} is larger than accepted, or the repository has just changed. Try again.")
    return paths[0].parent


def hub_upload(folder: Path, repository: str, names: Sequence[str], private: bool | None) -> str:
    """Upload files of a folder to a repository of the Hugging Face hub, which is made where it does not exist.

    Args:
        folder: The folder.
        repository: ``org/name``.
        names: Names of the files that may be uploaded.
        private: Whether a new repository is private; None follows the account.

    Returns:
        The address of the commit.

    Raises:
        MissingDependencyError: huggingface_hub is not installed.
        ModelError: The hub refuses, or there is no network.
    """
    huggingface_hub, constants = _hub()
    identity, revision = _repository(repository)
    api = huggingface_hub.HfApi()
    try:
        _check_network(constants.ENDPOINT)
        api.create_repo(identity, private=private, exist_ok=True)
        done = api.upload_folder(
            repo_id=identity, folder_path=folder, allow_patterns=list(names), revision=revision,
            commit_message="Upload a result of dsa_hw",
        )  # fmt: skip
    except Exception as error:  # of huggingface_hub, httpx, or the operating system
        raise ModelError(
            f"Cannot upload to {repository} on the Hugging Face hub ({first_line(error)}). Log in with hf auth login, "
            "or upload a saved folder later: hf upload ORG/NAME FOLDER."
        ) from error
    return str(done.commit_url)


def _hub() -> tuple[Any, Any]:
    """Return huggingface_hub and its constants.

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants
    except ImportError as error:
        raise MissingDependencyError(
            "The Hugging Face hub needs huggingface_hub. Run pip install 'dsa-hw[hub]'."
        ) from error
    return huggingface_hub, constants


def _repository(name: str) -> tuple[str, str | None]:
    """Return a repository and its revision.

    Raises:
        ModelError: The name has another form.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", name, re.ASCII):
        raise ModelError(f"A repository has the form ORG/NAME or ORG/NAME@REVISION; got {one_line(name, 80)!r}.")
    identity, _, revision = name.partition("@")
    return identity, revision or None


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
