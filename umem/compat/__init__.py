"""Chainer 7.8 on today's NumPy, Python and CuPy.

Importing this package does not import Chainer, so that a start-up hook can use it.
"""

from umem.compat.finder import install, is_installed
from umem.compat.getting import get_chainer
from umem.compat.mended import Row, check
from umem.compat.pth import install_pth, remove_pth

__all__ = ["Row", "check", "get_chainer", "install", "install_pth", "is_installed", "remove_pth"]
