"""What a host's compiler does not take of CUDA C++ as it stands, or takes otherwise."""

from __future__ import annotations

import re
from collections.abc import Sequence

from umem.devices.software.runtime import CUDA_VERSION

_TYPES = ("float16", "bfloat16")
_TRAILING = re.compile(r",\s*>")
"""A comma behind a template's last argument, which CUDA's compilers take."""
_XSF = re.compile(r"#include <cupy/xsf/[\w/]+\.h>")
_MACROS = re.compile(r"\b(M_\w+)\s*=[^=]")
"""Variables with names that a host's <math.h> gives to macros."""
_DYNAMIC = re.compile(
    r"\bextern\s+__shared__\s+(?:__align__\s*\(\s*\d+\s*\)\s*)?([\w:<>, ]+?)\s+(\w+)\s*\[\s*\]\s*;"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)
"""A comment; or a string or character, which may hold what looks like one."""
_CONDITION = re.compile(r"\s*#\s*(if|ifdef|ifndef|elif|else|endif)\b")
_NEVER = re.compile(r"\s*#\s*if\s+(0|false)\s*$")
_BRACE = re.compile(r'(extern\s*"C"\s*|\bnamespace[\w\s:]*)?\{|\}')
_IN_STEP = {
    "partition_kernel(": (
        "\n    }\n\n    // Sort a[x:y].",
        "\n        // After merge step, the first k elements",
        "\n        // Finally, we merge the first k elements",
    ),
    "max_len_seq(": ("\n        state[idx] = next_state;", "\n    }\n}\n"),
}
"""Places in kernels of CuPy's before which the threads of a warp are taken to be in step."""
_VERSION = "__CUDACC_VER_MAJOR__"


def translated(source: str) -> str:
    """Write CUDA C++ as a host's compiler takes it."""
    code = uncommented(source)
    source = _DYNAMIC.sub(lambda match: _dynamic(match, code), source)
    source = _XSF.sub(r'\g<0>\n#include "umem_xsf.h"', source)
    source = source.replace("static __shared__", "__shared__")  # which is static here
    for kernel, places in _IN_STEP.items():
        for before in places if kernel in source else ():
            source = source.replace(before, f"__syncwarp();{before}")
    return _TRAILING.sub(">", source)


def uncommented(source: str) -> str:
    """Put blanks in the place of comments and of what is under ``#if 0``; lengths stay."""
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


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _dynamic(match: re.Match[str], code: str) -> str:
    """Write a pointer for an array in shared memory; at file scope each launch sets it."""
    kind, name = match.groups()
    opened: list[bool] = []
    for brace in _BRACE.finditer(code, 0, match.start()):
        if brace[0] != "}":
            opened.append(brace[1] is None)
        elif opened:
            opened.pop()
    if any(opened):
        return f"{kind}* {name} = reinterpret_cast<{kind}*>(umem_shared_memory);"
    return f"static {kind}* {name}; static UmemDynamic umem_dynamic_{name}({name});"


def preamble(source: str, expressions: Sequence[str]) -> str:
    """Write what goes before a source: types that it only names, and names that it wants free."""
    parts = []
    if "cupy/" in source:
        types = (name for name in _TYPES if re.search(rf"\b{name}\b", source))
        parts = ["#include <cupy/carray.cuh>", *(f"#include <cupy/{name}.cuh>" for name in types)]
    parts += [f"#undef {name}" for name in _MACROS.findall(source)]
    if re.search(r"\btypedef\b[^;]*\bssize_t\s*;", source):
        parts.append("#define ssize_t umem_ssize_t")
    if re.search(r"\bhalf\b", "\n".join((source, *expressions))):
        parts.append("#include <cuda_fp16.h>")
    if _VERSION in source:  # after CuPy's headers, which would ask for NVIDIA's
        parts.append(f"#define {_VERSION} {CUDA_VERSION // 1000}")
    return "".join(f"{part}\n" for part in parts)


def pointer_to(name: str, parameters: str, source: str) -> str:
    """Write what names a kernel, among other functions of its name where there are some."""
    if len(re.findall(rf"\b{name}\s*\(", source)) == 1:
        return name
    return f"static_cast<void (*)({parameters})>({name})"
