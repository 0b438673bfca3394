"""A small convolutional network: what report.py records, with `umem run`."""

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


class Block(chainer.Chain):
    """Two convolutions, each normalised, and half the size."""

    def __init__(self, count):
        super().__init__()
        with self.init_scope():
            self.conv1 = L.Convolution2D(None, count, 3, pad=1, nobias=True)
            self.norm1 = L.BatchNormalization(count)
            self.conv2 = L.Convolution2D(count, count, 3, pad=1, nobias=True)
            self.norm2 = L.BatchNormalization(count)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        return F.max_pooling_2d(F.relu(self.norm2(self.conv2(x))), 2)


np.random.seed(0)
model = chainer.Sequential(
    Block(32), Block(64), Block(128), L.Linear(None, 512), F.relu, L.Linear(512, 10)
)
optimizer = chainer.optimizers.Adam().setup(model)
for _ in range(3):
    x = np.random.standard_normal((32, 3, 32, 32)).astype("f")
    t = np.random.randint(0, 10, 32).astype("i")
    loss = F.softmax_cross_entropy(model(x), t)
    model.cleargrads()
    loss.backward()
    optimizer.update()
