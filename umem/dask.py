"""Let dask's workers use more memory than the GPU has. Never run on a GPU or with dask-cuda."""

from __future__ import annotations

import importlib
import pickle
import sys
import uuid
import warnings
from contextlib import suppress
from typing import Any

import numpy as np

from umem._common import extras
from umem.devices import Mode
from umem.errors import DaskWarning, MissingDependencyError, StateError
from umem.memory import Handle, Size, checked_request, disable, enable, enabled
from umem.units import format_bytes

try:
    from distributed import WorkerPlugin, protocol
except ImportError as error:
    raise MissingDependencyError(f"umem.dask: {error}. {extras.command('dask')}") from error

__all__ = ["Plugin", "serialize_by_host_copies"]
_set_up: list[tuple[Plugin, Any]] = []  # in this process, with their workers
_made: Handle | None = None  # by a plugin, not by the program


class Plugin(WorkerPlugin):
    """Enable umem in every worker: ``client.register_plugin(umem.dask.Plugin("hybrid"))``.

    The arguments are as in `umem.enable`. Each worker resolves them itself, so a limit is per
    worker: two workers with ``"8GiB"`` may reserve 16 GiB, even on one card, and ``"90%"`` means
    the host memory available to that worker at that time. Each process has its own software GPU and
    VRAM. Never run on a GPU or with dask-cuda yet.

    ``client.scheduler_info()`` reports each worker's bytes at its last heartbeat in
    ``metrics["umem"]``, and as ``umem_used_bytes`` and so on for the dashboard's table. Managed
    bytes include spilled bytes. ``client.unregister_worker_plugin(plugin.name)`` of the last plugin
    disables umem again.

    Raises:
        StateError, SizeError: the mode or limit is invalid, or the plugin is used on the scheduler.
            On registering: other settings are on and stay on; workers that start later try too,
            until the plugin is removed.
        DeviceError, DeviceNotFoundError: on registering, as `umem.enable` in the worker.
    """

    def __init__(
        self, mode: Mode = "hybrid", *, limit: Size | None = None, prefetch: bool | None = None
    ) -> None:
        checked_request(mode, limit, bool(prefetch))
        self.name = f"umem-{mode}-{uuid.uuid4()}"
        self.mode, self.limit, self.prefetch = mode, limit, prefetch
        serialize_by_host_copies()  # for arrays that the client receives

    async def start(self, scheduler: Any) -> None:
        """Refuse to run on the scheduler, which calls this."""
        scheduler.plugins.pop(self.name, None)  # or the scheduler would hang at its end
        raise StateError("umem.dask.Plugin is for workers: client.register_plugin(plugin)")

    def setup(self, worker: Any) -> None:
        """Enable umem in the worker's process; an error leaves it unchanged."""
        global _made
        before = enabled()
        try:
            handle = enable(self.mode, limit=self.limit, prefetch=self.prefetch)
        except StateError as why:
            raise StateError(f"{self.name} beside {[p.name for p, _ in _set_up]}: {why}") from None
        _made = _made if handle is before else handle
        _set_up.append((self, worker))
        serialize_by_host_copies()
        # A copy, as a heartbeat may be in the middle of the old one.
        worker.metrics = {**worker.metrics, "umem": lambda _: _figures(handle.device)}
        for name in _figures(handle.device):
            worker.metrics[f"umem_{name}"] = lambda _, name=name: _figures(handle.device)[name]
        if worker.address.startswith("ucx") and self.mode != "unmanaged":
            text = "memory has no CUDA IPC handle: UCX needs staging buffers (ucx-py#892), tcp none"
            warnings.warn(f"{self.mode} {text}", DaskWarning, stacklevel=2)
        limit = _device_memory_limit(worker)
        if limit is not None and self.mode != "unmanaged":
            warnings.warn(
                f"dask-cuda copies results to the host above {format_bytes(limit)} of VRAM, before "
                f"{self.mode} memory is used. Pass LocalCUDACluster(device_memory_limit=None, "
                "memory_limit=None), or 0 for both to dask cuda worker",
                DaskWarning,
                stacklevel=2,
            )

    def teardown(self, worker: Any) -> None:
        """Disable umem if this was the last plugin and a plugin enabled it."""
        if (self, worker) in _set_up:
            _set_up.remove((self, worker))
        if worker not in [other for _, other in _set_up]:
            worker.metrics = {k: f for k, f in worker.metrics.items() if not k.startswith("umem")}
        if not _set_up and _made is not None and _made is enabled():
            disable()


def _device_memory_limit(worker: Any) -> int | None:
    """Return the bytes of results on the GPU above which dask-cuda moves some to the host.

    Reads dask-cuda's DeviceHostFile or, with JIT-unspill, ProxifyHostFile, which have no public
    name for it. None without a limit, and in workers of distributed itself.
    """
    data = getattr(worker, "data", None)
    for owner, name in (("device_buffer", "n"), ("manager", "_device_memory_limit")):
        limit = getattr(getattr(data, owner, None), name, None)
        if isinstance(limit, (int, float)):
            return int(limit)
    return None


def _figures(device: Any) -> dict[str, int]:
    found = {"used_bytes": device.pools.all_used_bytes(), **vars(device.usage())}
    return {name: value for name, value in found.items() if isinstance(value, int)}


def serialize_by_host_copies() -> None:
    """Make distributed exchange CuPy arrays by copies to the host, in this process.

    distributed's own serializer receives into memory of RMM or numba, and fails if neither works.
    `Plugin` calls this function in the client that creates it and in the workers. Call it yourself
    in other clients. UCX transfers between GPUs do not change.
    """
    for side in ("dask_serialize", "dask_deserialize", "cuda_serialize", "cuda_deserialize"):
        for package in ("cupy", "cupyx"):
            getattr(protocol, side).register_lazy(package, _register)
    if "distributed.protocol.cupy" in sys.modules:
        _register()


def _register() -> None:
    """Register for CuPy's arrays, after distributed's own serializer, which would replace this."""
    with suppress(Exception):  # RMM or numba may be missing, or fail in their own ways
        importlib.import_module("distributed.protocol.cupy")
    protocol.dask_serialize.register(sys.modules["cupy"].ndarray, _to_host)
    protocol.dask_deserialize.register(sys.modules["cupy"].ndarray, _from_host)


def _to_host(array: Any) -> tuple[dict[str, Any], list[memoryview]]:
    """Copy to the host, in a form that distributed's own serializer can read too."""
    array.device.synchronize()  # a task may use a stream that this thread's copies do not wait for
    host = array.get(order="A")
    header = {"shape": host.shape, "strides": host.strides, "typestr": host.dtype.str}
    header["dtype"] = pickle.dumps(host.dtype)
    return header, [memoryview(host.reshape(-1, order="A").view("u1"))]


def _from_host(header: dict[str, Any], frames: list[Any]) -> Any:
    """Copy an array to the GPU from a host copy, made by `_to_host` or by distributed itself."""
    dtype = pickle.loads(header["dtype"]) if "dtype" in header else header["typestr"]
    host = np.ndarray(header["shape"], dtype, frames[0], strides=header["strides"])
    return sys.modules["cupy"].array(host, blocking=True)
