"""Classifiers that Chainer brings: ResNet, VGG and GoogLeNet; 1000 classes."""

from __future__ import annotations

from typing import Any

import chainer.functions as F
import chainer.links as L

from models.model import Model, Region, call, chain, images


def resnet(links: Any, pixels: int) -> Model:
    """A region around each bottleneck, and around what comes before the first."""
    model = links(pretrained_model=None)
    units: list[Any] = []
    for name, functions in model.functions.items():
        if name.startswith("res"):
            (stage,) = functions
            units += [getattr(stage, part) for part in stage._forward]
        elif name != "prob":
            units += functions
    places = [n for n, unit in enumerate(units) if type(unit).__name__.startswith("Bottleneck")]
    head, tail = places[0], places[-1] + 1

    def loss(x: Any, t: Any, region: Region = call) -> Any:
        y = region(chain(units[:head]), x)
        for unit in units[head:tail]:
            y = region(unit, y)
        return F.softmax_cross_entropy(chain(units[tail:])(y), t)

    return Model(model, images(pixels, 1000), loss)


def vgg(links: Any, pixels: int, dropout: bool = True) -> Model:
    """A region around each stage up to its pooling.

    Without dropout: `F.forget`, which draws a second mask, can stand beside it.
    """
    model = links(pretrained_model=None)
    if pixels != 224:
        del model.fc6
        with model.init_scope():
            model.fc6 = L.Linear(512 * (pixels // 32) ** 2, 4096)
    stages: list[list[Any]] = [[]]
    for name, functions in model.functions.items():
        if name != "prob":
            stages[-1] += [f for f in functions if dropout or f is not F.dropout]
            if name.startswith("pool"):
                stages.append([])

    def loss(x: Any, t: Any, region: Region = call) -> Any:
        for stage in stages[:-1]:
            x = region(chain(stage), x)
        return F.softmax_cross_entropy(chain(stages[-1])(x), t)

    return Model(model, images(pixels, 1000), loss)


def googlenet() -> Model:
    """With both auxiliary losses, as it is trained."""
    m = L.GoogLeNet(pretrained_model=None)

    def side(h: Any, conv: Any, fc1: Any, fc2: Any, t: Any) -> Any:
        h = F.relu(conv(F.average_pooling_2d(h, 5, stride=3)))
        return F.softmax_cross_entropy(fc2(F.relu(fc1(h))), t)

    def loss(x: Any, t: Any) -> Any:
        """Compute GoogLeNet's loss, with those of its two side branches."""
        h = F.max_pooling_2d(F.relu(m.conv1(x)), 3, stride=2)
        h = F.local_response_normalization(h, n=5, k=1, alpha=2e-05)
        h = F.relu(m.conv2(F.relu(m.conv2_reduce(h))))
        h = F.local_response_normalization(h, n=5, k=1, alpha=2e-05)
        h = m.inc3b(m.inc3a(F.max_pooling_2d(h, 3, stride=2)))
        h = m.inc4a(F.max_pooling_2d(h, 3, stride=2))
        loss1 = side(h, m.loss1_conv, m.loss1_fc1, m.loss1_fc2, t)
        h = m.inc4d(m.inc4c(m.inc4b(h)))
        loss2 = side(h, m.loss2_conv, m.loss2_fc1, m.loss2_fc2, t)
        h = m.inc5b(m.inc5a(F.max_pooling_2d(m.inc4e(h), 3, stride=2)))
        h = m.loss3_fc(F.dropout(F.average_pooling_2d(h, 7, stride=1), 0.4))
        return 0.3 * (loss1 + loss2) + F.softmax_cross_entropy(h, t)

    return Model(m, images(224, 1000), loss)


MODELS = {
    "ResNet50": {
        "64 px": lambda: resnet(L.ResNet50Layers, 64),
        "128 px": lambda: resnet(L.ResNet50Layers, 128),
        "224 px": lambda: resnet(L.ResNet50Layers, 224),
    },
    "ResNet152": {"224 px": lambda: resnet(L.ResNet152Layers, 224)},
    "VGG16": {
        "32 px": lambda: vgg(L.VGG16Layers, 32),
        "64 px, no dropout": lambda: vgg(L.VGG16Layers, 64, dropout=False),
        "128 px, no dropout": lambda: vgg(L.VGG16Layers, 128, dropout=False),
    },
    "VGG19": {"224 px": lambda: vgg(L.VGG19Layers, 224)},
    "GoogLeNet": {"224 px": googlenet},
}
