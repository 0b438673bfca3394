"""Makes Chainer's own tests importable: Chainer as umem mends it, and `mock` under its old name."""

from __future__ import annotations

import sys
import unittest.mock

import umem.chainer  # noqa: F401  (before Chainer)

sys.modules.setdefault("mock", unittest.mock)
