"""Shrunk networks are ordinary modules, and the original stays as it was."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dsa_hw import find_groups, shrink
from tests.fakes.proving import IMAGE, Attention, Net, OptionA, Small, conv, head, prove, run, sizes


def test_original_and_its_training_modes_do_not_change(small: Small) -> None:
    small.train()
    small.deep.eval()
    before = copy.deepcopy(small.state_dict())
    modes = [m.training for m in small.modules()]
    groups = find_groups(small, IMAGE)
    shrink(small, groups, groups.sizes // 2)
    assert [m.training for m in small.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())


def test_attributes_of_modules_agree_with_their_weights() -> None:
    def forward(n: Net, x: Tensor) -> Tensor:
        x = n.gn(n.bn(n.up(n.dw(n.a(x)))))
        x = n.p(x).flatten(2).transpose(1, 2)
        return n.o(n.t(n.ln(x)))

    model = Net(
        forward,
        a=conv(3, 8),
        dw=conv(8, 8, groups=8),
        up=nn.ConvTranspose2d(8, 12, 2, 2),
        bn=nn.BatchNorm2d(12),
        gn=nn.GroupNorm(2, 12),
        p=nn.PReLU(12),
        ln=nn.LayerNorm(12),
        t=Attention(12, 4, 3),
        o=nn.Linear(12, 5),
    )
    groups = find_groups(model, IMAGE)
    assert sizes(groups) == [4, 6, 8, 12]
    widths = {"a": 5, "up": 4, "t.qkv": 3, "t.proj": 7}
    got = shrink(model, groups, widths)
    assert (got.a.in_channels, got.a.out_channels) == (3, 5)
    assert (got.dw.in_channels, got.dw.out_channels, got.dw.groups) == (5, 5, 5)
    assert (got.up.in_channels, got.up.out_channels) == (5, 8)
    assert got.bn.num_features == got.gn.num_channels == got.p.num_parameters == 8
    assert got.ln.normalized_shape == (8,)
    assert (got.t.num_heads, got.t.attn_dim, got.t.head_dim) == (3, 9, 3)
    assert (got.t.qkv.in_features, got.t.qkv.out_features, got.o.in_features) == (8, 27, 7)


def test_shrunk_network_trains_copies_pickles_and_is_pruned_again(small: Small, tmp_path: pathlib.Path) -> None:
    groups = find_groups(small, IMAGE)
    got = shrink(small, groups, groups.sizes // 2)
    assert type(got) is Small
    got.train()
    optimiser = torch.optim.SGD(got.parameters(), 0.1)
    before = got.stem[0].weight.detach().clone()
    F.cross_entropy(got(IMAGE), torch.tensor([0, 1])).backward()
    optimiser.step()
    assert not torch.equal(before, got.stem[0].weight)
    got.eval()
    expected = run(got, IMAGE)
    assert torch.equal(run(copy.deepcopy(got), IMAGE), expected)
    assert torch.equal(run(pickle.loads(pickle.dumps(got)), IMAGE), expected)
    other = shrink(Small(), groups, groups.sizes // 2, importance="l2").eval()
    other.load_state_dict(got.state_dict())
    assert torch.equal(run(other, IMAGE), expected)
    assert len(find_groups(got, IMAGE)) == len(groups), "it can be pruned again"


def test_shrunk_option_a_pickles_and_deepcopies() -> None:
    model = nn.Sequential(conv(3, 8), Net(_option_a_forward, b=conv(8, 12, stride=2), s=OptionA(2, 2)), head(12)).eval()
    groups = find_groups(model, IMAGE)
    shortcut = shrink(model, groups, [4, 2])[1].s
    x = torch.randn(2, 4, 8, 8)
    expected = shortcut(x)
    assert expected.shape[1] == 6
    assert torch.equal(pickle.loads(pickle.dumps(shortcut))(x), expected)
    assert torch.equal(copy.deepcopy(shortcut)(x), expected)


def _option_a_forward(net: Net, x: Tensor) -> Tensor:
    return net.b(x) + net.s(x)


def test_shrunk_network_exports_to_onnx(small: Small) -> None:
    pytest.importorskip("onnxscript", reason="pip install 'dsa-hw[onnx]'")
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'dsa-hw[onnx]'")
    groups = find_groups(small, IMAGE)
    got = shrink(small, groups, groups.sizes // 2).eval()
    file = io.BytesIO()
    torch.onnx.export(got, (IMAGE,), file, dynamo=True, external_data=False, verbose=False)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: IMAGE.numpy()})[0]
    np.testing.assert_allclose(found, run(got, IMAGE).numpy(), rtol=1e-4, atol=1e-5)


def test_tied_weights_stay_tied() -> None:
    a, b = nn.Linear(8, 12), nn.Linear(12, 8)
    b.weight = nn.Parameter(a.weight.detach().T.contiguous())
    c = nn.Linear(8, 12)
    c.weight = a.weight
    model = Net(lambda n, x: n.o(F.relu(n.c(n.b(F.relu(n.a(x)))))), a=a, b=b, c=c, o=nn.Linear(12, 5))
    tokens = torch.randn(2, 8)
    groups = find_groups(model, tokens)
    small = prove(model, groups, tokens, seed=4)
    assert small.a.weight is small.c.weight


def test_inputs_and_outputs_of_a_module_that_is_used_twice_are_one_group() -> None:
    model = Net(lambda n, x: n.h(n.b(F.relu(n.b(F.relu(n.a(x)))))), a=conv(3, 8), b=conv(8, 8), h=head(8))
    groups = find_groups(model, IMAGE)
    assert sizes(groups) == [8], "inputs and outputs of b are the same channels"
    prove(model, groups, IMAGE, seed=5)


def test_buffer_with_channels_is_narrowed() -> None:
    model = Net(lambda n, x: n.h(n.a(x) * n.table), a=conv(3, 8), h=head(8))
    model.register_buffer("table", torch.rand(1, 8, 1, 1) + 0.5)
    groups = find_groups(model, IMAGE)
    assert prove(model, groups, IMAGE, seed=6).table.shape[1] < 8
