"""Prefetch, advice and range attributes, by address and length, through NVIDIA's cuda.core.

CuPy's own calls are wrong for the CPU as a target on CUDA 13, and act on whole pool segments;
cuda.core (1.1 and newer) is right on CUDA 12 and 13. The caller checks that memory is managed.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

from umem._common import extras
from umem._common.extras import installed_version
from umem.devices.base import Advice, Location, Place, Span, common
from umem.devices.cuda.streams import LEGACY_STREAMS, PER_THREAD_STREAM
from umem.errors import DeviceError, HintError, MissingDependencyError, UmemError

_NOWHERE = -2  # cudaInvalidDeviceId
_CPU = -1
_DISCARD, _SINCE = b"cuMemDiscardBatchAsync", 13000
"""The driver's function for discards, and the CUDA version that introduced it."""


OLDEST_CORE = (1, 1)
"""The version of cuda-core that introduced ManagedBuffer and Host."""
_PARTS = ("cuda-core", "cuda-bindings", "cupti-python")


@contextlib.contextmanager
def umems_errors() -> Iterator[None]:
    """Turn cuda.core's errors into umem's; cuda.core's class is private before 1.3."""
    try:
        yield
    except UmemError:
        raise
    except Exception as error:
        raise DeviceError(f"the driver refused the hint: {error}") from error


def load(cuda_major: int) -> CoreHints:
    """Return the hints of cuda.core.

    Raises:
        MissingDependencyError: cuda.core or its driver bindings are missing, too old, or
            incompatible; the message names them and the packages to install.
    """
    try:
        core = importlib.import_module("cuda.core")
        bindings = importlib.import_module("cuda.bindings.driver")
        core.ManagedBuffer, core.Host  # noqa: B018
    except Exception as error:  # modules of Cython that do not fit raise TypeError and ValueError
        problem = _core_problem(cuda_major, error)
        raise MissingDependencyError(
            f"prefetch, advice and locations need NVIDIA's cuda-core 1.1 or newer, and {problem}"
        ) from error
    return CoreHints(core, bindings)


def _core_problem(cuda_major: int, error: Exception) -> str:
    """Explain why cuda.core cannot be imported, with the command that fixes it."""
    major = 13 if cuda_major == 13 else 12
    core = installed_version("cuda-core")
    if core is None or _release(core) < OLDEST_CORE:
        found = "it is not installed" if core is None else f"{core} is installed"
        return f"{found}: {extras.command(f'cuda{major}', 'cuda-core')}"
    versions = [(name, installed_version(name)) for name in _PARTS]
    found = ", ".join(f"{name} {version}" for name, version in versions if version is not None)
    first = str(error).strip().partition("\n")[0]
    # To install cuda-core again would change nothing: it takes any cuda-bindings of its CUDA.
    return (
        f"cuda.core cannot be imported ({found} installed): {first}. Install the newest "
        f"bindings: pip install --upgrade 'cuda-bindings=={major}.*'"
    )


