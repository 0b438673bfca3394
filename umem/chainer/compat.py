"""The compatibility layer: Chainer 7.8 on today's NumPy, Python and CuPy.

Importing this module imports :mod:`umem.chainer`, so the layer is in place and Chainer is
imported. To put the layer in place without importing Chainer, use :mod:`umem.compat`, which has
the same functions.
"""

from umem.compat import Row, check, install, install_pth, is_installed, remove_pth

__all__ = ["Row", "check", "install", "install_pth", "is_installed", "remove_pth"]
