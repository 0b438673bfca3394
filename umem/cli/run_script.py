"""A program as ``__main__``, as Python would run it, and the way out of errors that umem knows."""

from __future__ import annotations

import os
import re
import sys
import threading
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING

import click

from umem._common.printable import command_line, short
from umem._common.stacks import end_at_user
from umem.cli.run_ranks import given_options
from umem.compat import lent_script, package_in_need
from umem.errors import OutOfMemoryError, StateError, UmemError, causes, is_cupys_out_of_memory
from umem.launch import this_rank

if TYPE_CHECKING:
    from umem.cli.dry_run import DryRun
    from umem.memory import Explanation


@dataclass(frozen=True)
class Program:
    """A script or module to run as ``__main__``.

    Attributes:
        argv: the way to it on a command line, with the arguments of its own.
        source: the script's text; None for a module, which is found when it runs, because that
            imports the packages above it.
    """

    argv: tuple[str, ...]
    arguments: tuple[str, ...]
    source: bytes | None

    @classmethod
    def found(cls, script: str, arguments: tuple[str, ...], *, is_module: bool) -> Program:
        """Find a program before anything is set up for it.

        Raises:
            click.BadParameter: there is no program of that name, or it cannot be read.
        """
        if is_module:
            _require_module(script)
            return cls(("-m", script, *arguments), arguments, None)
        return cls((script, *arguments), arguments, _read(Path(script)))

    @property
    def name(self) -> str:
        """Return its short name, for titles."""
        return self.argv[1] if self.source is None else Path(self.argv[0]).name

    @property
    def module_name(self) -> str | None:
        """Return the name by which a module would import the script; None for python -m."""
        return None if self.source is None else Path(self.argv[0]).stem

    @property
    def folder(self) -> str:
        """Return the folder that Python puts first on the path to run it."""
        if self.source is None:
            return os.getcwd()
        return str(Path(os.path.abspath(self.argv[0])).resolve().parent)

    def prepared_main(self) -> tuple[ModuleType, CodeType | None]:
        """Set up ``__main__``, arguments and path as Python does; returns the code, a module's
        included.

        The module stays ``__main__``: what runs at exit, or is pickled, looks there.

        Raises:
            ImportError: there is no such module, or it cannot be run.
        """
        safe = getattr(sys.flags, "safe_path", False)  # python -P, from 3.11 on
        if self.source is None:
            if not safe:
                sys.path[0] = self.folder
            sys.argv = ["-m", *self.arguments]
            module, code = _module(self.argv[1])
            sys.argv[0] = str(module.__file__)
        else:
            path = os.path.abspath(self.argv[0])
            if not safe:
                sys.path[0] = self.folder
            sys.argv = [*self.argv]
            module, code = _main_module(path), None
        sys.modules["__main__"] = module
        return module, code


def _read(script: Path) -> bytes:
    """Read a script's source.

    Raises:
        click.BadParameter: it cannot be read, or has null bytes.
    """
    try:
        source = script.read_bytes()
        if b"\0" not in source:
            return source
        problem = f"{short(script)} is not a Python script: it contains null bytes"
    except IsADirectoryError:
        problem = f"{short(script)} is a directory"
    except FileNotFoundError:
        problem = f"there is no file {short(script)}"
    except OSError as error:
        problem = f"{short(script)} cannot be read: {error.strerror}"
    raise click.BadParameter(problem, param_hint="SCRIPT")


def _require_module(name: str) -> None:
    """Refuse a module whose package does not exist, without importing."""
    top = name.partition(".")[0]
    path = sys.path if getattr(sys.flags, "safe_path", False) else [os.getcwd(), *sys.path[1:]]
    if not all(part.isidentifier() for part in name.split(".")):
        problem = f"{short(name)} is not the name of a module. Write it without .py and folders"
    elif top in sys.builtin_module_names or PathFinder.find_spec(top, path) is None:
        problem = f"Python finds no module {short(top)} from here"
    else:
        return
    raise click.BadParameter(problem, param_hint="-m")


