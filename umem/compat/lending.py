"""`lend_removed_names`: only one package sees the names that NumPy has removed.

A finder at the front of `sys.meta_path` gives each module of the package its own builtins, whose
``__import__`` returns a stand-in for NumPy. Python reads the builtins of a module's code and
functions from ``__builtins__`` in the module's globals. NumPy itself does not change.

The stand-in is a different object from NumPy. It compares equal to NumPy with ``==``. Comparisons
with ``is``, such as ``xp is numpy``, are compiled to a call that treats both as the same.
"""

from __future__ import annotations

import ast
import builtins
import difflib
import importlib.util
import pkgutil
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import Any

from umem._common.switch import Switch
from umem.compat import numpy_stand_in
from umem.compat.installation import BESIDE
from umem.compat.removed_names import NAMES
from umem.errors import CompatError, MissingDependencyError, StateError

_MENDED = ("chainer", *BESIDE)
_MISSING = re.compile(
    r"module 'numpy' has no attribute '(\w+)'|`np\.(\w+)` was removed|"
    r"cannot import name '(\w+)' from 'numpy'"
)
"""Messages of NumPy and Python about a removed name of NumPy."""
_SAME = "__umem_same__"
"""The name, in the builtins of a lent module, of the function that replaces ``is``."""


class LentNames(Switch):
    """Lends NumPy's removed names to ``package`` until `undo`, or the end of ``with``.

    Later imports get NumPy itself; modules that were imported before keep the names.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        _on.append(self)
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)

    def _take_back(self) -> None:
        _on.remove(self)
        if not _on and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)


def lend_removed_names(package: str, path: Sequence[str] | None = None) -> LentNames:
    """Let the modules of a package see the names that NumPy has removed, such as ``np.float``.

    The package's own Python modules get a stand-in for NumPy, whose other attributes are NumPy's
    own objects. If pkg_resources is not installed, they get a stand-in for it too. No other module
    sees the stand-ins. Call it before the package is imported. You may call it for several
    packages.

    Args:
        package: its name in an import; ``package.part`` is only that part.
        path: folders to search for it, in addition to `sys.path`.

    Returns:
        a handle: ``undo()``, or the end of ``with``, ends the lending for later imports.

    Raises:
        MissingDependencyError: there is no such package; nothing was changed.
        StateError: one of its modules was imported before; nothing was changed.
        CompatError: it is NumPy, umem, Chainer or the script itself; nothing was changed.
    """
    top = package.partition(".")[0]
    if top in _MENDED:
        raise CompatError(f"{top} is mended by umem.compat.install(): do not lend it names")
    if top in ("numpy", "umem"):
        raise CompatError(f"{top} is lent no names: pass the package that uses the removed names")
    if top == "__main__":
        raise CompatError(
            "a script that is running cannot be lent names: start it by "
            "umem run --old-numpy __main__ SCRIPT"
        )
    for name in [name for name in sys.modules if _covers(package, name)]:
        its_builtins = getattr(sys.modules[name], "__builtins__", None)  # none in compiled modules
        if its_builtins and _SAME not in its_builtins:
            raise StateError(
                f"{name} was imported before, without the removed names: call "
                f"lend_removed_names({package!r}) before the first import of it"
            )
    _require(package, [*(path or ()), *sys.path])
    return LentNames(package)


def _require(package: str, path: Sequence[str]) -> None:
    """Raise MissingDependencyError if there is no such package; imports nothing."""
    parts, places = package.split("."), list(path)
    for count, part in enumerate(parts, 1):
        name = ".".join(parts[:count])
        spec = PathFinder.find_spec(name, places)
        if spec is None and count == 1 and part.isidentifier():
            spec = importlib.util.find_spec(part)  # asks the finders of editable installs too
        if spec is None:
            near = difflib.get_close_matches(
                part, [one.name for one in pkgutil.iter_modules(places)]
            )
            hint = f"; near: {', '.join(near)}" if near else ""
            raise MissingDependencyError(f"there is no package {name!r} to lend names to{hint}")
        places = list(spec.submodule_search_locations or ())


def package_in_need(error: BaseException) -> str | None:
    """Return the package whose module failed for lack of a removed name; None for other errors."""
    if not isinstance(error, (AttributeError, ImportError)):
        return None
    found = _MISSING.search(str(error))
    is_pkg_resources = isinstance(error, ImportError) and error.name == "pkg_resources"
    if not is_pkg_resources and (found is None or found[found.lastindex or 0] not in NAMES):
        return None
    frames = traceback.walk_tb(error.__traceback__)
    tops = [frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in frames]
    top = next((top for top in reversed(tops) if top not in ("numpy", "umem")), "__main__")
    return None if top in _MENDED else top


def lent_script(module: ModuleType, source: bytes | str | None, path: str) -> CodeType | None:
    """Prepare a script that is lent names, before it runs as ``__main__``.

    Processes that start by spawn run the script once more, without the names.

    Returns:
        its code with ``is`` replaced; None if it needs no change, or is lent nothing.
    """
    if not _is_lent("__main__"):
        return None
    _give_builtins(module)
    return None if source is None else _with_function(source, path)


# -- the modules of the package -------------------------------------------------------------------


class _LendingFinder(MetaPathFinder):
    """Finds the modules of lent packages by the other finders, and wraps their loaders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader lends, or None for a module of another package."""
        if not _is_lent(fullname):
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None:
            _lend(spec)
        return spec


_on: list[LentNames] = []
_finder = _LendingFinder()


def _covers(package: str, module: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def _is_lent(module: str) -> bool:
    return any(_covers(lent.package, module) for lent in _on)


def _lend(spec: ModuleSpec) -> None:
    """Make `_execute` run a module; leaves compiled modules and folders without code alone."""
    loader: Any = spec.loader
    if hasattr(loader, "exec_module") and not isinstance(loader, (type, ExtensionFileLoader)):
        spec.loader = loader = copy(loader)  # modules of an archive share one loader
        vars(loader)["exec_module"] = partial(_execute, loader.exec_module)


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    _give_builtins(module)
    code = None if module.__spec__ is None else _recompiled(module.__spec__)
    if code is None:
        execute(module)
    else:
        exec(code, vars(module))


def _give_builtins(module: ModuleType) -> None:
    lent = {"__import__": partial(_import, module.__name__), _SAME: numpy_stand_in.is_same}
    vars(module)["__builtins__"] = {**vars(builtins), **lent}


def _import(
    module: str,
    name: str,
    globals: Any = None,
    locals: Any = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> Any:
    """Import as the built-in does, but give a lent module the stand-in for NumPy.

    If ``pkg_resources`` is not installed, the module gets a stand-in for it, too.
    """
    try:
        found = builtins.__import__(name, globals, locals, fromlist or (), level)
    except ModuleNotFoundError as error:
        if not (name == error.name == "pkg_resources" and _is_lent(module)):
            raise
        return importlib.import_module("umem.compat.pkg_resources")
    if found is sys.modules.get("numpy") and _is_lent(module):
        is_star = fromlist is not None and "*" in fromlist
        return numpy_stand_in.star() if is_star else numpy_stand_in.STAND_IN
    return found


# -- comparisons with `is` ------------------------------------------------------------------------


class _ByFunction(ast.NodeTransformer):
    """Replaces ``a is b`` by a call of `is_same`."""

    changed = False

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Return the call, or the node itself if a side is a constant, which is not a module."""
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        is_not = isinstance(node.ops[0], ast.IsNot)
        if len(sides) > 2 or not (is_not or isinstance(node.ops[0], ast.Is)):
            return node
        if any(isinstance(side, ast.Constant) for side in sides):
            return node
        self.changed = True
        call: ast.expr = ast.Call(ast.Name(_SAME, ast.Load()), sides, [])
        call = ast.UnaryOp(ast.Not(), call) if is_not else call
        return ast.fix_missing_locations(ast.copy_location(call, node))


def _recompiled(spec: ModuleSpec) -> CodeType | None:
    """Compile a module with its comparisons replaced; None if it needs no change."""
    source = getattr(spec.loader, "get_source", lambda _: None)(spec.name)
    return None if source is None else _with_function(source, spec.origin or "<unknown>")


def _with_function(source: str | bytes, path: str) -> CodeType | None:
    """Compile source with its comparisons replaced; None if it has none or is invalid."""
    by_function = _ByFunction()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the source's own warnings, which Python issues only once
        try:
            tree = by_function.visit(ast.parse(source))
        except SyntaxError:
            return None  # Python's own loader raises a better error
        if not by_function.changed:
            return None
        return compile(tree, path, "exec", dont_inherit=True)
