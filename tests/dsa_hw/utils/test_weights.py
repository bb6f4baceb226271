"""Weights come back to the last bit, and a damaged or foreign file is refused on one line."""

from __future__ import annotations

import argparse
import random
import tracemalloc
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dsa_hw.errors import ModelError
from dsa_hw.utils.modules import load_weights
from dsa_hw.utils.weights import read_weights, tensors_digest, weights_bytes
from tests.fakes.archives import with_parts_called_folders


class Tied(nn.Module):
    """Tied weights, a weight that is not contiguous, a buffer without axes, and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(4, 6, 3)
        self.one.weight.data = self.one.weight.data.to(memory_format=torch.channels_last)
        self.two = nn.Linear(5, 7)
        self.three = nn.Linear(5, 7)
        self.three.weight = self.two.weight
        self.norm = nn.BatchNorm2d(6)
        self.view = nn.Parameter(torch.randn(8, 3).t())
        self.part = nn.Parameter(torch.randn(10)[2:7])
        self.register_buffer("small", torch.randn(3).half())
        self.register_buffer("brain", torch.randn(3).bfloat16())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("empty", torch.zeros(0, 3))


@pytest.fixture
def state() -> dict[str, Any]:
    torch.manual_seed(0)
    return dict(Tied().state_dict())


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
def test_weights_come_back_to_the_last_bit_and_tied(suffix: str, state: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / f"weights{suffix}"
    if suffix == ".pt":
        torch.save(state, file)
    else:
        file.write_bytes(weights_bytes(state))
    found = read_weights(file)
    assert set(found) == set(state)
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in state)
    assert tensors_digest(found) == tensors_digest(state)
    model = Tied()
    load_weights(model, found, "it")
    assert model.two.weight is model.three.weight
    assert tensors_digest(model.state_dict()) == tensors_digest(state)


def test_the_digest_notices_every_kind_of_change(state: dict[str, Any]) -> None:
    digest = tensors_digest(state)
    for name in [n for n in state if state[n].numel()]:
        changed = state[name].clone(memory_format=torch.contiguous_format)
        flat = changed.reshape(-1)
        flat[-1] = ~flat[-1] if flat.dtype == torch.bool else flat[-1] + 1
        assert tensors_digest({**state, name: changed.reshape(state[name].shape)}) != digest, name
    assert tensors_digest({("x" if n == "small" else n): t for n, t in state.items()}) != digest
    assert tensors_digest({**state, "two.bias": state["two.bias"].reshape(7, 1)}) != digest
    assert tensors_digest({**state, "small": state["small"].view(torch.int16)}) != digest, "same bytes of another type"


@pytest.mark.parametrize("kind", ["safetensors", "zip", "old"])
def test_damaged_weights_are_refused_or_unchanged(kind: str, state: dict[str, Any], tmp_path: Path) -> None:
    """A flipped bit or a cut: an error on one line, or (in padding, and in formats without checksums) other digests."""
    file = tmp_path / ("weights.safetensors" if kind == "safetensors" else "weights.pt")
    if kind == "safetensors":
        file.write_bytes(weights_bytes(state))
    else:
        torch.save(state, file, _use_new_zipfile_serialization=kind == "zip")
    whole, digest, rng = file.read_bytes(), tensors_digest(state), random.Random(0)
    errors, silent = [], 0
    for _ in range(60):
        data = bytearray(whole)
        if rng.random() < 0.8:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        else:
            del data[rng.randrange(len(data)) :]
        file.write_bytes(data)
        try:
            found = read_weights(file)
        except ModelError as error:
            errors.append(str(error))
        else:
            silent += tensors_digest(found) != digest
    assert len(errors) > 5
    assert not any("\n" in error for error in errors)
    if kind == "zip":
        assert silent == 0, "torch does not compare the checksums of the zip file; we do"


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "it contains a list"),
        ({"state_dict": {}, "epoch": 3}, "a dict under 'state_dict'"),
        ({"a": torch.zeros(1), "epoch": 3}, "a int under 'epoch'"),
        ({"a": Payload()}, "it contains getattr. Only tensors are loaded"),
        (b"just text\nin two lines", "is not a file of torch.save"),
        (b"", "is not a file of torch.save"),
        (b"PK\x03\x04", "damaged"),
    ],
    ids=["list", "checkpoint", "number", "payload", "text", "empty", "cut archive"],
)
def test_other_files_are_refused_with_what_to_do(
    content: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)
    with pytest.raises(ModelError, match=message) as caught:
        read_weights(file)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
    if isinstance(content, dict) and isinstance(content.get("a"), Payload):
        torch.load(file, weights_only=False)
        assert (tmp_path / "ran").exists(), "the payload works"


def test_folders_pipes_and_missing_files_are_refused(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.pt")
    for name, message in (("pipe.pt", "not a regular file"), (".", "not a regular file"), ("none.pt", "no such file")):
        with pytest.raises(ModelError, match=message):
            read_weights(tmp_path / name)


def averaged(model: nn.Module) -> Any:
    return torch.optim.swa_utils.AveragedModel(model).state_dict()


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda model: {"state_dict": model.state_dict(), "epoch": 3, "best": np.float64(0.7)},
        lambda model: {"model": model.state_dict(), "args": argparse.Namespace(lr=0.1)},
        lambda model: {"state_dict": nn.Linear(2, 2).state_dict(), "model_ema": averaged(model)},
        lambda model: {"model_state_dict": {f"module._orig_mod.{k}": v for k, v in model.state_dict().items()}},
        lambda model: {"state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}, "hyper_parameters": {}},
        lambda model: {"ema": {"state_dict": model.state_dict()}},
        lambda model: {"model": nn.Linear(2, 2).state_dict(), "ema": {"decay": 0.99, "shadow": model.state_dict()}},
        lambda model: {
            "state_dict": {"backbone.weight": model.weight, "backbone.bias": model.bias, "loss.weight": torch.ones(3)},
            "hyper_parameters": {"folder": Path("runs"), "metrics": defaultdict(list)},
        },
    ],
    ids=["plain", "torchvision", "averaged", "parallel and compiled", "lightning", "twice", "shadow", "a part"],
)
def test_state_dict_is_found_in_checkpoints(wrapped: Any, tmp_path: Path) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    torch.save(wrapped(model), tmp_path / "checkpoint.pth")
    load_weights(other, read_weights(tmp_path / "checkpoint.pth"), "the network")
    assert torch.equal(model.weight, other.weight)


def test_prefix_that_the_network_has_itself_stays() -> None:
    model = nn.ModuleDict({"model": nn.Linear(2, 2)})
    load_weights(model, {name: tensor + 1 for name, tensor in model.state_dict().items()}, "the network")


def test_several_such_networks_in_a_file_are_named() -> None:
    weights = {f"{part}.{key}": value for part in ("student", "teacher") for key, value in Tied().state_dict().items()}
    with pytest.raises(ModelError, match=r"contain it 2 times: 'student.', 'teacher.'. Save the state dict of one"):
        load_weights(Tied(), weights, "it")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (nn.Linear(3, 5), "weight is 5 x 3 in the file and 2 x 3 in the network"),
        (nn.Linear(3, 2, bias=False), "1 of 2 tensors of the network are not in the file, such as bias"),
        (nn.BatchNorm1d(2), "3 of 5 tensors in the file are not in the network, such as running_mean"),
    ],
)
def test_message_says_how_weights_differ(other: nn.Module, said: str) -> None:
    with pytest.raises(ModelError, match=f"The weights do not fit it: .*{said}"):
        load_weights(nn.Linear(3, 2), other.state_dict(), "it")


def test_what_is_no_state_dict_is_named(tmp_path: Path) -> None:
    torch.save({"model": nn.Linear(2, 2)}, tmp_path / "module.pt")
    torch.save({}, tmp_path / "empty.pt")
    (tmp_path / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 7\n")
    for file, said in (
        ("module.pt", "contains torch.nn.modules.linear.Linear. Only tensors are loaded"),
        ("empty.pt", "it is empty"),
        ("pointer.safetensors", "is a pointer of Git LFS, not the file itself"),
    ):
        with pytest.raises(ModelError, match=said):
            read_weights(tmp_path / file)


def test_a_small_file_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(2**24))
    assert path.stat().st_size < 2**15
    tracemalloc.start()
    with pytest.raises(ModelError, match="larger than the file"):
        read_weights(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 2**22


def test_what_is_not_a_plain_tensor_is_refused() -> None:
    for value in (3, torch.zeros(2, 2).to_sparse(), torch.zeros(2, device="meta")):
        for write in (weights_bytes, tensors_digest):
            with pytest.raises(ModelError, match="'a' is a"):
                write({"a": value})


def test_weights_are_the_bytes_whose_checksums_were_compared(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    (tmp_path / "w.pt").write_bytes(with_parts_called_folders((tmp_path / "w.pt").read_bytes()))
    assert torch.equal(read_weights(tmp_path / "w.pt")["weight"], model.weight)
