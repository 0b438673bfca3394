"""Stand-ins for the links of CuPy's compiled modules: each other's functions, NVIDIA's libraries.

CuPy's modules find each other's C functions through capsules: a name, a signature as text, a
pointer (Cython, ``__pyx_capi__``). Before another module reads them, each pointer is set to a C
function generated from the signature: it calls a Python function and converts the result. The
compiler that kernels need anyway compiles these functions, without Python's headers.

Libraries have stand-ins, so that CuPy can be imported without them. Each has the functions that
CuPy's modules require. Functions that CuPy calls without capsules also call Python; all others
return the library's "not supported", but the software GPU's computations never reach them.

Models: the text of Cython 3's signatures; functions with C++ structs by value are not changed.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from umem.errors import MissingDependencyError
from umem.host_cuda.kernels import HEADERS
from umem.host_cuda.toolchain import Toolchain

_SKIP = "int __pyx_skip_dispatch"
_HEADER = """\
#include <stddef.h>
#include <stdint.h>
typedef struct _object PyObject;
extern PyObject *PyObject_CallFunction(PyObject *, const char *, ...);
extern long long PyLong_AsLongLong(PyObject *);
extern unsigned long long PyLong_AsUnsignedLongLongMask(PyObject *);
extern double PyFloat_AsDouble(PyObject *);
extern PyObject *PyErr_Occurred(void);
extern void Py_DecRef(PyObject *);
extern PyObject *Py_BuildValue(const char *, ...);
int umem_is_over;  /* Python ends: its functions are gone, and CuPy still frees its memory */
struct optional { int count; unsigned int value; };
"""


class _Type(NamedTuple):
    """A C type with its text, its conversions to and from Python, and its error value."""

    text: str
    code: str
    cast: str
    take: str
    error: str


_SIGNED, _UNSIGNED = "PyLong_AsLongLong", "PyLong_AsUnsignedLongLongMask"
_OBJECT = _Type("PyObject *", "O", "", "", "0")
_TYPES = {
    "int": _Type("int", "i", "", _SIGNED, "-1"),
    "unsigned int": _Type("unsigned int", "I", "", _UNSIGNED, "0"),
    "size_t": _Type("size_t", "K", "(unsigned long long)", _UNSIGNED, "(size_t)-1"),
    "intptr_t": _Type("intptr_t", "L", "(long long)", _SIGNED, "0"),
    "PY_LONG_LONG": _Type("long long", "L", "", _SIGNED, "-1"),
    "uintmax_t": _Type("uintmax_t", "K", "(unsigned long long)", _UNSIGNED, "0"),
    "float": _Type("float", "d", "(double)", "PyFloat_AsDouble", "0"),
    "double": _Type("double", "d", "(double)", "PyFloat_AsDouble", "0"),
    "CUdevice": _Type("int", "i", "", _SIGNED, "-1"),
    "cudaMemcpyKind": _Type("int", "i", "", _SIGNED, "-1"),
    "PyObject *": _OBJECT,
}


class Signature(NamedTuple):
    """The signature of a C function shared between modules: result, arguments, optional part."""

    result: _Type
    arguments: tuple[_Type, ...]
    has_optional: bool


def parsed(text: str) -> Signature | None:
    """Parse a capsule's signature; None for variables, and for types Python cannot hold."""
    match = re.fullmatch(r"(.*?)\s*\((.*)\)", text)
    if match is None:
        return None
    result = _type_of(match[1].strip())
    names = [name.strip() for name in match[2].split(",") if name.strip() not in ("void", _SKIP)]
    has_optional = bool(names) and names[-1].startswith("struct __pyx_opt_args")
    arguments = [_type_of(name) for name in (names[:-1] if has_optional else names)]
    if result is None or None in arguments:
        return None
    return Signature(result, tuple(a for a in arguments if a is not None), has_optional)


def _type_of(text: str) -> _Type | None:
    if text.startswith("struct __pyx_obj") and text.endswith("*"):
        return _OBJECT
    return _TYPES.get(text)


def source_of(functions: Mapping[str, tuple[str, Signature]]) -> str:
    """Return the C functions ``umem_N`` in order, which call the entries of ``umem_handlers``."""
    parts = [_HEADER, f"PyObject *umem_handlers[{max(1, len(functions))}];\n"]
    for number, (text, signature) in enumerate(functions.values()):
        parts.append(_function(number, _SKIP in text, signature))
    return "".join(parts)


