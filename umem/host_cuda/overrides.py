"""Functions of C++ inside CuPy's compiled modules, in place of which others are called.

A module's own functions are found by the dynamic linker, too, which looks first in what is loaded
for the whole process. So a library with functions of these names, loaded before the module, stands
before what it has itself. Models: functions that return nothing.
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
"""Type and Python conversion for each letter in a C++ symbol."""


class Overrides:
    """Replacements of C++ functions that call Python; exceptions reach the caller.

    Args:
        module: the compiled module, which is not imported yet.
        functions: by name, the letters of what each takes, as symbols of C++ have them, in one or
            several versions of CuPy.
        kind: a pattern of the symbols of functions that have to be known here.

    Raises:
        MissingDependencyError: no ``nm``, which comes with the compiler.
        DeviceError: the module lacks a function, or has others of this kind.
    """

    def __init__(
        self, module: Path, functions: Mapping[str, Iterable[str]], kind: str, tools: Toolchain
    ) -> None:
        known = {
            f"_Z{len(name)}{name}{letters}": (name, letters)
            for name, versions in functions.items()
            for letters in versions
        }
        listed = [line.split() for line in symbols("--defined-only", module)]
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
        """Redirect each function to an object's method of its name."""
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