def _module(name: str) -> tuple[ModuleType, CodeType]:
    """Find a runnable module, or its package's ``__main__``, as ``python -m`` does."""
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = _spec(name)
    code = None
    if spec is not None and spec.origin is not None and spec.loader is not None:
        code = getattr(spec.loader, "get_code", lambda _: None)(name)
    if spec is None or not isinstance(code, CodeType):
        raise ImportError(f"the module {name} does not exist, or has no code to run", name=name)
    module = ModuleType("__main__")
    module.__file__, module.__spec__, module.__loader__ = spec.origin, spec, spec.loader
    module.__package__ = spec.parent
    vars(module)["__cached__"] = spec.cached
    return module, code


def _spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)  # imports the packages above
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def run_program(
    program: Program, virtual: str | None, vram: str | None, whole: bool, dry: DryRun | None = None
) -> tuple[int | str | None, str | None]:
    """Run a program as ``__main__`` as Python would; returns its exit status and advice.

    Args:
        program: what to run.
        virtual, vram: the virtual GPU that it runs on, if any.
        whole: show umem's own part of tracebacks.
        dry: the dry run that follows it, if any, which sums up before variables are gone.
    """
    exit_code: int | str | None = 0
    hint = None
    rank = this_rank()
    path = ""
    try:
        module, code = program.prepared_main()
        path = str(module.__file__)
        code = lent_script(module, program.source, path) or code
        if code is None:
            code = compile(program.source or b"", path, "exec", dont_inherit=True)
        exec(code, module.__dict__)
    except SystemExit as stop:
        exit_code = stop.code
        if dry is not None:
            dry.exited(stop)
    except BaseException as error:
        if dry is None or dry.stopped(error) or whole:
            _show(error, path, whole)
        if rank is not None and (dry is None or dry.ended == "error"):
            rank.raised(error)
        exit_code = 130 if isinstance(error, KeyboardInterrupt) else 1
        if dry is None or dry.ended == "error":
            hint = advice(error, [*program.argv], virtual, vram)
    if dry is None or dry.ended == "script":
        _wait_for_threads()
    if dry is not None:
        exit_code = dry.sum_up()
    if rank is not None:
        rank.over(exit_code)
    return exit_code, hint


def _main_module(path: str) -> ModuleType:
    module = ModuleType("__main__")
    module.__file__, module.__spec__ = path, None
    module.__loader__ = SourceFileLoader("__main__", path)
    return module


def _show(error: BaseException, path: str, whole: bool) -> None:
    """Print the traceback as Python prints it for the script alone, by the script's own hook.

    That of an error of umem's ends at the script's own line, unless the ``whole`` is wanted.
    """
    if isinstance(error, UmemError) and not whole:
        end_at_user(error)
    frames: TracebackType | None = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != path:
        frames = frames.tb_next
    if not path and type(error) is not ImportError:
        frames = error.__traceback__  # the packages above a module, while they are imported
    sys.excepthook(type(error), error.with_traceback(frames), frames)


def _wait_for_threads() -> None:
    # Python waits too, but later: they still need what is taken away before.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


_NO_GPU = "CUDA environment is not correctly set up"
"""Start of Chainer's message that it has no GPU."""
_NO_DEVICE = ("cudaErrorNoDevice", "cudaErrorInsufficientDriver", "CUDA_ERROR_NO_DEVICE")
"""Starts of CuPy's messages that CUDA has no device or no driver."""
_HAS_BUDGET = "a Recompute is on already"
"""Start of umem's message that one Recompute is inside of another."""
_NO_NUMBER = re.compile(
    r"only 0-dimensional arrays can be converted to Python scalars"
    r"|%\w format: a real number is required, not numpy\.ndarray"
)
"""NumPy's message, from 2.4 on, where an array of one element used to be taken as a number."""