def _release(version: str) -> tuple[int, ...]:
    """Parse the leading numbers of a version; packaging is not installed with CUDA's extras."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


class CoreHints:
    """cuda.core's managed memory calls on address ranges.

    Cost: a few microseconds a range. Thread-safety: any thread in which the GPU's context is
    current. Driver errors are raised as cuda.core's; ranges before the failed one keep the hint.
    """

    def __init__(self, core: Any, bindings: Any) -> None:
        self.core, self.bindings = core, bindings

    def prefetch(self, spans: Iterable[Span], to: Place, stream_address: int) -> int:
        """Move ranges in stream order; returns the bytes."""
        stream, place, moved = self._stream(stream_address), self._place(to), 0
        for span in spans:
            self._buffer(span).prefetch(place, stream=stream)
            moved += span.nbytes
        return moved

    @property
    def discards(self) -> bool:
        """Tell whether `discard` works: it needs a driver of CUDA 13, with any bindings."""
        return self._discard_batch is not None

    def discard(self, spans: Sequence[Span], stream_address: int) -> int:
        """Discard ranges in stream order, in one call; returns the bytes.

        Concurrent reads, writes and prefetches are undefined: see `OrderedDiscards`.

        Raises:
            DeviceError: the driver refuses, as on the legacy default stream; nothing was discarded.
        """
        if not spans:
            return 0
        assert self._discard_batch is not None
        count = len(spans)
        addresses = (ctypes.c_uint64 * count)(*(span.address for span in spans))
        sizes = (ctypes.c_size_t * count)(*(span.nbytes for span in spans))
        status = self._discard_batch(addresses, sizes, count, 0, stream_address)
        if status:
            name = self.bindings.CUresult(status).name
            raise DeviceError(f"the driver refused to discard {count} ranges: {name}")
        return sum(span.nbytes for span in spans)

    @cached_property
    def _discard_batch(self) -> Any:
        """Look up the driver's batched discard; None if the driver has none.

        cuda.core offers it only with cuda-bindings of CUDA 13, which a driver of CUDA 13 does not
        require.
        """
        found = self.bindings.cuGetProcAddress(_DISCARD, _SINCE, 0)
        if any(map(int, (found[0], *found[2:]))) or not int(found[1]):
            return None
        pointers = ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t)
        given = *pointers, ctypes.c_size_t, ctypes.c_ulonglong, ctypes.c_void_p
        return ctypes.CFUNCTYPE(ctypes.c_int, *given)(int(found[1]))

    def advise(self, spans: Iterable[Span], advice: Advice, place: Place, unset: bool) -> int:
        """Set or unset advice on ranges; returns the bytes."""
        advised = 0
        for span in spans:
            self._advise_one(self._buffer(span), advice, place, unset)
            advised += span.nbytes
        return advised

    def location(self, spans: Sequence[Span]) -> Location:
        """Ask the driver about ranges; fields in which they differ are None."""
        return common([self._location_of(span) for span in spans])

    def _advise_one(self, buffer: Any, advice: Advice, place: Place, unset: bool) -> None:
        """Set or unset one advice on one range."""
        if advice == "read_mostly":
            buffer.read_mostly = not unset
        elif advice == "preferred_location":
            buffer.preferred_location = None if unset else self._place(place)
        elif advice == "accessed_by":
            accessed_by = buffer.accessed_by
            (accessed_by.discard if unset else accessed_by.add)(self._place(place))
        else:
            raise HintError(f"unknown advice {advice!r}")

    def _location_of(self, span: Span) -> Location:
        """Ask the driver about one range."""
        buffer = self._buffer(span)
        preferred = buffer.preferred_location
        return Location(
            managed=True,
            preferred=None if preferred is None else self._name(preferred),
            accessed_by=tuple(sorted(map(self._name, buffer.accessed_by), key=str)),
            last_prefetch=self._last_prefetch(span),
            read_mostly=bool(buffer.read_mostly),
        )

    def _last_prefetch(self, span: Span) -> Place | None:
        # cuda.core has a property for it from 1.3 on; the attribute has always been there.
        attribute = self.bindings.CUmem_range_attribute
        status, value = self.bindings.cuMemRangeGetAttribute(
            4, attribute.CU_MEM_RANGE_ATTRIBUTE_LAST_PREFETCH_LOCATION, span.address, span.nbytes
        )
        if int(status) != 0 or int(value) == _NOWHERE:
            return None
        return "cpu" if int(value) == _CPU else int(value)

    def _buffer(self, span: Span) -> Any:
        return self.core.ManagedBuffer.from_handle(span.address, span.nbytes)

    def _place(self, place: Place) -> Any:
        return self.core.Host() if place == "cpu" else self.core.Device(place)

    def _name(self, place: Any) -> Place:
        return "cpu" if isinstance(place, self.core.Host) else int(place.device_id)

    def _stream(self, address: int) -> Any:
        if address in LEGACY_STREAMS:
            return self.core.LEGACY_DEFAULT_STREAM
        if address == PER_THREAD_STREAM:
            return self.core.PER_THREAD_DEFAULT_STREAM
        return self.core.Stream.from_handle(address)
