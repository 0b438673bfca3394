"""The errors of umem.

    UmemError
    +-- OutOfMemoryError        also MemoryError; on CUDA also CuPy's OutOfMemoryError
    |   +-- LimitError          the allocation exceeds a limit that you set, not the device's memory
    +-- DeviceNotFoundError     also RuntimeError: no CUDA device, and no virtual GPU is open
    +-- DeviceError             also RuntimeError: the device does not support the call
    +-- UnknownGpuError         also KeyError: the table of GPUs has no such name
    +-- SizeError               also ValueError: an invalid size, or one out of range
    +-- HintError               also ValueError: a hint or a view that is not possible
    +-- GradientError           also FloatingPointError: a gradient would corrupt optimizer state
    +-- GraphError              also ValueError: an inconsistent graph or plan
    +-- BudgetError             also ValueError: no plan fits the budget
    +-- StateError              also RuntimeError: enable twice, disable without enable, ...
    +-- LeakError               also RuntimeError: allocations outlived the block that tracks them
    +-- RecomputeError          also RuntimeError: the second run differs from the first
    |   +-- RecomputeCountError     in its functions
    |   +-- RecomputeShapeError     in their shapes
    |   +-- RecomputeDtypeError     in their types
    +-- PrecisionError          also ArithmeticError: gradients are not finite at any loss scale
    +-- AccumulationError       also RuntimeError: micro-batches cannot give the batch's gradient
    +-- DistillationError       also ValueError: the teacher's outputs do not fit the student
    +-- SpanError               also ValueError: a span freed twice, or never allocated
    +-- TraceError              also ValueError: a trace that cannot be read or replayed
    +-- OnnxError               also ValueError: an ONNX model that cannot become a training step
    +-- LayerError              also ValueError: a layer that cannot be replaced or tied
    +-- DataError               also ValueError: invalid data, or an invalid order of it
    +-- QuantizationError       also ValueError: a model that cannot be quantized, or a wrong file
    +-- FileError               also OSError: not a regular file, or it exists, or the disk is full
    +-- SnapshotError           also ValueError: a saved run that cannot be loaded
    +-- LaunchError             also RuntimeError: ranks cannot be started, or one of them failed
    +-- DryRunError             also RuntimeError: an effect that a dry run cannot prevent
    +-- UnsupportedError        also NotImplementedError: an operation that umem does not support
    +-- CompatError             also ImportError: Chainer cannot be made to run here
    +-- MissingDependencyError  also ImportError: names the package to install

Each error also inherits from the built-in that programs already catch, so existing handlers work. A
message gives facts with units, the reason, and the way out: ``needs 64.0 MiB for 'ones' array;
240.0 MiB of 256.0 MiB of VRAM in use (simulated T4). Run the block under umem.managed() or
umem.hybrid().``

An error leaves the state as before the call: nothing half-installed, nothing leaked.
Ten warnings are defined here too, each a UserWarning: AccumulationWarning, DaskWarning,
DataWarning, LeftOnWarning, LookaheadWarning, OffloadWarning, RecomputeWarning, SnapshotWarning,
UnverifiedWarning, WorkspaceWarning.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from types import FrameType
from typing import ClassVar


class UmemError(Exception):
    """Root of every error that umem raises on purpose."""

    _defined_in: ClassVar[tuple[str, str] | None] = None
    """Module and own name of a subclass that shows a public name; see `__init_subclass__`."""

    # Other modules of umem subclass these errors to tell some of them apart in their own code.
    # Tracebacks show such a class under its public base, a name that a program can import.
    def __init_subclass__(cls) -> None:
        if cls.__module__ != __name__ and _package(cls.__module__) == "umem":
            public = next(one for one in cls.__mro__ if globals().get(one.__name__) is one)
            cls._defined_in = cls.__module__, cls.__name__
            cls.__module__, cls.__name__, cls.__qualname__ = __name__, *2 * [public.__name__]

    # Once distributed is imported, tblib pickles errors that have only the built-in method. It
    # rebuilds them by a __new__ that refuses classes with two built-in bases.
    def __reduce__(self) -> str | tuple[object, ...]:
        if self._defined_in is None:
            return super().__reduce__()
        return _made_again, (*self._defined_in, self.args), self.__dict__


class OutOfMemoryError(UmemError, MemoryError):
    """An allocation does not fit; nothing was allocated."""

    needed_bytes: int | None
    """Bytes of the allocation; None if unknown."""

    def __init__(self, *args: object, needed_bytes: int | None = None) -> None:
        MemoryError.__init__(self, *args)  # CuPy's own would make a message from sizes
        self.needed_bytes = needed_bytes


class LimitError(OutOfMemoryError):
    """An allocation would exceed a limit that the user set; nothing was allocated."""

    is_cupys_limit = False
    """True if the limit was set by `set_limit` of CuPy's pool, not by ``limit=`` of umem."""


class DeviceNotFoundError(UmemError, RuntimeError):
    """There is no CUDA device, and no virtual GPU is open."""


