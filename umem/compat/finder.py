"""The import hook: a finder that mends a short list of Chainer's modules as they are imported.

A mended module is compiled from its own source with exact texts replaced. The file name and the
line numbers stay, so tracebacks and debuggers show the file on disk. Byte-code caches are neither
read nor written. NumPy never changes.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType

from umem._common import extras
from umem.compat import installation
from umem.compat.catalogue import SHIMS
from umem.compat.requirement import holds, parsed
from umem.compat.shim import Shim
from umem.errors import CompatError, MissingDependencyError

NOT_INSTALLED = f"Chainer is not installed. Install it: {extras.command('chainer')}"


class ShimLoader(SourceFileLoader):
    """Loads one module of Chainer with its mends applied."""

    def __init__(self, fullname: str, path: str, shims: Sequence[Shim]) -> None:
        super().__init__(fullname, path)
        self.shims = tuple(shim for shim in shims if holds(shim.versions))

    def get_code(self, fullname: str) -> CodeType | None:
        """Compile the mended source.

        Raises:
            CompatError: Chainer is not a 7.8 release, or a text does not match; the module was
                not imported.
        """
        version = installation.require_supported(self.path)
        if not self.shims:
            return super().get_code(fullname)
        source = importlib.util.decode_source(self.get_data(self.path))
        for shim in self.shims:
            source = shim.apply(source, version)
        return compile(source, self.path, "exec", dont_inherit=True)


class ShimFinder(MetaPathFinder):
    """Finds the modules that have mends; any other import costs one look-up."""

    def __init__(self, shims: Sequence[Shim] = SHIMS) -> None:
        self.shims = group(shims)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec whose loader mends the module, or None for every other module.

        Raises:
            CompatError: the module exists, but not as a source file.
        """
        shims = self.shims.get(fullname)
        spec = None if shims is None else self._find_elsewhere(fullname, path, target)
        if spec is None or shims is None:
            return None
        if not isinstance(spec.loader, SourceFileLoader) or spec.origin is None:
            raise CompatError(
                f"{fullname} at {spec.origin} is not a source file, so it cannot be mended; "
                "install chainer==7.8.1 with pip, unzipped."
            )
        if shims:
            spec.cached = None
        spec.loader = ShimLoader(fullname, spec.origin, shims)
        return spec

    def _find_elsewhere(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


def group(shims: Sequence[Shim]) -> Mapping[str, tuple[Shim, ...]]:
    """Return the mends by module, in order; ``chainer`` itself is included for its version
    check.
    """
    modules: dict[str, tuple[Shim, ...]] = {"chainer": ()}
    for shim in shims:
        modules[shim.module] = (*modules.get(shim.module, ()), shim)
    return modules


def active() -> ShimFinder | None:
    """Return the installed finder, or None."""
    return next((item for item in sys.meta_path if isinstance(item, ShimFinder)), None)


def arm() -> ShimFinder:
    """Install the finder without looking for Chainer, and return it; safe to repeat.

    Raises:
        CompatError: Chainer was imported before; the finder was not installed.
    """
    finder = active()
    if finder is None:
        finder = ShimFinder()
        refuse_unmended(finder)
        sys.meta_path.insert(0, finder)
    return finder


def refuse_unmended(finder: ShimFinder) -> None:
    """Raise CompatError if a module that needs a mend was imported without it."""
    for name in finder.shims:
        if name in sys.modules and not is_mended(name):
            raise CompatError(
                f"{name} was imported before umem's compatibility layer, so it runs unmended. "
                "Start a new process and put `import umem.chainer` before the first "
                "`import chainer`, or run `umem compat --install` once."
            )


def is_mended(name: str) -> bool:
    """Tell whether the module ``name`` is imported, and through the layer."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return isinstance(getattr(spec, "loader", None), ShimLoader)


def install() -> None:
    """Install the import hook that patches Chainer at the next ``import chainer``; safe to repeat.

    Takes a few milliseconds, does not import Chainer, and changes only ``sys.meta_path``.

    Raises:
        MissingDependencyError: Chainer or packaging is missing; the hook was not installed.
        CompatError: Chainer is not a 7.8 release, or was imported before; the hook was not
            installed.
    """
    if active() is not None:
        return
    package = installation.find_package()
    if package is None:
        raise MissingDependencyError(NOT_INSTALLED)
    installation.require_supported(str(package / "__init__.py"))
    parsed("chainer")  # raises now if packaging is missing, not at the first mended module
    arm()


def is_installed() -> bool:
    """Tell whether the import hook is installed in this process."""
    return active() is not None
