"""Narrowed graphs give what really shrunk networks give, for every kind of connection."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dsa_hw.channels import find_groups, shrink
from dsa_hw.errors import ProfileError
from dsa_hw.zoo import models
from profilers.litert.worker.masks import reshaped
from profilers.networks.builder import ConfigurationBuilder
from profilers.networks.onnx_export import export, generic
from profilers.networks.onnx_narrow import rules, template
from profilers.networks.onnx_narrow.template import OnnxTemplate
from profilers.targets import resolve
from tests.fakes.machine import Tiny


class OptionA(nn.Module):
    """A shortcut of slices and zero channels, as in the CIFAR ResNets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.shortcut = _Shortcut()
        self.third = nn.Conv2d(16, 12, 1)
        self.head = nn.Linear(12 * 16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, 8, 8) -> (N, 4)."""
        x = torch.relu(self.first(x))
        x = torch.relu(self.second(x) + self.shortcut(x))
        return self.head(torch.relu(self.third(x)).flatten(1))


class _Shortcut(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))


class Mixed(nn.Module):
    """Concatenation, chunk, depthwise, grouped and transposed convolution, squeeze-and-excite, layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(3, 6, 1)
        self.deep = nn.Conv2d(14, 14, 3, padding=1, groups=14)
        self.wide = nn.Conv2d(14, 16, 1)
        self.norm = nn.BatchNorm2d(16)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.up = nn.ConvTranspose2d(16, 10, 2, stride=2)
        self.scale = nn.Parameter(torch.ones(10, 1, 1))
        self.line, self.rest = nn.Linear(10, 12), nn.Linear(12, 10)
        self.layer = nn.LayerNorm(10)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(N, 3, H, W) -> (N, 3)."""
        x = torch.cat([torch.relu(self.a(x)), self.b(x)], 1)
        x = torch.relu(self.norm(self.wide(torch.relu(self.deep(x)))))
        x = self.grouped(x)
        x = x * torch.sigmoid(self.excite(torch.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        x = self.up(x) * self.scale
        x = x.flatten(2).transpose(1, 2)
        x = self.layer(x + self.rest(torch.nn.functional.gelu(self.line(x)))).mean(1)
        a, b = x.chunk(2, 1)
        return self.head(a * b)


def agreement(model: nn.Module, inputs: tuple[Any, ...], seeds: int = 2) -> tuple[float, int]:
    """Largest relative difference over random kept units, and the number of groups."""
    model = generic(model)
    groups = find_groups(model, inputs)
    template = OnnxTemplate(model, groups, inputs)
    target = resolve("onnxruntime/cpu")
    worst = 0.0
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        kept = [np.sort(rng.permutation(int(c))[: max(1, int(c * rng.uniform(0.2, 1)))]) for c in groups.sizes]
        made = template.make(kept)
        assert len(made) < len(template.make([np.arange(c) for c in groups.sizes]))
        onnx.checker.check_model(made, full_check=True)
        outputs = target.load(made, inputs).outputs
        assert outputs is not None
        with torch.no_grad():
            expected = shrink(model, groups, kept)(*inputs).numpy()
        worst = max(worst, float(np.abs(outputs()[0] - expected).max() / np.abs(expected).max()))
    return worst, len(groups)


@pytest.mark.parametrize("network", [Tiny, OptionA, Mixed])
def test_narrowed_graph_equals_shrunk_network(network: type[nn.Module]) -> None:
    torch.manual_seed(0)
    worst, groups = agreement(network().eval(), (torch.randn(1, 3, 8, 8),), seeds=4)
    assert groups >= 2
    assert worst < 1e-4


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2", "shufflenet_v2_x0_5"])
def test_narrowed_graph_equals_shrunk_network_of_the_zoo(name: str) -> None:
    worst, groups = agreement(*models.load_model(name, (1, 3, 32, 32)))
    assert groups > 10
    assert worst < 1e-4


def test_untrained_and_trained_networks_export_the_same_graph() -> None:
    """Biases of 0 and scales of 1 would be folded away, and the network timed would not be the one shipped."""
    model, inputs = Tiny().eval(), (torch.randn(1, 3, 8, 8),)
    for convolution in (model.inner, model.back):
        nn.init.zeros_(convolution.bias)  # type: ignore[arg-type]
    biases = {n.output[0]: len(n.input) for n in export(model, inputs).graph.node if n.op_type == "Conv"}
    assert min(biases.values()) == 2, "no test if the exporter keeps them anyway"
    again = {n.output[0]: len(n.input) for n in export(generic(model), inputs).graph.node if n.op_type == "Conv"}
    assert min(again.values()) == 3
    trained = Tiny().eval()
    for tensor in (*trained.parameters(), trained.norm.running_mean, trained.norm.running_var):
        assert tensor is not None
        nn.init.normal_(tensor)
    same = generic(trained).state_dict()
    assert all(torch.equal(v, same[k]) for k, v in trained.state_dict().items()), "a trained network stays as it is"


def test_export_does_not_change_the_network() -> None:
    model = Tiny().train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    export(model, (torch.randn(1, 3, 8, 8),))
    generic(model)
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@settings(max_examples=60)
@given(st.data())
def test_reshaped_masks_select_the_kept_elements(data: st.DataObject) -> None:
    """Against the definition: reshape the marks themselves."""
    old = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    total = int(np.prod(old))
    factors = data.draw(
        st.permutations([p for n in old for p in ([n] if n < 4 else [2, n // 2] if n % 2 == 0 else [n])])
    )
    new = tuple(factors) if int(np.prod(factors)) == total else (total,)
    axis = data.draw(st.integers(0, len(old) - 1))
    line = np.asarray(data.draw(st.lists(st.booleans(), min_size=old[axis], max_size=old[axis])))
    if not line.any():
        line[0] = True
    marks = np.zeros(old, bool)
    marks[(slice(None),) * axis + (line,)] = True
    found = reshaped({axis: line}, old, new)
    box = marks.reshape(new)
    if found is None:
        lines = [box.any(axis=tuple(j for j in range(len(new)) if j != i)) for i in range(len(new))]
        assert int(np.prod([x.sum() for x in lines])) > int(box.sum())
    else:
        assert np.array_equal(box[np.ix_(*found.values())], np.ones([x.sum() for x in found.values()], bool))
        assert box.sum() == np.prod([x.sum() for x in found.values()])


def test_unsupported_operation_is_named_and_ends_narrowing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delitem(rules._RULES, "ReduceMean")
    model, inputs = Tiny().eval(), (torch.randn(1, 3, 8, 8),)
    groups = find_groups(model, inputs)
    half = [np.arange(c // 2) for c in groups.sizes]
    with pytest.raises(ProfileError, match="ReduceMean"):
        OnnxTemplate(generic(model), groups, inputs).make(half)
    builder = ConfigurationBuilder(model, groups, inputs, resolve("onnxruntime/cpu"))
    loaded = builder.load([len(k) for k in half])
    assert loaded.run(1)[0] > 0
    assert builder.how.startswith("exported one by one")
    assert "ReduceMean" in builder.how
    assert "ReduceMean" in caplog.text


def test_wrong_outputs_end_narrowing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = Tiny().eval(), (torch.randn(1, 3, 8, 8),)
    groups = find_groups(model, inputs)
    builder = ConfigurationBuilder(model, groups, inputs, resolve("onnxruntime/cpu"))
    worst = builder.check()
    assert worst is not None
    assert worst < 1e-4
    assert builder.how == "narrowed"
    right = template._take
    monkeypatch.setattr(template, "_take", lambda array, axes: right(array, axes)[::-1].copy())
    worst = builder.check()
    assert worst is not None
    assert worst > 1e-2
    assert "differ" in builder.how
    assert "differ" in caplog.text
