"""The networks of bench/recompute.py in PyTorch, as sequences.

``python torch_networks.py NAME REPEATS`` prints, as JSON, what checkpoint_sequential saves and
costs relative to PyTorch's own plain step. Peaks are of what a step allocates (PyTorch's profiler
sees every allocation of its CPU allocator), gradients included, parameters, optimizer state and
inputs not; times are processor time on one thread.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint_sequential


class Residual(nn.Module):
    def __init__(self, channels: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.dropout = dropout

    def forward(self, x: Any) -> Any:
        y = F.relu(self.norm(self.conv(x)))
        return x + (F.dropout(y, self.dropout) if self.dropout else y)


class Bottleneck(nn.Module):
    def __init__(self, channels: int, middle: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, middle, 1, stride, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(),
            nn.Conv2d(middle, middle, 3, 1, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(),
            nn.Conv2d(middle, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.short: nn.Module = nn.Identity()
        if channels != out:
            self.short = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Any) -> Any:
        return F.relu(self.body(x) + self.short(x))


class DenseLayer(nn.Module):
    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            nn.ReLU(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Any) -> Any:
        return torch.cat((x, self.body(x)), 1)


class TransformerLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        weights = F.softmax(q @ k.transpose(-1, -2) * (width // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.narrow(F.relu(self.wide(self.norm2(x))))


class Steps(nn.Module):
    """A part of the sequence of an LSTM: its state, and the loss so far."""

    def __init__(self, cell: Any, score: Any, xs: Any) -> None:
        super().__init__()
        self.cell, self.score = cell, score
        self.xs = xs

    def forward(self, state: Any) -> Any:
        h, c, total = state
        for x in self.xs:
            h, c = self.cell(x, (h, c))
            total = total + self.score(h).square().mean()
        return h, c, total


class GraphLayer(nn.Module):
    def __init__(self, adjacency: Any, width: int, out: int, first: bool) -> None:
        super().__init__()
        self.linear, self.adjacency, self.first = nn.Linear(width, out), adjacency, first

    def forward(self, x: Any) -> Any:
        x = x if self.first else F.relu(x)
        return self.linear(torch.sparse.mm(self.adjacency, x))


class Mean(nn.Module):
    def forward(self, x: Any) -> Any:
        return x.mean((2, 3))


Case = tuple[list[nn.Module], Any, Callable[[Any], Any]]


def cross_entropy(*shape: int, classes: int) -> Callable[[Any], Any]:
    t = torch.randint(0, classes, shape)
    return lambda y: F.cross_entropy(y, t)


def residual(dropout: float = 0.0) -> Case:
    return [Residual(dropout=dropout) for _ in range(24)], torch.randn(8, 32, 32, 32), square


def square(y: Any) -> Any:
    return (y * y).mean()


def resnet50() -> Case:
    parts: list[nn.Module] = [
        nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )
    ]
    channels = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        for number in range(count):
            stride = 2 if stage and not number else 1
            parts.append(Bottleneck(channels, 64 << stage, 256 << stage, stride))
            channels = 256 << stage
    parts.append(nn.Sequential(Mean(), nn.Linear(channels, 1000)))
    return parts, torch.randn(8, 3, 128, 128), cross_entropy(8, classes=1000)


def vgg16() -> Case:
    parts: list[nn.Module] = []
    channels = 3
    for out, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            parts += [nn.Conv2d(channels, out, 3, padding=1), nn.ReLU()]
            channels = out
        parts.append(nn.MaxPool2d(2))
    parts += [
        nn.Flatten(),
        nn.Linear(512 * 16, 4096),
        nn.ReLU(),
        nn.Linear(4096, 4096),
        nn.ReLU(),
        nn.Linear(4096, 1000),
    ]
    return parts, torch.randn(8, 3, 128, 128), cross_entropy(8, classes=1000)


def densenet(growth: int = 12, layers: int = 8) -> Case:
    channels = 24
    parts: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
    for stage in range(3):
        for _ in range(layers):
            parts.append(DenseLayer(channels, growth))
            channels += growth
        if stage < 2:
            parts.append(
                nn.Sequential(nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2))
            )
            channels //= 2
    last = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), Mean(), nn.Linear(channels, 10))
    return [*parts, last], torch.randn(8, 3, 32, 32), cross_entropy(8, classes=10)


def transformer(width: int = 128, length: int = 128) -> Case:
    parts: list[nn.Module] = [TransformerLayer(width, 4) for _ in range(12)]
    parts.append(nn.Sequential(nn.Linear(width, 100), nn.Flatten(0, 1)))
    return parts, torch.randn(8, length, width), cross_entropy(8 * length, classes=100)


def lstm(steps: int = 200, batch: int = 128, width: int = 128) -> Case:
    cell, score = nn.LSTMCell(width, width), nn.Linear(width, 8)
    xs = torch.randn(steps, batch, width)
    zero = torch.zeros(batch, width)
    parts: list[nn.Module] = [Steps(cell, score, xs[i : i + 1]) for i in range(steps)]
    return parts, (zero, zero, torch.zeros(())), lambda state: state[2]


def gcn(layers: int = 8, nodes: int = 20_000, width: int = 64) -> Case:
    """A random graph of as many entries."""
    ends = torch.randint(0, nodes, (2, 10 * nodes))
    adjacency = torch.sparse_coo_tensor(ends, torch.full((10 * nodes,), 0.1), (nodes, nodes))
    adjacency = (adjacency + adjacency.t()).coalesce().to_sparse_csr()
    sizes = [width] * layers + [8]
    parts: list[nn.Module] = [
        GraphLayer(adjacency, a, b, not i) for i, (a, b) in enumerate(itertools.pairwise(sizes))
    ]
    return parts, torch.randn(nodes, width), cross_entropy(nodes, classes=8)


CASES: dict[str, Callable[[], Case]] = {
    "residual": residual, "residual, dropout": lambda: residual(0.1), "ResNet50": resnet50,
    "VGG16": vgg16, "DenseNet": densenet, "transformer": transformer, "LSTM": lstm, "GCN": gcn,
}  # fmt: skip


def peak_of(step: Callable[[], None]) -> int:
    """The most bytes that a step has allocated at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, nbytes in changes:
        held += nbytes
        peak = max(peak, held)
    return peak


