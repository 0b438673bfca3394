"""Translates CUDA C++ to C++ that a host compiler accepts."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from functools import cache

from umem.errors import DeviceError
from umem.host_cuda.capabilities import architecture

_TYPES = ("float16", "bfloat16")
_OF_TYPE = "#if __has_include(<cupy/{0}.cuh>)\n#include <cupy/{0}.cuh>\n#endif"
"""CuPy 13 has float16 in carray.cuh."""
_TRAILING = re.compile(r",\s*>")
"""A comma after a template's last argument, which CUDA's compilers accept."""
_XSF = re.compile(r"#include <cupy/xsf/[\w/]+\.h>")
_HEADERS = (
    (re.compile(r'(#\s*include\s*)[<"]cub/[\w/]+\.cuh[>"]'), r'\1"umem_cub.h"'),
    (
        re.compile(r'(#\s*include\s*)[<"]cooperative_groups/(reduce|scan)\.h[>"]'),
        r'\1"cooperative_groups.h"',
    ),
    # No file of this name: CuPy's copy of CCCL would take it for all of CUDA.
    (re.compile(r'(#\s*include\s*)[<"]cuda_runtime_api\.h[>"]'), r'\1"driver_types.h"'),
)
"""CUDA's headers that have replacements here."""
_LOADED = re.compile(r"const (\w+_type) (\w+)\(((?:umem_at\(_|_)raw_[^;\n]*)\);")
_STORED = re.compile(
    r"^(\s*)(umem_at\(_raw_\w+, [^;=\n]*\)|_raw_\w+\[_ind\.get\(\)\]) = (\w+);", re.MULTILINE
)
_ROUNDED = re.compile(r"= \((\w+(?: \w+)?)\)rint\(([^;\n]*)\);")
"""Reads, writes and rounding in CuPy's elementwise and interpolation kernels."""
_MACROS = re.compile(r"\b(M_\w+)\s*=[^=]")
"""Variable names that <math.h> defines as macros."""
_ALIGNED = r"(?:\b(?:__align__|alignas|__attribute__)\s*\((?:[^()]|\([^()]*\))*\)\s*)"
_DYNAMIC = re.compile(
    rf"(?P<words>(?:\b(?:extern|static|__shared__|volatile|const)\s+|{_ALIGNED})+)"
    rf"(?P<type>\w[\w:<>,\s]*?)\s+{_ALIGNED}?"
    r"(?P<names>\w+\s*\[\s*\](?:\s*\[[^\]]*\])*(?:\s*,\s*\w+\s*\[\s*\])*)\s*;"
)
"""Arrays without a size, perhaps ``extern __shared__``, with these words in any order."""
_NAME = re.compile(r"(\w+)\s*\[\s*\]((?:\s*\[[^\]]*\])*)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)
"""A comment; or a string or character, which may contain something that looks like one."""
_LONG_DOUBLE = re.compile(r"\b(?:long\s+double|double\s+long)\b")
_LONG = re.compile(
    rf"{_COMMENT.pattern}|({_LONG_DOUBLE.pattern})"
    r"|\b((?:\d+\.\d*(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+))[lL]\b",
    re.DOTALL,
)
"""``long double`` and its literals, outside comments and strings."""
_MAY_BE_LONG = re.compile(rf"{_LONG_DOUBLE.pattern}|[\d.][lL]\b")
_CONDITION = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b")
_NEVER = re.compile(r"\s*#\s*if\s+(0|false)\s*$")
_BRACE = re.compile(r'(extern\s*"C"\s*|\bnamespace[\w\s:]*)?\{|\}')
_VERSION, CUDA_MAJOR = "__CUDACC_VER_MAJOR__", "UMEM_CUDA_MAJOR"
_OWN_TRAIT = re.compile(
    r"\bnamespace\s+std\s*\{\s*template\s*<[^<>]*>\s*inline\s+constexpr\s+bool\s+"
    r"(\w+)_v\s*=\s*\1\s*<[^<>]*>\s*::\s*value\s*;\s*\}"
)
"""A type trait that a program adds to std, missing in NVRTC's std but not in the host's."""
OWN = "umem_its_"
"""Prefix of renamed functions that the C library has under the same name."""
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)((?:[^\n\\]|\\.)*)", re.MULTILINE | re.DOTALL)
_OF_HEADERS = re.compile(r"-D(_|CUPY_|CUB_|THRUST_|CCCL_|LIBCUDACXX_)")
"""Options meant for CuPy's headers."""
_COMPILERS = ("__CUDACC__", "__CUDACC_RTC__")
_HIDDEN = "pragma umem "
_INCLUDING = re.compile(r"^([ \t]*#[ \t]*)(?=include\b)", re.MULTILINE)
_ASSEMBLY = re.compile(
    r"\b(?:asm|__asm__|__asm)\s*(?:(?:volatile|__volatile__)\s*)?\(\s*(?!\"\"\s*[:)]|\s)"
)
"""Inline assembly that is not empty; empty assembly is a compiler barrier, also on the host."""
_REGISTER = re.compile(
    r"\b(?:asm|__asm__|__asm)\s*(?:(?:volatile|__volatile__)\s*)?\(\s*\"mov\.[ubs](?:32|64)\s+%0\s*,"
    r"\s*%%?(laneid|warpid|lanemask_(?:eq|lt|le|gt|ge)|clock|clock64|globaltimer)\s*;\s*\""
    r"\s*:\s*\"=[rl]\"\s*\(([^()]+)\)\s*(?::[\s:]*(?:\"memory\")?\s*)?\)"
)
"""Inline assembly that reads a special register."""
BOUNDS = r"(?:__launch_bounds__|__maxnreg__)\s*\((?:[^()]|\([^()]*\))*\)\s*"
KERNEL = re.compile(
    rf"\b__global__\s+(?:(?:void|static|inline|__forceinline__)\s+|extern\s*\"C\"\s*|{BOUNDS})*"
    rf"(\w+)\s*\(([^{{;]*)\)\s*\{{"
)
"""A kernel's name and parameters."""
_DEVICE = re.compile(r"\b__(?:device|constant)__\s[^;{}()=]*?\b(\w+)\s*([(\[=;])")
_TYPEDEF = re.compile(
    r"\btypedef\s+(?P<type>[\w\s]+?)\s+(?P<name>\w+_t)\s*;"
    r"|\busing\s+(?P<other>\w+_t)\s*=\s*(?P<meant>[\w\s]+);"
)
_OTHERWISE = re.compile(
    r"u?int(?:64|ptr|max|_(?:fast|least)64)_t(?=.*\blong\s+long\b)|u?int_fast(?:16|32)_t"
    r"|int_?(?:fast|least)?8_t(?= char$)|ssize_t"
)
"""Types that this machine's <stdint.h> maps to another C type of CUDA's width and sign."""
_SHARED = frozenset(
    "abs labs llabs malloc free memcpy memset printf clock assert isnan isinf isfinite finite "
    "copysign frexp ldexp modf scalbn".split()
)
"""Functions in both libc and CUDA: a program's own versions are overloads."""
_HOSTS = frozenset({"gamma", "drem", "scalb", "significand"})
"""Functions of libm that CUDA lacks."""