def _function(number: int, has_skip: bool, signature: Signature) -> str:
    """Return the C function ``umem_N``, which calls the handler with that number.

    With ``has_skip``, Cython passes one more int, which is ignored.
    """
    result, arguments, has_optional = signature
    taken = [f"{argument.text} a{i}" for i, argument in enumerate(arguments)]
    given = "".join(f", {argument.cast}a{i}" for i, argument in enumerate(arguments))
    codes = "".join(argument.code for argument in arguments)
    taken += ["int skip"] * has_skip + ["struct optional *more"] * has_optional
    call = f'PyObject_CallFunction(umem_handlers[{number}], "({codes})"{given})'
    if has_optional:
        more = f'PyObject_CallFunction(umem_handlers[{number}], "({codes}I)"{given}, more->value)'
        call = f"more && more->count ? {more} : {call}"
    if result.code == "O":
        body = f'if (umem_is_over) return Py_BuildValue(""); return {call};'
    else:
        body = (
            "if (umem_is_over) return 0; "
            f"PyObject *found = {call}; if (!found) return {result.error}; "
            f"{result.text} value = ({result.text}){result.take}(found); Py_DecRef(found); "
            "return value;"
        )
    return f"{result.text} umem_{number}({', '.join(taken) or 'void'}) {{ {body} }}\n"


class Trampolines:
    """C functions of one module that call Python, and the capsules that point to them.

    They are never freed, because CuPy's modules keep the pointers.
    """

    def __init__(self, module: Any, tools: Toolchain) -> None:
        self._capsules = capsules = getattr(module, "__pyx_capi__", {})
        texts = {name: signature(capsule) for name, capsule in capsules.items()}
        found = {name: (text, parsed(text)) for name, text in texts.items() if "(" in text}
        functions = {name: (text, s) for name, (text, s) in found.items() if s is not None}
        path = tools.shared_object(source_of(functions), "c")
        self._library = ctypes.PyDLL(str(path))
        self._names, self._handlers = list(functions), list[Any]()
        is_over = ctypes.c_int.in_dll(self._library, "umem_is_over")
        atexit.register(lambda: setattr(is_over, "value", 1))  # after CuPy's own, which come later

    def redirect(self, handler: Callable[[str], Any]) -> None:
        """Set the functions' handlers by name; None does not change a function."""
        count = max(1, len(self._names))
        slots = (ctypes.py_object * count).in_dll(self._library, "umem_handlers")
        kept = self._handlers
        self._handlers = [handler(name) for name in self._names]
        for number, name in enumerate(self._names):
            if self._handlers[number] is None:
                continue
            slots[number] = self._handlers[number]
            pointer = ctypes.cast(getattr(self._library, f"umem_{number}"), ctypes.c_void_p)
            if _set_pointer(self._capsules[name], pointer) != 0:
                raise RuntimeError(f"the capsule of {name} takes no pointer")
        del kept  # not before: another thread may be calling one


_set_pointer = ctypes.pythonapi.PyCapsule_SetPointer
_set_pointer.restype, _set_pointer.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_void_p]
_get_name = ctypes.pythonapi.PyCapsule_GetName
_get_name.restype, _get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]


_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.restype = ctypes.c_void_p
_get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def signature(capsule: Any) -> str:
    """Return the signature of a capsule's C function, which is the capsule's name."""
    return str(_get_name(capsule).decode())


def capsule_pointer(capsule: Any) -> int:
    """Return the address of a capsule's C function."""
    return int(_get_pointer(capsule, _get_name(capsule)))


# -- libraries -----------------------------------------------------------------------------------

NOT_SUPPORTED = {
    "libcublas": 15,  # CUBLAS_STATUS_NOT_SUPPORTED
    "libcusolver": 9,  # CUSOLVER_STATUS_NOT_SUPPORTED
    "libcurand": 105,  # CURAND_STATUS_TYPE_ERROR
    "libcusparse": 10,  # CUSPARSE_STATUS_NOT_SUPPORTED
    "libcufft": 16,  # CUFFT_NOT_SUPPORTED
    "libnvrtc": 11,  # NVRTC_ERROR_INTERNAL_ERROR
    "libnccl": 5,  # ncclInvalidUsage
}
"""Each library's status for missing functions, from its header."""
FAILED = {"libcusolver": 7, "libcufft": 5, "libnccl": 3}
"""INTERNAL_ERROR of each library, from its header."""
_VERSION = "cudaRuntimeGetVersion"
"""A function of libcudart, which numba-cuda calls at its import."""
_NVRTC_ERRORS = {
    1: "NVRTC_ERROR_OUT_OF_MEMORY",
    3: "NVRTC_ERROR_INVALID_INPUT",
    5: "NVRTC_ERROR_INVALID_OPTION",
    6: "NVRTC_ERROR_COMPILATION",
    8: "NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION",
}
"""Names of possible nvrtcResult values, from nvrtc.h."""
_WITHOUT_VERSIONS = {"nccl": "libnccl.so.2"}
"""Libraries with unversioned symbols, identified by the first four letters of their functions."""
_LONGEST_TEXT = 512


