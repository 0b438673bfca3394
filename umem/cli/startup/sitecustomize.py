"""Python runs this as it starts, in the processes that a script under ``umem run`` starts.

It waits for ``import chainer`` and mends it then; until then it imports neither umem nor NumPy.
A ``sitecustomize`` of the environment's own is run as it would have been without this one.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))


class WaitForChainer:
    """A finder that finds nothing until somebody imports Chainer."""

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find what the compatibility layer finds; nothing, where it cannot be imported."""
        if name != "chainer":
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        if PathFinder.find_spec("umem") is None:  # a checkout that is not installed
            sys.path.append(_ROOT)
        try:
            from umem.compat.finder import arm
        except ImportError:  # another Python, without what umem needs
            return None
        return arm().find_spec(name, None, target)


def _run_the_next() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, WaitForChainer())
    _run_the_next()
