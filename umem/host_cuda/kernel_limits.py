"""Limits of a kernel, from its source: threads of a block, static memory.

Bounds are evaluated as text, so that they do not change a kernel's code. Sizes of variables come
from the symbols in its shared object. A kernel has the variables that its function names, or any
function that it reaches by name. An undetermined limit is None, and refuses nothing.

Does not model: registers; the layout of shared memory; variables in the program's own headers.
"""

from __future__ import annotations

import ast
import ctypes
import operator
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from umem.errors import DeviceError
from umem.host_cuda.dialect import KERNEL, uncommented, without_macros
from umem.host_cuda.strictness import hint

STATIC_SHARED_BYTES, CONSTANT_BYTES = 48 << 10, 64 << 10
"""The most static shared memory and constant memory of a kernel, on every capability."""
_BOUNDS = re.compile(r"__launch_bounds__\s*\(")
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+([^\n]+)$", re.MULTILINE)
_NUMBER = re.compile(r"\b(?:const|constexpr)\s+(?:static\s+)?[\w\s]*?(\w+)\s*=\s*([^;,{}]+);")
_ENUM = re.compile(r"\benum\b[^{};]*\{([^{}]*)\}")
_TEMPLATE = re.compile(r"\btemplate\s*<([^;{}]*)>[^;{}]*$")
_SUFFIX = re.compile(r"\b(0[xX][\da-fA-F]+|\d+)[uUlL]*\b")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: operator.floordiv, ast.Mod: operator.mod, ast.LShift: operator.lshift,
    ast.RShift: operator.rshift, ast.BitOr: operator.or_, ast.BitAnd: operator.and_,
}  # fmt: skip
MOST_NESTED = 16
"""Most nesting of definitions; deeper nesting is circular."""

# -- launch bounds ---------------------------------------------------------------------------------


def launch_bounds(
    source: str, options: Sequence[str], expressions: Sequence[str]
) -> dict[str, int]:
    """Return the most threads of a block by kernel, where the source declares them."""
    if "__launch_bounds__" not in source:
        return {}
    plain = uncommented(source)
    code, known = without_macros(plain), _definitions(plain, options)
    found: dict[str, int] = {}
    for match in KERNEL.finditer(code):
        start = max(code.rfind(end, 0, match.start()) for end in ";}") + 1
        head = code[start : match.end(1)]
        bounds = _BOUNDS.search(head)
        if bounds is None:
            continue
        text = _arguments(head, bounds.end())[0]
        template = _TEMPLATE.search(head[: match.start() - start])
        instances = [] if template else [(match[1], match[1])]
        instances += [
            (f"expression_{i}", one) for i, one in enumerate(expressions) if base(one) == match[1]
        ]
        for label, instance in instances:
            given = _instance(template[1], instance) if template else {}
            value = _value(text, {**known, **given})
            if value is not None:
                found[label] = value
    return found


def base(expression: str) -> str:
    """Return the kernel's name in an expression, without namespaces and arguments."""
    return expression.partition("<")[0].strip("&( )").rpartition("::")[2]


def _definitions(plain: str, options: Sequence[str]) -> dict[str, str | None]:
    """Return the constants of a source and its options; None for a constant with several values."""
    pairs = [option[2:].partition("=") for option in options if option.startswith("-D")]
    found: dict[str, str | None] = {name: text for name, is_given, text in pairs if is_given}
    enums = (part for each in _ENUM.finditer(plain) for part in each[1].split(","))
    values = [part.partition("=") for part in enums]
    named = [(name.strip(), text) for name, is_given, text in values if is_given]
    for pattern in (_MACRO, _NUMBER):
        named += [(each[1], each[2]) for each in pattern.finditer(plain)]
    for name, text in named:
        found[name] = text.strip() if name not in found else None
    return found


def _arguments(text: str, start: int, brackets: str = "()") -> list[str]:
    """Split the contents of the brackets that are open at a position."""
    opening, closing = brackets[::2], brackets[1::2]
    found, depth = [""], 0
    for letter in text[start:]:
        depth += (letter in opening) - (letter in closing)
        if depth < 0:
            break
        if letter == "," and not depth:
            found.append("")
        else:
            found[-1] += letter
    return found