class Bytes128(ctypes.Structure):
    """ncclUniqueId, from nccl.h."""

    _fields_ = (("content", ctypes.c_ubyte * 128),)


_C_TYPES: dict[str, tuple[str, Any]] = {
    "p": ("void *", ctypes.c_size_t), "i": ("int", ctypes.c_int),
    "l": ("long long", ctypes.c_longlong), "c": ("signed char", ctypes.c_byte),
    "u": ("struct bytes128", Bytes128),
}  # fmt: skip
"""C type and Python conversion for each letter of a library function's signature."""


class LibraryFailure(Exception):
    """A call failed, with a library's status and a reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Interrupt(int):
    """A status that raises an interrupt in the program once C has returned the status.

    Otherwise Python would raise the interrupt at once inside code called by C, where it is lost. An
    interrupt just as C calls Python is printed and lost.
    """

    __del__ = _thread.interrupt_main


def returning_status(
    function: Callable[..., Any], failed: Callable[[BaseException], int]
) -> Callable[..., int]:
    """Wrap a function for C, so that it returns a status and raises nothing.

    Args:
        function: returns a status, or None for success.
        failed: returns the status of an error.
    """

    def call(*arguments: Any) -> int:
        try:
            return int(function(*arguments) or 0)
        except KeyboardInterrupt as error:
            # all is well for C, where the program is sure to be interrupted right after it
            is_sure = signal.getsignal(signal.SIGINT) is signal.default_int_handler
            return _Interrupt(0 if is_sure else failed(error))
        except BaseException as error:
            return failed(error)

    return call


class StandIns:
    """Stand-ins for the libraries that CuPy's compiled modules link to; they stay loaded.

    Args:
        modules: CuPy's compiled modules.
        redirected: functions that `redirect` points at Python, with the letters of their arguments.

    Raises:
        MissingDependencyError: no ``nm``, which comes with the compiler.
    """

    def __init__(
        self, modules: Iterable[Path], tools: Toolchain, redirected: Mapping[str, str] | None = None
    ) -> None:
        self._redirected = redirected or {}
        self._callbacks: list[Any] = []
        wanted: dict[str, set[str]] = defaultdict(set)
        for line in symbols(tools, "--undefined-only", *modules):
            name, _, version = line.split()[-1].partition("@")
            unversioned = [
                lib for start, lib in _WITHOUT_VERSIONS.items() if name.startswith(start)
            ]
            library = version.strip("@") or "".join(unversioned)
            if library.partition(".so")[0] in NOT_SUPPORTED:
                wanted[library].add(name)
        self._tools = tools
        self._loaded = {
            library.partition(".so")[0]: _load(library, sorted(names), tools, self._redirected)
            for library, names in wanted.items()
        }

    def add(self, library: str, loaded: ctypes.CDLL) -> None:
        """Use a loaded library as stand-in for another."""
        self._loaded[library] = loaded

    def redirect(self, library: str, functions: Any) -> None:
        """Redirect a library's exports to an object's methods, each returning a status or None.

        A Python error cannot pass through C: CuPy raises its own. Its message contains a
        `LibraryFailure`; other errors are printed. An interrupt reaches the program when C returns
        to it.
        """
        loaded, failed = self._loaded[library], FAILED[library]
        text = (ctypes.c_char * _LONGEST_TEXT).in_dll(loaded, f"umem_{library}_said")

        def failing(error: BaseException) -> int:
            if not isinstance(error, LibraryFailure):
                sys.excepthook(type(error), error, error.__traceback__)
                return failed
            text.value = str(error).encode()[: _LONGEST_TEXT - 1]
            return int(error.status)

        for name, codes in self._redirected.items():
            method = getattr(functions, name, None)
            if method is None or not hasattr(loaded, name):
                continue

            types = [_C_TYPES[code][1] for code in codes]
            call = returning_status(method, failing)
            self._callbacks.append(ctypes.CFUNCTYPE(ctypes.c_int, *types)(call))
            slot = ctypes.c_void_p.in_dll(loaded, f"umem_{name}")
            slot.value = ctypes.cast(self._callbacks[-1], ctypes.c_void_p).value
        is_over = ctypes.c_int.in_dll(loaded, f"umem_{library}_is_over")
        atexit.register(lambda: setattr(is_over, "value", 1))

    def find(self, name: str) -> tuple[str, int]:
        """Return path and handle of a library; an empty stand-in if CuPy does not need it."""
        library = f"lib{name}"
        if library not in self._loaded:
            functions = [_VERSION] if library == "libcudart" else []
            loaded = _load(f"{library}.so.0", functions, self._tools, {})
            if functions:
                driver: Any = importlib.import_module("cupy_backends.cuda.api.driver")
                ctypes.c_int.in_dll(loaded, f"umem_{_VERSION}").value = driver.get_build_version()
            self._loaded[library] = loaded
        found = self._loaded[library]
        # Documented by ctypes, in spite of the underscores.
        return str(found._name), int(found._handle)

    def stand_in(self) -> None:
        """Make CuPy find the stand-ins where cuda-pathfinder looks for NVIDIA's libraries.

        CuPy 13 does not use that package: it finds the loaded libraries by name.
        """
        try:
            pathfinder: Any = importlib.import_module("cuda.pathfinder")
        except ModuleNotFoundError:
            return
        parts = importlib.import_module("cuda.pathfinder._dynamic_libs.load_dl_common")

        def load(name: str) -> Any:
            path, handle = self.find(name)
            return parts.LoadedDL(path, True, handle, "umem")

        pathfinder.load_nvidia_dynamic_lib = load
        # CuPy 14 compiles nothing without CUDA's headers; to look for them starts a process.
        pathfinder.find_nvidia_header_directory = lambda name: str(HEADERS)


def hide_from_numba() -> None:
    """Make Numba find no GPU, also in processes that the program starts: its kernels are PTX.

    Sets an environment variable from Numba's documentation, which Numba reads at its import.
    """
    os.environ.setdefault("NUMBA_DISABLE_CUDA", "1")
    config: Any = sys.modules.get("numba.core.config")
    if config is not None:
        config.DISABLE_CUDA = 1


def symbols(tools: Toolchain, which: str, *paths: Path) -> list[str]:
    """List libraries' imported or exported symbols, using ``nm`` with an option; one line each.

    They are kept until a library has another size or time.

    Raises:
        MissingDependencyError: no ``nm``, which comes with the compiler.
    """
    stats = [path.stat() for path in paths]
    files = [(str(p), s.st_size, s.st_mtime_ns) for p, s in zip(paths, stats, strict=True)]

    def listed() -> str:
        nm = shutil.which("nm")
        if nm is None:
            raise MissingDependencyError("the software GPU needs nm, of binutils: install g++")
        command = [nm, "-D", which, *map(str, paths)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    lines = tools.remembered(f"nm {which} {files}", listed).splitlines()
    return [line for line in lines if len(line.split()) > 1]  # no names of files


def _load(
    library: str, functions: list[str], tools: Toolchain, redirected: Mapping[str, str]
) -> ctypes.CDLL:
    """Compile and load a stand-in library that exports functions."""
    name = library.partition(".so")[0]
    text = "the software GPU has no such function"
    parts = [
        f"int umem_{name}_is_over;\nstruct bytes128 {{ unsigned char content[128]; }};\n"
        f'char umem_{name}_said[{_LONGEST_TEXT}] = "{text}";\n'
    ]
    parts += [_exported(name, function, redirected.get(function)) for function in functions]
    script = tools.text_file(f"{library} {{ global: *; }};\n", ".map")
    options = [f"-Wl,-soname,{library}", f"-Wl,--version-script={script}"]
    made = tools.shared_object("".join(parts), "c", options)
    return ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)


def _exported(library: str, name: str, codes: str | None) -> str:
    """Return the C source of one exported function, which calls its handler if there is one."""
    status = NOT_SUPPORTED.get(library, 1)
    if name == _VERSION:
        return f"int umem_{name};\nint {name}(int *v) {{ *v = umem_{name}; return 0; }}\n"
    if library == "libnvrtc" and name.endswith("GetErrorString"):
        cases = "".join(f'case {i}: return "{text}"; ' for i, text in _NVRTC_ERRORS.items())
        return (
            f"const char *{name}(int s) {{ switch (s) {{ {cases}}} return umem_{library}_said; }}\n"
        )
    if re.search("Get(Error|Status)(String|Name)$", name):
        return f"const char *{name}(int status) {{ return umem_{library}_said; }}\n"
    if codes is None:
        return f"int {name}(void) {{ return {status}; }}\n"
    types = [_C_TYPES[code][0] for code in codes]
    taken = ", ".join(f"{text} a{i}" for i, text in enumerate(types))
    given = ", ".join(f"a{i}" for i in range(len(types)))
    return (
        f"int (*umem_{name})({', '.join(types)});\n"
        f"int {name}({taken}) {{ if (umem_{library}_is_over) return 0; "
        f"return umem_{name} ? umem_{name}({given}) : {status}; }}\n"
    )
