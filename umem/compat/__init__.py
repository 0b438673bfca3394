"""Chainer 7.8 on today's NumPy, Python and CuPy.

Importing this package does not import Chainer, so that a start-up hook can use it.
"""

from umem.compat.chainer_installer import get_chainer
from umem.compat.finder import install, is_installed
from umem.compat.pth import install_pth, remove_pth
from umem.compat.shim_report import Row, check

__all__ = ["Row", "check", "get_chainer", "install", "install_pth", "is_installed", "remove_pth"]
