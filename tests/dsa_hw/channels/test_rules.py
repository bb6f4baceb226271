"""Each rule on a network of its own: the expected groups, equal masked and shrunk outputs, exact costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from dsa_hw import find_groups
from dsa_hw.channels.assemble import analyse
from dsa_hw.channels.trace import trace
from dsa_hw.channels.walk import RULES
from tests.fakes.proving import Attention, Net, OptionA, conv, head, prove, sizes

IMAGE = torch.randn(2, 3, 8, 8)
TOKENS = torch.randn(2, 6, 8)
LINE = torch.randn(2, 3, 12)


def move(function: Any, channels: int = 8, source: nn.Module | None = None, last: nn.Module | None = None) -> Net:
    """conv -> function -> head."""
    return Net(lambda n, x: n.h(function(n.a(x))), a=source or conv(3, channels), h=last or head(channels))


def tokens(function: Any) -> Net:
    """linear -> function -> linear on the last axis."""
    return Net(lambda n, x: n.b(function(n.a(x))), a=nn.Linear(8, 12), b=nn.Linear(12, 5))


class Rotary(nn.Module):
    """Attention as in LLaMA: rotated queries and keys, a norm per head, one head of keys for several of queries."""

    def __init__(self, dim: int, heads: int, head_dim: int, repeats: int = 1) -> None:
        super().__init__()
        self.head_dim, self.repeats = head_dim, repeats
        self.q = nn.Linear(dim, heads * head_dim)
        self.k, self.v = (nn.Linear(dim, heads // repeats * head_dim) for _ in range(2))
        self.norm = nn.Parameter(torch.ones(head_dim))
        self.o = nn.Linear(heads * head_dim, dim)

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[2])[:, None] * torch.linspace(0.1, 1.0, self.head_dim)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6) * self.norm
        many = [
            y[:, :, None].expand(b, y.shape[1], self.repeats, n, self.head_dim).reshape(b, -1, n, self.head_dim)
            for y in (self.rotated(k), v)
        ]
        y = F.scaled_dot_product_attention(self.rotated(q), *many)
        return self.o(y.transpose(1, 2).reshape(b, n, -1))


CASES: dict[str, tuple[nn.Module, Any, list[int]]] = {
    # element-wise operations
    "residual": (Net(lambda n, x: n.h(n.a(x) + n.b(x)), a=conv(3, 8), b=conv(3, 8), h=head(8)), IMAGE, [8]),
    "squeeze and excite": (
        Net(
            lambda n, x: n.h((y := n.a(x)) * torch.sigmoid(n.c(F.relu(n.b(F.adaptive_avg_pool2d(y, 1)))))),
            a=conv(3, 8),
            b=conv(8, 4, 1),
            c=conv(4, 8, 1),
            h=head(8),
        ),
        IMAGE,
        [4, 8],
    ),
    "spatial attention": (
        Net(lambda n, x: n.h((y := n.a(x)) * n.b(y)), a=conv(3, 8), b=conv(8, 1), h=head(8)),
        IMAGE,
        [8],
    ),
    "dropout of channels": (
        move(lambda x: F.feature_alpha_dropout(F.alpha_dropout(F.dropout2d(x, training=False)))),
        IMAGE,
        [8],
    ),
    "where": (move(lambda x: torch.where(x > 0, x, torch.full_like(x, 0.5) * x.new_full((1,), 2.0))), IMAGE, [8]),
    "a scale for all tokens after a class token": (
        Net(
            lambda n, x: n.b((torch.cat([n.token.expand(len(x), -1, -1), n.a(x)], 1) * n.scale).mean(1)),
            a=nn.Linear(8, 12),
            token=nn.Parameter(torch.ones(1, 1, 12)),
            scale=nn.Parameter(torch.ones(12)),
            b=nn.Linear(12, 5),
        ),
        TOKENS,
        [12],
    ),
    "activations": (move(lambda x: F.hardswish(F.dropout(F.silu(x), training=False))), IMAGE, [8]),
    "prelu": (Net(lambda n, x: n.h(n.p(n.a(x))), a=conv(3, 8), p=nn.PReLU(8), h=head(8)), IMAGE, [8]),
    "glu": (move(lambda x: F.glu(x, dim=1), source=conv(3, 16)), IMAGE, [8]),
    "same": (move(lambda x: x.detach().clone().contiguous().to(torch.float32).type_as(x)), IMAGE, [8]),
    "fixed partner": (Net(lambda n, x: n.h(n.a(x) + x), a=conv(3, 3), h=head(3)), IMAGE, []),
    "free parameter": (
        Net(
            lambda n, x: n.h(n.a(x) * n.scale + n.shift),
            a=conv(3, 8),
            scale=nn.Parameter(torch.ones(8, 1, 1)),
            shift=nn.Parameter(torch.ones(1, 8, 8, 8)),
            h=head(8),
        ),
        IMAGE,
        [8],
    ),
    "constants": (
        move(
            lambda x: (
                x
                + torch.zeros(8, 8)
                + torch.arange(8)
                + torch.ones(1)
                + torch.full((1,), 2.0)
                + torch.meshgrid(torch.linspace(0, 1, 8), torch.linspace(0, 1, 8), indexing="ij")[0]
            )
        ),
        IMAGE,
        [8],
    ),
    "made like": (
        move(lambda x: x + x.new_zeros(8, 8) + x.new_ones(1) + torch.zeros_like(x) * torch.ones_like(x)),
        IMAGE,
        [8],
    ),
    "in place": (
        move(
            lambda x: (
                y := x.permute(0, 1, 3, 2).contiguous().clone(),
                y[:, :, :2].fill_(1.0),
                y[:, :, 2:4].zero_(),
                y.copy_(x),
            )[0]
        ),
        IMAGE,
        [8],
    ),
    # moves of data
    "flatten before linear": (
        Net(lambda n, x: n.b(torch.flatten(n.a(x), 1)), a=conv(3, 8), b=nn.Linear(512, 5)),
        IMAGE,
        [8],
    ),
    "view": (Net(lambda n, x: n.b(n.a(x).view(2, -1)), a=conv(3, 8), b=nn.Linear(512, 5)), IMAGE, [8]),
    "reshape and unflatten": (move(lambda x: x.reshape(2, -1, 64).unflatten(2, (8, 8))), IMAGE, [8]),
    "view_as": (move(lambda x: x.flatten(2).view_as(x).flatten(2).reshape_as(x)), IMAGE, [8]),
    "squeeze": (
        Net(
            lambda n, x: n.b(F.adaptive_avg_pool2d(n.a(x), 1).squeeze(-1).squeeze(-1).unsqueeze(1)),
            a=conv(3, 8),
            b=nn.Linear(8, 5),
        ),
        IMAGE,
        [8],
    ),
    "permute": (move(lambda x: x.permute(0, 2, 3, 1).transpose(1, 2).swapaxes(1, 2).movedim(-1, 1)), IMAGE, [8]),
    "matrix transpose": (
        Net(lambda n, x: n.b(n.a(x[0]).t().t()), a=nn.Linear(8, 12), b=nn.Linear(12, 5)),
        TOKENS,
        [12],
    ),
    "select": (tokens(lambda x: x[:, 0]), TOKENS, [12]),
    "slice": (move(lambda x: x[:, :, ::2, 1:].narrow(2, 0, 3)), IMAGE, [8]),
    "expand": (
        Net(
            lambda n, x: n.b(n.a(x) + n.t.expand(2, -1, -1) + n.u.expand_as(x[..., :1])),
            a=nn.Linear(8, 12),
            t=nn.Parameter(torch.ones(1, 6, 12)),
            u=nn.Parameter(torch.ones(1, 1, 1)),
            b=nn.Linear(12, 5),
        ),
        TOKENS,
        [12],
    ),
    "class token": (
        Net(
            lambda n, x: n.b(n.n(torch.cat([n.t.expand(2, -1, -1), n.a(x)], 1) + n.p)[:, 0]),
            a=nn.Linear(8, 12),
            n=nn.LayerNorm(12),
            t=nn.Parameter(torch.ones(1, 1, 12)),
            p=nn.Parameter(torch.ones(1, 7, 12)),
            b=nn.Linear(12, 5),
        ),
        TOKENS,
        [12],
    ),
    "concat": (
        Net(
            lambda n, x: n.h(n.n(torch.cat([n.a(x), n.b(x), x], 1))),
            a=conv(3, 8),
            b=conv(3, 6),
            n=nn.BatchNorm2d(17),
            h=head(17),
        ),
        IMAGE,
        [6, 8],
    ),
    "dense block": (
        Net(
            lambda n, x: n.h(torch.cat([y := n.a(x), z := n.b(y), n.c(torch.cat([y, z], 1))], 1)),
            a=conv(3, 8),
            b=conv(8, 4),
            c=conv(12, 4),
            h=head(16),
        ),
        IMAGE,
        [4, 4, 8],
    ),
    "stack": (
        Net(lambda n, x: n.h(torch.stack([n.a(x), n.b(x)], 1).mean(1)), a=conv(3, 8), b=conv(3, 8), h=head(8)),
        IMAGE,
        [8],
    ),
    "chunk": (
        Net(
            lambda n, x: n.h(torch.cat([(p := n.a(x).chunk(2, 1))[0], n.b(p[1])], 1)),
            a=conv(3, 16),
            b=conv(8, 8),
            h=head(16),
        ),
        IMAGE,
        [8, 8],
    ),
    "split": (
        Net(lambda n, x: n.h((p := (y := n.a(x)).split(y.shape[1] // 2, 1))[0] * p[1]), a=conv(3, 16), h=head(8)),
        IMAGE,
        [8],
    ),
    "unequal split of a fixed axis": (
        move(lambda x: (p := x.split([3, 5], 2))[0][:, :, :3] + p[1][:, :, :3]),
        IMAGE,
        [8],
    ),
    "unbind": (move(lambda x: x.unbind(2)[1].unsqueeze(2)), IMAGE, [8]),
    "channel shuffle by hand": (
        Net(
            lambda n, x: n.h((y := n.a(x)).view(2, 2, y.shape[1] // 2, 8, 8).transpose(1, 2).reshape(2, -1, 8, 8)),
            a=conv(3, 12),
            h=head(12),
        ),
        IMAGE,
        [6],
    ),
    "channel shuffle": (move(lambda x: F.channel_shuffle(x, 2)), IMAGE, [4]),
    "option A": (
        Net(
            lambda n, x: n.h(n.b(y := F.relu(n.a(x))) + n.s(y)),
            a=conv(3, 8),
            b=conv(8, 12, stride=2),
            s=OptionA(2, 2),
            h=head(12),
        ),
        IMAGE,
        [4, 8],
    ),
    "spatial padding": (move(lambda x: F.pad(F.pad(x, (1, 1, 2, 0)), (1, 1, 1, 1), mode="reflect")), IMAGE, [8]),
    "index known at run time": (
        Net(
            lambda n, x: n.h(n.a(x)[:, :, (x[0, 0, 0] > 0).long()].index_select(3, (x[0, 0, 0] > 0).long())),
            a=conv(3, 8),
            h=head(8),
        ),
        IMAGE,
        [8],
    ),
    "index of channels known at run time": (
        Net(lambda n, x: n.h(n.a(x)[:, (x[0, 0, 0] > 0).long()]), a=conv(3, 8), h=head(8)),
        IMAGE,
        [],
    ),
    "gather": (
        Net(lambda n, x: n.h((y := n.a(x)).gather(3, (x[:, :1] > 0).long().expand(y.shape))), a=conv(3, 8), h=head(8)),
        IMAGE,
        [8],
    ),
    "other names of cat": (
        Net(
            lambda n, x: n.h(torch.concatenate([n.a(x), torch.concat([n.b(x), n.a(x)], 1)], 1)),
            a=conv(3, 4),
            b=conv(3, 6),
            h=head(14),
        ),
        IMAGE,
        [4, 6],
    ),
    "index": (move(lambda x: x[:, :, torch.tensor([0, 2, 4])]), IMAGE, [8]),
    "roll and flip": (move(lambda x: torch.roll(x, 1, 2).flip(3)), IMAGE, [8]),
    "repeat": (Net(lambda n, x: n.h(n.a(x).repeat(1, 2, 1, 1)), a=conv(3, 8), h=head(16)), IMAGE, [8]),
    "pixel shuffle": (move(lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2), 16), IMAGE, [4]),
    "unfold": (move(lambda x: x.unfold(2, 2, 2).mean(-1)), IMAGE, [8]),
    # reductions
    "pooling": (move(lambda x: F.max_pool2d(F.avg_pool2d(x, 2), 2)), IMAGE, [8]),
    "adaptive max pooling": (move(lambda x: F.adaptive_max_pool2d(x, 4)), IMAGE, [8]),
    "pooling a volume": (
        Net(
            lambda n, x: n.b(
                F.adaptive_avg_pool3d(F.adaptive_max_pool3d(F.avg_pool3d(F.max_pool3d(n.a(x), 2), 1), 2), 1).flatten(1)
            ),
            a=nn.Conv3d(3, 8, 1),
            b=nn.Linear(8, 5),
        ),
        torch.randn(2, 3, 6, 6, 6),
        [8],
    ),
    "max pooling with indices": (move(lambda x: F.max_pool2d(x, 2, return_indices=True)[0]), IMAGE, [8]),
    "pooling a line": (
        Net(
            lambda n, x: n.b(
                F.adaptive_avg_pool1d(F.adaptive_max_pool1d(F.avg_pool1d(F.max_pool1d(n.a(x), 2), 2), 2), 1).flatten(1)
            ),
            a=nn.Conv1d(3, 8, 3, padding=1),
            b=nn.Linear(8, 5),
        ),
        LINE,
        [8],
    ),
    "upsampling a line": (
        Net(
            lambda n, x: n.b(F.interpolate(F.interpolate(n.a(x), size=9), size=7, mode="linear").mean(2)),
            a=nn.Conv1d(3, 8, 3),
            b=nn.Linear(8, 5),
        ),
        LINE,
        [8],
    ),
    "upsampling a volume": (
        Net(
            lambda n, x: n.b(F.interpolate(F.interpolate(n.a(x), size=4), size=5, mode="trilinear").mean((2, 3, 4))),
            a=nn.Conv3d(3, 8, 3),
            b=nn.Linear(8, 5),
        ),
        torch.randn(2, 3, 5, 5, 5),
        [8],
    ),
    "resizing with antialias": (move(lambda x: F.interpolate(x, size=5, mode="bilinear", antialias=True)), IMAGE, [8]),
    "upsampling": (
        move(
            lambda x: F.interpolate(
                F.interpolate(F.interpolate(x, scale_factor=2), size=5, mode="bilinear"), size=7, mode="bicubic"
            )
        ),
        IMAGE,
        [8],
    ),
    "mean over space": (
        Net(lambda n, x: n.b(n.a(x).mean([2, 3]) + n.a(x).amax((2, 3))), a=conv(3, 8), b=nn.Linear(8, 5)),
        IMAGE,
        [8],
    ),
    "sum and var over space": (
        Net(
            lambda n, x: n.b(n.a(x).sum((2, 3)) + n.a(x).var((2, 3)) + n.a(x).std((2, 3))),
            a=conv(3, 8),
            b=nn.Linear(8, 5),
        ),
        IMAGE,
        [8],
    ),
    "norm over space": (
        Net(
            lambda n, x: n.b(
                torch.linalg.vector_norm(n.a(x), dim=(2, 3))
                + n.a(x).flatten(2).max(2).values
                + n.a(x).amin((2, 3))
                + n.a(x).flatten(2).min(2)[0]
            ),
            a=conv(3, 8),
            b=nn.Linear(8, 5),
        ),
        IMAGE,
        [8],
    ),
    "mean over channels": (move(lambda x: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1)), IMAGE, [8]),
    "mean over channels and space": (move(lambda x: x / (1 + x.mean() ** 2)), IMAGE, []),
    "smaller of two": (
        Net(lambda n, x: n.h(torch.min(n.a(x), n.b(x))), a=conv(3, 8), b=conv(3, 8), h=head(8)),
        IMAGE,
        [8],
    ),
    "softmax over space": (move(lambda x: x * torch.softmax(x, 2)), IMAGE, [8]),
    "softmax over channels": (move(lambda x: torch.log_softmax(x, 1)), IMAGE, []),
    # normalisation
    "batch norm": (Net(lambda n, x: n.h(n.n(n.a(x))), a=conv(3, 8), n=nn.BatchNorm2d(8), h=head(8)), IMAGE, [8]),
    "instance norm": (
        Net(lambda n, x: n.h(n.n(n.a(x))), a=conv(3, 8), n=nn.InstanceNorm2d(8, affine=True), h=head(8)),
        IMAGE,
        [8],
    ),
    "layer norm": (
        Net(lambda n, x: n.b(n.n(n.a(x))), a=nn.Linear(8, 12), n=nn.LayerNorm(12), b=nn.Linear(12, 5)),
        TOKENS,
        [12],
    ),
    "layer norm without scale": (tokens(lambda x: F.layer_norm(x, (12,))), TOKENS, []),
    "layer norm over space": (
        Net(lambda n, x: n.h(n.n(n.a(x))), a=conv(3, 8), n=nn.LayerNorm(8), h=head(8)),
        IMAGE,
        [8],
    ),
    "rms norm": (
        Net(lambda n, x: n.b(n.n(n.a(x))), a=nn.Linear(8, 12), n=nn.RMSNorm(12), b=nn.Linear(12, 5)),
        TOKENS,
        [12],
    ),
    "group norm": (Net(lambda n, x: n.h(n.n(n.a(x))), a=conv(3, 12), n=nn.GroupNorm(3, 12), h=head(12)), IMAGE, [4]),
    # producers
    "plain": (Net(lambda n, x: n.h(F.relu(n.b(F.relu(n.a(x))))), a=conv(3, 8), b=conv(8, 6), h=head(6)), IMAGE, [6, 8]),
    "depthwise": (Net(lambda n, x: n.h(n.b(n.a(x))), a=conv(3, 8), b=conv(8, 8, groups=8), h=head(8)), IMAGE, [8]),
    "depthwise with multiplier": (
        Net(lambda n, x: n.h(n.b(n.a(x))), a=conv(3, 8), b=conv(8, 16, groups=8), h=head(16)),
        IMAGE,
        [8],
    ),
    "grouped": (Net(lambda n, x: n.h(n.b(n.a(x))), a=conv(3, 12), b=conv(12, 8, groups=2), h=head(8)), IMAGE, [4, 6]),
    "transposed": (
        Net(lambda n, x: n.h(n.b(n.a(x))), a=conv(3, 8), b=nn.ConvTranspose2d(8, 6, 2, 2), h=head(6)),
        IMAGE,
        [6, 8],
    ),
    "transposed, grouped": (
        Net(lambda n, x: n.h(n.b(n.a(x))), a=conv(3, 12), b=nn.ConvTranspose2d(12, 8, 2, 2, groups=2), h=head(8)),
        IMAGE,
        [4, 6],
    ),
    "transposed, depthwise": (
        Net(lambda n, x: n.h(n.b(n.a(x))), a=conv(3, 8), b=nn.ConvTranspose2d(8, 16, 2, 2, groups=8), h=head(16)),
        IMAGE,
        [8],
    ),
    "one dimension": (
        Net(
            lambda n, x: n.c(n.b(n.a(x))).mean(2),
            a=nn.Conv1d(3, 8, 3),
            b=nn.ConvTranspose1d(8, 6, 3),
            c=nn.Conv1d(6, 5, 3),
        ),
        LINE,
        [6, 8],
    ),
    "three dimensions": (
        Net(
            lambda n, x: n.c(n.b(n.a(x))).mean((2, 3, 4)),
            a=nn.Conv3d(3, 8, 3),
            b=nn.ConvTranspose3d(8, 6, 3),
            c=nn.Conv3d(6, 5, 3),
        ),
        torch.randn(2, 3, 5, 5, 5),
        [6, 8],
    ),
    "mlp": (Net(lambda n, x: n.b(F.gelu(n.a(x))), a=nn.Linear(8, 12), b=nn.Linear(12, 5)), TOKENS, [12]),
    "matrix product with a parameter": (
        Net(
            lambda n, x: torch.addmm(n.c, torch.mm(n.a(x[0]), n.w), n.v),
            a=nn.Linear(8, 12),
            w=nn.Parameter(torch.ones(12, 7)),
            v=nn.Parameter(torch.ones(7, 5)),
            c=nn.Parameter(torch.ones(5)),
        ),
        TOKENS,
        [7, 12],
    ),
    "embedding": (
        Net(lambda n, x: n.b(n.e(x)).mean(1), e=nn.Embedding(10, 8), b=nn.Linear(8, 5)),
        torch.randint(0, 10, (2, 6)),
        [8],
    ),
    "computed weight": (
        Net(
            lambda n, x: n.h(F.conv2d(n.a(x), n.w * 2)), a=conv(3, 8), w=nn.Parameter(torch.ones(6, 8, 1, 1)), h=head(6)
        ),
        IMAGE,
        [],
    ),
    **{
        kind.__name__: (
            Net(
                lambda n, x: n.h(n.r(n.a(x))[0][:, -1]),
                a=nn.Linear(8, 10),
                r=kind(10, 7, num_layers=2, batch_first=True, **options),
                h=nn.Linear(7 * (1 + bool(options.get("bidirectional"))), 5),
            ),
            TOKENS,
            [7, 10],
        )
        for kind, options in ((nn.LSTM, {"bidirectional": True}), (nn.GRU, {"bias": False}), (nn.RNN, {}))
    },
    "rnn with relu and its last state": (
        Net(lambda n, x: n.h(n.r(x)[1][0]), r=nn.RNN(8, 7, nonlinearity="relu"), h=nn.Linear(7, 5)),
        TOKENS,
        [7],
    ),
    "recurrent with an initial state from outside": (
        Net(lambda n, x: n.h(n.r(x, x[:1, :, :7])[0]), r=nn.GRU(8, 7), h=nn.Linear(7, 5)),
        TOKENS,
        [],
    ),
    # products of activations
    "rotated heads": (Net(lambda n, x: n.o(n.t(x)), t=Rotary(8, 4, 4), o=nn.Linear(8, 5)), TOKENS, [4, 8]),
    "grouped queries": (Net(lambda n, x: n.o(n.t(x)), t=Rotary(8, 6, 4, repeats=2), o=nn.Linear(8, 5)), TOKENS, [3, 8]),
    "attention": (Net(lambda n, x: n.o(n.t(x)), t=Attention(8, 4, 3), o=nn.Linear(8, 5)), TOKENS, [4, 8]),
    "attention by hand": (
        Net(lambda n, x: n.o(n.t(x)), t=Attention(8, 4, 3, fused=False), o=nn.Linear(8, 5)),
        TOKENS,
        [4, 8],
    ),
    "einsum": (
        Net(
            lambda n, x: n.o(torch.einsum("bnc,bmc->bnm", n.a(x), n.b(x))),
            a=nn.Linear(8, 12),
            b=nn.Linear(8, 12),
            o=nn.Linear(6, 5),
        ),
        TOKENS,
        [],
    ),
    "bmm": (Net(lambda n, x: n.o(torch.bmm(x, x.transpose(1, 2))), o=nn.Linear(6, 5)), TOKENS, []),
    # operations without a rule
    "unknown": (move(lambda x: torch.fft.fft2(x).real), IMAGE, []),
}


@pytest.mark.parametrize("name", CASES)
def test_rule_gives_the_expected_groups(name: str) -> None:
    model, inputs, expected = CASES[name]
    _, groups = analyse(model.eval(), inputs)  # without verification, which would hide a wrong rule
    assert sizes(groups) == expected
    prove(model, groups, inputs, seed=len(name), memory=name not in ("sum and var over space",))


def test_every_rule_is_tested() -> None:
    seen = {"getitem"}
    for model, inputs, _ in CASES.values():
        seen |= {operation.kind for operation in trace(model.eval(), inputs).operations}
    assert sorted(set(RULES) - seen) == []


def test_unknown_operation_is_reported_with_its_name_and_place() -> None:
    model, inputs, _ = CASES["unknown"]
    _, groups = analyse(model.eval(), inputs)
    reasons = [frozen.reason for frozen in groups.frozen]
    assert any("fft_fft2" in reason and "proving.py:" in reason for reason in reasons)


class TokenMixing(nn.Module):
    """A block of MLP-Mixer: a layer over the tokens, between two axes that it exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.tokens, self.out = nn.LayerNorm(8), nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).transpose(1, 2)
        return x + self.out(self.tokens(y).relu()).transpose(1, 2)


def test_layers_over_tokens_pass_channels_on() -> None:
    model = nn.Sequential(nn.Linear(3, 8), TokenMixing(), nn.Linear(8, 4))
    inputs = torch.randn(2, 9, 3)
    groups = find_groups(model, inputs)
    assert sizes(groups) == [8]
    prove(model, groups, inputs, seed=1)
