"""Headers of the host's compiler that CUDA's run-time compiler lacks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from umem.host_cuda.dialect import uncommented
from umem.host_cuda.included import INCLUDE, find, folders_of

HOSTS = frozenset(
    "algorithm any array atomic barrier bit bitset cassert ccomplex cctype cerrno cfenv cfloat"
    " charconv chrono cinttypes climits clocale cmath codecvt compare complex concepts"
    " condition_variable coroutine csetjmp csignal cstdarg cstdbool cstddef cstdint cstdio cstdlib"
    " cstring ctgmath ctime cuchar cwchar cwctype deque exception execution filesystem format"
    " forward_list fstream functional future initializer_list iomanip ios iosfwd iostream istream"
    " iterator latch limits list locale map memory memory_resource mutex new numbers numeric"
    " optional ostream queue random ranges ratio regex scoped_allocator semaphore set shared_mutex"
    " source_location span sstream stack stdexcept stop_token streambuf string string_view"
    " strstream syncstream system_error thread tuple type_traits typeindex typeinfo unordered_map"
    " unordered_set utility valarray variant vector version"
    " assert.h complex.h ctype.h errno.h fenv.h float.h inttypes.h iso646.h limits.h locale.h"
    " math.h setjmp.h signal.h stdalign.h stdarg.h stdatomic.h stdbool.h stddef.h stdint.h stdio.h"
    " stdlib.h stdnoreturn.h string.h tgmath.h threads.h time.h uchar.h wchar.h wctype.h"
    " alloca.h dirent.h dlfcn.h fcntl.h malloc.h memory.h poll.h pthread.h semaphore.h strings.h"
    " unistd.h x86intrin.h immintrin.h sys/mman.h sys/stat.h sys/time.h sys/types.h omp.h".split()
)
"""Headers of C, C++ and Linux that NVRTC 12.9.86 and 13.5.37 do not find.

Each was included in a kernel compiled by these with the folders of CuPy 14 and of CUDA's own
headers (nvidia-cuda-runtime 12.9.79), which bundle none of them. Other headers are accepted.
"""
OF_NVRTC = (
    "-D__CUDACC__=1", "-D__CUDACC_RTC__=1", "-D__CUDA_ARCH__=750",
    "-U__GNUC__", "-U__linux__", "-Ulinux", "-U__x86_64__", "-U__SIZEOF_INT128__",
)  # fmt: skip
"""Macros that distinguish NVRTC from a host's compiler, as in NVRTC 12.9.86."""


def foreign_header(
    source: str,
    options: Sequence[str],
    theirs: Sequence[Path],
    preprocessed: Callable[[str, Sequence[str]], str],
) -> tuple[int, str] | None:
    """Return line and name of a header that CUDA's compiler would not find, if any.

    Args:
        source: CUDA C++.
        options: NVRTC's options.
        theirs: folders of headers that do not belong to the program.
        preprocessed: removes a source's code for other compilers, given its options.
    """
    if not any(found[2] in HOSTS for found in INCLUDE.finditer(source)):
        return None
    folders = folders_of(options, theirs)
    defines = [option for option in options if option.startswith("-D")]
    code = uncommented(preprocessed(source, (*OF_NVRTC, *defines)))
    for found in INCLUDE.finditer(code):
        name = found[2]
        if name in HOSTS and find(name, found[1] == '"', None, folders) is None:
            return _line_of(source, name), name
    return None


def _line_of(source: str, name: str) -> int:
    found = re.search(rf"^\s*#\s*include\s*[<\"]{re.escape(name)}", source, re.MULTILINE)
    return 1 if found is None else source.count("\n", 0, found.end()) + 1
