"""The errors of umem.

    UmemError
    +-- OutOfMemoryError        also MemoryError; on CUDA also CuPy's OutOfMemoryError
    |   +-- LimitError          the limit that was asked for, not the device, is reached
    +-- DeviceNotFoundError     also RuntimeError: no CUDA device, and no virtual one is open
    +-- DeviceError             also RuntimeError: the device cannot do what was asked
    +-- UnknownGpuError         also KeyError
    +-- SizeError               also ValueError: not a size, or out of range
    +-- HintError               also ValueError: a hint or a view that cannot be given
    +-- GradientError           also FloatingPointError: a gradient that would spoil what is kept
    +-- GraphError              also ValueError: a graph or a plan that does not hold together
    +-- BudgetError             also ValueError: no plan needs as little as that
    +-- StateError              also RuntimeError: enable twice, disable without enable, ...
    +-- LeakError               also RuntimeError: allocations outlived the block that tracks them
    +-- RecomputeError          also RuntimeError: a second run differs from the first
    |   +-- RecomputeCountError     in its functions
    |   +-- RecomputeShapeError     in their shapes
    |   +-- RecomputeDtypeError     in their types
    +-- PrecisionError          also ArithmeticError: gradients are not finite, at any loss scale
    +-- AccumulationError       also RuntimeError: parts of a batch cannot give its gradient
    +-- DistillationError       also ValueError: a teacher that cannot teach this student
    +-- SpanError               also ValueError: a span freed twice, or never handed out
    +-- TraceError              also ValueError: a trace that cannot be read or replayed
    +-- OnnxError               also ValueError: a model in ONNX that no step can be made of
    +-- LayerError              also ValueError: a layer that cannot be exchanged or tied
    +-- DataError               also ValueError: data, or an order of it, not as it should be
    +-- QuantizationError       also ValueError: what cannot be in few bits, or is another model's
    +-- FileError               also OSError: what is in the place of a file is none, or in the way,
    |                           or there is no room for it
    +-- SnapshotError           also ValueError: a saved run that cannot be loaded
    +-- LaunchError             also RuntimeError: ranks that cannot be started, or cannot go on
    +-- DryRunError             also RuntimeError: what a dry run cannot keep from taking effect
    +-- UnsupportedError        also NotImplementedError: outside what umem follows
    +-- CompatError             also ImportError: Chainer cannot be made to run here
    +-- MissingDependencyError  also ImportError: names what to install

An error also inherits the built-in that people already catch, so that existing handlers work. A
message gives facts with units, the reason, and the way out: ``needs 64.0 MiB for 'ones' array;
240.0 MiB of 256.0 MiB of VRAM in use (simulated T4). Run the block under umem.managed() or
umem.hybrid().``

Whatever is raised, the state is as before the call: nothing half-installed, nothing leaked.
Ten warnings belong here too, each a UserWarning: AccumulationWarning, DaskWarning, DataWarning,
LeftOnWarning, LookaheadWarning, OffloadWarning, RecomputeWarning, SnapshotWarning,
UnverifiedWarning, WorkspaceWarning.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import FrameType
from typing import ClassVar


class UmemError(Exception):
    """Root of every error that umem raises on purpose."""

    _defined_in: ClassVar[tuple[str, str] | None] = None
    """Module and name of a class that goes by another one's; see `__init_subclass__`."""

    # A class of another module of umem is an error of this one that some code has to tell apart.
    # Tracebacks name it as what it is to the program: under a name that can be imported.
    def __init_subclass__(cls) -> None:
        if cls.__module__ != __name__ and _package(cls.__module__) == "umem":
            public = next(one for one in cls.__mro__ if globals().get(one.__name__) is one)
            cls._defined_in = cls.__module__, cls.__name__
            cls.__module__, cls.__name__, cls.__qualname__ = __name__, *2 * [public.__name__]

    # Once distributed is imported, errors that have only the built-in method are pickled by tblib,
    # and are made again by a __new__ that refuses classes with two built-in bases.
    def __reduce__(self) -> str | tuple[object, ...]:
        if self._defined_in is None:
            return super().__reduce__()
        return _made_again, (*self._defined_in, self.args), self.__dict__


class OutOfMemoryError(UmemError, MemoryError):
    """An allocation does not fit; nothing was allocated."""

    needed_bytes: int | None
    """Bytes of the allocation; None where they are unknown."""

    def __init__(self, *args: object, needed_bytes: int | None = None) -> None:
        MemoryError.__init__(self, *args)  # CuPy's own would make a message from sizes
        self.needed_bytes = needed_bytes


class LimitError(OutOfMemoryError):
    """An allocation would pass the limit that the user set; nothing was allocated."""

    is_cupys_limit = False
    """True if `set_limit` of CuPy's pool has set it, not ``limit=`` of umem."""


class DeviceNotFoundError(UmemError, RuntimeError):
    """There is no CUDA device, and no virtual GPU is open."""


class DeviceError(UmemError, RuntimeError):
    """The device is there and cannot do what was asked."""


