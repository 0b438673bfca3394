"""Python runs this as it starts, in the processes that a script under ``umem run`` starts.

It waits for ``import chainer`` and mends it then, and for the packages of ``--old-numpy``, which
are lent names then; until then it imports neither umem nor NumPy.
In the workers of multiprocessing it takes away what mpiexec told a rank, which they are not: one
that imports mpi4py, as its script does above ``__main__``, would join as a second rank of that
number, and hang. There it sees itself alone.
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

OLD_NUMPY = "UMEM_OLD_NUMPY"
"""The variable with the packages of ``--old-numpy``, by commas."""


class WaitForChainer:
    """A finder that finds nothing until Chainer, or a package that is lent names, is imported."""

    def __init__(self) -> None:
        self.lent = [package for package in os.environ.get(OLD_NUMPY, "").split(",") if package]

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find what the compatibility layer finds; nothing, where it cannot be imported."""
        if name not in ("chainer", *(package.partition(".")[0] for package in self.lent)):
            return None
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        if PathFinder.find_spec("umem") is None:  # a checkout that is not installed
            sys.path.append(_ROOT)
        try:
            from umem.compat import LentNames, arm
        except ImportError:  # another Python, without what umem needs
            return None
        arm()
        for package in self.lent:
            LentNames(package)  # `umem run` has looked for it
        specs = (finder.find_spec(name, None, target) for finder in sys.meta_path)
        return next(filter(None, specs), None)


def _be_no_rank() -> None:
    if any(word.startswith("from multiprocessing.") for word in sys.orig_argv):
        told = ("PMIX_", "PMI_", "OMPI_COMM_WORLD_")
        for name in [name for name in os.environ if name.startswith(told)]:
            del os.environ[name]


def _run_the_next() -> None:
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    sys.meta_path.insert(0, WaitForChainer())
    _be_no_rank()
    _run_the_next()
