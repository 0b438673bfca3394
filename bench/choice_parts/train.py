"""Trains a network of bench/models, as a script with Chainer does: FAMILY SIZE BATCH.

It knows nothing of umem beyond the networks: it runs under ``umem choose`` as it is.
"""

import sys

from models import build, sent  # imports Chainer, with the compatibility layer

# isort: split
import chainer

STEPS = 12
family, size, batch = sys.argv[1], sys.argv[2], int(sys.argv[3])
model, device = build(family, size), chainer.get_device("@cupy:0")
device.use()
model.link.to_device(device)
optimizer = chainer.optimizers.Adam().setup(model.link)
examples = model.inputs(batch)
for _ in range(STEPS):
    optimizer.update(model.loss, *sent(examples, device))
