"""Libraries of a dry run: their work is skipped, but they return results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from umem.host_cuda.dry.dry_runtime import DryRuntime
from umem.host_cuda.runtime import LeftOut


class DryLibrary:
    """A library whose work is skipped if `DryRuntime.operation` decides so.

    Every function reports its reads and writes before it works, and can be stopped only there. It
    reports once, because code after the first report does not run.

    Args:
        functions: has the functions of CuPy's module.
    """

    def __init__(self, functions: Any, runtime: DryRuntime) -> None:
        self._functions, self._runtime = functions, runtime

    def __getattr__(self, name: str) -> Any:
        """Return a library's function, which returns 0 or None if its work is skipped."""
        function = getattr(self._functions, name)
        return self._dry(function, name) if callable(function) else function

    def _dry(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a function so that its operations may be skipped."""
        runtime, whole = self._runtime, function
        while isinstance(whole, partial):
            whole = whole.func
        annotations = getattr(whole, "__annotations__", {})
        returns = annotations.get("return") not in (None, "None")

        def call(*given: Any) -> Any:
            runtime.enter_library()
            try:
                return function(*given)
            except LeftOut as left_out:
                return left_out.returned if returns else None
            finally:
                runtime.leave_library()

        call.__name__ = name  # for CuPy's errors
        call.__annotations__ = annotations  # which `deferred_libraries` reads
        return call
