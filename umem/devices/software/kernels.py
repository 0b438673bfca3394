"""Compiles the kernels that CuPy writes for a GPU, for this machine's processor.

CuPy has one Python function that turns CUDA C++ into a module. Here the same source goes to a C++
compiler, between a header that has what kernels use of CUDA and one that runs a kernel over its
grid. C++ source only: no machine code and no PTX is read.

A kernel runs in one of three ways. One whose threads share a loop (``CUPY_FOR``, which divides the
elements among them) runs it as one thread, and so does one of CuPy's reductions, whose threads add
up in shared memory what each has found. Otherwise threads run one after another, as fibers where
they wait for one another, or where the threads of a warp are to run in step (`warps.py`).
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

from umem.devices.software.dialect import (
    BOUNDS,
    CUDA_MAJOR,
    KERNEL,
    definitions,
    is_its_macro,
    macros,
    needs_expansion,
    pointer_to,
    preamble,
    refuse_assembly,
    saturating,
    taken,
    translated,
    uncommented,
    with_includes,
    without,
    without_includes,
    without_macros,
)
from umem.devices.software.faults import ASSERT, LAUNCH_FAILURE, KernelFault
from umem.devices.software.races import SOURCE, with_names
from umem.devices.software.sharing import may_share
from umem.devices.software.templates import WAITS, as_loops
from umem.devices.software.toolchain import Toolchain
from umem.devices.software.warps import IN_ALL_MEMORY, STEPS, can_step, step_options
from umem.errors import DeviceError

HEADERS = Path(__file__).parent / "include"
ONCE, APART, TOGETHER, SHARED = range(4)
"""Ways to run a kernel, as in umem_launch.h."""
CCCL = ("cub", "thrust", "libcudacxx")
"""CUDA's C++ library headers that CuPy brings."""
PREFIX = (
    "umem_cuda.h", "umem_static.h", "cupy/complex.cuh", "cupy/carray.cuh", "cupy/atomics.cuh",
    "cupy/math_constants.h", "umem_loops.h",
)  # fmt: skip
"""The includes of nearly all of CuPy's kernels, which are precompiled."""
ALIGNMENT = 64
"""Alignment of copied arguments in bytes, enough for any type."""
NO_CONTRACTION = {"-fmad=false", "--fmad=false"}
"""Options under which products are rounded before they are added."""
_TEMPLATE = re.compile(r"\btemplate\s*<[^;{}]*>\s*(?:(?:static|inline|void)\s+|" + BOUNDS + r")*$")
_PLAIN = re.compile(
    r"cupy/|cuda/std/|std\w+\.h|(math|float|limits|assert|string)\.h|cuda_(bf|fp)16\.h"
    r"|curand_kernel\.h|cuComplex\.h|math_constants\.h|\w+$"
)
_INCLUDE = re.compile(r"^\s*#\s*include\s*[<\"]([^>\"]+)", re.MULTILINE)
_ASSERTION = re.compile(r"^block \(.*\): the assertion .* failed$", re.DOTALL)
_NO_FAULTS = ("the software GPU", "there is no memory", "a block has")
"""Beginnings of what a kernel says that cannot be run here: no faults of CUDA's."""
_PROCESS = ctypes.create_string_buffer(1024)
"""State that kernels share, as in umem_process.h; it begins with the reason of an early end."""
_THREADS = 520
"""Offset of the number of threads that may share a kernel."""
_Sizes = ctypes.c_uint * 6
_BLOCK = 12
"""Offset of the block's sizes behind the grid's."""
_HANDLE = 512
"""Offset of the function that handles divisions by zero."""
_IS_CHECKED = 544
"""Offset of the flag that makes races of shared memory errors."""


def report_races() -> None:
    """Make races of shared memory errors, for all kernels of the process."""
    _PROCESS[_IS_CHECKED] = b"\1"