def translated(source: str) -> str:
    """Translate CUDA C++ to C++ that a host compiler accepts."""
    code = uncommented(source)
    parts, at = [], 0
    for found in _DYNAMIC.finditer(code):  # a comment before it may end in one of its words
        parts += [source[at : found.start()], _dynamic(found, code)]
        at = found.end()
    source = "".join((*parts, source[at:]))
    source = _XSF.sub(r'\g<0>\n#include "umem_xsf.h"', source)
    for pattern, header in _HEADERS:
        source = pattern.sub(header, source)
    source = _OWN_TRAIT.sub(lambda m: _blank(m[0]), source)
    source = source.replace("static __shared__", "__shared__")  # which is static here
    return _TRAILING.sub(">", source)


def has_long_double(source: str) -> bool:
    """Tell whether a source names ``long double``."""
    return _LONG_DOUBLE.search(uncommented(source)) is not None


def without_long_double(source: str) -> str:
    """Make ``long double`` and its literals double, as nvcc does."""
    if not _MAY_BE_LONG.search(source):
        return source
    return _LONG.sub(lambda m: (m[1] and "double") or m[2] or m[0], source)


def saturating(source: str) -> str:
    """Make CuPy's kernels convert floats to integers as a GPU does.

    In C++ the conversion of a float that does not fit the integer is undefined. The program's own
    C++, with implicit conversions, is not changed.
    """
    source = _LOADED.sub(r"const \1 \2(umem_to<\1>(\3));", source)
    source = _STORED.sub(r"\1umem_store(\2, \3);", source)
    return _ROUNDED.sub(r"= umem_to<\1>(rint(\2));", source)