def advice(error: BaseException, argv: list[str], gpu: str | None, vram: str | None) -> str | None:
    """Return umem's advice on the error that ended a script; None if it has none.

    There is advice on memory that ran out, on a missing GPU, on ``--recompute`` for a script that
    has a Recompute of its own, on arrays that NumPy 2.4 no longer takes for numbers, and on names
    that NumPy has removed. The causes of the error are looked at, too.

    Args:
        argv: the script and its arguments.
        gpu: the virtual GPU that the script ran on, if any.
        vram: the VRAM given in place of that GPU's own, if any.
    """
    found = list(causes(error))
    explained = [one for one in map(_explained, found) if one is not None]
    held = "".join(f"umem: {one}\n" for one in explained)
    if any(one.graph is not None for one in explained):
        return held.rstrip("\n")  # more memory would only put the end off
    if any(isinstance(cause, OutOfMemoryError) for cause in found):
        gpu_options = ["--gpu", gpu or "t4", *(["--vram", vram] if vram else [])]
        return held + _memory_needed(command_line(*argv), command_line(*gpu_options))
    if any(isinstance(c, StateError) and str(c).startswith(_HAS_BUDGET) for c in found):
        return "umem: the script already uses a Recompute. Run it without --recompute"
    if any(is_cupys_out_of_memory(cause) for cause in found):
        return held + (
            "umem: to run the script unchanged, with host memory for what does not fit:\n"
            f"  umem run --mode hybrid {command_line(*argv)}\n"
            f"  umem run --mode managed --paging {command_line(*argv)}"
        )
    if any(isinstance(cause, RuntimeError) and str(cause).startswith(_NO_GPU) for cause in found):
        follows = "" if gpu is None else f", which the virtual {gpu} simulates"
        return (
            f"umem: Chainer finds no GPU here. Run the script with NumPy{follows}: most of "
            "Chainer's examples take -g -1, --gpu -1 or --device -1. Or run it with CuPy on a "
            "software GPU:\n"
            f"  umem run --software {gpu or 't4'} {command_line(*argv)}"
        )
    if any(_has_no_gpu(cause) for cause in found):
        return (
            "umem: CuPy finds no GPU here. Run the script on a software GPU: CuPy computes on this "
            "processor, and memory and time are simulated:\n"
            f"  umem run --software {gpu or 't4'} {command_line(*argv)}"
        )
    if any(isinstance(c, TypeError) and _NO_NUMBER.fullmatch(str(c)) for c in found):
        return (
            "umem: NumPy up to 2.3 converted an array of shape (1,) to a number, with a warning. "
            "Newer versions do not. Write a.item() instead of int(a) or float(a), or use the older "
            "version: pip install 'numpy<2.4'"
        )
    if package := next(filter(None, map(package_in_need, found)), None):
        who = "the script" if package == "__main__" else package
        context = click.get_current_context(silent=True)
        given = [] if context is None else given_options(context)
        return (
            f"umem: {who} uses names that NumPy or setuptools has removed. To give them to {who} "
            "alone, add an option:\n"
            f"  umem run --old-numpy {package} {command_line(*given, *argv)}"
        )
    return None


def _explained(error: BaseException) -> Explanation | None:
    """Return who holds the memory if it is CuPy's that ran out; None if the GPU cannot tell."""
    if not is_cupys_out_of_memory(error):
        return None
    from umem.memory import explain

    try:
        return explain(error)
    except Exception:  # an error of the driver must not hide the script's
        return None


def _has_no_gpu(error: BaseException) -> bool:
    """Tell whether an error is CuPy's for a missing device or driver."""
    kind = type(error)
    is_cupys = kind.__name__ in ("CUDARuntimeError", "CUDADriverError")
    return is_cupys and str(error).startswith(_NO_DEVICE)


def _memory_needed(command: str, reason: str) -> str:
    return (
        "umem: to find out how much memory the script needs, record it where it fits (without "
        "--virtual, or with --mode managed):\n"
        f"  umem run --record out/run.umem.gz {command}\n"
        f"  umem replay out/run.umem.gz {reason}"
    )