def _instance(parameters: str, expression: str) -> dict[str, str | None]:
    """Return the values of a template's parameters in an instance."""
    names = [part.partition("=")[0].split() for part in _arguments(parameters, 0, "()<>")]
    _, is_given, rest = expression.partition("<")
    given = _arguments(rest, 0, "()<>") if is_given else []
    texts = [*given, *[None] * len(names)]
    return {words[-1]: text for words, text in zip(names, texts, strict=False) if words}


def _value(text: str | None, known: Mapping[str, str | None], depth: int = 0) -> int | None:
    """Return the value of an expression of whole numbers; None if it cannot be evaluated."""
    if text is None or depth > MOST_NESTED:
        return None
    try:
        return _number(ast.parse(_SUFFIX.sub(r"\1", text.strip()), mode="eval").body, known, depth)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _number(node: ast.expr, known: Mapping[str, str | None], depth: int) -> int | None:
    """Return the value of a part of an expression; None if it cannot be evaluated."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return _value(known.get(node.id), known, depth + 1)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = (_number(side, known, depth) for side in (node.left, node.right))
        if left is not None and right is not None:
            return _OPERATORS[type(node.op)](left, right)
    return None


# -- static memory ---------------------------------------------------------------------------------

_SHARED = re.compile(r"\b__shared__\b([^;]*);")
_EXTERN = re.compile(r"\bextern\s+(?:\"C\"\s*)?__shared__\b[^;]*;")
_CONSTANT = re.compile(r"\b__constant__\b([^;={]*)[;={]")
_FUNCTION = re.compile(
    r"\b(\w+)\s*\((?:[^;{}()]|\((?:[^;{}()]|\([^;{}()]*\))*\))*\)\s*(?:const\b|noexcept\b|\s)*\{"
)
_NO_FUNCTIONS = frozenset({"if", "for", "while", "switch", "catch"})
_OTHERS = re.compile(r"#\s*include\s*[<\"](cub|thrust|cuda)/|\b_sdata_raw\b")
"""Memory whose size differs from a GPU's: of CUDA's classes, and of CuPy's reductions."""


class StaticMemory(NamedTuple):
    """The static memory of a source's kernels.

    Attributes:
        shared: bytes of shared memory by kernel; without kernels whose size is unknown.
        constant_bytes: bytes of constant memory of all kernels together.
    """

    shared: dict[str, int]
    constant_bytes: int

    def check(self) -> None:
        """Raise if the memory exceeds CUDA's limits.

        Raises:
            DeviceError: with ptxas' message, as in NVRTC's log.
        """
        for name, nbytes in self.shared.items():
            if nbytes > STATIC_SHARED_BYTES:
                self._refuse(f"Entry function '{name}' uses too much shared data", nbytes)
        if self.constant_bytes > CONSTANT_BYTES:
            self._refuse("File uses too much global constant data", self.constant_bytes)

    @staticmethod
    def _refuse(text: str, nbytes: int) -> None:
        most = CONSTANT_BYTES if "constant" in text else STATIC_SHARED_BYTES
        raise DeviceError(f"ptxas error   : {text} ({nbytes:#x} bytes, {most:#x} max)\n{hint()}")


class KernelLimits(NamedTuple):
    """The limits of a source's kernels.

    Attributes:
        bounds: the most threads of a block by kernel, if a kernel declares it.
        static: their static memory.
    """

    bounds: dict[str, int]
    static: StaticMemory


