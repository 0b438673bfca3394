"""The models that benchmarks train, by name and size; one file a family.

    >>> model = build("transformer", "4 layers")
    >>> loss = model.loss(*model.inputs(8))

A size is a shape that results were measured with. Where two benchmarks had other shapes of a
model, both are here, each under its own size.
"""

from umem.compat import install

install()

from models.catalogue import MODELS, build  # noqa: E402  (after the layer: they import Chainer)
from models.model import Model, Region, call, sent  # noqa: E402

__all__ = ["MODELS", "Model", "Region", "build", "call", "sent"]
