"""Trains ResNet50 on images of 224 px, as a script with Chainer does: BATCH STEPS."""

import sys

import chainer
import numpy as np
from chainer import links as L

batch, steps = map(int, sys.argv[1:])
model = L.Classifier(L.ResNet50Layers(pretrained_model=None))
forward = model.predictor.forward
model.predictor.forward = lambda x: forward(x, ["fc6"])["fc6"]
model.to_device("@cupy:0")
optimizer = chainer.optimizers.MomentumSGD().setup(model)
for _ in range(steps):
    x, t = np.zeros((batch, 3, 224, 224), "f"), np.zeros(batch, "i")
    optimizer.update(model, model.xp.asarray(x), model.xp.asarray(t))
