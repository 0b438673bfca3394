"""The software GPU without its arithmetic: what is small and known is computed, the rest left out.

Device memory is address space that nobody touches. A range of it is known (it came from the host, or
from a call all of whose inputs are known), guessed (a small result of what was left out: zeros, or
what `GUESSES` says), or unknown. A call runs where nothing that it reads is unknown and it touches
little memory in all; else it is left out, and the model of VRAM, pages and time is told of it alone.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.array_utils import byte_bounds

from umem.devices.software.allocations import HOST
from umem.devices.software.driver import _HAS_SHARED, HostDriver, _Module
from umem.devices.software.kernels import _POINTER, _WRITTEN, Kernel, _parts, _use, parameters_of
from umem.devices.software.memory_sources import _FAILED, _libc
from umem.devices.software.nvrtc import HostNvrtc, unpacked
from umem.devices.software.runtime import HostRuntime
from umem.devices.software.warps import can_step  # noqa: F401
from umem.trace.events import Access
from umem.units import BLOCK_BYTES

LIMIT_BYTES = 1 << 20
"""A call that touches at most this much is computed."""
WHOLE_NUMBERS_LIMIT_BYTES = 32 << 20
"""The same for calls that write whole numbers and flags alone: they decide sizes."""
COPY_LIMIT_BYTES = 8 << 20
"""A copy from the host up to this size is made."""
GUESSED_BYTES, GUESSED_WHOLE_BYTES = 64, 1 << 12
"""Results up to this size of what is left out are guessed: of fractions, and of whole numbers."""
KNOWN, GUESSED, UNKNOWN = range(3)
GUESSES = {"cupy_all": 1, "cupy_isfinite": 1}
"""Bytes of the flags by which the program goes on; all else is zero."""
COUNTS = re.compile("bsum_shfl|scan|cumsum|count_nonzero|^cupy_sum")
"""Kernels that count flags: of unknown ones all are set, which asks for the most memory."""
SUMS = re.compile("bsum|sum$|count_nonzero|cupy_sum")
"""Those of them that do not add up along the way."""


STRUCTURE = {
    "spgemm", "csrgeam", "denseToSparse", "nnz_compress", "coo2csr", "csr2coo", "csr2csc", "sort",
    "identity", "csr2csr_compress",
}  # fmt: skip
"""Work of libraries that decides sizes by whole numbers, whatever the values beside them."""


class Origin(NamedTuple):
    """What is known of a range: level, what wrote it, its items and where it begins.

    ``weight`` is how many flags an item counts, beyond the one before if ``is_running``.
    """

    level: int
    name: str = ""
    itemsize: int = 0
    low: int = 0
    weight: float = 0.0
    is_running: bool = False
    is_whole: bool = False

    def count(self, number: int) -> int:
        """What an item says, if all flags are set."""
        return round(self.weight * (number + 1 if self.is_running else 1))


_KNOWN = Origin(KNOWN)


class Knowledge:
    """What is known of memory, by address."""

    def __init__(self) -> None:
        self._at: list[int] = [0]
        self._is: list[Origin] = [_KNOWN]

    def put(self, low: int, high: int, origin: Origin) -> None:
        at, kept = self._at, self._is
        first = bisect_left(at, low)
        last = bisect_right(at, high) - 1  # the piece in which `high` lies
        rest = kept[last]
        before = kept[first - 1] if first else None
        starts, origins = [], []
        if before is None or before != origin:
            starts.append(low)
            origins.append(origin)
        if rest != origin:
            starts.append(high)
            origins.append(rest)
        end = last + 1
        at[first:end], kept[first:end] = starts, origins

    def worst(self, low: int, high: int) -> Origin:
        first = bisect_right(self._at, low) - 1
        last = bisect_left(self._at, high)
        found = self._is[first:last]
        return max(found, key=lambda each: each.level) if found else _KNOWN


class AddressSpace:
    """Address space that is never touched, but where something small is computed."""

    def __init__(self) -> None:
        self.given_bytes = 0
        self._sizes: dict[int, tuple[int, int]] = {}

    def take(self, nbytes: int) -> int | None:
        big = nbytes >= BLOCK_BYTES // 2
        size = (
            max(4096, -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES + BLOCK_BYTES)
            if big
            else max(4096, -(-nbytes // 4096) * 4096)
        )
        place = _libc.mmap(None, size, 3, 0x22 | 0x4000, -1, 0)
        if place in (None, _FAILED):
            return None
        _libc.madvise(place, size, 15)  # no huge pages
        address = -(-place // BLOCK_BYTES) * BLOCK_BYTES if big else place
        self._sizes[address] = (place, size)
        self.given_bytes += nbytes
        return address

    def give(self, address: int, nbytes: int) -> None:
        place, size = self._sizes.pop(address)
        self.given_bytes -= nbytes
        _libc.munmap(place, size)


def clear(address: int, nbytes: int) -> None:
    """Make memory zero, by giving back whole pages: what nobody touches costs nothing."""
    low, high = -(-address // 4096) * 4096, (address + nbytes) // 4096 * 4096
    if high - low < 1 << 16:
        ctypes.memset(address, 0, nbytes)
        return
    ctypes.memset(address, 0, low - address)
    _libc.madvise(low, high - low, 4)  # MADV_DONTNEED
    ctypes.memset(high, 0, address + nbytes - high)


class LeftOut(Exception):
    """A library's work is left out, after the model was told of it."""


