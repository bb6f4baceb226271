"""What a target loads: built once, loaded often."""

from __future__ import annotations

import threading
from typing import Any

import torch

from dsa_hw.channels import find_groups
from profilers.networks.builder import ConfigurationBuilder
from tests.fakes.formula import Formula, Net


class File:
    """A file in the folder of another process, as LiteRT targets have them; it cannot be copied."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_file_of_the_targets_own_is_loaded_as_it_is(monkeypatch: Any) -> None:
    model, inputs = Net().eval(), (torch.randn(1, 3, 16, 16),)
    builder = ConfigurationBuilder(model, find_groups(model, inputs), inputs, Formula())
    file, loaded = File(), []
    monkeypatch.setattr(builder, "artefact", lambda kept: file)
    monkeypatch.setattr(builder.target, "load", lambda artefact, inputs: loaded.append(artefact))
    network = builder.loadable_kept(builder.kept(builder.groups.sizes))
    network.load()
    network.load()
    assert loaded == [file, file]


def test_a_module_is_loaded_with_weights_of_its_own(monkeypatch: Any) -> None:
    model, inputs = Net().eval(), (torch.randn(1, 3, 16, 16),)
    builder = ConfigurationBuilder(model, find_groups(model, inputs), inputs, Formula())
    loaded: list[Any] = []
    monkeypatch.setattr(builder.target, "load", lambda artefact, inputs: loaded.append(artefact))
    network = builder.loadable_kept(builder.kept(builder.groups.sizes))
    network.load()
    network.load()
    assert len({module.one.weight.data_ptr() for module in loaded}) == 2, "copies take turns in the caches"
