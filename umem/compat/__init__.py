"""Chainer 7.8 on today's NumPy, Python and CuPy.

This package imports neither NumPy nor Chainer by itself, so that a start-up hook can use it;
``umem.chainer.compat`` gives the same names to programs.
"""

from umem.compat.finder import install, is_installed

__all__ = ["install", "is_installed"]