def main(name: str, repeats: int, what: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts, x, loss_of = CASES[name]()
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    segments = max(1, round(len(parts) ** 0.5))
    runs: dict[str, Callable[[], torch.Tensor]] = {"plain": lambda: model(x)}
    if what == "compile":
        torch._functorch.config.activation_memory_budget = 0.0
        compiled = torch.compile(model)
        runs[what] = lambda: compiled(x)
    else:
        runs[what] = lambda: checkpoint_sequential(parts, segments, x, use_reentrant=False)

    def step(kind: str) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(runs[kind]()).backward()
        optimizer.step()

    peaks = {}
    for kind in runs:
        step(kind)
        optimizer.zero_grad(set_to_none=True)
        peaks[kind] = peak_of(lambda kind=kind: step(kind))
    seconds: dict[str, list[float]] = {kind: [] for kind in runs}
    for _ in range(repeats):
        for kind, found in seconds.items():
            start = time.process_time()
            step(kind)
            found.append(time.process_time() - start)
    medians = {kind: statistics.median(found) for kind, found in seconds.items()}
    ratios = [a / b for a, b in zip(seconds[what], seconds["plain"], strict=True)]
    print(
        json.dumps(
            {
                "peak_mb": peaks[what] / 1e6,
                "of_raw": peaks[what] / peaks["plain"],
                "median_s": medians[what],
                "time_ratio": medians[what] / medians["plain"],
                "ratio_low": min(ratios),
                "ratio_high": max(ratios),
                "seconds": seconds[what],
                "plain_seconds": seconds["plain"],
                "torch": torch.__version__,
                "verdict": f"{segments} segments" if what == "checkpoint" else None,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