class Kernel:
    """A compiled kernel: how to run it, and what its parameters read and write."""

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
        shared = ctypes.c_void_p.in_dll(library, "umem_process")
        shared.value = ctypes.addressof(_PROCESS)

    def run(self, grid: Sequence[int], block: Sequence[int], shared_bytes: int, given: int) -> None:
        """Run it over a grid; ``given`` points to the arguments' addresses.

        Raises:
            KernelFault, DeviceError: as `check` does.
        """
        sizes = _Sizes(*grid, *block)
        place = ctypes.addressof(sizes)
        self._run(given, place, place + _BLOCK, shared_bytes)
        self.check()

    def check(self) -> None:
        """Raise the error with which the kernel ended, if any.

        Raises:
            KernelFault: an assertion in it failed, or it had a race. What it wrote stays.
            DeviceError: the software GPU cannot run it.
        """
        if said := _PROCESS.value:
            _PROCESS[0] = b"\0"
            text = with_names(said.decode(errors="replace"), self._path)
            sentence = f"the kernel {self.name}: {text}"
            if text.startswith(_NO_FAULTS):
                raise DeviceError(sentence)
            raise KernelFault(ASSERT if _ASSERTION.search(text) else LAUNCH_FAILURE, sentence)

    def ranges(self, given: int) -> list[tuple[int, int, str]]:
        """Return each pointer argument's range (high 0: unknown) and use.

        The use is ``"r"``, ``"w"`` or ``"rw"``.
        """
        count = self._reach(given, ctypes.addressof(self._ranges))
        found = [(r.low, r.high) for r in self._ranges[:count]]
        return [(*r, use) for r, use in zip(found, self.uses, strict=True) if r[0]]

    @property
    def address(self) -> int:
        """Return the address of its code."""
        return ctypes.cast(self._run, ctypes.c_void_p).value or 0

    def pointers(self, given: int) -> list[tuple[tuple[int, str], int]]:
        """Return each pointer parameter by number and text, with its value: 0 of an empty array."""
        self.ranges(given)
        texts = enumerate(text.strip().removeprefix(WRITTEN) for text in self._texts)
        pairs = zip(texts, self._ranges, strict=False)
        return [(it, found.low) for it, found in pairs if found.low or POINTER.search(it[1])]

    def captured(self, given: int) -> Captured:
        """Copy the arguments, not what they point to."""
        sizes = (ctypes.c_uint * max(1, len(self.uses)))()
        count = self._sizes(ctypes.addressof(sizes))
        return Captured((ctypes.c_void_p * max(1, count)).from_address(given), sizes[:count])


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
    """Compiler options by which the threads of a warp run in lockstep, if needed."""


