"""Finds kernels whose warps must run in lockstep, and their compiler options.

Threads that run one after another give other results than threads in lockstep, if one thread reads
without a barrier data that another thread of its warp writes: in shared memory, in volatile memory,
or in an array that a thread writes at one index and reads at another. Other kernels are compiled
without lockstep, which would change nothing.

Does not model: an exchange through a global array that a kernel accesses through several
non-volatile pointers, or in functions with other names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence

LIBRARIES = ("-nodefaultlibs", "-Wl,--no-as-needed,-lstdc++,-lm,-lgcc_s")
"""Options to link a kernel without the library of -fsanitize."""
STEPS = (
    "-DUMEM_IN_STEP", "-O1", "-g1", "-fsanitize=thread", "-fsanitize-coverage=trace-pc",
    "--param=tsan-instrument-func-entry-exit=0", "--param=tsan-distinguish-volatile=1",
    "-finline-functions", "-finline-small-functions",
    # Code and accesses as they are written, in that order:
    "-fno-reorder-blocks", "-fno-tree-ch", "-fno-thread-jumps", "-fno-tree-dominator-opts",
    "-fno-tree-dse", "-fno-tree-fre", "-fno-tree-pre", "-fno-tree-sink", "-fno-tree-loop-im",
    "-fno-ssa-phiopt", "-fno-tree-cselim",
    # A kernel's variables are its own, and one thread of the machine runs it:
    "-fno-gnu-unique", "-fno-threadsafe-statics",
    *LIBRARIES,
)  # fmt: skip
"""Options for kernels whose warps run in lockstep, as in umem_steps.h."""
ADDRESSES = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")
"""Options for kernels without lockstep whose addresses are checked, as in umem_addresses.h."""
IN_ALL_MEMORY = "-DUMEM_STEPS_IN_ALL_MEMORY"
"""Option for lockstep of accesses to global memory too."""
_SHARED = re.compile(r"\b__shared__\b|(?<!asm )\bvolatile\b(?!\s*\()")
_SUBSCRIPT = re.compile(r"(\w+)\s*\[")
_IN_BLOCK = re.compile(r"\b__shared__\b[^;]*;")
_DECLARED = re.compile(r"(?<!\breturn)(?<!\belse)[\w>*&]\s+(\w+)\s*\[[^\]\n]*\]\s*(?:[=;{,]|\[)")
_FUNCTION = re.compile(r"\b__(?:global|device)__\b")
_ASSIGNED = re.compile(r"\s*(?:\.\w+\s*)?(?:(=)(?!=)|(?:[-+*/%&|^]|<<|>>)=|\+\+|--)")


def can_step(compiler: str) -> bool:
    """Tell from its version whether the compiler is g++ 12 or later, which lockstep needs."""
    found = re.findall(r" (\d+)\.\d+\.\d+", compiler.partition("\n")[0])
    return "clang" not in compiler and bool(found) and int(found[-1]) >= 12


def step_options(code: str, has_headers: bool) -> Sequence[str]:
    """Return the options for lockstep of a kernel's warps, if needed.

    Args:
        code: the source, without comments and macros.
        has_headers: whether it includes headers that were not inspected.
    """
    shared = {*_SUBSCRIPT.findall(" ".join(_IN_BLOCK.findall(code)))}
    if any(_exchanged(function) - shared for function in _FUNCTION.split(code)):
        return (*STEPS, IN_ALL_MEMORY)
    return STEPS if has_headers or _SHARED.search(code) else ()


def _exchanged(code: str) -> set[str]:
    """Return arrays that a function writes at one index and reads at another, except local ones."""
    reads: defaultdict[str, set[str]] = defaultdict(set)
    writes: defaultdict[str, set[str]] = defaultdict(set)
    for name, place, is_read, is_written in _accesses(code):
        if is_read:
            reads[name].add(place)
        if is_written:
            writes[name].add(place)
    both = ({*reads} & {*writes}).difference(_DECLARED.findall(code))
    return {name for name in both if len(reads[name] | writes[name]) > 1}


def _accesses(code: str) -> Iterator[tuple[str, str, bool, bool]]:
    """Return the subscripted names in code, with position and whether read or written."""
    for found in _SUBSCRIPT.finditer(code):
        depth, end = 1, found.end()
        while depth and end < len(code):
            depth += {"[": 1, "]": -1}.get(code[end], 0)
            end += 1
        place = re.sub(r"\s", "", code[found.end() : end - 1])
        assigned = _ASSIGNED.match(code, end)
        yield found[1], place, assigned is None or not assigned[1], assigned is not None