class DeviceError(UmemError, RuntimeError):
    """The device exists but does not support the call."""


class UnknownGpuError(UmemError, KeyError):
    """The table of GPUs has no such name; the message offers the nearest names."""

    def __str__(self) -> str:  # KeyError would print the repr of its argument
        return str(self.args[0]) if self.args else ""


class SizeError(UmemError, ValueError):
    """A size is invalid or out of range."""


class HintError(UmemError, ValueError):
    """Advice, a preset, a prefetch or a view is not possible; no hint was given."""


class GradientError(UmemError, FloatingPointError):
    """A gradient is not finite, or too large for the optimizer's state; nothing changed."""


class GraphError(UmemError, ValueError):
    """A graph or a plan is inconsistent; the message names the node."""


class BudgetError(UmemError, ValueError):
    """No plan fits the budget; the message names the smallest possible budget and its cause."""


class StateError(UmemError, RuntimeError):
    """The call conflicts with the current state, such as another mode; the state stays."""


class LeakError(UmemError, RuntimeError):
    """Allocations of a tracked block are still held at its end; they stay alive, untracked."""


class RecomputeError(UmemError, RuntimeError):
    """The second run of a region differs from the first; no gradient was set."""


class RecomputeCountError(RecomputeError):
    """The second run has more, fewer or other functions."""


class RecomputeShapeError(RecomputeError):
    """A function of the second run has inputs of other shapes."""


class RecomputeDtypeError(RecomputeError):
    """A function of the second run has inputs of other types."""


class PrecisionError(UmemError, ArithmeticError):
    """Gradients are not finite even at the least loss scale; no parameter was changed."""


class AccumulationError(UmemError, RuntimeError):
    """Micro-batches cannot give the full batch's gradient; no parameter was updated."""


class DistillationError(UmemError, ValueError):
    """The teacher's outputs do not fit this student or this batch; no parameter was changed."""


class SpanError(UmemError, ValueError):
    """A span was freed before, or this pool never allocated it."""


class TraceError(UmemError, ValueError):
    """A trace cannot be read, or is inconsistent."""


class OnnxError(UmemError, ValueError):
    """An ONNX model cannot become a training step; the message names the node or the axis."""


class LayerError(UmemError, ValueError):
    """Layers cannot be replaced or tied; the message names each. The model is unchanged."""


class DataError(UmemError, ValueError):
    """Data, in a file or a cache, or an order of it is invalid."""


class QuantizationError(UmemError, ValueError):
    """A model cannot be quantized, calibrated or loaded from its file; no model was changed."""


class FileError(UmemError, OSError):
    """A path is not a file, may not be overwritten, or has no space; nothing was changed."""


class SnapshotError(UmemError, ValueError):
    """A saved run cannot be loaded, or not into these objects; the objects are unchanged."""


class LaunchError(UmemError, RuntimeError):
    """Ranks cannot be started, and none was; or one of them failed, and all were stopped."""


class DryRunError(UmemError, RuntimeError):
    """A dry run would start another program or write a file for real; nothing was done."""


class UnsupportedError(UmemError, NotImplementedError):
    """The virtual GPU does not support it, or a checkpoint cannot repeat it; nothing was done."""


class CompatError(UmemError, ImportError):
    """Chainer cannot run with the installed packages; Chainer was not imported."""


class MissingDependencyError(UmemError, ImportError):
    """An optional package is missing; the message names the package and the extra."""


class AccumulationWarning(UserWarning):
    """The accumulated gradient was not compared with the full batch's; issued once."""


class DaskWarning(UserWarning):
    """Workers exchange or spill memory in a way that is slow or may fail."""


class DataWarning(UserWarning):
    """A data cache does less than requested; items are the same. Issued once each."""


class LeftOnWarning(UserWarning):
    """A feature was still on after its block should have ended; it is off now."""


class LookaheadWarning(UserWarning):
    """Lookahead prefetch has paused or stopped; results do not change."""


class OffloadWarning(UserWarning):
    """An offload target is full, slow or refused; other arrays stay in memory. Issued once each."""


class RecomputeWarning(UserWarning):
    """A pass does not or cannot follow a plan; its results are exact. Issued once each."""


class SnapshotWarning(UserWarning):
    """A snapshot was skipped, or could not be written; training continues."""


class UnverifiedWarning(UserWarning):
    """A file of an earlier umem has no checksums: it was loaded, but damage would go unnoticed."""


class WorkspaceWarning(UserWarning):
    """A cap on workspace is below a call's least, which is used instead. Issued once."""


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
    """Unpickle an error whose class shows the name of its public base."""
    error: UmemError = getattr(import_module(module), name)(*args)
    return error


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, each once, as a program can link them in a circle."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_cupys_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error is CuPy's OutOfMemoryError, or one of umem's that inherits it."""
    return any(
        kind.__name__ == "OutOfMemoryError" and kind.__module__.partition(".")[0] == "cupy"
        for kind in type(error).__mro__
    )
