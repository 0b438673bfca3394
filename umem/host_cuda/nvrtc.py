"""The run-time compiler: the functions of ``cupy_backends.cuda.libs.nvrtc``, under the same names.

CuPy compiles a program, caches the result and loads it, perhaps in another process. Here the result
is not machine code but the input of the compiler: source, options and names, as text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from umem.errors import DeviceError
from umem.host_cuda.kernels import KernelCompiler
from umem.host_cuda.runtime import HostRuntime
from umem.host_cuda.strictness import hint

COMPILATION = 6
"""Value of nvrtcResult, from nvrtc.h."""

STANDARD_INPUT = "<stdin>"
"""The program's name in g++'s messages."""


@dataclass
class _Program:
    """A source with its file name and compilation result."""

    source: str
    name: str
    expressions: list[str] = field(default_factory=list)
    options: tuple[str, ...] = ()
    log: str = ""


class HostNvrtc:
    """NVRTC's functions; programs are known by handle.

    Args:
        runtime: makes the handles.
        compiler: compiles for this machine's processor.
        fail: raises CuPy's error for a status.
    """

    def __init__(
        self, runtime: HostRuntime, compiler: KernelCompiler, fail: Callable[[int], None]
    ) -> None:
        self._runtime, self._compiler, self._fail = runtime, compiler, fail
        self._programs: dict[int, _Program] = {}

    def getVersion(self) -> tuple[int, int]:
        found = self._runtime.cuda_version
        return found // 1000, found % 1000 // 10

    def getSupportedArchs(self) -> list[int]:
        major, minor = (self._runtime.deviceGetAttribute(which, 0) for which in (75, 76))
        return [10 * major + minor]

    def createProgram(
        self, source: str, name: str, headers: Sequence[str], include_names: Sequence[str]
    ) -> int:
        """Register a source; returns its handle.

        Raises:
            NotImplementedError: headers are passed with the source.
        """
        if headers:
            raise NotImplementedError(
                "the software GPU reads headers from files only, not passed with a source"
            )
        handle = self._runtime.new_handle()
        self._programs[handle] = _Program(source, name)
        return handle

    def destroyProgram(self, program: int) -> None:
        self._programs.pop(program, None)

    def addNameExpression(self, program: int, name: str) -> None:
        self._programs[program].expressions.append(name)

    def compileProgram(self, program: int, options: Sequence[str]) -> None:
        """Compile a program; an error is written to its log, and raises NVRTC's error."""
        found = self._programs[program]
        found.options = tuple(options)
        if not found.source:  # CuPy asks what the compiler calls itself
            return
        try:
            self._refuse_foreign(found)
            self._compiler.compile(found.source, found.options, found.expressions)
            return
        except DeviceError as error:
            found.log = str(error).replace(STANDARD_INPUT, found.name)
        self._fail(COMPILATION)  # here, as its traceback says nothing that the log does not

    def _refuse_foreign(self, program: _Program) -> None:
        """Raise as NVRTC does for a header that only the host's compiler has."""
        if not self._runtime.is_strict:
            return
        foreign = self._compiler.foreign_header(program.source, program.options)
        if foreign is not None:
            line, name = foreign
            raise DeviceError(
                f"{STANDARD_INPUT}({line}): catastrophic error: cannot open source file "
                f'"{name}": NVRTC has no headers of the host\'s compiler. {hint()}'
            )

    def getLoweredName(self, program: int, name: str) -> str:
        return f"expression_{self._programs[program].expressions.index(name)}"

    def getProgramLog(self, program: int) -> str:
        found = self._programs[program]
        if found.log:
            return found.log
        log = self._compiler.warnings(found.source, found.options, found.expressions)
        return log.replace(STANDARD_INPUT, found.name)

    def getCUBIN(self, program: int) -> bytes:
        found = self._programs[program]
        parts = [found.source, found.options, found.expressions]
        return f"// {self._compiler.name}\n{json.dumps(parts)}".encode()

    getPTX = getCUBIN


def unpacked(image: bytes, compiler: str) -> tuple[str, list[str], list[str]] | None:
    """Parse the output of `HostNvrtc.getCUBIN`: source, options, names; None for other data."""
    first, _, rest = image.partition(b"\n")
    if first.decode(errors="replace") != f"// {compiler}":
        return None
    source, options, expressions = json.loads(rest)
    return source, options, expressions
