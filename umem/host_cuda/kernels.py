"""Compiles CuPy's GPU kernels for this machine's processor.

CuPy has one Python function that turns CUDA C++ into a module. Here a C++ compiler gets the same
source, between a header with the CUDA features that kernels use and a header that runs a kernel
over its grid. It reads only C++ source, not machine code or PTX.

A kernel runs in one of three ways. If its threads share a loop (``CUPY_FOR``, which divides the
elements among them), one thread runs the loop; likewise for CuPy's reductions, whose threads
combine their results in shared memory. Otherwise threads run one after another, or as fibers if
they wait for one another or a warp's threads must run in lockstep (`warps.py`).
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from umem.errors import DeviceError
from umem.host_cuda import capabilities
from umem.host_cuda.dialect import (
    BOUNDS,
    CUDA_MAJOR,
    KERNEL,
    definitions,
    has_long_double,
    is_its_macro,
    macros,
    needs_expansion,
    of_compiler,
    pointer_to,
    preamble,
    refuse_assembly,
    saturating,
    taken,
    translated,
    uncommented,
    with_includes,
    with_registers,
    without,
    without_includes,
    without_long_double,
    without_macros,
)
from umem.host_cuda.faults import ASSERT, LAUNCH_FAILURE, Finding, KernelFault
from umem.host_cuda.host_headers import foreign_header
from umem.host_cuda.included import folders_of, with_headers
from umem.host_cuda.kernel_limits import KernelLimits, launch_bounds, static_memory
from umem.host_cuda.races import SOURCE, line_at, with_names
from umem.host_cuda.sharing import may_share
from umem.host_cuda.shifts import HEADER as SHIFTS
from umem.host_cuda.shifts import clamped
from umem.host_cuda.strictness import hint
from umem.host_cuda.templates import WAITS, as_loops
from umem.host_cuda.toolchain import Toolchain
from umem.host_cuda.warps import ADDRESSES, IN_ALL_MEMORY, LIBRARIES, STEPS, can_step, step_options

HEADERS = Path(__file__).parent / "include"
TOOLKIT = HEADERS / "toolkit"
"""CUDA headers that programs often include; nothing in them makes threads wait."""
AFTER = "-idirafter"
"""Option for a header folder that is searched after all others."""
ONCE, APART, TOGETHER, SHARED = range(4)
"""Ways to run a kernel, as in umem_launch.h."""
CCCL = ("cub", "thrust", "libcudacxx")
"""CUDA's C++ library headers, bundled with CuPy."""
PREFIX = (
    "umem_cuda.h", "umem_static.h", "cupy/complex.cuh", "cupy/carray.cuh", "cupy/atomics.cuh",
    "cupy/math_constants.h", "umem_loops.h",
)  # fmt: skip
"""The includes of nearly all of CuPy's kernels, which are precompiled."""
ALIGNMENT = 64
"""Alignment of copied arguments in bytes, enough for any type."""
NO_CONTRACTION = {"-fmad=false", "--fmad=false"}
"""Options under which products are rounded before they are added."""
VARIABLE_ARRAY, NO_VARIABLE_ARRAY = "[-Werror=vla", "-Wno-vla"
"""Text in a message about a variable-length array; and the option that permits one."""
CHECKED = ("-DUMEM_CHECKED", "-fsanitize=alignment", "-g1", *LIBRARIES)
"""Options of kernels in checked mode, as in umem_checked.h."""
_TEMPLATE = re.compile(r"\btemplate\s*<[^;{}]*>\s*(?:(?:static|inline|void)\s+|" + BOUNDS + r")*$")
_PLAIN = re.compile(
    r"cupy/|cuda/std/|std\w+\.h|(math|float|limits|assert|string)\.h|cuda_(bf|fp)16\.h"
    r"|curand_kernel\.h|cuComplex\.h|math_constants\.h|\w+$"
)
_INCLUDE = re.compile(r"^\s*#\s*include\s*[<\"]([^>\"]+)", re.MULTILINE)
_ASSERTION = re.compile(r"^block \(.*\): the assertion .* failed$", re.DOTALL)
_TOOLS = {
    "racecheck": "and no barrier is between them",
    "synccheck": "waits at the barrier in line",
}
"""Tools of compute-sanitizer, and the kernels' messages for the faults that they find, as in
umem_races.h and umem_threads.h.
"""
_NO_FAULTS = ("the software GPU", "there is no memory", "a block has")
"""Prefixes of messages of kernels that cannot run here; these are not CUDA faults."""
_PROCESS = ctypes.create_string_buffer(1024)
"""State shared by kernels, as in umem_process.h; it begins with the reason for an early end."""
_THREADS = 520
"""Offset of the number of threads that may share a kernel."""
_Sizes = ctypes.c_uint * 6
_BLOCK = 12
"""Offset of the block's sizes after the grid's."""
_HANDLE = 512
"""Offset of the function that handles divisions by zero."""
_MISALIGNED = 16
"""Number of misaligned accesses that umem_checked.h records."""
_IS_CHECKED = 544
"""Offset of the flag that makes races of shared memory errors."""


