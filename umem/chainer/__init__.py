"""Chainer under umem: importing this package imports Chainer through the compatibility layer."""

from umem.compat import install

install()

import chainer  # noqa: E402, F401  (the layer must be in place first)
