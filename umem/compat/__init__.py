"""Chainer 7.8 on today's NumPy, Python and CuPy, and old packages on today's NumPy.

Importing this package does not import Chainer, so that a start-up hook can use it.
"""

from umem.compat.finder import install, is_installed
from umem.compat.lending import lend_removed_names

__all__ = ["install", "is_installed", "lend_removed_names"]