class UnknownGpuError(UmemError, KeyError):
    """No GPU of that name is in the table; the message offers the nearest names."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else ""


class SizeError(UmemError, ValueError):
    """A size that is no size, or is out of range."""


class HintError(UmemError, ValueError):
    """Advice, a preset, a prefetch or a view that cannot be given; none was given."""


class GradientError(UmemError, FloatingPointError):
    """A gradient is not finite, or too large for the state that it goes into; nothing changed."""


class GraphError(UmemError, ValueError):
    """A graph or a plan that does not hold together; the message names the node."""


class BudgetError(UmemError, ValueError):
    """No plan fits the budget; the message names the smallest that one fits, and what forces it."""


class StateError(UmemError, RuntimeError):
    """The call does not fit what is on now; what is on stays on."""


class LeakError(UmemError, RuntimeError):
    """Allocations of a tracked block are still held at its end; they live on, unwatched."""


class RecomputeError(UmemError, RuntimeError):
    """The second run of a region is not the first; no gradient was set."""


class RecomputeCountError(RecomputeError):
    """The second run has more, fewer or other functions."""


class RecomputeShapeError(RecomputeError):
    """A function of the second run has inputs of other shapes."""


class RecomputeDtypeError(RecomputeError):
    """A function of the second run has inputs of other types."""


class PrecisionError(UmemError, ArithmeticError):
    """Gradients are not finite at the least loss scale; no parameter was changed."""


class AccumulationError(UmemError, RuntimeError):
    """Parts of a batch cannot give the gradient of the whole; no parameter was updated."""


class DistillationError(UmemError, ValueError):
    """A teacher that cannot teach this student, or this batch; no parameter was changed."""


class SpanError(UmemError, ValueError):
    """A span that was freed before, or that this pool never handed out."""


class TraceError(UmemError, ValueError):
    """A trace that cannot be read, or does not hold together."""


class OnnxError(UmemError, ValueError):
    """A model in ONNX that no step can be made of; the message names the node or the axis."""


class LayerError(UmemError, ValueError):
    """Layers that cannot be exchanged or tied; the message names each, and the model stays."""


class DataError(UmemError, ValueError):
    """Data, in a file or cached, or an order of it, that is not what it should be."""


class QuantizationError(UmemError, ValueError):
    """A model, its calibration or its file cannot be in few bits; no model was changed."""


class FileError(UmemError, OSError):
    """A path is not a file, must not be overwritten, or has no room; nothing was changed."""


class SnapshotError(UmemError, ValueError):
    """A saved run that cannot be loaded, or not into these objects; the run is as it was."""


class LaunchError(UmemError, RuntimeError):
    """Ranks cannot be started together, or not go on; none was started, or all are ended."""


class DryRunError(UmemError, RuntimeError):
    """A dry run would start another program or write a file for real; nothing was done."""


class UnsupportedError(UmemError, NotImplementedError):
    """The virtual GPU does not follow it, or a checkpoint cannot run it twice; nothing was done."""


class CompatError(UmemError, ImportError):
    """Chainer cannot be made to run with what is installed; Chainer was not imported."""


class MissingDependencyError(UmemError, ImportError):
    """An optional package is missing; the message names what to install, and the extra."""


class AccumulationWarning(UserWarning):
    """The gradient of parts was not compared with that of the whole; said once."""


class DaskWarning(UserWarning):
    """Workers exchange or spill memory in a way that is slow, or may fail."""


class DataWarning(UserWarning):
    """A cache of data does less than it was asked for; items are the same. Said once each."""


class LeftOnWarning(UserWarning):
    """Something was still on that should have been over; it is off now."""


class LookaheadWarning(UserWarning):
    """Lookahead prefetch does not help for a while, or any more; results are not concerned."""


class OffloadWarning(UserWarning):
    """The offload target is full, slow or refused; what is not offloaded stays. Said once each."""


class RecomputeWarning(UserWarning):
    """A pass is not, or cannot be, run by a plan; it is exact all the same. Said once each."""


class SnapshotWarning(UserWarning):
    """A snapshot was passed over, or could not be written; training goes on."""


class UnverifiedWarning(UserWarning):
    """A file of an earlier umem has no checksums: it was loaded, and damage would not be seen."""


class WorkspaceWarning(UserWarning):
    """A cap on workspace is below the least that a call can do with; that is used. Said once."""


def warn_at_program(text: str, category: type[Warning]) -> None:
    """Warn at the program's own line: the innermost one that is neither umem's nor Chainer's."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _package(_name(frame)) in ("umem", "chainer"):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def _name(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _made_again(module: str, name: str, args: tuple[object, ...]) -> UmemError:
    """Return an error of a class that goes by the name of another, from a pickle."""
    error: UmemError = getattr(import_module(module), name)(*args)
    return error


def is_cupys_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is CuPy's OutOfMemoryError, or one of umem's that is one, too."""
    return any(
        kind.__name__ == "OutOfMemoryError" and kind.__module__.partition(".")[0] == "cupy"
        for kind in type(error).__mro__
    )
