"""Replaces C++ functions inside CuPy's compiled modules.

The dynamic linker also resolves a module's own functions, and first searches libraries loaded for
the whole process. So a library with functions of the same names, loaded before the module, takes
precedence. Models: functions that return nothing.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from umem.errors import DeviceError
from umem.host_cuda.linking import symbols
from umem.host_cuda.toolchain import Toolchain

_TYPES = {
    "i": ("int", "i"), "j": ("unsigned", "I"), "l": ("long", "l"), "m": ("unsigned long", "k"),
}  # fmt: skip
"""C type and Python conversion for each letter in a C++ symbol."""


class Overrides:
    """Replacements of C++ functions that call Python; exceptions reach the caller in Python.

    Args:
        module: the compiled module, before its import.
        functions: by name, the letters of each function's arguments, as in C++ symbols, for one or
            several versions of CuPy.
        kind: a pattern of symbols of functions that must all be known here.

    Raises:
        MissingDependencyError: ``nm``, which belongs to the compiler, is missing.
        DeviceError: the module lacks a function, or has unknown functions of this kind.
    """

    def __init__(
        self, module: Path, functions: Mapping[str, Iterable[str]], kind: str, tools: Toolchain
    ) -> None:
        known = {
            f"_Z{len(name)}{name}{letters}": (name, letters)
            for name, versions in functions.items()
            for letters in versions
        }
        listed = [line.split() for line in symbols(tools, "--defined-only", module)]
        own = {name for _, how, name in listed if how == "T"}
        other = {name for name in own if re.fullmatch(kind, name)} - known.keys()
        other |= functions.keys() - {known[name][0] for name in own & known.keys()}
        if other:
            raise DeviceError(f"{module.name} has unknown functions: {sorted(other)}")
        self._names = [name for name, _ in known.values()]
        parts = [
            "typedef struct _object PyObject; void Py_DecRef(PyObject *);\n"
            "PyObject *PyObject_CallFunction(PyObject *, const char *, ...);\n"
            f"PyObject *umem_overrides[{len(known)}];\n"
        ]
        parts += [_function(number, *each) for number, each in enumerate(known.items())]
        script = tools.text_file("{ global: umem_overrides; _Z*; local: *; };\n", ".map")
        made = tools.shared_object("".join(parts), "c", [f"-Wl,--version-script={script}"])
        self._library = ctypes.PyDLL(str(made), mode=ctypes.RTLD_GLOBAL)
        self._handlers: list[Any] = []

    def redirect(self, functions: Any) -> None:
        """Redirect each function to an object's method of the same name."""
        self._handlers = [getattr(functions, name) for name in self._names]
        slots = (ctypes.py_object * len(self._names)).in_dll(self._library, "umem_overrides")
        for number, handler in enumerate(self._handlers):
            slots[number] = handler


def _function(number: int, symbol: str, known: tuple[str, str]) -> str:
    types = [_TYPES[letter] for letter in known[1]]
    taken = ", ".join(f"{text} a{i}" for i, (text, _) in enumerate(types))
    given = "".join(f", a{i}" for i in range(len(types)))
    codes = "".join(code for _, code in types)
    call = f'PyObject_CallFunction(umem_overrides[{number}], "({codes})"{given})'
    return f"void {symbol}({taken}) {{ Py_DecRef({call}); }}\n"
