"""Tracing works on a copy: the model, its modes and its attributes stay as they were."""

from __future__ import annotations

import copy
import gc
import importlib
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

from dsa_hw import find_groups
from dsa_hw.errors import ModelError, TraceError
from tests.fakes.proving import IMAGE, Net, Small, conv, prove


class Grid(nn.Module):
    """As YOLO's detection head: ``anchors`` is on the class until ``forward`` assigns it; ``seen`` is a list."""

    anchors = torch.empty(0)
    shape: torch.Size | None = None

    def __init__(self) -> None:
        super().__init__()
        self.convolution = conv(8, 4, 1)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x)
        if self.shape != x.shape:
            self.shape = x.shape
            self.anchors = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
            self.seen.append(self.anchors)
        return x + self.anchors


def _attributes(model: nn.Module) -> dict[str, dict[str, object]]:
    """Every attribute of every module; containers are copied, so that an item more is a difference."""
    return {
        name: {key: copy.copy(value) if isinstance(value, (list, dict)) else value for key, value in vars(part).items()}
        for name, part in model.named_modules()
    }


def _assert_unchanged(model: nn.Module, before: dict[str, dict[str, object]]) -> None:
    for name, found in _attributes(model).items():
        assert found.keys() == before[name].keys()
        for key, value in found.items():
            old = before[name][key]
            assert value is old or value == old, (name, key)


@pytest.mark.parametrize("run_before", [False, True])
def test_what_forward_assigns_is_not_left_in_the_model(run_before: bool) -> None:
    model = nn.Sequential(conv(3, 8), nn.ReLU(), Grid()).train()
    if run_before:
        model(torch.randn(2, 3, 6, 6))
    before = _attributes(model)
    groups = find_groups(model, IMAGE)
    assert groups.names == ("0",)
    with pytest.raises(TraceError):
        find_groups(model, torch.randn(2, 5, 8, 8))  # the export fails half-way and a real run follows
    _assert_unchanged(model, before)
    copy.deepcopy(model)
    prove(model.eval(), groups, IMAGE)


@pytest.mark.parametrize("export", ["profilers.networks.onnx_export:export", "profilers.litert.convert:_program"])
def test_what_forward_assigns_is_not_left_in_an_exported_model(export: str) -> None:
    pytest.importorskip("onnxscript")
    module, _, function = export.partition(":")
    model = nn.Sequential(conv(3, 8), Grid()).train()
    before = _attributes(model)
    getattr(importlib.import_module(module), function)(model, (IMAGE,))
    _assert_unchanged(model, before)


def test_the_copy_that_is_traced_is_released_and_holds_no_weights_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[weakref.ref[nn.Module]] = []

    def export(module: nn.Module, *args: object, **options: object) -> object:
        copies.extend(map(weakref.ref, module.modules()))
        pointers.extend(t.data_ptr() for t in [*module.parameters(), *module.buffers()])
        return original(module, *args, **options)  # type: ignore[arg-type]

    original, pointers = torch.export.export, list[int]()
    monkeypatch.setattr(torch.export, "export", export)
    model = Small()
    groups = find_groups(model, IMAGE)
    assert len(groups)
    assert pointers == [t.data_ptr() for t in [*model.parameters(), *model.buffers()]]
    gc.collect()
    assert len(copies) == len(list(model.modules()))
    assert all(reference() is None for reference in copies)


def test_a_model_that_cannot_be_copied_is_rejected_with_the_reason() -> None:
    model = Small()
    model.stale = model.head.weight * 2  # type: ignore[assignment]  # a result with a history of gradients is copied
    assert len(find_groups(model, IMAGE))
    model.lock = threading.Lock()  # type: ignore[assignment]
    with pytest.raises(TraceError, match=r"Small cannot be copied with copy.deepcopy.*pickle.*lock"):
        find_groups(model, IMAGE)


def _select(net: Net, x: Tensor) -> Tensor:
    return net.a(x)[x.mean((1, 2, 3)) > 0].sum() if bool((x > 0).any()) else x


def test_wrong_input_and_untraceable_model_are_distinguished() -> None:
    with pytest.raises(TraceError, match=r"does not run on the example input \(2x4x8x8 float32 on cpu\)"):
        find_groups(Small(), torch.randn(2, 4, 8, 8))
    model = Net(lambda n, x: n.a(x) if x.sum() > 0 else n.a(-x), a=conv(3, 4))
    with pytest.raises(TraceError, match="data-dependent control flow"):
        find_groups(model, IMAGE)
    detector = Net(lambda n, x: n.head(n.backbone(x)), backbone=conv(3, 4), head=Net(_select, a=conv(4, 4)))
    message = (
        r"cannot trace Net in 'head' at test_trace.py:\d+: .*"
        r"prune a part of the model without it: dsa_hw.find_groups\(model.backbone, ...\)"
    )
    with pytest.raises(TraceError, match=message):
        find_groups(detector, IMAGE)
    assert len(find_groups(detector.backbone, IMAGE)) == 0
    with pytest.raises(ModelError, match="must be a tensor, a tuple of positional arguments"):
        find_groups(model, 3)
