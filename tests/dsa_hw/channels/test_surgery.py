"""shrink, choose, masked, Plan: what a user may do with groups, and what a user may do wrong."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import json
import pathlib
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import dsa_hw
from dsa_hw import Plan, apply_plan, find_groups, masked, select_channels, shrink
from dsa_hw.channels.discovery import difference, randomise
from dsa_hw.channels.importance import scores
from dsa_hw.errors import ModelError, PlanError, TraceError, WidthError
from dsa_hw.zoo.models import load_model
from tests.fakes.proving import Attention, Net, OptionA, conv, head, prove, run, sizes

IMAGE = torch.randn(2, 3, 8, 8)


class Small(nn.Module):
    """A network that can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU())
        self.deep = nn.Sequential(conv(8, 8, groups=8), conv(8, 12, 1), nn.BatchNorm2d(12), nn.Dropout(0.5))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.deep(self.stem(x)).mean((2, 3))
        return self.head(self.norm(x))


@pytest.fixture
def small() -> Small:
    torch.manual_seed(0)
    return Small()


def test_original_is_untouched_and_training_modes_survive(small: Small) -> None:
    small.train()
    small.deep.eval()
    before = copy.deepcopy(small.state_dict())
    modes = [m.training for m in small.modules()]
    groups = find_groups(small, IMAGE)
    shrink(small, groups, groups.sizes // 2)
    assert [m.training for m in small.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in small.state_dict().items())


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


def test_a_model_that_cannot_be_copied_is_refused_with_the_reason() -> None:
    model = Small()
    model.stale = model.head.weight * 2  # type: ignore[assignment]
    with pytest.raises(TraceError, match=r"Small cannot be copied with copy.deepcopy.*explicitly by the user"):
        find_groups(model, IMAGE)


def test_attributes_agree_with_weights() -> None:
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


def test_shrunk_network_is_ordinary(small: Small, tmp_path: pathlib.Path) -> None:
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


# --- masks -----------------------------------------------------------------------------------------------------------


def test_mask_comes_off_cleanly_even_after_an_error(small: Small) -> None:
    small.eval()
    groups = find_groups(small, IMAGE)
    expected, keys = run(small, IMAGE), list(small.state_dict())
    kept = select_channels(small, groups, groups.sizes // 2)

    def use() -> None:
        with masked(small, groups, kept):
            assert list(small.state_dict()) == keys
            assert not torch.equal(run(small, IMAGE), expected)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert torch.equal(run(small, IMAGE), expected)
    assert not any("weight" in m.__dict__ for m in small.modules())


def test_soft_masks_give_gradients_to_masks_and_weights(small: Small) -> None:
    small.double().eval()
    image = IMAGE.double()
    groups = find_groups(small, image)
    masks = [torch.rand(int(n), dtype=torch.float64, requires_grad=True) for n in groups.sizes]

    def loss(*given: Tensor) -> Tensor:
        with masked(small, groups, given):
            return small(image).square().mean()

    assert torch.autograd.gradcheck(loss, masks)
    loss(*masks).backward()
    assert small.stem[0].weight.grad is not None
    assert small.stem[0].weight.grad.abs().sum() > 0


def test_mask_of_the_wrong_shape_is_refused(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    with (
        pytest.raises(WidthError, match=r"shape \(3,\): it must be \(8,\)"),
        masked(small, groups, [torch.ones(3), torch.ones(12)]),
    ):
        pass


# --- importance ------------------------------------------------------------------------------------------------------


def test_gamma_is_the_batch_norms_scale() -> None:
    model = nn.Sequential(conv(3, 4), nn.BatchNorm2d(4), nn.ReLU(), head(4))
    groups = find_groups(model, IMAGE)
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.1, -3.0, 2.0, 0.0]))
    (kept,) = select_channels(model, groups, [2])
    assert kept.tolist() == [1, 2]


def test_members_are_normalised_before_they_are_averaged() -> None:
    model = Net(lambda n, x: n.h(n.a(x) + n.b(x)), a=conv(3, 3, 1, bias=False), b=conv(3, 3, 1, bias=False), h=head(3))
    with torch.no_grad():
        model.a.weight.copy_(
            torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1, 1) * 1000
        )  # loud, but mean 1 after normalising
        model.b.weight.copy_(torch.tensor([6.0, 2.0, 1.0]).view(3, 1, 1, 1))
    groups = find_groups(model, IMAGE)
    (score,) = scores(model, groups, "l1")
    np.testing.assert_allclose(score, (np.array([1, 2, 3]) / 2 + np.array([6, 2, 1]) / 3) / 2)


