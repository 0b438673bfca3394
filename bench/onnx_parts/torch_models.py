"""Architectures in PyTorch, small, as bench/onnx_torch.py exports them.

Attention is written out in products and a softmax: PyTorch has a kernel for it that keeps no
weights of attention, and ONNX does not say which of the two a program takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def _conv(ins: int, outs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(ins, outs, size, stride, size // 2, groups=groups, bias=False)


class _Bottleneck(nn.Module):
    def __init__(self, ins: int, width: int, stride: int) -> None:
        super().__init__()
        outs = 4 * width
        self.body = nn.Sequential(
            _conv(ins, width, 1), nn.BatchNorm2d(width), nn.ReLU(),
            _conv(width, width, 3, stride), nn.BatchNorm2d(width), nn.ReLU(),
            _conv(width, outs, 1), nn.BatchNorm2d(outs),
        )  # fmt: skip
        self.short = (
            nn.Identity()
            if ins == outs and stride == 1
            else nn.Sequential(_conv(ins, outs, 1, stride), nn.BatchNorm2d(outs))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.short(x))


class _Head(nn.Module):
    """The mean of each channel, and scores."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.score = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def resnet() -> nn.Module:
    blocks = [_Bottleneck(32, 16, 1), _Bottleneck(64, 16, 1), _Bottleneck(64, 32, 2)]
    stem = [_conv(3, 32, 7, 2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(*stem, *blocks, _Bottleneck(128, 32, 1), _Head(128))


class _Dense(nn.Module):
    def __init__(self, ins: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(ins), nn.ReLU(), _conv(ins, 4 * growth, 1),
            nn.BatchNorm2d(4 * growth), nn.ReLU(), _conv(4 * growth, growth),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.body(x)], 1)


def densenet() -> nn.Module:
    layers: list[nn.Module] = [_conv(3, 24, 3, 2)]
    width = 24
    for block, count in enumerate((6, 8, 6)):
        for _ in range(count):
            layers.append(_Dense(width, 12))
            width += 12
        if block < 2:
            layers += [nn.BatchNorm2d(width), nn.ReLU(), _conv(width, width // 2, 1)]
            layers.append(nn.AvgPool2d(2))
            width //= 2
    return nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU(), _Head(width))


def vgg() -> nn.Module:
    layers: list[nn.Module] = []
    ins = 3
    for width, count in ((32, 2), (64, 2), (128, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(ins, width, 3, padding=1), nn.ReLU()]
            ins = width
        layers.append(nn.MaxPool2d(2))
    scores = [nn.Flatten(), nn.Linear(128 * 8 * 8, 256), nn.ReLU(), nn.Linear(256, 10)]
    return nn.Sequential(*layers, *scores)


class _Inverted(nn.Module):
    def __init__(self, ins: int, outs: int, stride: int, act: Callable[[], nn.Module]) -> None:
        super().__init__()
        wide = 4 * ins
        self.adds = ins == outs and stride == 1
        self.body = nn.Sequential(
            _conv(ins, wide, 1), nn.BatchNorm2d(wide), act(),
            _conv(wide, wide, 3, stride, wide), nn.BatchNorm2d(wide), act(),
            _conv(wide, outs, 1), nn.BatchNorm2d(outs),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.adds else self.body(x)


def mobilenet(act: Callable[[], nn.Module] = nn.SiLU) -> nn.Module:
    shapes = ((16, 24, 2), (24, 24, 1), (24, 40, 2), (40, 40, 1), (40, 40, 1))
    blocks = [_Inverted(*shape, act) for shape in shapes]
    return nn.Sequential(_conv(3, 16, 3, 2), nn.BatchNorm2d(16), act(), *blocks, _Head(40))


class _Level(nn.Module):
    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            _conv(ins, outs), nn.GroupNorm(8, outs), nn.SiLU(),
            _conv(outs, outs), nn.GroupNorm(8, outs), nn.SiLU(),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


class _UNet(nn.Module):
    """Levels that become smaller by a convolution, as in diffusion, or by max pooling."""

    def __init__(self, pools: bool) -> None:
        super().__init__()
        smaller = [nn.MaxPool2d(2)] * 2 if pools else [_conv(16, 16, 3, 2), _conv(32, 32, 3, 2)]
        self.smaller = nn.ModuleList([nn.Identity(), *smaller])
        self.down = nn.ModuleList([_Level(3, 16), _Level(16, 32), _Level(32, 64)])
        ups = [nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)]
        self.up = nn.ModuleList(ups)
        self.merge = nn.ModuleList([_Level(64, 32), _Level(32, 16)])
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for smaller, level in zip(self.smaller, self.down, strict=True):
            x = level(smaller(x))
            seen.append(x)
        for up, merge, side in zip(self.up, self.merge, seen[-2::-1], strict=True):
            x = merge(torch.cat([up(x), side], 1))
        return self.last(x)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.each = heads, width // heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).reshape(batch, length, 3, self.heads, self.each).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        weights = torch.softmax((q @ k.transpose(-2, -1)) * self.each**-0.5, -1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, approximate: str) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = _Attention(width, heads)
        gelu = nn.GELU(approximate=approximate)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), gelu, nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before(x))
        return x + self.mlp(self.after(x))


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(1000, 96), nn.Parameter(torch.zeros(64, 96))
        self.layers = nn.Sequential(*(_Layer(96, 4, "none") for _ in range(3)), nn.LayerNorm(96))
        self.score = nn.Linear(96, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.layers(self.words(x) + self.places))


class _VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 96, 8, 8)
        self.first = nn.Parameter(torch.zeros(1, 1, 96))
        self.places = nn.Parameter(torch.zeros(65, 96))
        self.layers = nn.Sequential(*(_Layer(96, 4, "tanh") for _ in range(3)), nn.LayerNorm(96))
        self.score = nn.Linear(96, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.first.expand(h.shape[0], -1, -1), h], 1) + self.places
        return self.score(self.layers(h)[:, 0])


class _NextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.gain = nn.LayerNorm(width), nn.Parameter(torch.full((width,), 0.1))
        wide = 4 * width
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.mlp(self.norm(self.depth(x).permute(0, 2, 3, 1)))
        return x + (self.gain * h).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    stages: list[nn.Module] = [nn.Conv2d(3, 32, 4, 4)]
    for ins, outs in ((32, 64), (64, 64)):
        stages += [_NextBlock(ins), _NextBlock(ins), nn.Conv2d(ins, outs, 2, 2)]
    return nn.Sequential(*stages, _Head(64))


def _images(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 64, 64)


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "ResNet": (resnet, _images),
    "DenseNet": (densenet, _images),
    "VGG": (vgg, _images),
    "MobileNet, SiLU": (mobilenet, _images),
    "U-Net, GroupNorm": (lambda: _UNet(pools=False), _images),
    "U-Net, max pooling": (lambda: _UNet(pools=True), _images),
    "transformer encoder, GELU": (_Encoder, lambda: torch.randint(0, 1000, (4, 64))),
    "vision transformer, tanh GELU": (_VisionTransformer, _images),
    "ConvNeXt, LayerNorm": (convnext, _images),
}
"""By name: the network, and an input for it."""