def uncommented(source: str) -> str:
    """Blank out comments and code under ``#if 0``, keeping lengths."""
    source = _COMMENT.sub(lambda m: _blank(m[0]) if m[0][0] == "/" else m[0], source)
    lines, depth = source.splitlines(keepends=True), 0
    for i, line in enumerate(lines):
        found = _CONDITION.match(line)
        word = found[1] if found else ""
        if depth:
            depth += word.startswith("if") - (word == "endif")
            if depth == 1 and word.startswith("el"):
                depth = 0
            lines[i] = line if not depth else _blank(line)
        elif word == "if" and _NEVER.match(line):
            depth = 1
    return "".join(lines)


def without_macros(code: str) -> str:
    """Blank out macro definitions, keeping lengths."""
    return _DEFINE.sub(lambda match: _blank(match[0]), code)


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _dynamic(match: re.Match[str], code: str) -> str:
    """Replace a dynamic shared array by a pointer that each launch sets."""
    words = re.findall(r"\b(?:extern|__shared__|volatile|const)\b", match["words"])
    if not {"extern", "__shared__"} <= {*words}:
        return match[0]
    opened: list[bool] = []
    for brace in _BRACE.finditer(code, 0, match.start()):
        if brace[0] != "}":
            opened.append(brace[1] is None)
        elif opened:
            opened.pop()
    kept = "".join(f"{word} " for word in words if word in ("volatile", "const"))
    made = []
    for name, sizes in _NAME.findall(match["names"]):
        kind = f"{kept}{match['type']}"
        if sizes:
            made.append(f"typedef {kind} umem_row_{name}{sizes};")
            kind = f"umem_row_{name}"
        if any(opened):
            made.append(f'{kind}* {name} = reinterpret_cast<{kind}*>(umem_dynamic("{name}"));')
        else:
            made.append(
                f'static {kind}* {name}; static UmemDynamic umem_dynamic_{name}({name}, "{name}");'
            )
    return " ".join(made)


def with_registers(source: str) -> str:
    """Replace inline assembly that reads a special register by the register's value here."""
    return _REGISTER.sub(r"\2 = umem_register_\1()", source)


def preamble(source: str, expressions: Sequence[str]) -> str:
    """Return the code to put before a source: types it only names, and names to undefine."""
    parts = []
    if "cupy/" in source:
        types = (name for name in _TYPES if re.search(rf"\b{name}\b", source))
        parts = ["#include <cupy/carray.cuh>", *map(_OF_TYPE.format, types)]
    parts += [f"#undef {name}" for name in _MACROS.findall(uncommented(source))]
    if "umem_register_" in source:
        parts.append('#include "umem_registers.h"')
    if re.search(r"\bhalf\b", "\n".join((source, *expressions))):
        parts.append("#include <cuda_fp16.h>")
    if _VERSION in source:  # after CuPy's headers, which would ask for NVIDIA's
        parts.append(f"#define {_VERSION} {CUDA_MAJOR}")
    parts += [f"#define {name} {OWN}{name}" for name in taken(source)]
    return "".join(f"{part}\n" for part in parts)


def is_its_macro(option: str) -> bool:
    """Tell whether an option defines a macro of the program, not of the headers."""
    return option.startswith("-D") and _OF_HEADERS.match(option) is None