class DryRuntime(HostRuntime):
    """The runtime of a dry run."""

    def __init__(self, *arguments: Any, limit: int = LIMIT_BYTES) -> None:
        super().__init__(*arguments)
        self.source = AddressSpace()
        self.known = Knowledge()
        self.limit, self.whole_limit = limit, max(limit, WHOLE_NUMBERS_LIMIT_BYTES)
        self.depth = 0
        self.counts: Counter[str] = Counter()
        self.reads: Counter[tuple[str, str]] = Counter()
        self.blocks: dict[int, int] = {}
        self.answers: dict[str, float] = {}

    # -- blocks of pools ---------------------------------------------------------------------

    def new_block(self, address: int, nbytes: int) -> None:
        """What is handed out is known: nobody may read it before it is written."""
        self.blocks[address] = nbytes
        clear(address, nbytes)
        self.known.put(address, address + nbytes, _KNOWN)

    def end_of(self, address: int) -> int:
        """Where the memory that a plain pointer leads to ends."""
        if address in self.blocks:
            return address + self.blocks[address]
        found = self.allocation_of(address)
        return address + 1 if found is None else found.address + found.nbytes

    def release(self, ptr: int) -> None:
        found = self.allocation_of(ptr) if ptr else None
        if found is not None:
            self.known.put(found.address, found.address + max(1, found.nbytes), _KNOWN)
        super().release(ptr)

    # -- what is left out ---------------------------------------------------------------------

    def judged(
        self,
        name: str,
        reads: Any,
        writes: Any,
        whole: bool = False,
        total: float = 0,
        can_run: bool = True,
    ) -> bool:
        """Whether a call is to be run; notes what will be known of what it writes."""
        level, touched = KNOWN, 0
        for low, high in reads:
            touched += high - low
            level = max(level, self.known.worst(low, high).level)
        touched += sum(each[1] - each[0] for each in writes)
        is_run = (
            can_run and level < UNKNOWN and touched <= (self.whole_limit if whole else self.limit)
        )
        self.counts["run" if is_run else "left out"] += 1
        for low, high, *size in writes:
            itemsize = size[0] if size else 0
            if is_run:
                now = _KNOWN if level == KNOWN else Origin(GUESSED, name)
            else:
                is_small = high - low <= (GUESSED_WHOLE_BYTES if whole else GUESSED_BYTES)
                weight = total * itemsize / (high - low) if total else 0.0
                is_running = SUMS.search(name) is None
                level_now = GUESSED if is_small else UNKNOWN
                now = Origin(level_now, name, itemsize, low, weight, is_running, whole)
                if high - low <= GUESSED_WHOLE_BYTES:
                    ctypes.memset(low, GUESSES.get(name.split("__")[0], 0), high - low)
                    if weight and itemsize in (4, 8):
                        kind = ctypes.c_int64 if itemsize == 8 else ctypes.c_int32
                        for i in range((high - low) // itemsize):
                            kind.from_address(low + i * itemsize).value = now.count(i)
            self.known.put(low, high, now)
        return is_run

    def operation(self, name: str, reads: Any, writes: Any, *more: Any, **named: Any) -> None:
        super().operation(name, reads, writes, *more, **named)
        if not self.depth:
            return
        arrays, self.arrays = self.arrays, None
        ranges = [
            [
                (self._addresses[a.tensor] + a.start, self._addresses[a.tensor] + a.stop)
                for a in each
            ]
            for each in (reads, writes)
        ]
        is_structure = name in STRUCTURE
        if is_structure and arrays is not None:  # whole numbers say how many there are
            whole = [
                x for x in arrays[0] if not isinstance(x, list) and x.size and x.dtype.kind in "iu"
            ]
            ranges[0] = [byte_bounds(x) for x in whole] or ranges[0]
        is_whole = is_structure or (
            arrays is not None
            and all(not isinstance(x, list) and x.dtype.kind in "biu" for x in arrays[1])
            and bool(arrays[1])
        )
        if not self.judged(name, *ranges, is_whole):
            raise LeftOut(name)

    def copy(self, dst: int, src: int, size: int, stream: int = 0) -> None:
        self.tell_copy(dst, src, size, self.device_of(stream), stream)
        source, target = self.allocation_of(src), self.allocation_of(dst)
        origin = _KNOWN if source is None else self.known.worst(src, src + size)
        on_device = target is not None and target.kind != HOST
        if target is None and origin.level:
            self._read(dst, src, size, origin)
            return
        most = (
            COPY_LIMIT_BYTES
            if source is None or source.kind == HOST or target is None
            else self.limit
        )
        if size <= most and origin.level < UNKNOWN:
            ctypes.memmove(dst, src, size)
        elif target is not None:
            origin = Origin(UNKNOWN, origin.name or "copy", origin.itemsize, dst)
        if target is not None:
            self.known.put(dst, dst + size, origin)

    def _read(self, dst: int, src: int, size: int, origin: Origin) -> None:
        """The host reads what is not known."""
        line = program_line()
        self.reads[line, origin.name] += 1
        kinds = {1: ctypes.c_bool, 4: ctypes.c_int32, 8: ctypes.c_int64}
        if not origin.is_whole:
            kinds = {1: ctypes.c_bool, 4: ctypes.c_float, 8: ctypes.c_double}
        if line in self.answers and size in kinds:
            kinds[size].from_address(dst).value = self.answers[line]
        elif (
            origin.level == UNKNOWN and origin.weight and size == origin.itemsize and size in kinds
        ):
            kinds[size].from_address(dst).value = origin.count((src - origin.low) // size)
        elif size <= COPY_LIMIT_BYTES:
            ctypes.memmove(dst, src, size)  # zeros where nothing was written

    def fill(self, ptr: int, value: int, size: int) -> None:
        self.tell_fill(ptr, size)
        origin = _KNOWN
        if not value:
            clear(ptr, size)
        elif size <= self.whole_limit:
            ctypes.memset(ptr, value, size)
        else:
            origin = Origin(UNKNOWN, "memset", 0, ptr)
        self.known.put(ptr, ptr + size, origin)

    def put_other_bytes(self, ranges: Sequence[tuple[int, int]], stream: int) -> None:
        for address, nbytes in ranges:
            self.known.put(address, address + nbytes, Origin(UNKNOWN, "discard"))


_OURS = re.compile(r"[/\\](site-packages|lib/python3\.\d+|umem/umem)[/\\]|^<")


def program_line() -> str:
    """The line of the program that is running, outside of libraries."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _OURS.search(name) or frame.f_back is None:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


# -- kernels -------------------------------------------------------------------------------------

_CARRAY = re.compile(r"\bCArray<\s*(.+?)\s*,\s*(\d+)\s*(?:,[^<>]*)?>\s*\w*\s*$")
_SIZES = {
    "bool": 1, "char": 1, "signed char": 1, "unsigned char": 1, "short": 2, "unsigned short": 2,
    "float16": 2, "int": 4, "unsigned int": 4, "float": 4, "long": 8, "unsigned long": 8,
    "long long": 8, "unsigned long long": 8, "double": 8, "ptrdiff_t": 8, "size_t": 8,
    "complex<float>": 8, "thrust::complex<float>": 8, "complex<double>": 16,
    "thrust::complex<double>": 16, "__half": 2, "__nv_bfloat16": 2, "int8_t": 1, "uint8_t": 1,
    "int16_t": 2, "uint16_t": 2, "int32_t": 4, "uint32_t": 4, "int64_t": 8, "uint64_t": 8,
}  # fmt: skip
_WHOLE = {
    name
    for name in _SIZES
    if "float" not in name and "double" not in name and "half" not in name and "bfloat" not in name
}
_U64 = ctypes.c_uint64


_KINDS = {
    "bool": "?", "char": "i1", "signed char": "i1", "unsigned char": "u1", "short": "i2",
    "unsigned short": "u2", "float16": "f2", "int": "i4", "unsigned int": "u4", "float": "f4",
    "long": "i8", "unsigned long": "u8", "long long": "i8", "unsigned long long": "u8",
    "double": "f8", "ptrdiff_t": "i8", "size_t": "u8", "complex<float>": "c8",
    "complex<double>": "c16", "thrust::complex<float>": "c8", "thrust::complex<double>": "c16",
}  # fmt: skip


class ByNumpy:
    """CuPy's plain functions by NumPy, for small arrays: no kernel is compiled for them."""

    def __init__(self, name: str, parameters: str) -> None:
        self.call: Any = None
        base = name.removeprefix("cupy_").split("__")[0]
        self._arguments: list[tuple[int, int, Any, bool]] = []  # number, dimensions, dtype, written
        for number, part in enumerate(_parts(parameters)):
            part = part.strip()
            plain = part.removeprefix(_WRITTEN)
            if "CIndexer" in plain:
                continue
            array = _CARRAY.search(plain)
            kind = array[1] if array else plain.removeprefix("const ").rpartition(" ")[0]
            if kind not in _KINDS:
                return
            is_written = array is not None and not plain.startswith("const ")
            self._arguments.append(
                (number, int(array[2]) if array else -1, np.dtype(_KINDS[kind]), is_written)
            )
        if not name.startswith("cupy_") or sum(each[3] for each in self._arguments) != 1:
            return
        arrays = [each for each in self._arguments if each[1] >= 0]
        if base in _REDUCTIONS and "__" not in name and len(arrays) == 2:
            self._arguments = arrays
            self.call = partial(_reduced, _REDUCTIONS[base])
            return
        function = _ELEMENTS.get(base) or getattr(np, base, None)
        if base in _ELEMENTS or ("__" in name and isinstance(function, np.ufunc)):
            self.call = _ranged if base == "arange" else partial(_assigned, function)

    def run(self, given: int) -> None:
        places = ctypes.cast(given, ctypes.POINTER(_U64))
        inputs, output = [], None
        for number, ndim, dtype, is_written in self._arguments:
            place = places[number]
            if ndim < 0:
                found = np.frombuffer(ctypes.string_at(place, dtype.itemsize), dtype)[0]
            else:
                words = (ctypes.c_int64 * (2 + 2 * ndim)).from_address(place)
                shape, steps = tuple(words[2 : 2 + ndim]), tuple(words[2 + ndim :])
                spans = [(n - 1) * step for n, step in zip(shape, steps, strict=True)]
                low = sum(span for span in spans if span < 0)
                nbytes = sum(map(abs, spans)) + dtype.itemsize if all(shape) else 0
                memory: Any = (ctypes.c_char * nbytes).from_address(words[0] + low)
                found = np.ndarray(shape, dtype, memory, -low, steps)
            if is_written:
                output = found
            else:
                inputs.append(found)
        with np.errstate(all="ignore"):
            self.call(inputs, output)


def _assigned(function: Any, inputs: Any, output: Any) -> None:
    output[...] = function(*inputs)


def _ranged(inputs: Any, output: Any) -> None:
    output[...] = (inputs[0] + np.arange(output.size) * inputs[1]).reshape(output.shape)


def _reduced(function: Any, inputs: Any, output: Any) -> None:
    rows = inputs[0].reshape(-1, max(1, output.size))
    output[...] = function(rows).reshape(output.shape)


_ELEMENTS: dict[str, Any] = {
    "copy": lambda x: x, "fill": lambda x: x, "rsqrt": lambda x: 1 / np.sqrt(x),
    "subtract": np.subtract, "arange": None, "where": np.where, "clip": np.clip,
}  # fmt: skip
_REDUCTIONS: dict[str, Any] = {
    "sum": lambda x: x.sum(0), "sum_with_dtype": lambda x: x.sum(0), "prod": lambda x: x.prod(0),
    "max": lambda x: x.max(0), "min": lambda x: x.min(0), "amax": lambda x: x.max(0),
    "amin": lambda x: x.min(0), "all": lambda x: x.all(0), "any": lambda x: x.any(0),
    "argmax": lambda x: x.argmax(0), "argmin": lambda x: x.argmin(0), "mean": lambda x: x.mean(0),
    "count_nonzero": lambda x: (x != 0).sum(0),
}  # fmt: skip


class Parameter(NamedTuple):
    number: int
    use: str
    ndim: int  # -1: a plain pointer
    itemsize: int
    is_whole: bool


def parameter_list(text: str) -> list[Parameter]:
    """The pointers among a kernel's parameters."""
    found = []
    for number, part in enumerate(_parts(text)):
        part = part.strip()
        plain = part.removeprefix(_WRITTEN)
        if not _POINTER.search(plain):
            continue
        array = _CARRAY.search(plain)
        if array is None:
            kind = plain.partition("*")[0].replace("const", "").strip()
            found.append(Parameter(number, _use(part), -1, _SIZES.get(kind, 0), kind in _WHOLE))
        else:
            found.append(
                Parameter(
                    number, _use(part), int(array[2]), _SIZES.get(array[1], 0), array[1] in _WHOLE
                )
            )
    return found


class DryKernel:
    """A kernel that is compiled when it is first run."""

    def __init__(self, name: str, parameters: str, made: Callable[[], Kernel]) -> None:
        self.name, self._made = name, made
        self.parameters = parameter_list(parameters)
        self.by_numpy = ByNumpy(name, parameters)
        self._kernel: Kernel | None = None

    def compiled(self) -> Kernel:
        if self._kernel is None:
            self._kernel = self._made()
        return self._kernel

    def ranges(self, given: int) -> list[tuple[int, int, int, Parameter]]:
        """Each pointer's range (high 0: unknown) and number of items."""
        places = ctypes.cast(given, ctypes.POINTER(_U64))
        found = []
        for p in self.parameters:
            place = places[p.number]
            if p.ndim < 0:
                low = _U64.from_address(place).value
                if low:
                    found.append((low, 0, 0, p))
                continue
            words = (ctypes.c_int64 * (2 + 2 * p.ndim)).from_address(place)
            low, size = words[0], words[1]
            if not size:
                continue
            high = low
            for d in range(p.ndim):
                far = (words[2 + d] - 1) * words[2 + p.ndim + d]
                if far < 0:
                    low += far
                else:
                    high += far
            itemsize = p.itemsize
            if not itemsize:
                itemsize = abs(words[1 + 2 * p.ndim]) if p.ndim and words[1 + p.ndim] > 1 else 16
            found.append((low, high + itemsize, size, p))
        return found


class DryDriver(HostDriver):
    """CuPy's driver in a dry run: kernels are compiled when one has to run."""

    _runtime: DryRuntime
    has_compiler = not os.environ.get("UMEM_DRY_NO_COMPILER")

    def moduleLoadData(self, image: bytes) -> int:
        found = unpacked(image, self._compiler.name)
        if found is None:
            return super().moduleLoadData(image)
        source, options, expressions = found
        kernels = parameters_of(self._compiler._expanded(source, options), expressions, options)
        handle = self._runtime.new_handle()
        has_shared = _HAS_SHARED.search(source) is not None
        here = self._runtime.device_here
        self._modules[handle] = _Module(found, None, kernels, has_shared, here, [])  # type: ignore[arg-type]
        return handle

    def _compiled_module(self, module: int) -> _Module:
        kept = self._modules[module]
        if kept.path is None:
            path, kernels = self._compiler.compile(*kept.library)  # type: ignore[misc]
            self._runtime.counts["compiled"] += 1
            kept = self._modules[module] = kept._replace(
                library=self._library(path), path=path, kernels=kernels
            )
        return kept

    def moduleGetFunction(self, module: int, name: str) -> int:
        found = self._module(module)
        if name not in found.kernels:
            self._fail(500)
        handle = self._runtime.new_handle()

        def made() -> Kernel:
            whole = self._compiled_module(module)
            return Kernel(whole.library, name, whole.kernels[name], whole.path)

        self._kernels[handle] = DryKernel(name, found.kernels[name], made)  # type: ignore[assignment]
        self._devices[handle] = found.device
        found.handles.append(handle)
        if found.has_shared:
            self._with_shared.add(handle)
        return handle

    def moduleGetGlobal(self, module: int, name: str) -> int:
        self._compiled_module(module)
        return super().moduleGetGlobal(module, name)

    def launch(self, kernel: Any, sizes: Any, shared_bytes: int, stream: int, given: int) -> None:
        runtime = self._runtime
        with runtime.lock:
            ranges = kernel.ranges(given)
            runtime.here.beside.compute(stream)
            reads: list[Access] = []
            writes: list[Access] = []
            read, written = [], []
            is_whole, total = True, 0.0
            counts = COUNTS.search(kernel.name) is not None
            for low, high, size, p in ranges:
                accesses = runtime.access(low, high - low if high else 1 << 62)
                span = (low, high or runtime.end_of(low))
                if "r" in p.use:
                    reads += accesses
                    read.append(span)
                    if counts:
                        total = max(total, size * (runtime.known.worst(*span).weight or 1.0))
                if "w" in p.use:
                    writes += accesses
                    written.append((*span, p.itemsize))
                    is_whole = is_whole and p.is_whole
            runtime.operation(kernel.name, reads, writes)
            plain = kernel.by_numpy.call is not None
            can_run = plain or self.has_compiler
            if runtime.judged(
                kernel.name, read, written, is_whole, total if is_whole else 0, can_run
            ):
                if plain:
                    runtime.counts["by NumPy"] += 1
                    kernel.by_numpy.run(given)
                else:
                    Kernel.run(kernel.compiled(), *sizes, shared_bytes, given)


class DryNvrtc(HostNvrtc):
    """The run-time compiler of a dry run, which compiles nothing yet."""

    def compileProgram(self, program: int, options: Sequence[str]) -> None:
        self._programs[program].options = tuple(options)

    def getProgramLog(self, program: int) -> str:
        return ""


# -- libraries -----------------------------------------------------------------------------------


class DryLibrary:
    """A library whose work is left out where `DryRuntime.operation` says so.

    Every function tells of its reads and writes before it works: the one place to stop it.
    """

    def __init__(self, functions: Any, runtime: DryRuntime) -> None:
        self._functions, self._runtime = functions, runtime

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._functions, name)
        if not callable(function):
            return function
        return dry(function, self._runtime, name)


def dry(function: Callable[..., Any], runtime: DryRuntime, name: str) -> Any:
    def call(*given: Any) -> Any:
        runtime.depth += 1
        try:
            return function(*given)
        except LeftOut:
            return 0 if _returns(function) else None
        finally:
            runtime.depth -= 1

    call.__name__ = name
    kept = function
    while isinstance(kept, partial):
        kept = kept.func
    call.__annotations__ = dict(getattr(kept, "__annotations__", {}))
    return call


def _returns(function: Any) -> bool:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__annotations__", {}).get("return") not in (None, "None")


def follow_blocks(cupy: Any, runtime: DryRuntime) -> Any:
    """Have CuPy's pools say what they hand out."""

    class Blocks(cupy.cuda.MemoryHook):
        name = "umem dry run"

        def malloc_postprocess(self, **named: Any) -> None:
            runtime.new_block(named["mem_ptr"], named["mem_size"])

    hook = Blocks()
    hook.__enter__()
    return hook


def leave_out_initializers(chainer: Any, limit: int = LIMIT_BYTES) -> None:
    """Have Chainer's initializers draw small arrays alone: what is large is unknown on the GPU."""
    for name in (
        "Normal",
        "Uniform",
        "LeCunNormal",
        "LeCunUniform",
        "GlorotNormal",
        "GlorotUniform",
        "HeNormal",
        "HeUniform",
        "Orthogonal",
        "constant._Constant",
    ):
        kind: Any = attrgetter(name)(chainer.initializers)

        def call(self: Any, array: Any, _draw: Any = kind.__call__) -> None:
            if array.nbytes <= limit:
                _draw(self, array)

        kind.__call__ = call
