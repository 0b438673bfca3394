"""The functions that mended modules of Chainer call.

They do not import Chainer. Arrays are NumPy's, CuPy's or any objects with ``dtype`` and ``astype``.
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
    """Return a Python integer as a scalar of an integer ``dtype``, wrapped round as in C.

    NumPy 2 refuses ``uint8(-1)``, which Chainer uses for padding and constants. Other values, and
    values for other dtypes, are returned unchanged.
    """
    dtype = np.dtype(dtype)
    if isinstance(value, int) and dtype.kind in "iu":
        return np.asarray(value).astype(dtype)[()]
    return value


def as_float64(value: Any) -> Any:
    """Return a scalar or zero-dimensional array in at least float64, on its device.

    A CuPy array stays a CuPy array, without waiting for the device. Python numbers and non-numeric
    values are returned unchanged.
    """
    dtype = getattr(value, "dtype", None)
    if getattr(dtype, "kind", "") not in tuple("biufc"):
        return value
    wide = np.result_type(dtype, np.float64)
    return value if dtype == wide else value.astype(wide)


def require_device(module: Any) -> bool:
    """Return True if CUDA has a device.

    Raises:
        RuntimeError: there is no device; Chainer then treats CUDA as unavailable and quotes the
            message.
    """
    from umem.compat.cuda_devices import count

    if count(module) == 0:
        raise RuntimeError("CuPy is installed, but there is no CUDA device.")
    return True


def quiet_nccl() -> Any:
    """Return ``cupy.cuda.nccl``, without CuPy's warning if NCCL is missing.

    Only the parallel updater needs NCCL, and reports it itself.

    Raises:
        ImportError: NCCL or CuPy is missing; Chainer then treats NCCL as unavailable.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"\s*nccl library could not be loaded")
        from cupy.cuda import nccl

        return nccl


def onnx_types() -> Any:
    """Return a mapping from NumPy dtypes to ONNX tensor types, as in ``onnx.mapping``."""
    helper = importlib.import_module("onnx.helper")

    class TensorTypes:
        def __getitem__(self, dtype: Any) -> int:
            return int(helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    return TensorTypes()


def requirements_met(requirements: tuple[str, ...]) -> bool:
    """Tell whether the installed packages meet all requirements."""
    return all(holds(requirement) for requirement in requirements)


def h5_value(dataset: Any) -> Any:
    """Return the content of an HDF5 dataset, with text as ``str`` as in h5py 2."""
    h5py = importlib.import_module("h5py")

    info = h5py.check_string_dtype(dataset.dtype)
    if info is not None and info.length is None:
        return np.asarray(dataset.asstr()[()])
    return np.asarray(dataset)


def require_communicator(name: str) -> None:
    """Refuse a ChainerMN communicator that cannot work here, in the same way on every rank.

    Raises:
        ValueError: Chainer 7 has removed the communicator.
        RuntimeError: it needs NCCL or a CUDA device, which is missing.
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
    """Return the array if MPI can send it in one message.

    Raises:
        OverflowError: it has more elements than MPI can count; nothing was sent.
    """
    if array.size > _MESSAGE_LIMIT:
        raise OverflowError(
            f"an array of {array.size:,} elements exceeds one message of MPI, which counts at most "
            f"{_MESSAGE_LIMIT:,}. Send it in parts; bcast_obj and scatter_dataset already do so."
        )
    return array


def mend_fork_server() -> None:
    """Make workers of a later fork server run mended, too.

    The server then imports Chainer once for all of its workers. This does not affect a server that
    is already running, or workers of a program that calls ``set_forkserver_preload`` later.
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
            "MultiprocessIterator forks its workers from a process that uses MPI, which MPI "
            "allows at best on one machine and never over InfiniBand. Call "
            "multiprocessing.set_start_method('forkserver') at the start of the program.",
            RuntimeWarning,
            stacklevel=4,
        )