def static_memory(
    source: str, path: Path, kernels: Iterable[str], expressions: Sequence[str]
) -> StaticMemory:
    """Return the static memory of the kernels of a compiled source."""
    if not ("__shared__" in source or "__constant__" in source):
        return StaticMemory(dict.fromkeys(kernels, 0), 0)
    plain = uncommented(source)
    if _OTHERS.search(plain):
        return StaticMemory({}, 0)
    code = without_macros(plain)
    shared = _words(_SHARED.findall(_EXTERN.sub("", code)))
    constant = _words(_CONSTANT.findall(code)) - shared
    sizes = _sizes(path, shared | constant)
    bodies, found, in_constants = _bodies(code), dict[str, int](), dict[str, int]()
    for label in kernels:
        number = label.removeprefix("expression_")
        name = base(expressions[int(number)]) if number != label else label
        reached = _reached(name, bodies)
        mine = {key: size for key, size in sizes.items() if (key[0] or key[1]) in reached}
        found[label] = sum(size for key, size in mine.items() if key[1] in shared)
        in_constants.update({key[1]: size for key, size in mine.items() if key[1] in constant})
    return StaticMemory(found, sum(in_constants.values()))


def _words(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in re.findall(r"\w+", text)}


def _bodies(code: str) -> dict[str, set[str]]:
    """Return the words in each function of a source, by its name."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for match in _FUNCTION.finditer(code):
        if match[1] not in _NO_FUNCTIONS:
            depth, end = 1, match.end()
            for end in (brace.start() for brace in re.finditer("[{}]", code[match.end() :])):
                depth += 1 if code[match.end() + end] == "{" else -1
                if not depth:
                    break
            found[match[1]] |= _words([code[match.end() : match.end() + end]])
    return found


def _reached(name: str, bodies: Mapping[str, set[str]]) -> set[str]:
    """Return the words that a function reaches, its name included."""
    found, left = {name}, [name]
    while left:
        new = bodies.get(left.pop(), set()) - found
        found |= new
        left += [word for word in new if word in bodies]
    return found


def _sizes(path: Path, names: Set[str]) -> dict[tuple[str, str], int]:
    """Return the sizes of variables in a shared object, by function, which may be "", and name.

    For instances of a template and overloads it is the least size.
    """
    by_signature: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    wanted = [name.encode() for name in names]
    for symbol, size in _variables(path.read_bytes()):
        if not any(name in symbol for name in wanted):
            continue
        where, _, name = _demangled(symbol).rpartition("::")
        if name in names:
            function = _ARGUMENTS.sub("", where).partition("(")[0].split("::")[-1].split()
            by_signature[function[-1] if function else "", where, name] += size
    found: dict[tuple[str, str], int] = {}
    for (function_name, _, name), size in by_signature.items():
        key = (function_name, name)
        found[key] = min(size, found.get(key, size))
    return found


_ARGUMENTS = re.compile(r"<[^()]*>")
"""A template's arguments; with several templates, everything from the first to the last."""
_LOCAL = b"_ZZ"


@cache
def _demangler() -> tuple[Any, Any]:
    """Return the functions of libstdc++ and libc that demangle a symbol, and free the result."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    demangle.argtypes = [ctypes.c_char_p, *[ctypes.c_void_p] * 3]
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    return demangle, free


def _demangled(symbol: bytes) -> str:
    """Return a demangled symbol; outside functions without its namespaces."""
    demangle, free = _demangler()
    place = demangle(symbol, None, None, None) if symbol.startswith(b"_Z") else None
    if not place:
        return symbol.decode(errors="replace")
    text = ctypes.string_at(place).decode(errors="replace")
    free(place)
    return text if symbol.startswith(_LOCAL) else text.rpartition("::")[2]


_OBJECT, _SYMBOLS = 1, 2
"""STT_OBJECT and SHT_SYMTAB, from elf.h."""


def _variables(image: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the names and sizes of the variables in a 64-bit shared object."""
    (first,), (size, count) = (
        struct.unpack_from("<Q", image, 0x28), struct.unpack_from("<HH", image, 0x3A),
    )  # fmt: skip
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, first + i * size) for i in range(count)]
    for section in sections:
        if section[1] != _SYMBOLS:
            continue
        names = sections[section[6]][4]
        table = image[section[4] : section[4] + section[5]]
        for name, info, _, _, _, nbytes in struct.iter_unpack("<IBBHQQ", table):
            if info & 15 == _OBJECT and nbytes:
                end = image.index(b"\0", names + name)
                yield image[names + name : end], nbytes
