"""The folder of a comparison or a sweep, which the same command continues after an interruption.

``settings.json`` says what the folder is for; ``rows.jsonl`` has a line for each finished network; ``networks/`` holds
its weights (``state_dict``, read with ``weights_only``) and ``plans/`` its plan. The line is written last, so a network
that has one is complete. Files and lines have a checksum: what is damaged is refused or made again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor, nn

from dsa_hw.errors import DsaError, FileError
from dsa_hw.training.origins import Origin
from dsa_hw.utils.documents import SealedDocument, read_bytes, read_document, sealed
from dsa_hw.utils.files import append_line, whole_file, write_text
from dsa_hw.utils.text import one_line
from dsa_hw.utils.weights import checked_archive

__all__ = ["RunFileDocument", "RunFolder", "RunRowDocument", "Share", "slug"]

Share = Annotated[float, Field(ge=0, le=1)]

_log = logging.getLogger(__name__)


class RunFileDocument(SealedDocument):
    """A JSON file of a comparison or a sweep: its settings, the cost model's provenance, a measuring session."""

    model_config = ConfigDict(title="dsa_hw run file")
    remedy = "Choose another --out or delete the folder."

    format: Literal["dsa_hw run file 1"]
    content: dict[str, Any] | list[Any]


class RunRowDocument(SealedDocument):
    """A line of ``rows.jsonl``: a finished network. Each experiment adds its fields and forbids others."""

    model_config = ConfigDict(extra="allow")

    id: str = Field(min_length=1)


class RunFolder:
    """The results of one question in one folder."""

    def __init__(self, path: Path, settings: Mapping[str, Any], row: type[RunRowDocument] = RunRowDocument) -> None:
        """Make the folder, or continue in it.

        Args:
            path: The folder.
            settings: Everything that the results depend on.
            row: The schema of a finished network.

        Raises:
            DsaError: The folder cannot be written, or contains results of other settings.
        """
        self.path, self._row = path, row
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
            different = Origin.of(known if isinstance(known, dict) else {}).differences(Origin.of(wanted))
            raise DsaError(
                f"{str(path)!r} contains results of a run with different settings ({different}). Choose another --out "
                "or delete the folder."
            )

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the finished networks by id; a line that is cut off or damaged is left out with a warning.

        Raises:
            FileError: The file cannot be read.
        """
        found: dict[str, dict[str, Any]] = {}
        path = self.path / "rows.jsonl"
        try:
            lines = read_bytes(path).splitlines()
        except FileError:
            if path.exists():
                raise
            return {}
        for number, line in enumerate(lines, 1):
            try:
                row = read_document(line, self._row, f"line {number} of {path}")
            except FileError as error:
                if line:
                    _log.warning("%s Its network is made again.", error)
                continue
            found[row.id] = row.model_dump(exclude={"sha256"}, mode="json")
        return found

    def add(self, row: Mapping[str, Any]) -> None:
        """Add a finished network."""
        finite = json.loads(json.dumps(dict(row)), parse_constant=lambda _: None)  # JSON has no NaN
        document = sealed(finite)
        read_document(document, self._row, f"the row of {row['id']}")  # what cannot be read is not written
        append_line(self.path / "rows.jsonl", json.dumps(document))
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
            found = dict(torch.load(checked_archive(file), weights_only=True))
            if not isinstance(found["state_dict"], Mapping):
                raise ValueError("it has no state dict")
        except Exception as error:  # torch and pickle raise a dozen unrelated classes for a damaged file
            raise DsaError(f"Cannot read {file}: {one_line(error)}. Delete it to train again.") from error
        return found

    def unfinished(self, id: str, what: str) -> Path:
        """Return the folder for unfinished work on a network; `add` removes it."""
        return self.path / "unfinished" / slug(id) / hashlib.sha256(what.encode()).hexdigest()[:12]

    def read(self, name: str) -> Any:
        """Return the content of a JSON file; None where there is none.

        Raises:
            FileError: The file cannot be read, is damaged, or is of another version.
        """
        path = self.path / name
        return read_document(path, RunFileDocument).content if path.exists() else None

    def write(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        document = sealed({"format": "dsa_hw run file 1", "content": content})
        write_text(self.path / name, json.dumps(document, indent=1))

    def _network(self, id: str) -> Path:
        return self.path / "networks" / f"{slug(id)}.pt"


def slug(text: str) -> str:
    """Return a file name of letters, digits and dashes."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text.replace("%", "pc")).strip("-")