compiled: set[Path] = set()
"""The kernels that this process has compiled, without those found in the cache."""


def report_races() -> None:
    """Make races of shared memory an error, for all kernels of the process."""
    _PROCESS[_IS_CHECKED] = b"\1"


class Kernel:
    """A compiled kernel, with the reads and writes of its parameters."""

    def __init__(self, library: ctypes.CDLL, name: str, parameters: str, path: Path) -> None:
        self.name, self._path = name, path
        self._texts = parts_of(parameters)
        self.uses = [use_of(part.strip()) for part in self._texts]
        self._run = getattr(library, f"umem_run_{name}")
        self._reach = getattr(library, f"umem_reach_{name}")
        self._run.restype = None
        self._run.argtypes = [*[ctypes.c_void_p] * 3, ctypes.c_uint]
        self._reach.argtypes = [ctypes.c_void_p] * 2
        self._sizes = getattr(library, f"umem_sizes_{name}")
        self._sizes.argtypes = [ctypes.c_void_p]
        self._ranges = (_Range * max(1, len(self.uses)))()
        self._misaligned = None
        if hasattr(library, "umem_misaligned"):
            places = (_Place * _MISALIGNED).in_dll(library, "umem_misaligned")
            self._misaligned = ctypes.c_uint.in_dll(library, "umem_misaligned_count"), places
        shared = ctypes.c_void_p.in_dll(library, "umem_process")
        shared.value = ctypes.addressof(_PROCESS)

    def run(self, grid: Sequence[int], block: Sequence[int], shared_bytes: int, given: int) -> None:
        """Run the kernel over a grid; ``given`` points to the addresses of its arguments.

        Raises:
            KernelFault, DeviceError: see `check`.
        """
        sizes = _Sizes(*grid, *block)
        place = ctypes.addressof(sizes)
        self._run(given, place, place + _BLOCK, shared_bytes)
        self.check()

    def check(self) -> None:
        """Raise the error with which the kernel ended, if any.

        Raises:
            KernelFault: an assertion failed in it, or it had a race. Its writes stay.
            DeviceError: the software GPU cannot run it.
        """
        if message := _PROCESS.value:
            _PROCESS[0] = b"\0"
            text = with_names(message.decode(errors="replace"), self._path)
            text = text.replace("<hint>", f". {hint()}")
            sentence = f"the kernel {self.name}: {text}"
            if text.startswith(_NO_FAULTS):
                raise DeviceError(sentence)
            status = ASSERT if _ASSERTION.search(text) else LAUNCH_FAILURE
            tool = next((tool for tool, words in _TOOLS.items() if words in text), None)
            raise KernelFault(status, sentence, None if tool is None else Finding(tool, self.name))

    def line_of(self, place: int) -> str:
        """Return the line in the program's source just before an address in its code."""
        return line_at(place - 1, self._path)

    def misaligned(self) -> list[Misaligned]:
        """Return and clear the misaligned accesses.

        Only the first one at each code position, if compiled for checked mode.
        """
        if self._misaligned is None:
            return []
        count, places = self._misaligned
        found = [
            Misaligned(each.place, each.alignment, each.is_write != 0, each.address)
            for each in places[: count.value]
        ]
        count.value = 0
        return found

    def ranges(self, given: int) -> list[tuple[int, int, str]]:
        """Return each pointer argument's range (high is 0 if unknown) and use.

        The use is ``"r"``, ``"w"`` or ``"rw"``.
        """
        count = self._reach(given, ctypes.addressof(self._ranges))
        found = [(r.low, r.high) for r in self._ranges[:count]]
        return [(*r, use) for r, use in zip(found, self.uses, strict=True) if r[0]]

    @property
    def address(self) -> int:
        """Return the address of the kernel's code."""
        return ctypes.cast(self._run, ctypes.c_void_p).value or 0

    def pointers(self, given: int) -> list[tuple[tuple[int, str], int]]:
        """Return each pointer parameter's number, text and value; 0 for an empty array."""
        self.ranges(given)
        texts = enumerate(text.strip().removeprefix(WRITTEN) for text in self._texts)
        pairs = zip(texts, self._ranges, strict=False)
        return [(it, found.low) for it, found in pairs if found.low or POINTER.search(it[1])]

    def captured(self, given: int) -> Captured:
        """Copy the arguments, but not the memory they point to."""
        sizes = (ctypes.c_uint * max(1, len(self.uses)))()
        count = self._sizes(ctypes.addressof(sizes))
        return Captured((ctypes.c_void_p * max(1, count)).from_address(given), sizes[:count])