def test_own_importance_and_l2(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    kept = select_channels(small, groups, [2, 2], importance=lambda model, g: [np.arange(n) for n in g.sizes])
    assert [k.tolist() for k in kept] == [[6, 7], [10, 11]]
    with torch.no_grad():
        small.stem[0].weight.zero_()
        small.stem[0].weight[3] = 1.0
        small.deep[0].weight.fill_(1.0)
    assert select_channels(small, groups, [1, 12], importance="l2")[0].tolist() == [3]


def test_nan_importance_is_refused(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    with torch.no_grad():
        small.stem[1].weight[0] = float("nan")
    with pytest.raises(WidthError, match="NaN"):
        select_channels(small, groups, [4, 4])


def test_unknown_importance_is_refused(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    with pytest.raises(WidthError, match="choose from auto, gamma, l1, l2"):
        select_channels(small, groups, [4, 4], importance="taylor")


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ([0, 4], "width 0 for group 'stem.0': it must be from 1 to 8"),
        ([4, 13], "width 13 for group 'deep.1': it must be from 1 to 12"),
        ([4], "1 widths for 2 channel groups"),
        ([0.5, 0.5], "whole channel counts"),
        ({"nobody": 3}, "no channel group is called 'nobody'"),
    ],
)
def test_bad_widths(small: Small, widths: list[int], message: str) -> None:
    groups = find_groups(small, IMAGE)
    with pytest.raises(WidthError, match=message):
        shrink(small, groups, widths)


@pytest.mark.parametrize("kept", [[[], [0]], [[8], [0]], [[0, 0], [0]], [[-1], [0]]])
def test_bad_kept_units(small: Small, kept: list[list[int]]) -> None:
    groups = find_groups(small, IMAGE)
    with pytest.raises(WidthError, match="distinct and from 0 to 7"):
        shrink(small, groups, kept)


def test_groups_of_another_network(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    with pytest.raises(WidthError, match=r"stem.0.weight is missing in the model"):
        shrink(nn.Sequential(conv(3, 4), head(4)), groups, groups.sizes)


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


def test_module_used_twice() -> None:
    model = Net(lambda n, x: n.h(n.b(F.relu(n.b(F.relu(n.a(x)))))), a=conv(3, 8), b=conv(8, 8), h=head(8))
    groups = find_groups(model, IMAGE)
    assert sizes(groups) == [8], "what b takes and what b gives are the same channels"
    prove(model, groups, IMAGE, seed=5)


def test_buffer_with_channels() -> None:
    model = Net(lambda n, x: n.h(n.a(x) * n.table), a=conv(3, 8), h=head(8))
    model.register_buffer("table", torch.rand(1, 8, 1, 1) + 0.5)
    groups = find_groups(model, IMAGE)
    assert prove(model, groups, IMAGE, seed=6).table.shape[1] < 8


def test_two_inputs_and_dict_output() -> None:
    model = Net(
        lambda n, x, y: {"sum": n.h(n.a(x) + n.b(y)), "inner": n.o(n.a(x))},
        a=conv(3, 8),
        b=conv(4, 8),
        h=head(8),
        o=conv(8, 2),
    )
    inputs = (IMAGE, torch.randn(2, 4, 8, 8))
    groups = find_groups(model, inputs)
    assert sizes(groups) == [8]
    prove(model, groups, inputs, seed=7)
    by_name = find_groups(model, {"x": inputs[0], "y": inputs[1]})
    assert by_name.fingerprint == groups.fingerprint


def test_no_prunable_group() -> None:
    model = conv(3, 4)
    groups = find_groups(model, IMAGE)
    assert len(groups) == 0
    assert [f.reason for f in groups.frozen] == ["network output"]
    small = shrink(model, groups, [])
    assert small is not model
    assert torch.equal(run(small, IMAGE), run(model, IMAGE))
    assert groups.to_frame().why_frozen.tolist() == ["network output"]


def test_wrong_input_and_untraceable_model() -> None:
    with pytest.raises(TraceError, match=r"does not run on the example input \(2x4x8x8\)"):
        find_groups(Small(), torch.randn(2, 4, 8, 8))
    model = Net(lambda n, x: n.a(x) if x.sum() > 0 else n.a(-x), a=conv(3, 4))
    with pytest.raises(TraceError, match="data-dependent control flow"):
        find_groups(model, IMAGE)
    with pytest.raises(ModelError, match="must be a tensor, a tuple of positional arguments"):
        find_groups(model, 3)


class Hard(nn.Module):
    """A forward with a channel count in it."""

    def __init__(self, view: str) -> None:
        super().__init__()
        self.a, self.b, self.h, self.view = conv(3, 8), conv(8, 8), head(8), view

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        if self.view == "fails":
            x = x.view(x.shape[0], 8, -1).view(x.shape[0], 8, 8, 8)
        elif self.view == "silently differs":
            x = x / x.shape[1]
        return self.h(self.b(x))


@pytest.mark.parametrize(
    ("view", "message"),
    [
        ("fails", r"the code at test_surgery.py:\d+ depends on this channel count"),
        ("silently differs", "shrinking changes the outputs"),
    ],
)
def test_hard_coded_channel_counts_are_refused_with_the_place(view: str, message: str) -> None:
    model = Hard(view)
    groups = find_groups(model, IMAGE)
    assert groups.names == ("b",), "the other group is still pruned"
    (frozen,) = [f for f in groups.frozen if f.name == "a"]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(frozen.reason)
    prove(model, groups, IMAGE, seed=8)


def test_channel_padding_inside_a_larger_forward_is_refused_with_the_remedy() -> None:
    model = Net(lambda n, x: n.h(n.b(x) + F.pad(n.a(x), (0, 0, 0, 0, 2, 2))), a=conv(3, 8), b=conv(3, 12), h=head(12))
    groups = find_groups(model, IMAGE)
    assert sizes(groups) == [8], "the padded channels are frozen, those that pass through are not"
    assert [f.channels for f in groups.frozen if "put it into a module of its own" in f.reason] == [4]
    prove(model, groups, IMAGE, seed=9)


# --- plans -----------------------------------------------------------------------------------------------------------


def test_plan_rebuilds_from_constructor_and_state_dict(small: Small, tmp_path: pathlib.Path) -> None:
    randomise(small, 1).eval()
    groups = find_groups(small, IMAGE)
    kept = select_channels(small, groups, [3, 7])
    got = shrink(small, groups, kept)
    Plan.of(groups, kept).save(tmp_path / "plan.json")
    torch.save(got.state_dict(), tmp_path / "weights.pt")
    again = apply_plan(Small(), tmp_path / "plan.json").eval()
    again.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert difference(run(got, IMAGE), run(again, IMAGE)) == 0
    assert Plan.load(tmp_path / "plan.json") == Plan.of(groups, kept)
    assert Plan.of(groups, kept).widths == {"stem.0": 3, "deep.1": 7}
    assert [path.name for path in tmp_path.iterdir() if path.suffix not in (".json", ".pt")] == [], "no stray files"


def test_plan_that_does_not_fit(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    plan = Plan.of(groups, select_channels(small, groups, [3, 7]))
    other = Small()
    other.head = nn.Linear(12, 6)
    with pytest.raises(PlanError, match=r"head.weight is \(6, 12\) in the model and \(5, 12\) in the plan"):
        apply_plan(other, plan)


def test_plan_of_a_network_wired_differently(small: Small) -> None:
    groups = find_groups(small, IMAGE)
    plan = Plan.of(groups, select_channels(small, groups, [3, 7]))

    class Rewired(Small):
        def forward(self, x: Tensor) -> Tensor:
            y = self.stem(x)
            x = self.deep(y).mean((2, 3))
            return self.head(self.norm(x)), y

    with pytest.raises(PlanError, match=r"group 'stem.0' has no units in the model and 8 in the plan"):
        apply_plan(Rewired(), plan)


def test_damaged_plans(small: Small, tmp_path: pathlib.Path) -> None:
    groups = find_groups(small, IMAGE)
    path = tmp_path / "plan.json"
    Plan.of(groups, select_channels(small, groups, [3, 7])).save(path)
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(PlanError, match="not a whole plan"):
        Plan.load(path)
    document = json.loads(text)
    document["kept"][0][0] = 7
    path.write_text(json.dumps(document))
    with pytest.raises(PlanError, match="changed after it was saved"):
        Plan.load(path)
    path.write_text(json.dumps({"version": 1}))
    with pytest.raises(PlanError, match="not a plan of dsa_hw"):
        Plan.load(path)
    path.write_text(json.dumps({**json.loads(text), "version": 99}))
    with pytest.raises(PlanError, match="plan version 99"):
        Plan.load(path)
    path.write_bytes(b"\x80\x04\x95pickle")
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(path)
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path / "absent.json")


def test_lazy_names() -> None:
    assert "find_groups" in dir(dsa_hw)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = dsa_hw.nonsense


def test_resnet_by_name_runs() -> None:
    model, inputs = load_model("resnet18", (2, 3, 32, 32))
    assert model(*inputs).shape == (2, 1000)
