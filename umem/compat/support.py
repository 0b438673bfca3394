"""The functions that mended modules of Chainer call.

They know no Chainer. Arrays are NumPy's, CuPy's or anything that has ``dtype`` and ``astype``.
"""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import warnings
from typing import Any

import numpy as np

from umem.compat.requirement import holds

_REMOVED = ("hierarchical", "single_node", "two_dimensional")
_WITH_NCCL = ("non_cuda_aware", "pure_nccl")
_ON_GPUS = (*_WITH_NCCL, "dummy", "flat")
_MESSAGE_LIMIT = 2**31 - 1


def as_dtype(value: Any, dtype: Any) -> Any:
    """Return a Python integer as a scalar of an integer ``dtype``, wrapped round as C does.

    NumPy 2 refuses ``uint8(-1)``, which Chainer uses for padding and constants. Everything that
    is no Python integer, or is for a dtype that is no integer, is returned as it came.
    """
    dtype = np.dtype(dtype)
    if isinstance(value, int) and dtype.kind in "iu":
        return np.asarray(value).astype(dtype)[()]
    return value


def as_float64(value: Any) -> Any:
    """Return a scalar or zero-dimensional array in at least float64, on the device it is on.

    A CuPy array stays a CuPy array and nothing waits for the device. Python numbers, and values
    that are no numbers, are returned as they came.
    """
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "kind", "") not in tuple("biufc"):
        return value
    wide = np.result_type(dtype, np.float64)
    return value if dtype == wide else value.astype(wide)


def require_device(module: Any) -> bool:
    """Return True where CUDA has a device.

    Raises:
        RuntimeError: there is no device; Chainer then takes CUDA as unavailable and quotes the
            text.
    """
    from umem.compat.cuda_devices import count

    if count(module) == 0:
        raise RuntimeError("CuPy is installed, but there is no CUDA device.")
    return True


def quiet_nccl() -> Any:
    """Return ``cupy.cuda.nccl`` without CuPy's warning where there is no NCCL.

    Only the parallel updater needs it, and says so itself when it is used.

    Raises:
        ImportError: NCCL or CuPy is missing; Chainer then takes NCCL as unavailable.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\s*nccl library could not be loaded")
        from cupy.cuda import nccl

        return nccl


def onnx_types() -> Any:
    """Return a mapping from NumPy dtypes to ONNX tensor types, as ``onnx.mapping`` had it."""
    helper = importlib.import_module("onnx.helper")

    class TensorTypes:
        def __getitem__(self, dtype: Any) -> int:
            return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    return TensorTypes()


def requirements_met(requirements: tuple[str, ...]) -> bool:
    """Tell whether all of the requirements are met by what is installed."""
    return all(holds(requirement) for requirement in requirements)


def h5_value(dataset: Any) -> Any:
    """Return what an HDF5 dataset holds; text as ``str``, as h5py 2 gave it."""
    h5py = importlib.import_module("h5py")

    info = h5py.check_string_dtype(dataset.dtype)
    if info is not None and info.length is None:
        return np.asarray(dataset.asstr()[()])
    return np.asarray(dataset)


def require_communicator(name: str) -> None:
    """Refuse a ChainerMN communicator that cannot work here; on every rank alike.

    Raises:
        ValueError: Chainer 7 has no such communicator any more.
        RuntimeError: it needs NCCL or a CUDA device, which are not here.
    """
    if name in _REMOVED:
        raise ValueError(
            f"The communicator {name!r} was removed in Chainer 7. Use 'pure_nccl' (GPUs with "
            "NCCL) or 'flat' (GPUs, by MPI) instead, or 'naive' on the CPU."
        )
    nccl = importlib.import_module("chainermn.nccl")
    if name in _WITH_NCCL and not hasattr(nccl, "NcclCommunicator"):
        raise RuntimeError(
            f"The communicator {name!r} exchanges gradients by NCCL, and NCCL cannot be loaded "
            "here (cupy.cuda.nccl). Use 'flat' for CuPy arrays by MPI, or 'naive' on the CPU."
        )
    if name in _ON_GPUS and not importlib.import_module("chainer.backends.cuda").available:
        raise RuntimeError(
            f"The communicator {name!r} exchanges CuPy arrays, and CUDA has no device here. "
            "Use 'naive' on the CPU, or run under umem.software_gpu."
        )


def one_message(array: Any) -> Any:
    """Return an array that MPI can send at once.

    Raises:
        OverflowError: it has more elements than MPI counts; nothing was sent.
    """
    if array.size > _MESSAGE_LIMIT:
        raise OverflowError(
            f"an array of {array.size:,} elements is no single message of MPI, which counts "
            f"{_MESSAGE_LIMIT:,} at most. Send it in parts; bcast_obj and scatter_dataset do so "
            "by themselves."
        )
    return array


def mend_fork_server() -> None:
    """Make workers of a fork server that starts later run mended, too.

    The server then imports Chainer once, for all of them. One that is running already is left
    alone, and so are workers where a program calls ``set_forkserver_preload`` later.
    """
    if "forkserver" in multiprocessing.get_all_start_methods():
        multiprocessing.set_forkserver_preload(["umem.compat.workers", "chainer"])


def warn_of_fork() -> None:
    """Issue a RuntimeWarning if worker processes will be forked while MPI is initialised."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
        return
    if multiprocessing.get_start_method() == "fork":
        warnings.warn(
            "MultiprocessIterator forks its workers from a process that is in MPI, which MPI "
            "allows at best on one machine and never over InfiniBand. Call "
            "multiprocessing.set_start_method('forkserver') at the start of the program.",
            RuntimeWarning,
            stacklevel=4,
        )