def _kernels_of(source: str, expressions: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the parameters of a source's kernels, and what C++ calls each."""
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
    """Return the parameters of a source's kernels, without compiling it."""
    return _kernels_of(source, expressions)[0]


def for_host(
    source: str, expressions: Sequence[str] = (), options: Sequence[str] = ()
) -> HostSource:
    """Rewrite CUDA C++ for a host compiler; ``expressions`` name template instances."""
    kernels, named = _kernels_of(source, expressions)
    code = without_macros(uncommented(source))
    first = preamble(source, expressions) + definitions(source, options)
    hidden = [*taken(source), *macros(source, options)]
    source = translated(source)
    text = as_loops(source)
    steps: Sequence[str] = ()
    if text is not None:
        how = SHARED if may_share(source, text, kernels.values()) else ONCE
    else:
        plain = uncommented(source)
        others = [name for name in _INCLUDE.findall(plain) if not (HEADERS / name).exists()]
        steps = step_options(code, not all(map(_PLAIN.match, others)))
        text, how = source, TOGETHER if steps or _may_wait(plain) else APART
    launch = without(hidden, '#include "umem_launch.h"\n')
    here = f'#line 1 "{SOURCE}"\n' if steps else ""
    parts = [first, here, saturating(text), "\n", launch]
    parts += [f"UMEM_KERNEL({label}, {how}, {name})\n" for label, name in named.items()]
    return HostSource("".join(parts), kernels, steps)


def _may_wait(code: str) -> bool:
    """Tell whether threads of a kernel wait for one another, or an unknown header may make them."""
    headers = _INCLUDE.findall(code)
    return WAITS.search(code) is not None or not all(map(_PLAIN.match, headers))


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
    """Split a parameter list at its own commas, not at those of templates."""
    found, depth = [""], 0
    for letter in re.sub(r"//[^\n]*|/\*.*?\*/", "", parameters, flags=re.DOTALL):
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return [part for part in found if part.strip()]


def _is_taken(option: str) -> bool:
    """Tell whether a compiler option applies on the host.

    Options for lockstep of warps apply, macros that are not the program's own, and include paths
    that do not replace CUDA's headers.
    """
    if option in (*STEPS, IN_ALL_MEMORY):
        return True
    if option.startswith("-I"):
        folder = Path(option[2:])
        return folder != HEADERS and not (folder / "driver_types.h").exists()
    return option.startswith("-D") and not is_its_macro(option)


class KernelCompiler:
    """Compiles CUDA C++ to shared objects for the host.

    Args:
        cuda_version: as ``12090``.

    Attributes:
        name: differs where the headers that kernels are compiled with differ.
    """

    def __init__(self, tools: Toolchain, cupy_folder: Path, cuda_version: int) -> None:
        self._tools = tools
        self._include = cupy_folder / "_core" / "include"
        content = b"".join(path.read_bytes() for path in sorted(HEADERS.rglob("*.*h")))
        self.name = f"umem's software GPU {hashlib.sha256(content).hexdigest()[:16]}"
        version = (cupy_folder / "_version.py").read_bytes()
        digest = hashlib.sha256(content + version).hexdigest()[:16]
        cuda = f"-D{CUDA_MAJOR}={cuda_version // 1000}"
        self._own = (f"-DUMEM_HEADERS_{digest}", cuda, "-fno-exceptions")

    def compile(
        self, source: str, options: Sequence[str], expressions: Sequence[str] = ()
    ) -> tuple[Path, dict[str, str]]:
        """Return a source's shared object, and its kernels' parameters.

        Raises:
            DeviceError: the compiler refuses the source; what it says is in the message.
        """
        made = for_host(self.expanded(source, options), expressions, options)
        if not ctypes.c_void_p.from_buffer(_PROCESS, _HANDLE).value:
            self._handle_divisions()
        if can_step(self._tools.version):
            options = (*options, *made.steps)
        given, places = self._options(options), partial(self._places, source, options)
        return self._tools.shared_object(made.text, "c++", given, places), made.kernels

    def warnings(self, source: str, options: Sequence[str], expressions: Sequence[str] = ()) -> str:
        """Return the compiler's warnings on a source."""
        made = for_host(self.expanded(source, options), expressions, options)
        given = (*self._places(source, options), *self._options(options))
        return self._tools.remarks(made.text, "c++", given)

    def expanded(self, source: str, options: Sequence[str]) -> str:
        """Expand macros if they hide kernels; raises for PTX."""
        if not needs_expansion(uncommented(source), options):
            return source
        given = ["-E", "-dD", *(option for option in options if option.startswith("-D"))]
        made = with_includes(self._tools.preprocessed(without_includes(source), given))
        refuse_assembly(uncommented(made))
        return made

    def _handle_divisions(self) -> None:
        """Load the handler of divisions, which all kernels of the process share."""
        text = '#include "umem_divisions.h"\n'
        path = self._tools.shared_object(text, "c++", self._own, lambda: [f"-I{HEADERS}"])
        found = ctypes.cast(ctypes.CDLL(str(path)).umem_handle, ctypes.c_void_p)
        ctypes.c_void_p.from_buffer(_PROCESS, _HANDLE).value = found.value

    def _options(self, options: Sequence[str]) -> list[str]:
        given = [*self._own, *filter(_is_taken, options)]
        given = [option for option in given if not self._is_cupys(option)]
        return [*given, "-ffp-contract=off"] if NO_CONTRACTION & {*options} else given

    def _is_cupys(self, option: str) -> bool:
        """Tell whether an option is an include path of CuPy, which its version identifies."""
        return option.startswith("-I") and Path(option[2:]).is_relative_to(self._include)

    def _places(self, source: str, options: Sequence[str]) -> list[str]:
        """Return the options for umem's precompiled headers and for CuPy's."""
        places = [f"-I{HEADERS}", f"-I{self._include}"]
        places += [f"-I{self._include / 'cupy' / '_cccl' / name}" for name in CCCL]
        prefix = PREFIX if "cupy/" in source else PREFIX[:1]
        text = "".join(f"#include <{name}>\n" for name in prefix)
        header = self._tools.header(text, [*places, *self._options(options)])
        return ["-include", str(header), *places]
