"""A folder in which a comparison or a sweep does its work, so that the same command can go on after Ctrl-C.

``settings.json`` says what the folder is for; ``rows.jsonl`` has a line per finished network; ``networks/`` its weights
(``state_dict``, read with ``weights_only``), ``plans/`` its plan. The line is written last: what has one is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dsa_hw.errors import DsaError
from dsa_hw.experiments.settings import Settings
from dsa_hw.pipeline.meters import DENSE
from dsa_hw.training.finetune import finetune
from dsa_hw.training.metrics import correct_predictions

__all__ = ["Settings", "Workshop", "digest", "rewind", "slug", "train", "train_dense"]


class Workshop:
    """The folder ``path``; ``settings`` that differ from those of an earlier run there are refused."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        try:
            for folder in ("networks", "plans", "histories"):
                (path / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DsaError(f"cannot work in {path}: {error}; name another folder with --out") from error
        wanted = json.loads(json.dumps(dict(settings)))
        known = self._json("settings.json")
        if known is None:
            self._write("settings.json", json.dumps(wanted, indent=1))
        elif known != wanted:
            key = next(k for k in [*known, *wanted] if known.get(k) != wanted.get(k))
            raise DsaError(
                f"{path} holds the results of another question ({key}: {known.get(key)!r} there, {wanted.get(key)!r} "
                "asked for now): name another folder with --out, or delete it"
            )

    def rows(self) -> dict[str, dict[str, Any]]:
        """Finished networks by id; a last line that was cut off by a crash does not count."""
        found = {}
        try:
            lines = (self.path / "rows.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return {}
        for line in lines:
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[str(row["id"])] = row
        return found

    def add(self, row: Mapping[str, Any]) -> None:
        """One more finished network."""
        with (self.path / "rows.jsonl").open("a+") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():  # a line that was cut off must not swallow this one
                file.seek(file.tell() - 1)
                if file.read(1) != "\n":
                    file.write("\n")
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(self.path / "unfinished" / slug(str(row["id"])), ignore_errors=True)

    def keep(self, id: str, model: nn.Module, **more: Tensor) -> None:
        """The weights of a network, and tensors that belong to it."""
        file = self.path / "networks" / f"{slug(id)}.pt"
        with _whole(file) as temporary:
            torch.save({"state_dict": model.state_dict(), **more}, temporary)

    def weights(self, id: str) -> dict[str, Any] | None:
        """What ``keep`` kept; None where there is nothing."""
        file = self.path / "networks" / f"{slug(id)}.pt"
        if not file.exists():
            return None
        try:
            return dict(torch.load(file, weights_only=True))
        except Exception as error:  # torch and pickle raise a dozen unrelated classes for a damaged file
            raise DsaError(
                f"{file} cannot be read ({type(error).__name__}: {error}); delete it to train again"
            ) from error

    def begun(self, id: str, what: str) -> Path:
        """Where unfinished work on a network is kept; removed once the network has its line."""
        return self.path / "unfinished" / slug(id) / hashlib.sha256(what.encode()).hexdigest()[:12]

    def read(self, name: str) -> Any:
        """A JSON file; None where there is none."""
        return self._json(name)

    def write(self, name: str, content: Any) -> None:
        """A JSON file, whole or not at all."""
        self._write(name, json.dumps(content, indent=1))

    def _json(self, name: str) -> Any:
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None
        except (OSError, json.JSONDecodeError) as error:
            raise DsaError(f"{self.path / name} cannot be read ({error}); delete it") from error

    def _write(self, name: str, text: str) -> None:
        with _whole(self.path / name) as temporary:
            temporary.write_text(text)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise DsaError(f"cannot write {path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def slug(text: str) -> str:
    """A name for a file: letters, digits and dashes."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text.replace("%", "pc")).strip("-")


def digest(model: nn.Module) -> str:
    """Which weights these are."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(name.encode())
        found.update(np.ascontiguousarray(tensor.detach().cpu().float().numpy()).tobytes())
    return found.hexdigest()[:16]


def rewind(*loaders: Any) -> None:
    """Back to the first epoch: every network sees the same images in the same order, also after a restart."""
    for loader in loaders:
        if hasattr(loader, "epoch"):
            loader.epoch = 0


def train(
    model: nn.Module,
    loader: Any,
    epochs: float,
    lr: float,
    settings: Settings,
    progress: bool,
    title: str,
    folder: Path | None = None,
) -> None:
    """Train in place; the same call gives the same network, also after an interruption if there is a ``folder``."""
    rewind(loader)
    torch.manual_seed(settings.seed)
    finetune(model, loader, epochs, lr=lr, precision=settings.precision, progress=progress, title=title, folder=folder)
    model.eval()


def train_dense(
    shop: Workshop, model: nn.Module, data: Any, settings: Settings, progress: bool, say: Callable[[str], None]
) -> None:
    """Train and test the dense network in place, or load what an earlier run trained."""
    kept = shop.weights(DENSE)
    if kept is not None:
        model.load_state_dict(kept["state_dict"])
        model.eval()
        return
    if settings.train_epochs:
        say(f"training the dense network on {data.name}, {settings.train_epochs:g} epochs")
        folder, title = shop.begun(DENSE, "training"), "training the dense network"
        train(model, data.train, settings.train_epochs, settings.lr, settings, progress, title, folder)
        shutil.rmtree(folder, ignore_errors=True)
    model.eval()
    shop.keep(DENSE, model, correct=torch.from_numpy(correct_predictions(model, data.test)))