class Misaligned(NamedTuple):
    """An access whose address is not a multiple of its type's alignment, in bytes."""

    place: int
    alignment: int
    is_write: bool
    address: int


class Captured:
    """Copied arguments of a launch; ``address`` points to their addresses."""

    def __init__(self, given: Any, sizes: Sequence[int]) -> None:
        places = list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
        self._memory = ctypes.create_string_buffer(places[-1] + ALIGNMENT)
        start = -(-ctypes.addressof(self._memory) // ALIGNMENT) * ALIGNMENT
        self._places = (ctypes.c_void_p * max(1, len(sizes)))()
        for i, size in enumerate(sizes):
            self._places[i] = start + places[i]
            ctypes.memmove(start + places[i], given[i], size)
        self.address = ctypes.addressof(self._places)


class _Place(ctypes.Structure):
    _fields_ = (
        ("place", ctypes.c_size_t),
        ("address", ctypes.c_size_t),
        ("alignment", ctypes.c_uint),
        ("is_write", ctypes.c_uint),
    )


class _Range(ctypes.Structure):
    _fields_ = (("low", ctypes.c_ulonglong), ("high", ctypes.c_ulonglong))


def share_kernels(threads: int) -> None:
    """Set the number of threads that may share a kernel."""
    ctypes.c_int.from_buffer(_PROCESS, _THREADS).value = threads


class HostSource(NamedTuple):
    """A kernel's source for the host, with its kernels and their parameters."""

    text: str
    kernels: dict[str, str]
    steps: Sequence[str]
    """Compiler options for lockstep of a warp's threads, if needed, or for checks of addresses."""


def _kernels_of(source: str, expressions: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the parameters of a source's kernels, and each kernel's C++ name."""
    code = without_macros(uncommented(source))
    found = {match[1]: match for match in KERNEL.finditer(code)}
    kernels = {
        name: _marked(source, match[2])
        for name, match in found.items()
        if _TEMPLATE.search(code, 0, match.start()) is None
    }
    named = {name: pointer_to(name, found[name][2], code) for name in kernels}
    for number, expression in enumerate(expressions):
        base = re.match(r"[\w:]+", expression)
        name = "" if base is None else base[0].rpartition("::")[2]
        if name not in found:
            raise DeviceError(f"the software GPU finds no kernel {expression!r} in its source")
        kernels[f"expression_{number}"] = found[name][2]
        named[f"expression_{number}"] = expression
    return kernels, named


def parameters_of(source: str, expressions: Sequence[str] = ()) -> dict[str, str]:
    """Return the parameters of a source's kernels without compiling it."""
    return _kernels_of(source, expressions)[0]


def _has_kernels(source: str, expressions: Sequence[str]) -> bool:
    """Tell whether a source has kernels, including the named ones."""
    try:
        return bool(_kernels_of(source, expressions)[0])
    except DeviceError:
        return False


def for_host(
    source: str,
    expressions: Sequence[str] = (),
    options: Sequence[str] = (),
    lacking: Sequence[str] = (),
    is_checked: bool = False,
) -> HostSource:
    """Rewrite CUDA C++ for a host compiler.

    Args:
        source: a program's source.
        expressions: the names of template instances.
        options: the compiler's options.
        lacking: intrinsics to leave undefined.
        is_checked: whether to check the addresses of its threads.
    """
    kernels, named = _kernels_of(source, expressions)
    code = without_macros(uncommented(source))
    first = preamble(source, expressions) + definitions(source, options)
    first += capabilities.definitions(lacking)
    hidden = [*taken(source), *macros(source, options)]
    source = translated(source)
    text = as_loops(source)
    steps: Sequence[str] = ()
    if text is not None:
        how = SHARED if may_share(source, text, kernels.values()) else ONCE
    else:
        plain = uncommented(source)
        others = [name for name in _INCLUDE.findall(plain) if not (HEADERS / name).exists()]
        steps = step_options(code, not all(map(_is_plain, others)))
        text, how = source, TOGETHER if steps or _may_wait(plain) else APART
        steps = steps or (ADDRESSES if is_checked else ())
    launch = without(hidden, '#include "umem_launch.h"\n')
    here = f'#line 1 "{SOURCE}"\n'
    text, has_shifts = clamped(saturating(text))
    parts = [first, SHIFTS if has_shifts else "", here, text, "\n", launch]
    parts += [f"UMEM_KERNEL({label}, {how}, {name})\n" for label, name in named.items()]
    return HostSource("".join(parts), kernels, steps)


def _may_wait(code: str) -> bool:
    """Tell whether a kernel's threads wait for one another, or may because of an unknown header."""
    headers = _INCLUDE.findall(code)
    return WAITS.search(code) is not None or not all(map(_is_plain, headers))


def _is_plain(header: str) -> bool:
    return _PLAIN.match(header) is not None or (TOOLKIT / header).exists()


_ARRAY = re.compile(r"(?<!const )CArray<[^<>]*(?:<[^<>]*>)?[^<>]*>\s+_raw_(\w+)")
WRITTEN = "written "
POINTER = re.compile(r"\*|^(const )?CArray\b")


def _marked(source: str, parameters: str) -> str:
    """Mark arrays that a CuPy kernel writes and never reads."""
    for name in _ARRAY.findall(parameters):
        by_name = re.search(rf"&{name} = _raw_{name}\[", source)
        stored = re.search(rf"_raw_{name}\[_ind\.get\(\)\] = {name};", source)
        uses = re.findall(rf"(?<![&\w]){name}\b\s*(=(?!=)|.)", source)
        if stored or (by_name and all(use == "=" for use in uses)):
            place = parameters.rindex("CArray", 0, parameters.index(f"_raw_{name}"))
            parameters = f"{parameters[:place]}{WRITTEN}{parameters[place:]}"
    return parameters


def use_of(parameter: str) -> str:
    """Return a pointer parameter's use: "r", "w" or "rw"."""
    return "w" if parameter.startswith(WRITTEN) else "r" if parameter.startswith("const ") else "rw"


def parts_of(parameters: str) -> list[str]:
    """Split a parameter list at its own commas, not at commas inside templates."""
    found, depth = [""], 0
    for letter in re.sub(r"//[^\n]*|/\*.*?\*/", "", parameters, flags=re.DOTALL):
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part for part in found if part.strip()]


def _warnings_of(text: str) -> str:
    """Return nvcc's warning of each line with ``long double``, by the program's file name."""
    lines = enumerate(uncommented(text).splitlines(), 1)
    return "".join(
        f"{SOURCE}({number}): warning #20208-D: 'long double' is treated as 'double' in device "
        "code\n"
        for number, line in lines
        if has_long_double(line)
    )


def _is_taken(option: str) -> bool:
    """Tell whether a compiler option applies on the host.

    These are options for lockstep of warps, and macros that are not the program's own.
    """
    if option in (*STEPS, IN_ALL_MEMORY, *ADDRESSES):
        return True
    return option.startswith("-D") and not is_its_macro(option)


class KernelCompiler:
    """Compiles CUDA C++ to shared objects for the host.

    Args:
        cuda_version: the CUDA version, such as ``12090``.

    Attributes:
        is_strict: whether to refuse the same sources as CUDA's compiler.
        is_checked: whether kernels check for misaligned addresses and different barriers.
    """

    def __init__(self, tools: Toolchain, cupy_folder: Path, cuda_version: int) -> None:
        self._tools = tools
        self.is_strict, self.is_checked = True, False
        self._limits: dict[Path, KernelLimits] = {}
        self._include = cupy_folder / "_core" / "include"
        self._theirs = (self._include, HEADERS)
        content = b"".join(path.read_bytes() for path in sorted(HEADERS.rglob("*.*h*")))
        self._name = f"umem's software GPU {hashlib.sha256(content).hexdigest()[:16]}"
        version = (cupy_folder / "_version.py").read_bytes()
        digest = hashlib.sha256(content + version).hexdigest()[:16]
        cuda = f"-D{CUDA_MAJOR}={cuda_version // 1000}"
        self._own = (f"-DUMEM_HEADERS_{digest}", cuda, "-fno-exceptions")

    @property
    def name(self) -> str:
        """Return a name that depends on the headers and on the refusals.

        CuPy caches compiled code under this name.
        """
        return self._name if self.is_strict else f"{self._name}, not strict"

    def compile(
        self,
        source: str,
        options: Sequence[str],
        expressions: Sequence[str] = (),
        in_headers: bool = False,
    ) -> tuple[Path, dict[str, str]]:
        """Return a source's shared object, and its kernels' parameters.

        Args:
            source: CUDA C++.
            options: NVRTC's options.
            expressions: names of template instances.
            in_headers: also finds kernels in the program's own headers, which are searched anyway
                if the source has no kernels.

        Raises:
            DeviceError: the compiler refuses the source; the message contains the compiler's.
        """
        text = self.expanded(source, options, expressions, in_headers)
        try:
            found = self._with_double(text, options, expressions)
        except DeviceError:  # of a header, perhaps, which g++ gets as it is
            whole = self.expanded(source, options, expressions, in_headers=True)
            if whole == text:
                raise
            text = whole
            found = self._with_double(text, options, expressions)
        if found[0] not in self._limits:
            static = static_memory(text, found[0], found[1], expressions)
            bounds = launch_bounds(text, options, expressions)
            self._limits[found[0]] = KernelLimits(bounds, static)
        if self.is_strict:
            self._limits[found[0]].static.check()
        return found

    def limits(self, path: Path) -> KernelLimits:
        """Return the limits of the kernels in a shared object."""
        return self._limits[path]

    def _with_double(
        self, source: str, options: Sequence[str], expressions: Sequence[str]
    ) -> tuple[Path, dict[str, str]]:
        """Compile a source with double for ``long double``.

        Except for a program that has a function for each of both types.
        """
        try:
            return self._compiled(without_long_double(source), options, expressions)
        except DeviceError:
            if not has_long_double(source):
                raise
        return self._compiled(source, options, expressions)

    def _compiled(
        self, source: str, options: Sequence[str], expressions: Sequence[str]
    ) -> tuple[Path, dict[str, str]]:
        """Compile a source, after expanding macros that hide kernels."""
        lacking: Sequence[str] = ()
        if self.is_strict and capabilities.names_any(source):
            lacking = capabilities.absent(uncommented(source), options)
        made = for_host(source, expressions, options, lacking, self.is_checked)
        if not ctypes.c_void_p.from_buffer(_PROCESS, _HANDLE).value:
            self._handle_divisions()
        if can_step(self._tools.version):
            options = (*options, *made.steps)
        given, places = self._options(options), partial(self._places, source, options)
        try:
            path = self._tools.shared_object(made.text, "c++", given, places)
        except DeviceError as error:
            if VARIABLE_ARRAY not in str(error) or self.is_strict:
                raise DeviceError(self._explained(str(error), options)) from None
            given = [*given, NO_VARIABLE_ARRAY]
            path = self._tools.shared_object(made.text, "c++", given, places)
        compiled.update({path} & self._tools.made)
        return path, made.kernels

    @staticmethod
    def _explained(message: str, options: Sequence[str]) -> str:
        """Return the compiler's message, with the option that turns off CUDA's refusals."""
        if VARIABLE_ARRAY in message:
            message = f"{message}\n{hint()}"
        return capabilities.explained(message, options)

    def warnings(self, source: str, options: Sequence[str], expressions: Sequence[str] = ()) -> str:
        """Return the compiler's warnings on a source."""
        text = self.expanded(source, options, expressions)
        made = for_host(without_long_double(text), expressions, options)
        given = (*self._places(source, options), *self._options(options))
        return _warnings_of(text) + self._tools.remarks(made.text, "c++", given)

    def expanded(
        self,
        source: str,
        options: Sequence[str],
        expressions: Sequence[str] = (),
        in_headers: bool = False,
    ) -> str:
        """Expand macros if they hide kernels, or headers if it has no kernels; raises for PTX."""
        source = with_registers(source)
        text = self._without_macros(source, options)
        if not in_headers and _has_kernels(text, expressions):
            return text
        whole = with_headers(source, folders_of(options, self._theirs))
        return text if whole == source else self._without_macros(with_registers(whole), options)

    def _without_macros(self, source: str, options: Sequence[str]) -> str:
        if not needs_expansion(uncommented(source), options):
            return source
        its = (option for option in options if option.startswith("-D"))
        given = ["-E", "-dD", *its, *of_compiler(source, options)]
        made = with_includes(self._tools.preprocessed(without_includes(source), given))
        refuse_assembly(uncommented(made))
        return made

    def foreign_header(self, source: str, options: Sequence[str]) -> tuple[int, str] | None:
        """Return the line and name of a header that NVRTC would not find, if any."""

        def preprocessed(source: str, given: Sequence[str]) -> str:
            return with_includes(self._tools.preprocessed(without_includes(source), ["-E", *given]))

        return foreign_header(source, options, self._theirs, preprocessed)

    def _handle_divisions(self) -> None:
        """Load the handler of divisions by zero, shared by all kernels of the process."""
        text = '#include "umem_divisions.h"\n'
        path = self._tools.shared_object(text, "c++", self._own, lambda: [f"-I{HEADERS}"])
        found = ctypes.cast(ctypes.CDLL(str(path)).umem_handle, ctypes.c_void_p)
        ctypes.c_void_p.from_buffer(_PROCESS, _HANDLE).value = found.value

    def _options(self, options: Sequence[str]) -> list[str]:
        # A program's folders come last: the C library's headers are meant where it has some, too.
        folders = folders_of(options, self._theirs)
        given = [*self._own, *CHECKED * self.is_checked, *filter(_is_taken, options)]
        given += [f"{AFTER}{each}" for each in folders]
        return [*given, "-ffp-contract=off"] if NO_CONTRACTION & {*options} else given

    def _places(self, source: str, options: Sequence[str]) -> list[str]:
        """Return the options for umem's precompiled headers and for CuPy's."""
        places = [f"-I{HEADERS}", f"-I{self._include}"]
        places += [f"-I{self._include / 'cupy' / '_cccl' / name}" for name in CCCL]
        places.append(f"{AFTER}{TOOLKIT}")
        prefix = PREFIX if "cupy/" in source else PREFIX[:1]
        text = "".join(f"#include <{name}>\n" for name in prefix)
        given = [option for option in self._options(options) if not option.startswith(AFTER)]
        header = self._tools.header(text, [*places, *given])
        return ["-include", str(header), *places]