def definitions(source: str, options: Sequence[str]) -> str:
    """Return the program's macros as source, because headers must not see names such as N.

    The same applies to macros of a GPU's compiler, under which CuPy's headers would require more
    than there is.
    """
    own = filter(is_its_macro, options)
    pairs = [option[2:].partition("=") for option in (*own, *of_compiler(source, options))]
    return "".join(f"#define {name} {value if given else 1}\n" for name, given, value in pairs)


def of_compiler(source: str, options: Sequence[str]) -> list[str]:
    """Return options that define the macros of a GPU's compiler which a source names."""
    found = [f"-D{name}=1" for name in _COMPILERS if name in source]
    here = architecture(options)
    if here is not None and "__CUDA_ARCH__" in source:
        found.append(f"-D__CUDA_ARCH__={here}0")
    return found


def macros(source: str, options: Sequence[str]) -> list[str]:
    """Return the names that a source and its options define as macros."""
    names = (option[2:].partition("=")[0] for option in options if is_its_macro(option))
    return sorted({*names, *(found[1] for found in _DEFINE.finditer(uncommented(source)))})


def without(names: Sequence[str], text: str) -> str:
    """Undefine names in a source."""
    before = (f'#pragma push_macro("{name}")\n#undef {name}\n' for name in names)
    after = (f'#pragma pop_macro("{name}")\n' for name in names)
    return "".join((*before, text, *after))


def taken(source: str) -> list[str]:
    """Return the names that a source defines differently from this machine's C library."""
    return sorted({*_taken(without_macros(uncommented(source)))})


def _taken(code: str) -> Iterator[str]:
    """Yield the names of functions and types that clash with the C library's."""
    for found in KERNEL.finditer(code):
        if _has("libc.so.6", found[1]) or _has("libm.so.6", found[1]):
            yield found[1]
    for found in _DEVICE.finditer(code):
        name, is_function = found[1], found[2] == "("
        if is_function and (name in _HOSTS or (name not in _SHARED and _has("libc.so.6", name))):
            yield name
        elif not is_function and (_has("libc.so.6", name) or _has("libm.so.6", name)):
            yield name
    for found in _TYPEDEF.finditer(code):
        name, text = found["name"] or found["other"], found["type"] or found["meant"]
        if _OTHERWISE.match(f"{name} {text}"):
            yield name


@cache
def _has(library: str, name: str) -> bool:
    """Tell whether a shared library of this machine exports a name."""
    try:
        return hasattr(ctypes.CDLL(library), name)
    except OSError:
        return False


def needs_expansion(code: str, options: Sequence[str]) -> bool:
    """Tell whether a source has assembly, or macros that generate kernels or their signatures."""
    macros = [(found[1], found[2]) for found in _DEFINE.finditer(code)]  # some of them twice
    macros += [option[2:].partition("=")[::2] for option in options if option.startswith("-D")]
    if any("__global__" in text for _, text in macros) or _ASSEMBLY.search(code):
        return True
    names, code = {name for name, _ in macros}, without_macros(code)
    kernels = (f"{found[1]} {found[2]}" for found in KERNEL.finditer(code))
    return any(word in names for text in kernels for word in re.findall(r"\w+", text))


def without_includes(source: str) -> str:
    """Hide a source's includes from the preprocessor, for `with_includes` to restore."""
    return _INCLUDING.sub(rf"\1{_HIDDEN}", source)


def with_includes(source: str) -> str:
    """Restore the includes that `without_includes` hid."""
    return source.replace(f"#{_HIDDEN}", "#")


def refuse_assembly(code: str) -> None:
    """Raise for a macro-expanded source with PTX.

    Raises:
        DeviceError: it has non-empty assembly.
    """
    if found := _ASSEMBLY.search(without_macros(code)):
        text = code[found.start() :].partition(";")[0]
        raise DeviceError(f"the software GPU cannot run inline PTX: {' '.join(text.split())[:80]}")


def pointer_to(name: str, parameters: str, source: str) -> str:
    """Return an expression for a kernel's address, even if it is overloaded."""
    if len(re.findall(rf"\b{name}\s*\(", source)) == 1:
        return name
    return f"static_cast<void (*)({parameters})>({name})"
