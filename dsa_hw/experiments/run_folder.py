"""The folder of a comparison or a sweep, which the same command continues after an interruption.

``settings.json`` says what the folder is for; ``rows.jsonl`` has a line for each finished network; ``networks/`` holds
its weights (``state_dict``, read with ``weights_only``) and ``plans/`` its plan. The line is written last, so a network
that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dsa_hw.errors import DsaError
from dsa_hw.utils.files import whole_file, write_text
from dsa_hw.utils.text import one_line

__all__ = ["RunFolder", "slug"]


class RunFolder:
    """The results of one question in one folder."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        """Make the folder, or continue in it.

        Args:
            path: The folder.
            settings: Everything that the results depend on.

        Raises:
            DsaError: The folder cannot be written, or contains results of other settings.
        """
        self.path = path
        try:
            for folder in ("networks", "plans", "histories"):
                (path / folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DsaError(f"Cannot write to {path}: {error.strerror}. Choose another --out.") from error
        wanted = json.loads(json.dumps(dict(settings)))
        known = self.read("settings.json")
        if known is None:
            self.write("settings.json", wanted)
        elif known != wanted:
            key = next(k for k in [*known, *wanted] if known.get(k) != wanted.get(k))
            raise DsaError(
                f"{str(path)!r} contains results of a run with different settings ({key}={known.get(key)!r}, requested "
                f"{key}={wanted.get(key)!r}). Choose another --out or delete the folder."
            )

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the finished networks by id; a line that a crash cut off is left out."""
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
        """Add a finished network."""
        with (self.path / "rows.jsonl").open("a+") as file:
            file.seek(0, os.SEEK_END)
            if file.tell():  # start a new line after one that was cut off
                file.seek(file.tell() - 1)
                if file.read(1) != "\n":
                    file.write("\n")
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(self.path / "unfinished" / slug(str(row["id"])), ignore_errors=True)

    def keep(self, id: str, model: nn.Module, **more: Tensor) -> None:
        """Write the weights of a network and tensors that belong to it."""
        with whole_file(self._network(id)) as file:
            torch.save({"state_dict": model.state_dict(), **more}, file)

    def weights(self, id: str) -> dict[str, Any] | None:
        """Return what `keep` wrote; None where there is nothing.

        Raises:
            DsaError: The file is damaged.
        """
        file = self._network(id)
        if not file.exists():
            return None
        try:
            return dict(torch.load(file, weights_only=True))
        except Exception as error:  # torch and pickle raise a dozen unrelated classes for a damaged file
            raise DsaError(f"Cannot read {file}: {one_line(error)}. Delete it to train again.") from error

    def unfinished(self, id: str, what: str) -> Path:
        """Return the folder for unfinished work on a network; `add` removes it."""
        return self.path / "unfinished" / slug(id) / hashlib.sha256(what.encode()).hexdigest()[:12]

    def read(self, name: str) -> Any:
        """Return the content of a JSON file; None where there is none.

        Raises:
            DsaError: The file cannot be read.
        """
        try:
            return json.loads((self.path / name).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise DsaError(f"Cannot read {self.path / name}: {one_line(error)}. Delete it.") from error

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        write_text(self.path / name, json.dumps(content, indent=1))

    def _network(self, id: str) -> Path:
        return self.path / "networks" / f"{slug(id)}.pt"


def slug(text: str) -> str:
    """Return a file name of letters, digits and dashes."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text.replace("%", "pc")).strip("-")
