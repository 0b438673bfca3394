"""Chainer's networks of bench/dry_runs.py that bench/models does not have, and how each trains."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import chainer
import chainer.functions as F
import chainer.links as L
import cupy as cp
import numpy as np
from models.catalogue import build
from models.model import Parts, labels, normal, sent

import umem.chainer

Step = Callable[[], None]


def trained(
    name: str,
    size: str,
    batch: int,
    *,
    within: Callable[[], Any] | None = None,
    set_up: Callable[[Any, Any], Any] | None = None,
    optimizer: Any = None,
) -> Callable[[], Step]:
    """A network of bench/models that trains.

    Args:
        name, size, batch: of the network.
        within: makes what is enabled around all steps.
        set_up: takes the network and its optimizer.
        optimizer: instead of the network's own.
    """

    def start() -> Step:
        """Set up the network, its optimizer and a batch; return the step."""
        model = build(name, size)
        device = chainer.get_device("@cupy:0")
        model.link.to_device(device)
        made = (optimizer() if optimizer else model.make_optimizer()).setup(model.link)
        given = sent(model.inputs(batch), device)
        if set_up is not None:
            _kept.append(set_up(model.link, made))
        if within is not None:
            _open.enter_context(within())
        return lambda: made.update(model.loss, *given)

    return start


_kept: list[Any] = []
_open = ExitStack()
close = _open.close
"""Ends what is enabled around steps."""


def rivals() -> Step:
    """DCGAN: two networks, each with its optimizer."""
    model = build("DCGAN", "32 px")
    device = chainer.get_device("@cupy:0")
    make, judge = model.link
    model.link.to_device(device)
    noise, images = sent(model.inputs(16), device)
    first, second = (model.make_optimizer().setup(link) for link in (make, judge))

    def step() -> None:
        fake = make(noise)
        judged = judge(fake)
        first.update(lambda: F.mean(F.softplus(-judged)))
        fake.unchain_backward()
        real = judge(images)
        second.update(lambda: F.mean(F.softplus(judge(fake))) + F.mean(F.softplus(-real)))

    return step


def in_parts() -> Step:
    """Each batch of 16 is split into parts of 4 whose gradients are summed."""
    model = build("mixer", "4 layers")
    device = chainer.get_device("@cupy:0")
    model.link.to_device(device)
    optimizer = model.make_optimizer().setup(model.link)
    x, t = sent(model.inputs(16), device)
    _open.enter_context(umem.chainer.accumulate(optimizer, micro_batch=4))
    return lambda: optimizer.update(model.loss, x, t)


def _training(link: Any, loss: Callable[..., Any], *given: Any, optimizer: str = "Adam") -> Step:
    device = chainer.get_device("@cupy:0")
    link.to_device(device)
    made = getattr(chainer.optimizers, optimizer)().setup(link)
    inputs = sent(given, device)
    return lambda: made.update(loss, *inputs)


def masked_lm() -> Step:
    """The network of examples/masked_lm, two layers of 128."""
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    from masked_lm.network import MaskedLanguageModel

    model = MaskedLanguageModel(500, 128, 2, 64)
    tokens, targets = (labels(8, 64, classes=500) for _ in range(2))
    return _training(model, model, tokens, targets)


def wavenet() -> Step:
    """Gated, dilated convolutions along the time with skips (van den Oord and others, 2016)."""
    m, width = Parts(), 32
    first = m.conv(1, width, (1, 1))
    layers = [
        (
            m.conv(width, 2 * width, (1, 2), dilate=(1, 2**n), pad=(0, 2**n)),
            m.conv(width, 2 * width, (1, 1)),
        )
        for n in range(8)
    ]
    last = m.conv(width, 64, (1, 1))

    def loss(x: Any, t: Any) -> Any:
        h, skips, length = first(x), 0, x.shape[3]
        for gated, mixed in layers:
            a, b = F.split_axis(gated(h)[:, :, :, :length], 2, axis=1)
            rest, skip = F.split_axis(mixed(F.tanh(a) * F.sigmoid(b)), 2, axis=1)
            h, skips = h + rest, skips + skip
        return F.softmax_cross_entropy(last(F.relu(skips)), t)

    return _training(m, loss, normal(2, 1, 1, 2048), labels(2, 1, 2048, classes=64))


def gat() -> Step:
    """Attention over the edges of a graph (Velickovic and others, 2018)."""
    nodes, edges, width = 2000, 12_000, 32
    draw = np.random.default_rng(0)
    source, target = (np.sort(draw.integers(0, nodes, edges)).astype("i") for _ in range(2))
    m = Parts()
    layers = [(m.add(L.Linear(64, width)), m.add(L.Linear(2 * width, 1)))]
    layers += [(m.add(L.Linear(width, width)), m.add(L.Linear(2 * width, 1)))]
    last = m.add(L.Linear(width, 7))

    def attend(x: Any, source: Any, target: Any) -> Any:
        """Compute the classes of all nodes by layers of graph attention."""
        for linear, score in layers:
            h = linear(x)
            of, to = F.embed_id(source, h), F.embed_id(target, h)
            weight = F.exp(F.tanh(F.leaky_relu(score(F.concat((of, to))))))
            zeros = cp.zeros((nodes, 1), "f")
            total = F.scatter_add(zeros, target, weight)
            share = weight / F.embed_id(target, total)
            sums = F.scatter_add(
                cp.zeros((nodes, width), "f"), target, of * F.broadcast_to(share, of.shape)
            )
            x = F.elu(sums)
        return last(x)

    def loss(x: Any, source: Any, target: Any, t: Any) -> Any:
        return F.softmax_cross_entropy(attend(x, source, target), t)

    return _training(m, loss, normal(nodes, 64), source, target, labels(nodes, classes=7))


def ode_block() -> Step:
    """A block of a fourth-order Runge-Kutta method, 6 steps (Chen and others, 2018)."""
    m = Parts()
    first, a, b, last = m.conv(1, 24, 3, pad=1), m.conv(24, 24, 3, pad=1), None, None
    b, last = m.conv(24, 24, 3, pad=1), m.add(L.Linear(24, 10))

    def slope(x: Any) -> Any:
        return b(F.tanh(a(x)))

    def loss(x: Any, t: Any) -> Any:
        h, dt = first(x), 1 / 6
        for _ in range(6):
            k1 = slope(h)
            k2 = slope(h + dt / 2 * k1)
            k3 = slope(h + dt / 2 * k2)
            k4 = slope(h + dt * k3)
            h = h + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return F.softmax_cross_entropy(last(F.mean(h, axis=(2, 3))), t)

    return _training(m, loss, normal(8, 1, 28, 28), labels(8, classes=10))


def capsules() -> Step:
    """Capsules with three rounds of routing by agreement (Sabour and others, 2017)."""
    m = Parts()
    first, primary = m.conv(1, 32, 9), m.conv(32, 64, 9, stride=2)
    votes = m.add(L.Linear(8, 10 * 16, nobias=True))

    def squash(s: Any) -> Any:
        square = F.sum(s * s, axis=-1, keepdims=True)
        return s * F.broadcast_to(F.sqrt(square) / (1 + square), s.shape)

    def loss(x: Any, t: Any) -> Any:
        """Compute the loss of a capsule network, with three rounds of routing."""
        h = primary(F.relu(first(x)))
        batch, count = len(x), h.size // len(x) // 8
        u = F.reshape(squash(F.reshape(h, (batch * count, 8))), (batch * count, 8))
        u_hat = F.reshape(votes(u), (batch, count, 10, 16))
        logits: Any = cp.zeros((batch, count, 10), "f")
        for _ in range(3):
            weight = F.broadcast_to(F.softmax(logits, axis=2)[..., None], u_hat.shape)
            v = squash(F.sum(weight * u_hat, axis=1))
            logits = logits + F.sum(u_hat * F.broadcast_to(v[:, None], u_hat.shape), axis=3)
        return F.softmax_cross_entropy(F.sqrt(F.sum(v * v, axis=2) + 1e-6), t)

    return _training(m, loss, normal(4, 1, 28, 28), labels(4, classes=10))


def mobilenet() -> Step:
    """Depthwise and pointwise convolutions (Howard and others, 2017)."""
    m, widths = Parts(), (16, 32, 64, 64, 128, 128)
    parts = [m.conv_norm(3, 16, 3, stride=2, pad=1)]
    for number, (low, high) in enumerate(itertools.pairwise(widths)):
        parts.append(m.conv_norm(low, low, 3, stride=1 + number % 2, pad=1, groups=low))
        parts.append(m.conv_norm(low, high, 1))
    last = m.add(L.Linear(128, 100))

    def loss(x: Any, t: Any) -> Any:
        for part in parts:
            x = F.clipped_relu(part(x), 6.0)
        return F.softmax_cross_entropy(last(F.mean(x, axis=(2, 3))), t)

    return _training(m, loss, normal(8, 3, 64, 64), labels(8, classes=100), optimizer="RMSprop")


def character_lstm() -> Step:
    """Sentences of many lengths in NStepLSTM, whose lengths shrink as sentences end."""
    embed, cells, score = L.EmbedID(60, 64), L.NStepLSTM(2, 64, 128, 0.1), L.Linear(128, 60)
    link = chainer.ChainList(embed, cells, score)
    device = chainer.get_device("@cupy:0")
    link.to_device(device)
    optimizer = chainer.optimizers.Adam().setup(link)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(5.0))
    draw = np.random.default_rng(0)
    texts = [draw.integers(0, 60, n).astype("i") for n in draw.integers(10, 60, 16)]

    def loss() -> Any:
        given = [device.send(text) for text in texts]
        _, _, found = cells(None, None, [embed(text[:-1]) for text in given])
        asked = F.concat([chainer.as_variable(text[1:]) for text in given], axis=0)
        return F.softmax_cross_entropy(score(F.concat(found, axis=0)), asked)

    return lambda: optimizer.update(loss)


def diffusion() -> Step:
    """A U-Net with attention at its lowest level learns the noise (Ho and others, 2020)."""
    m, width = Parts(), 32
    first, down = m.conv(3, width, 3, pad=1), m.conv(width, 2 * width, 3, stride=2, pad=1)
    norms = [m.add(L.GroupNormalization(8, n)) for n in (width, 2 * width, 2 * width)]
    time = m.add(L.Linear(32, 2 * width))
    qkv, out = m.conv(2 * width, 6 * width, 1), m.conv(2 * width, 2 * width, 1)
    up = m.add(L.Deconvolution2D(2 * width, width, 4, 2, 1))
    last = m.conv(2 * width, 3, 3, pad=1)
    schedule = cp.cumprod(1 - cp.linspace(1e-4, 0.02, 1000)).astype("f")

    def predicted(x: Any, steps: Any) -> Any:
        """Compute the noise in images at some steps of a diffusion."""
        angles = steps[:, None] * cp.exp(-cp.arange(16, dtype="f") / 2)[None]
        code = cp.concatenate([cp.sin(angles), cp.cos(angles)], axis=1).astype("f")
        high = F.relu(norms[0](first(x)))
        h = down(high)
        h = F.relu(norms[1](h + F.broadcast_to(time(code)[:, :, None, None], h.shape)))
        batch, channels, side, _ = h.shape
        q, k, v = F.split_axis(F.reshape(qkv(norms[2](h)), (batch, 3 * channels, -1)), 3, axis=1)
        weight = F.softmax(F.matmul(q, k, transa=True) * channels**-0.5, axis=2)
        seen = F.reshape(F.matmul(v, weight, transb=True), (batch, channels, side, side))
        return last(F.concat((high, up(h + out(seen)))))

    def loss(x: Any) -> Any:
        steps = cp.random.randint(0, 1000, len(x))
        noise = cp.random.standard_normal(x.shape, dtype="f")
        level = schedule[steps][:, None, None, None]
        return F.mean_squared_error(
            predicted(cp.sqrt(level) * x + cp.sqrt(1 - level) * noise, steps), noise
        )

    return _training(m, loss, normal(4, 3, 32, 32))


def message_passing() -> Step:
    """Messages along edges, summed by F.scatter_add; the target is a number of each graph."""
    nodes, edges, width = 3000, 15_000, 48
    draw = np.random.default_rng(1)
    source, target = (draw.integers(0, nodes, edges).astype("i") for _ in range(2))
    graph = np.sort(draw.integers(0, 100, nodes)).astype("i")
    m = Parts()
    message, update = m.add(L.Linear(2 * width, width)), m.add(L.StatelessGRU(width, width))
    score = m.add(L.Linear(width, 1))

    def loss(x: Any, source: Any, target: Any, graph: Any, t: Any) -> Any:
        for _ in range(3):
            sent_ = F.relu(message(F.concat((F.embed_id(source, x), F.embed_id(target, x)))))
            x = update(x, F.scatter_add(cp.zeros((nodes, width), "f"), target, sent_))
        read = F.scatter_add(cp.zeros((100, width), "f"), graph, x)
        return F.mean_squared_error(score(read), t)

    return _training(m, loss, normal(nodes, width), source, target, graph, normal(100, 1))


def translation() -> Step:
    """Trains a sequence to a sequence, and then decodes with a beam of 4 until all have ended."""
    words, width, beam = 500, 96, 4
    m = Parts()
    embed_x, embed_y = m.add(L.EmbedID(words, width)), m.add(L.EmbedID(words, width))
    encoder, decoder = m.add(L.StatelessLSTM(width, width)), m.add(L.StatelessLSTM(width, width))
    score = m.add(L.Linear(width, words))

    def encoded(x: Any) -> Any:
        c = h = None
        for position in range(x.shape[1]):
            c, h = encoder(c, h, embed_x(x[:, position]))
        return c, h

    def loss(x: Any, y: Any) -> Any:
        c, h = encoded(x)
        total: Any = 0
        for position in range(y.shape[1] - 1):
            c, h = decoder(c, h, embed_y(y[:, position]))
            total += F.softmax_cross_entropy(score(h), y[:, position + 1])
        return total

    text = labels(8, 16, classes=words)
    learn = _training(m, loss, text, text[:, ::-1].copy())
    given = cp.asarray(text[:1])

    def step() -> None:
        """Train once, then translate by a beam search until all ends agree."""
        learn()
        with chainer.no_backprop_mode(), chainer.using_config("train", False):
            c, h = encoded(given)
            c, h = (F.broadcast_to(each, (beam, width)) for each in (c, h))
            last, sums = cp.zeros(beam, "i"), cp.zeros((beam, 1), "f")
            for _ in range(12):
                c, h = decoder(c, h, embed_y(last))
                totals = (sums + F.log_softmax(score(h)).array).ravel()
                best = cp.argsort(-totals)[:beam]
                sums, last = totals[best][:, None], (best % words).astype("i")
                c, h = c[best // words], h[best // words]
                if bool((last == 1).all()):
                    break

    return step


RESIDUAL = ("residual", "24 blocks", 8)
PROGRAMS: dict[str, Callable[[], Step]] = {
    "ResNet50": trained("ResNet50", "64 px", 4),
    "VGG16": trained("VGG16", "32 px", 4),
    "U-Net": trained("U-Net", "4 levels", 2),
    "LSTM": trained("LSTM", "40 words", 16),
    "transformer": trained("transformer", "4 layers", 8),
    "language model": trained("language model", "4,000 words", 16),
    "masked LM": masked_lm,
    "GCN": trained("GCN", "3 layers, 16 classes", 2000),
    "DCGAN": rivals,
    "WaveNet": wavenet,
    "GAT": gat,
    "ODE block": ode_block,
    "capsules": capsules,
    "MobileNet": mobilenet,
    "character LSTM": character_lstm,
    "offload": trained(*RESIDUAL, within=umem.chainer.Offload),
    "lookahead": trained(*RESIDUAL, within=umem.chainer.LookaheadPrefetch),
    "hybrid": trained(*RESIDUAL),
    "managed": trained(*RESIDUAL),
    "workspace": trained(*RESIDUAL, within=lambda: umem.chainer.workspace("2MiB")),
    "Adam of 8 bits": trained(
        "transformer", "4 layers", 8, optimizer=lambda: umem.chainer.optimizers.Adam8bit()
    ),
    "recompute": trained(*RESIDUAL, within=lambda: umem.chainer.Recompute("40%")),
    "half precision": trained(*RESIDUAL, set_up=umem.chainer.half_precision),
    "accumulate": in_parts,
    "diffusion": diffusion,
    "message passing": message_passing,
    "seq2seq with a beam": translation,
}
