"""Modules whose code contains a channel count: which are replaced by their graph, and what that graph accepts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsa_hw import find_groups
from tests.fakes.proving import IMAGE, conv, head, prove, sizes


class Halves(nn.Module):
    """Splits at a number that is no attribute, so that its child fails and not the line with the number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(4, 4), Block(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.split(4, 1)
        return self.last(torch.cat([a, self.first(b)], 1))


class Block(nn.Module):
    """Convolution and activation."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.conv = conv(i, o)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu()


def test_the_caller_of_a_failing_layer_is_replaced_and_not_the_layer() -> None:
    model = nn.Sequential(Block(3, 8), Halves(), head(8))
    groups = find_groups(model, IMAGE)
    assert sorted(sizes(groups)) == [4, 4, 8], "the halves lose the same channels"
    small = prove(model, groups, IMAGE, seed=2, memory=False)
    assert type(small[0]) is Block
    assert type(small[1]).__name__ == "ResizedHalves"


class Doubled(nn.Module):
    """Multiplies by a tensor that ``forward`` creates, and splits at a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Block(4, 4), Block(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b = (x * torch.tensor(2.0)).split(4, 1)
        return self.last(torch.cat([a, self.first(b)], 1))


class Nested(nn.Module):
    """Splits around a child that creates a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Doubled()

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.inner(x).split(4, 1)
        return torch.cat([a * torch.tensor(3.0), b], 1)


def test_constants_that_a_child_creates_are_kept() -> None:
    model = nn.Sequential(Block(3, 8), Nested(), head(8))
    groups = find_groups(model, IMAGE)
    small = prove(model, groups, IMAGE, seed=2, memory=False)
    assert type(small[1]).__name__ == "ResizedNested"


class Sentence(nn.Module):
    """Attention over words, with the width of a head from the width of the input and a mask made in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 24), nn.Linear(24, 3)
        self.attention = Words()

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.attention(self.embedding(words))).mean(1)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        place = torch.arange(n, device=x.device)
        far = (place[:, None] - place[None, :]).abs() / (n + 1)
        weights = (q @ k.transpose(-2, -1) * (c // 4) ** -0.5 - far).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(b, n, c))


def test_graphs_accept_other_batches_and_lengths() -> None:
    model, words = Sentence(), torch.randint(0, 11, (1, 7))
    groups = find_groups(model, words)
    assert sorted(sizes(groups)) == [4, 24, 24]
    small = prove(model, groups, words, seed=1, memory=False)
    assert type(small.attention).__name__ == "ResizedWords"
    pair = torch.randint(0, 11, (3, 5))
    with torch.no_grad():
        assert torch.allclose(small(pair), torch.cat([small(one[None]) for one in pair]), atol=1e-6)
    on_meta = small.to("meta")(pair.to("meta"))
    assert on_meta.device.type == "meta", "what forward creates is on the device of the input"
